"""Which way of differentiating a policy has, found out once by trial.

    jvp                one forward with dual numbers: exact, with error bars
    double_backward    reverse mode twice: exact, with error bars, about twice the cost
    reverse            one gradient: exact, without per-rollout terms, hence without error bars
    central            differences of two forwards; the reverse value leads (`estimate.central`)

`auto` takes the first of the first three that works on one rollout and agrees there with reverse
mode along its own gradient; where per-rollout terms are indispensable (influences, ledgers),
central stands in for reverse. A model that is cut over ranks has reverse and central only.
"""

from __future__ import annotations

from typing import Literal, get_args
from weakref import finalize

import torch

from entropy_experiments.estimate.ratio import shortest
from entropy_experiments.numerics.derivatives import (
    How,
    dot,
    first_line,
    no_autocast,
    norm,
    pushforward,
)
from entropy_experiments.types import Params, Policy, Rollouts, Scores

Mode = Literal["auto", "jvp", "double_backward", "reverse", "central"]
Used = Literal["jvp", "double_backward", "reverse", "central"]

EXACT: tuple[How, ...] = ("jvp", "double_backward")
AGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Of the squared gradient norm, which a slope along the gradient is: nothing cancels in it. Half
precision gets HALF_AGREEMENT. A derivative that drops a term misses by far more."""
HALF_AGREEMENT = 0.1
FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)
"""What a trial may end with in a model that is not made for it."""

_tried: dict[int, Used] = {}
"""By the policy's identity, as long as it lives: policies are compared by value, or not at all."""


def cut_over_ranks(policy: Policy) -> bool:
    """Whether each rank holds a part of the model, so that all must make every pass together.

    Such a model has reverse mode and differences, and no gradients of single rollouts in a pass.
    """
    return getattr(policy, "lockstep", 1) > 1


def used_mode(policy: Policy, rollouts: Rollouts, mode: Mode) -> Used:
    """`mode` itself, or what `auto` stands for with this policy."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r}; expected one of {get_args(Mode)}.")
    offered = getattr(policy, "modes", None)
    if mode == "auto":
        return "central" if offered is not None else _by_trial(policy, rollouts)
    if offered is not None and mode not in offered:
        raise ValueError(
            f"mode={mode!r} on a {type(policy).__name__}; expected one of {('auto', *offered)}. A "
            "model cut over ranks has neither forward mode nor a double backward."
        )
    return mode


def used_forward_mode(policy: Policy, rollouts: Rollouts, mode: Mode) -> How:
    """The same where per-rollout terms are needed: by auto, central in place of reverse."""
    found = used_mode(policy, rollouts, mode)
    if found != "reverse":
        return found
    if mode == "auto":
        return "central"
    raise ValueError(
        "mode='reverse' gives no per-rollout terms, which this needs; expected 'auto', 'jvp', "
        "'double_backward' or 'central'."
    )


def _by_trial(policy: Policy, rollouts: Rollouts) -> Used:
    key = id(policy)
    if key not in _tried:
        _tried[key] = _first_that_works(policy, shortest(rollouts))
        finalize(policy, _tried.pop, key, None)
    return _tried[key]


def _first_that_works(policy: Policy, one: Rollouts) -> Used:
    def score(params: Params) -> Scores:
        return policy.score(params, one)

    try:
        gradient = _gradient(policy, one)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise ValueError(
            f"{_name(policy)} has no derivative: a backward pass of one rollout ends with "
            f"{type(error).__name__} ({first_line(error)}). Neither the step nor a prediction can "
            "be computed; expected a model whose log-probs autograd can differentiate."
        ) from error
    size = norm(gradient)
    v = {name: g / size if size else g for name, g in gradient.items()}
    dtype = next(iter(policy.params.values())).dtype
    limit = AGREEMENT.get(dtype, HALF_AGREEMENT)
    for how in EXACT:
        try:
            _, slope = pushforward(score, policy.params, v, how=how)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            continue
        along = float(_total(slope, one).detach())
        if abs(along - dot(gradient, v)) <= limit * size:
            return how
    return "reverse"


def _gradient(policy: Policy, one: Rollouts) -> Params:
    """Of the sum of all scores; parameters that one rollout does not reach get zeros."""
    leaves = {name: value.detach().requires_grad_() for name, value in policy.params.items()}
    with torch.enable_grad(), no_autocast():
        value = _total(policy.score(leaves, one), one)
        if not value.requires_grad:  # the scores ignore the parameters: refused where that is seen
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        grads = torch.autograd.grad(value, tuple(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad.detach()
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }


def _total(scores: Scores, one: Rollouts) -> torch.Tensor:
    return torch.where(one.response_NS, scores.logprob_NS + scores.entropy_NS, 0.0).sum()


def _name(policy: Policy) -> str:
    """The model's class, where there is a model."""
    return type(getattr(policy, "model", policy)).__name__
