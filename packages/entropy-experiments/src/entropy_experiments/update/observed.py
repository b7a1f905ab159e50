"""The step that really happened, read off two sets of parameters."""

from __future__ import annotations

from entropy_experiments.types import Direction, Params, check_params


def observed(before: Params, after: Params, lr: float) -> Direction:
    """(after - before) / lr, so that before + lr * direction is after.

    Stored parameters limit it to about ulp(theta) / lr: compare with a rebuilt step accordingly.
    """
    check_params("the parameters after the step", after, before)
    change = {
        name: ((after[name].double() - old.double()) / lr).to(old.dtype)
        for name, old in before.items()
    }
    return Direction(parts={"observed": change}, lr=lr)
