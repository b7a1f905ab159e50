"""What a part of the step does in the long run, P and the slope held.

    m' = b1 m + (1 - b1) c g          the gradient acts 1 + b1 + b1^2 + ... = 1 / (1 - b1) times

AdamW's decay acts on theta itself, once. Adam's coupled L2 decay is added to g and lives on in m'
as the gradient does. The momentum of this step is what *earlier* batches do in the end, so its
eventual share is 0.
"""

from __future__ import annotations

from entropy_experiments.attribution.terms import GRADIENT_LINES, GRADIENT_PART
from entropy_experiments.types import AdamGroup, Estimate, OptimizerState


def eventual(
    name: str, line: Estimate, momentum_decay: float, *, coupled_decay: bool = False
) -> Estimate:
    """`line` is what it does in this step: the gradient as a whole, or a line of the ledger."""
    if name in (GRADIENT_PART, *GRADIENT_LINES) or (name == "decay" and coupled_decay):
        return line / (1 - momentum_decay)
    return 0.0 * line if name == "momentum" else line


def momentum_of(optimizer: OptimizerState) -> tuple[float, bool]:
    """(b1, whether weight decay is coupled), the same for all groups that train something."""
    groups = [group for group in optimizer.groups if group.names]
    adam = [group for group in groups if isinstance(group, AdamGroup)]
    if not groups or len(adam) < len(groups):
        raise ValueError(
            f"The optimizer has {len(adam)} groups of Adam with parameters, of {len(groups)}; "
            "expected one or more, and no others: eventual shares are known for Adam and AdamW."
        )
    decays = {group.betas[0] for group in adam}
    if len(decays) > 1:
        raise ValueError(
            f"The optimizer's groups have b1 {sorted(decays)}; expected one for all: eventually "
            "a line does this step's share over 1 - b1. Train with one b1."
        )
    coupled = {not group.decoupled for group in adam if group.weight_decay}
    if len(coupled) > 1:
        raise ValueError(
            "Weight decay is coupled in some groups and decoupled in others; expected one kind: "
            "they act differently often. Train with Adam or AdamW, not both."
        )
    return decays.pop(), True in coupled
