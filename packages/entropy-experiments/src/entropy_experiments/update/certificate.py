"""Two certificates, never one word for both.

*optimizer*: our arithmetic against torch's own, on the same gradient. torch steps copies of the
parameters at learning rate 1 (relative error of the direction), and at the real rate (distance of
theta + lr v from the stepped theta, in units in the last place). It says nothing about whether the
gradient was the trainer's.

*step*: the direction rebuilt from a checkpoint and a recorded batch against what the trainer really
did, theta_{k+1} - theta_k. Stored parameters limit it to ulp(theta) / lr in each element.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.numerics.derivatives import dot, norm
from entropy_experiments.numerics.sketch import distance, sketch
from entropy_experiments.types import AdamGroup, Direction, OptimizerState, Params, SGDGroup
from entropy_experiments.update.observed import observed

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
MAX_ULP = 4.0
"""torch's own update rounds that often; on parameters much larger than lr v the distance is 2."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    relative_error: float
    cosine: float
    max_ulp: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.relative_error <= self.tolerance and self.max_ulp <= MAX_ULP


def optimizer_certificate(
    direction: Direction,
    params: Params,
    gradient: Params,
    optimizer: OptimizerState,
    *,
    max_grad_norm: float | None = None,
) -> Certificate:
    """Our arithmetic against torch's own: the step replayed with torch.optim on the same gradient.

    Args:
        direction: The rebuilt step.
        params: Parameters before it.
        gradient: The loss gradient, before clipping.
        optimizer: Its state before the step.
        max_grad_norm: Of gradient clipping; None: none.

    Returns:
        Relative error, cosine and distance in units in the last place; `passed` judges them.

    Examples:
        >>> import torch
        >>> params = {"w": torch.ones(2, requires_grad=True)}
        >>> gradient = {"w": torch.tensor([1.0, -2.0])}
        >>> state = read_state(torch.optim.AdamW(params.values()), params)
        >>> direction = adamw_direction(params, gradient, state)
        >>> optimizer_certificate(direction, params, gradient, state).passed
        True
    """
    params = {name: theta.detach() for name, theta in params.items()}
    at_one = _stepped(params, gradient, optimizer, max_grad_norm, lr=1.0)
    reference = {name: at_one[name].double() - theta.double() for name, theta in params.items()}
    rebuilt = direction.total
    gap = {name: rebuilt[name].double() - value for name, value in reference.items()}
    size = norm(reference)
    stepped = _stepped(params, gradient, optimizer, max_grad_norm, lr=optimizer.lr)
    ours = {
        name: (theta.double() + direction.lr * rebuilt[name].double()).to(theta.dtype)
        for name, theta in params.items()
    }
    dtype = next(iter(params.values())).dtype
    return Certificate(
        relative_error=norm(gap) / size if size else norm(gap),
        cosine=dot(rebuilt, reference) / (norm(rebuilt) * size) if size else 1.0,
        max_ulp=max(
            _ulps(
                stepped[name],
                ours[name],
                [params[name], *(direction.lr * part[name] for part in direction.parts.values())],
            )
            for name in params
        ),
        tolerance=TOLERANCE.get(dtype, 1e-2),
    )


STEP_TOLERANCE = 1e-5
"""Of the largest element of the direction; storage adds ulp(theta) / lr on top."""
STEP_SHARE = 0.999
STEP_COSINE = 1 - 1e-9
HANDFUL = 4
"""Elements that may miss in any model: among 1,536 even a step rebuilt in fp64 misses three by the
trainer's own rounding, on some CPUs, and that is more than a thousandth."""
APART = 0.05
"""Relative distance from which on a rebuilt step is not the step that was made."""
CLOSE = 1e-3
"""Relative distance up to which the two are the same but for rounding."""
SAME_BUT_FOR_ROUNDING, MOST = 1 - 1e-6, 0.95
"""Seen in the first steps of a LoRA run, where B is zero and A's gradient next to nothing."""


@dataclass(frozen=True, kw_only=True)
class StepCertificate:
    """How well a rebuilt step is the step that was made."""

    share: float
    """Of all elements, those within STEP_TOLERANCE of the largest plus ulp(theta) / lr."""
    cosine: float
    relative_error: float
    elements: int
    worst: str
    """The parameter with the largest error."""

    @property
    def apart(self) -> bool:
        return not self.relative_error <= APART

    @property
    def passed(self) -> bool:
        missed = round((1 - self.share) * self.elements)
        allowed = max(HANDFUL, (1 - STEP_SHARE) * self.elements)
        return missed <= allowed and self.cosine >= STEP_COSINE

    def __str__(self) -> str:
        if self.passed:
            return (
                f"the step rebuilt here is the step that was made: {self.share:.2%} of "
                f"{self.elements:,} elements to rounding, 1 - cosine {1 - self.cosine:.1e}"
            )
        if self.cosine >= SAME_BUT_FOR_ROUNDING and self.share >= MOST:
            return (
                f"the step rebuilt here is the step that was made, but for elements with gradients "
                f"near zero, which Adam scales up with their rounding: {self.share:.2%} of "
                f"{self.elements:,} agree, 1 - cosine {1 - self.cosine:.1e}"
            )
        if not self.apart:
            return (
                f"the step rebuilt here is the step that was made to within "
                f"{self.relative_error:.2g} of its size: {self.share:.2%} of {self.elements:,} "
                f"elements agree to rounding, most of the rest is in {self.worst}"
            )
        return (
            f"{NOT_MADE}: it is {self.relative_error:.0%} away from it, cosine {self.cosine:.4f}, "
            f"worst in {self.worst}"
        )


