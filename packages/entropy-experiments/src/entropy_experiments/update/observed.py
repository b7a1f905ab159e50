"""The step that really happened, read off two sets of parameters."""

from __future__ import annotations

from entropy_experiments.types import Direction, Params, check_params


def observed(before: Params, after: Params, lr: float) -> Direction:
    """The step that was made, read off two sets of parameters: (after - before) / lr.

    Stored parameters limit it to about ulp(theta) / lr: compare with a rebuilt step accordingly.

    Args:
        before: Parameters before the step.
        after: The same parameters after it.
        lr: Its learning rate.

    Returns:
        A direction with the single part "observed"; before + lr * direction is after.

    Raises:
        ValueError: If names or shapes differ.

    Examples:
        >>> import torch
        >>> observed({"w": torch.zeros(2)}, {"w": torch.ones(2)}, lr=0.5).total["w"].tolist()
        [2.0, 2.0]
    """
    check_params("the parameters after the step", after, before)
    change = {
        name: ((after[name].double() - old.double()) / lr).to(old.dtype)
        for name, old in before.items()
    }
    return Direction(parts={"observed": change}, lr=lr)
