"""`entropy-probe arc`: the commands of `arc_refine`, mounted; the only place that knows of it."""

from arc_refine.command import app

__all__ = ["app"]