NOT_MADE = "the step rebuilt here is not the step that training made"


@dataclass(frozen=True, kw_only=True)
class FingerprintCertificate:
    """How far a step is from the one whose fingerprint training recorded (`numerics.sketch`)."""

    relative_error: float
    """Estimated from 64 numbers, to about a tenth of itself."""
    cosine: float

    @property
    def apart(self) -> bool:
        return not self.relative_error <= APART

    @property
    def passed(self) -> bool:
        return self.relative_error <= CLOSE

    @property
    def share(self) -> None:
        """Of single elements a fingerprint knows nothing."""
        return None

    def __str__(self) -> str:
        distance = f"{self.relative_error:.2g} of its size away, by the recorded fingerprint"
        if self.apart:
            return f"{NOT_MADE}: it is {self.relative_error:.0%} away, by the recorded fingerprint"
        if not self.passed:
            return (
                f"the step analysed here is near the step that was made, not the same: {distance}"
            )
        return f"the step analysed here is the step that was made: {distance}"


def fingerprint_certificate(direction: Direction, change: Tensor) -> FingerprintCertificate:
    """The step lr v against the sketch of theta_after - theta_before."""
    size = float(change.norm())
    if size == 0:
        raise ValueError("The recorded step moved nothing; expected a step to compare with.")
    ours = direction.lr * sketch(direction.total)
    both = float(ours.norm()) * size
    return FingerprintCertificate(
        relative_error=distance(ours, change),
        cosine=float(ours @ change) / both if both else 0.0,
    )


def step_certificate(direction: Direction, before: Params, after: Params) -> StepCertificate:
    """The rebuilt direction against the step that training made, (after - before) / lr.

    Args:
        direction: The rebuilt step.
        before: Parameters before it.
        after: Parameters of the checkpoint that follows.

    Returns:
        The share of elements that agree to rounding, cosine and relative error; `passed` judges
        them.

    Raises:
        ValueError: If nothing moved.

    Examples:
        >>> import torch
        >>> before, after = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        >>> step_certificate(observed(before, after, lr=0.5), before, after).passed
        True
    """
    made, rebuilt = observed(before, after, direction.lr).total, direction.total
    size = norm(made)
    if size == 0:
        raise ValueError(
            "The parameters after the step equal those before it: no step was made (a skipped "
            "step, or the same checkpoint twice). Expected the checkpoint that follows."
        )
    largest = max(float(value.abs().max()) for value in made.values())
    gap = {name: (rebuilt[name].double() - value.double()).abs() for name, value in made.items()}
    within = {
        name: gap[name] <= STEP_TOLERANCE * largest + _spacing(before[name]) / direction.lr
        for name in made
    }
    elements = sum(value.numel() for value in made.values())
    return StepCertificate(
        share=sum(int(good.sum()) for good in within.values()) / elements,
        cosine=dot(rebuilt, made) / (norm(rebuilt) * size),
        relative_error=norm(gap) / size,
        elements=elements,
        worst=max(gap, key=lambda name: float(gap[name].max())),
    )


def _stepped(
    params: Params,
    gradient: Params,
    optimizer: OptimizerState,
    max_grad_norm: float | None,
    *,
    lr: float,
) -> Params:
    """Parameters after torch's own step, every group's rate scaled so that the first has `lr`."""
    leaves = {name: theta.detach().clone().requires_grad_() for name, theta in params.items()}
    scale = lr / optimizer.lr
    groups = []
    for group in optimizer.groups:
        options: dict[str, Any] = asdict(group)
        names = options.pop("names")
        options["params"] = [leaves[name] for name in names]
        options["lr"] = group.lr * scale
        options.pop("decoupled", None)  # told by torch's class, see _torch_kind
        groups.append(options)
    torch_optimizer = _torch_kind(optimizer)(groups)
    for name, entry in optimizer.state.items():
        torch_optimizer.state[leaves[name]] = {
            key: value.detach().clone() if isinstance(value, Tensor) else value
            for key, value in entry.items()
        }
    for name, leaf in leaves.items():
        leaf.grad = gradient[name].detach().clone().to(leaf.dtype)
    if max_grad_norm:
        torch.nn.utils.clip_grad_norm_(list(leaves.values()), max_grad_norm)
    torch_optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def _torch_kind(optimizer: OptimizerState) -> Any:
    group = optimizer.groups[0]
    if isinstance(group, AdamGroup):
        return torch.optim.AdamW if group.decoupled else torch.optim.Adam
    if isinstance(group, SGDGroup):
        return torch.optim.SGD
    raise ValueError(
        f"An optimizer with groups of {type(group).__name__} has no class of torch's here; "
        "expected AdamGroup or SGDGroup. Add it to _torch_kind of update/certificate.py."
    )


def _ulps(stepped: Tensor, ours: Tensor, summands: list[Tensor]) -> float:
    """Largest distance, in the spacing of floats at the size of theta and what is added to it."""
    size = torch.stack(summands).abs().sum(0)
    return float(((stepped - ours).abs() / _spacing(size)).max())


def _spacing(x: Tensor) -> Tensor:
    """Distance to the next float: one unit in the last place."""
    size = x.detach().abs()
    return torch.nextafter(size, torch.full_like(size, torch.inf)) - size
