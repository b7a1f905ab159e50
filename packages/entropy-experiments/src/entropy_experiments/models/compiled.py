"""Models that torch.compile has wrapped: their parameters have other names, and no forward mode."""

from __future__ import annotations

from typing import Any


def refuse_compiled(model: Any) -> None:
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            f"model is a {type(model._orig_mod).__name__} that torch.compile has wrapped; expected "
            "the model itself: pass the uncompiled model (model._orig_mod, whose weights are the "
            "same ones). Training may go on with the compiled one."
        )
