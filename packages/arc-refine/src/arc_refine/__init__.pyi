# Written by docs/make_reference.py from _HOME: `make docs` writes it again.
from arc_refine.batch import collate
from arc_refine.config import TrainConfig
from arc_refine.contracts import Breach, ContractError
from arc_refine.data import Pair, Task, leave_one_out, load_tasks
from arc_refine.document_003 import PolicyRL, QwenCfg, QwenHybridPrompt
from arc_refine.efe import EFE, EfeWeights
from arc_refine.policy import RefinePolicy

__all__ = [
    "EFE",
    "Breach",
    "ContractError",
    "EfeWeights",
    "Pair",
    "PolicyRL",
    "QwenCfg",
    "QwenHybridPrompt",
    "RefinePolicy",
    "Task",
    "TrainConfig",
    "collate",
    "leave_one_out",
    "load_tasks",
]
