"""The step as a sum of lines: the optimizer's own parts, and one per term of the loss.

    v = momentum + decay + sum over gradient lines of -P c grad L_line

    L = L_positive + L_negative + L_kl + L_bonus

positive and negative are the policy loss with A replaced by max(A, 0) and min(A, 0). The policy
loss of a token is 0 at A = 0, so the two add up whatever is clipped, and also when the ratio is
that of the whole sequence. Every line is the objective itself with the other terms switched off:
no term has a formula of its own here. P and c are those of the whole step ("frozen").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from entropy_experiments.distributed import current
from entropy_experiments.estimate.gradient import weighted_gradient
from entropy_experiments.estimate.modes import cut_over_ranks
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.numerics.derivatives import (
    GradientSum,
    as_gradients,
    norm,
    require_full_precision,
)
from entropy_experiments.numerics.sums import whole
from entropy_experiments.types import (
    Direction,
    Params,
    Policy,
    Scores,
    UpdateBatch,
    check_direction,
)
from entropy_experiments.types.direction import BASELINE_PARTS, check_finite, sum_of
from entropy_experiments.update.objective import Objective, token_coefficients

GRADIENT_PART = "gradient"
"""Of a Direction; the lines below are what it is made of."""
GRADIENT_LINES = ("positive", "negative", "kl", "entropy_bonus")
LINES = (*BASELINE_PARTS, *GRADIENT_LINES)


def sum_rule_tolerance(params: Params) -> float:
    """How far sums may be off, relative to the sizes of what is added: 10 sqrt(eps)."""
    return 10 * max(torch.finfo(value.dtype).eps for value in params.values()) ** 0.5


def line_objectives(
    objective: Objective, batch: UpdateBatch
) -> dict[str, tuple[Objective, UpdateBatch]]:
    """Each gradient line as a loss of its own; terms that the objective lacks are absent."""
    alone = replace(objective, beta=0.0, entropy_coef=0.0)

    def with_advantage(advantage_NS: Tensor) -> UpdateBatch:
        return replace(batch, advantage_NS=advantage_NS)

    advantage_NS = batch.advantage_NS
    nobody = with_advantage(torch.zeros_like(advantage_NS))
    lines = {
        "positive": (alone, with_advantage(advantage_NS.clamp(min=0))),
        "negative": (alone, with_advantage(advantage_NS.clamp(max=0))),
    }
    if objective.beta:
        lines["kl"] = (replace(objective, entropy_coef=0.0), nobody)
    if objective.entropy_coef:
        lines["entropy_bonus"] = (replace(objective, beta=0.0), nobody)
    return lines


def line_coefficients(
    objective: Objective, scores: Scores, batch: UpdateBatch
) -> dict[str, Scores]:
    """dL_line/dl_ik and dL_line/dh_ik of each gradient line: they sum to `token_coefficients`."""
    return {
        name: token_coefficients(loss, scores, part)
        for name, (loss, part) in line_objectives(objective, batch).items()
    }


def rollouts_by_line(
    objective: Objective, scores: Scores, batch: UpdateBatch
) -> dict[str, list[int]] | None:
    """The update rollouts of each gradient line; None if one belongs to several lines.

    Then a line is a sum of the influence matrix's columns, and costs no pass of its own.
    """
    in_line = {
        name: torch.stack([c_NS != 0 for c_NS in cotangent]).any(0).any(1)
        for name, cotangent in line_coefficients(objective, scores, batch).items()
    }
    if int(torch.stack(list(in_line.values())).sum(0).max()) > 1:
        return None
    return {name: rows_N.nonzero().flatten().tolist() for name, rows_N in in_line.items()}


def line_directions(
    trained: Policy,
    batch: UpdateBatch,
    objective: Objective,
    direction: Direction,
    *,
    microbatch: int = 8,
    scores: Scores | None = None,
) -> dict[str, Params]:
    """Every line's share of `direction.total`, per unit learning rate.

    One forward over U, and one backward for each gradient line; of a model cut over ranks, one
    forward and backward for each, and `scores` of the batch under `trained` spare another forward.
    The gradient lines must sum to the direction's gradient: another batch, objective or policy
    than the one that made it is refused.
    """
    _check(trained, batch, direction)
    gradients = line_gradients(trained, batch, objective, microbatch=microbatch, scores=scores)
    _refuse_another_step(gradients, direction, trained.params)
    # P, c and the normalisers are the whole step's: only so are the lines' shares of it linear.
    lines = {name: _share(gradient, direction) for name, gradient in gradients.items()}
    parts = {name: direction.parts[name] for name in BASELINE_PARTS if name in direction.parts}
    return {**parts, **lines}


def line_gradients(
    trained: Policy,
    batch: UpdateBatch,
    objective: Objective,
    *,
    microbatch: int = 8,
    scores: Scores | None = None,
) -> dict[str, dict[str, Tensor]]:
    """grad L_line of every gradient line, with the normalisers of the whole batch."""
    whole(batch.rollouts)
    require_full_precision(trained.params)
    if cut_over_ranks(trained):
        total = _by_coefficients(trained, batch, objective, microbatch, scores)
    else:
        total = _by_losses(trained, batch, objective, microbatch)
    for name, gradient in total.items():
        check_finite(f"gradient of the line {name!r}", gradient)
    return total


def _by_coefficients(
    trained: Policy,
    batch: UpdateBatch,
    objective: Objective,
    microbatch: int,
    scores: Scores | None,
) -> dict[str, dict[str, Tensor]]:
    """J^T dL_line/d(l, h), a pass for each line: FSDP frees what a pass kept with its backward."""
    rollouts = batch.rollouts
    scores = scores or score_all(trained, trained.params, rollouts, microbatch=microbatch)
    return {
        name: weighted_gradient(trained, rollouts, coefficient, microbatch=microbatch)
        for name, coefficient in line_coefficients(objective, scores, batch).items()
    }


def _by_losses(
    trained: Policy, batch: UpdateBatch, objective: Objective, microbatch: int
) -> dict[str, dict[str, Tensor]]:
    """One graph for all lines."""
    weights = objective.token_weights(batch)
    lines = line_objectives(objective, batch)
    leaves = {name: value.detach().requires_grad_() for name, value in trained.params.items()}
    ranks = current()

    def local() -> list[Tensor]:
        sums = [GradientSum(leaves) for _ in lines]
        for rows_N, columns, part in ranks.shard(batch.rollouts.split(microbatch, trained)):
            with torch.enable_grad():
                scores = trained.score(leaves, part)
                losses = [
                    loss.weighted(scores, of.take(rows_N, columns), weights.take(rows_N, columns))
                    for loss, of in lines.values()
                ]
            for into, grads in zip(sums, _gradients(losses, tuple(leaves.values())), strict=True):
                into.add(dict(zip(leaves, grads, strict=True)))
        return [total for one in sums for total in one.sums]

    found, each = iter(ranks.all_reduce(local)), len(leaves)
    return {name: as_gradients(islice(found, each), leaves) for name in lines}


def _share(gradient: Params, direction: Direction) -> dict[str, Tensor]:
    """-P c g, in fp64 and then in the direction's own dtype, as optimizers' parts are made."""
    assert direction.preconditioner is not None  # checked before any pass
    return {
        name: (-direction.clip_factor * p.double() * gradient[name].double()).to(p.dtype)
        for name, p in direction.preconditioner.items()
    }


def _gradients(losses: list[Tensor], leaves: tuple[Tensor, ...]) -> Iterable[tuple[Tensor, ...]]:
    """One backward per loss through one graph, freed by the last.

    A parameter that a line does not reach has no part in it. One that *no* line reaches shows in
    the sum rule, and was refused when the direction was made.
    """
    for k, loss in enumerate(losses):
        if not loss.requires_grad:
            raise ValueError(
                "A term of the loss does not depend on any parameter: was `score` computed under "
                "no_grad? Expected scores that can be differentiated."
            )
        yield torch.autograd.grad(
            loss, leaves, retain_graph=k + 1 < len(losses), materialize_grads=True
        )


def _check(trained: Policy, batch: UpdateBatch, direction: Direction) -> None:
    if not isinstance(batch, UpdateBatch):
        raise TypeError(
            f"Got {type(batch).__name__} as update batch; expected an UpdateBatch, which has "
            "advantages beside its rollouts."
        )
    check_direction(trained, direction)
    known = (*BASELINE_PARTS, "gradient")
    foreign = sorted(set(direction.parts) - set(known))
    if foreign or "gradient" not in direction.parts or direction.preconditioner is None:
        has = sorted(direction.parts)
        raise ValueError(
            f"This direction has the parts {has} and "
            f"{'no' if direction.preconditioner is None else 'a'} preconditioner; expected parts "
            f"among {known}, the gradient always, and a preconditioner. An observed step cannot "
            "be split into lines: rebuild it with compute_update_vector_adamw."
        )


def _refuse_another_step(
    gradients: Mapping[str, Params], direction: Direction, params: Params
) -> None:
    """Compared before P is applied, which blows up the rounding of gradients that are next to 0."""
    assert direction.preconditioner is not None  # checked before any pass
    gap = {
        key: direction.clip_factor * sum_of(g[key].double() for g in gradients.values())
        + direction.gradient[key].double() / p.double()
        for key, p in direction.preconditioner.items()
    }
    size = direction.clip_factor * sum(norm(g) for g in gradients.values())
    limit = sum_rule_tolerance(params)
    if norm(gap) > limit * size:
        raise ValueError(
            "The lines sum to another gradient than the direction's: they differ by "
            f"{norm(gap):.3g}, expected at most {limit:.1g} of the lines' size {size:.3g}. Pass "
            "the update batch, the objective and the policy (at its training temperature) that "
            "made this direction."
        )
