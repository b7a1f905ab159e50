"""Is this log-probability that of the sampler? The mean of its gradient must be zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradient_doctor.findings import Finding, Severity
from gradient_doctor.keep import random_states, restore_random_states

_ALARM = 5.0  # standard errors; by chance once in some 100 000 tests at 64 draws


@dataclass(frozen=True)
class ScoreTest:
    """What `score_test` saw.

    Args:
        z: The mean score in standard errors, along the direction that most speaks against it.
        draws: How many samples were drawn.
        finding: What is wrong; None: nothing.

    Examples:
        >>> ScoreTest(z=0.3, draws=64, finding=None).passed
        True
    """

    z: float
    draws: int
    finding: Finding | None

    @property
    def passed(self) -> bool:
        return self.finding is None


def score_test(
    sample: Callable[[], Tensor],
    log_prob: Callable[[Tensor], Tensor],
    parameters: Iterable[Tensor],
    draws: int = 64,
    seed: int | None = None,
) -> ScoreTest:
    """Is this log-probability that of the sampler? The mean of its gradient must be zero.

    The draws are split in two: one half chooses the direction, the other is tested along it, and
    the other way round. The random state is left as it was.

    Args:
        sample: Draws an action.
        log_prob: Its log-probability, as the loss computes it.
        parameters: Of the policy.
        draws: How many samples.
        seed: Makes the test repeatable.

    Returns:
        How far the mean is from zero; `passed` judges it.

    Raises:
        ValueError: If no parameter needs a gradient, or there are fewer than 16 draws.

    Examples:
        >>> import torch
        >>> mean = torch.zeros(3, requires_grad=True)
        >>> policy = torch.distributions.Normal(mean, 1.0)
        >>> score_test(policy.sample, policy.log_prob, [mean], seed=0).passed
        True
        >>> wrong = score_test(policy.sample, lambda x: policy.log_prob(x + 1), [mean], seed=0)
        >>> wrong.passed
        False
    """
    leaves = [p for p in parameters if p.requires_grad]
    if not leaves:
        raise ValueError("no parameter needs a gradient: there is no score to test")
    if draws < 16:
        raise ValueError(f"draws is {draws}; the test needs at least 16")
    states = random_states()
    try:
        if seed is not None:
            torch.manual_seed(seed)
        scores = torch.stack([_score(sample, log_prob, leaves) for _ in range(draws)])
    finally:
        restore_random_states(states)
    half = draws // 2
    z = _along(scores[:half], scores[half:]) + _along(scores[half:], scores[:half])
    z /= math.sqrt(2)
    return ScoreTest(z, draws, _finding(z, draws) if abs(z) > _ALARM else None)


def _score(
    sample: Callable[[], Tensor], log_prob: Callable[[Tensor], Tensor], leaves: list[Tensor]
) -> Tensor:
    with torch.no_grad():
        action = sample()
    with torch.enable_grad():
        value = log_prob(action.detach()).mean()
        if not value.requires_grad:
            raise ValueError("log_prob(sample()) does not depend on the parameters")
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    parts = [g.detach().double().flatten() for g in gradients if g is not None]
    return torch.cat(parts)


def _along(first: Tensor, second: Tensor) -> float:
    """The second half's mean along the first half's, in its own standard errors."""
    # each coordinate in units of its own spread, or the loudest one would decide alone
    spread = first.std(0)
    mean = first.mean(0)
    direction = torch.where(spread > 0, mean / spread.clamp(min=1e-300).square(), mean * 0)
    if not bool(direction.any()):
        direction = mean
    if not bool(direction.any()):
        return 0.0
    projected = second @ (direction / direction.norm())
    error = projected.std() / math.sqrt(len(projected))
    if not float(error) > 0:
        return 0.0 if abs(float(projected.mean())) < 1e-12 else math.inf
    return float(projected.mean() / error)


def _finding(z: float, draws: int) -> Finding:
    return Finding(
        24,
        Severity.ERROR,
        f"The mean score is {z:.1f} standard errors from zero: log_prob is not the density of the "
        "samples.",
        f"Over {draws} draws the gradient of log_prob(sample()) does not average to zero, as that "
        "of the sampler's own density must.",
        "Evaluate log_prob at the value that was drawn (before tanh, clamp or rounding), with the "
        "same temperature, mask and truncation as the sampler; or add the missing correction.",
    )
