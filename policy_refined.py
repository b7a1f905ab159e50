"""Document 003's policy; it lives in `arc_refine.document_003` and `arc_refine.policy`."""

from arc_refine.document_003 import PolicyRL
from arc_refine.policy import RefinePolicy

__all__ = ["PolicyRL", "RefinePolicy"]
