"""The matrix of influences: what update rollout j did to entropy, seen by evaluation rollout i.

    v_j  = -P c J_j^T coef_j            j's share of the step, per unit learning rate
    M_ij = lr w_i (A_ij' - H B_ij') / B,    A_ij' = grad A_i . v_j,  B_ij' = grad B_i . v_j

A_i and B_i are the per-rollout sums of `estimate.ratio`, H = sum w A / sum w B and B = sum w B_i.
Summed over i, column j is the influence of rollout j on H; summed over j as well, it is what the
gradient part of the step does. A' and B' are kept apart, so the jackknife of any column is exactly
that of `first_order` along v_j: the same value, influence values and error bar.

P, c, the normaliser and the advantages are those of the real step (frozen): exact for this step,
and not what would have happened without the rollout (`leave_one_out`).

Directions are made and used in blocks under a memory budget: one pass over U in all, and over E
one forward and two backwards per block. Other directions (momentum, decay, lines of a ledger) ride
along as `extra` columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from entropy_experiments.attribution.folds import FoldGradients
from entropy_experiments.distributed import current
from entropy_experiments.estimate.gradient import weighted_gradient
from entropy_experiments.estimate.ratio import (
    check_estimand,
    check_repeatable,
    drawn_with,
    payload,
    ratio_sums,
    score_all,
    stale_reasons,
)
from entropy_experiments.numerics.derivatives import norm, require_full_precision
from entropy_experiments.numerics.rollout_gradients import (
    BLOCK_BYTES,
    fitting,
    products,
    rollout_gradients,
    stacked,
    stacked_rows,
)
from entropy_experiments.numerics.sums import by_prompt, whole
from entropy_experiments.types import (
    Direction,
    Estimand,
    Estimate,
    Params,
    Policy,
    Rollouts,
    Scores,
    UpdateBatch,
    check_direction,
    check_params,
)
from entropy_experiments.update.objective import Objective, token_coefficients

SUM_RULE = 0.01
"""Of the sum of |parts|: far above fp32 rounding, far below another batch's or loss's gradient."""

Column = int | str
"""An update rollout by its row, or an extra direction by its name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InfluenceMatrix:
    """A and B of each evaluation rollout, and their slopes along each column's direction."""

    evaluation: Rollouts
    estimand: Estimand
    lr: float
    columns_C: tuple[Column, ...]
    """Update rollouts 0, 1, ... in order, then the extra directions."""
    top_N: Tensor
    bottom_N: Tensor
    dtop_NC: Tensor = field(repr=False)
    dbottom_NC: Tensor = field(repr=False)
    doubts: tuple[str, ...] = ()
    passes: int = 0
    """Over E: one forward and two backwards each."""
    g_K: tuple[Params, ...] = field(default=(), repr=False)
    """g_H^(k) of folds of E, if asked for: they add up to g_H, the gradient of entropy."""

    @property
    def matrix_EN(self) -> Tensor:
        """[N_E, N_U] contributions in nats of the step."""
        return self._entries_NC[:, : self.update_rollouts]

    @property
    def update_rollouts(self) -> int:
        return sum(isinstance(column, int) for column in self.columns_C)

    @property
    def extra_EX(self) -> dict[str, Tensor]:
        """Contributions [N_E] along each extra direction."""
        entries_NC = self._entries_NC
        return {c: entries_NC[:, i] for i, c in enumerate(self.columns_C) if isinstance(c, str)}

    @property
    def row_E(self) -> Tensor:
        """What each evaluation rollout says of the whole gradient part."""
        return self.matrix_EN.sum(1)

    @property
    def column_N(self) -> Tensor:
        """The influence of each update rollout on H."""
        return self.matrix_EN.sum(0)

    @property
    def total(self) -> float:
        """The influence of all update rollouts: lr times the slope along the gradient part."""
        return float(self.matrix_EN.sum())

    @property
    def _entries_NC(self) -> Tensor:
        share_N, level = _shares(self.evaluation, self.top_N, self.bottom_N)
        return self.lr * share_N[:, None] * (self.dtop_NC - level * self.dbottom_NC)

    def columns(self, which: Iterable[Column] | None = None) -> dict[Column, Estimate]:
        """Influences in nats with their error bars, of some columns or of all."""
        which = self.columns_C if which is None else tuple(which)
        return {column: self.lr * self.slope(column) for column in which}

    def slope(self, *columns: Column) -> Estimate:
        """dH per unit learning rate along a column's direction, or the sum of several.

        What `first_order` gives for that direction.
        """
        index = [self._index(column) for column in columns]
        sums = (self.dtop_NC[:, index].sum(1), self.dbottom_NC[:, index].sum(1))
        return by_prompt(
            _slope,
            torch.stack([*sums, self.top_N, self.bottom_N], dim=1),
            self.evaluation,
            self.estimand,
            why_not=self.doubts,
            check_tail=True,
        )

    def score_slopes(self, *columns: Column) -> Tensor:
        """[N_E] D S along the sum of these columns' directions: what B'/B is in the snis form."""
        if self.estimand.form != "snis":
            raise ValueError(
                f"The matrix has form {self.estimand.form!r}, which does not hold D S of whole "
                "responses; expected 'snis'. Differentiate the scores instead."
            )
        index = [self._index(column) for column in columns]
        return self.dbottom_NC[:, index].sum(1) / self.bottom_N

    def _index(self, column: Column) -> int:
        if column not in self.columns_C:
            extra = [c for c in self.columns_C if isinstance(c, str)]
            raise KeyError(
                f"The matrix has no column {column!r}; it has update rollouts 0 to "
                f"{self.update_rollouts - 1} and the extra directions {extra}."
            )
        return self.columns_C.index(column)


def influence_matrix(
    policy: Policy,
    evaluation: Rollouts,
    trained: Policy,
    batch: UpdateBatch,
    objective: Objective,
    direction: Direction,
    *,
    estimand: Estimand,
    microbatch: int = 8,
    block_bytes: int = BLOCK_BYTES,
    base: Scores | None = None,
    scores: Scores | None = None,
    extra: Mapping[str, Params] | None = None,
    fold_N: Tensor | None = None,
) -> InfluenceMatrix:
    """First-order contributions of every pair of rollouts, in nats of the step.

    `policy` measures entropy on `evaluation`, with scores `base` at theta; `trained` is the policy
    as the loss sees it, with scores `scores` of `batch`. Both are computed if not given. With
    `fold_N`, a fold 0, 1, ... for each evaluation rollout, the same pass gives g_H by fold.
    """
    extra = dict(extra or {})
    check_direction(policy, direction)
    check_params("the trained policy", trained.params, policy.params)
    check_estimand(policy, estimand)
    for name, v in extra.items():
        check_params(f"extra direction {name!r}", v, policy.params)
    whole(evaluation)
    whole(batch.rollouts)
    require_full_precision(policy.params)
    check_repeatable(policy, evaluation)
    base = base or score_all(policy, policy.params, evaluation, microbatch=microbatch)
    scores = scores or score_all(trained, trained.params, batch.rollouts, microbatch=microbatch)
    coefficient = token_coefficients(objective, scores, batch)
    (top_N, bottom_N), cotangents = _sums_and_cotangents(base, evaluation, estimand)

    columns_C: tuple[Column, ...] = (*range(len(batch.rollouts)), *extra)
    slopes_NC = [top_N.new_zeros(len(evaluation), len(columns_C)) for _ in range(2)]
    ranks, g_K, folds = current(), (), None
    if fold_N is not None:
        folds = FoldGradients(policy.params, fold_N, *_shares(evaluation, top_N, bottom_N))
    size, passes, made = fitting(policy.params, block_bytes), 0, _Sum()
    at_once = min(microbatch, fitting(policy.params, block_bytes, each=len(cotangents)))
    for start in range(0, len(columns_C), size):
        names = columns_C[start : start + size]
        block = _directions(
            names, extra, trained, batch, coefficient, direction, min(microbatch, size)
        )
        made.add(block, sum(isinstance(name, int) for name in names))
        passes += 1
        with_folds = folds if start == 0 else None

        def local() -> list[Tensor]:
            """Slopes along the block of this rank's evaluation rollouts, and their g_H."""
            out_NC = [top_N.new_zeros(len(evaluation), len(names)) for _ in slopes_NC]
            for rows_N, columns, part in ranks.shard(evaluation.split(at_once, policy)):
                cut = [
                    Scores(*(x_NS[rows_N, columns] for x_NS in cotangent))
                    for cotangent in cotangents
                ]
                found = rollout_gradients(policy, part, cut)
                for into_NC, gradients in zip(out_NC, found):
                    into_NC[rows_N] = products(gradients, block).to(into_NC.device)
                if with_folds is not None:
                    with_folds.add(rows_N, found)
            return [*out_NC, *(() if with_folds is None else with_folds.sums)]

        found = ranks.all_reduce(local)
        for into_NC, slope_NC in zip(slopes_NC, found):
            into_NC[:, start : start + size] = slope_NC
        if with_folds is not None:
            g_K = with_folds.rounded(found[len(slopes_NC) :])
    made.check(direction)
    return InfluenceMatrix(
        evaluation=evaluation,
        estimand=estimand,
        lr=direction.lr,
        columns_C=columns_C,
        top_N=top_N,
        bottom_N=bottom_N,
        dtop_NC=slopes_NC[0],
        dbottom_NC=slopes_NC[1],
        doubts=stale_reasons(base, evaluation, estimand),
        passes=passes,
        g_K=g_K,
    )


def update_directions(
    trained: Policy,
    batch: UpdateBatch,
    coefficient: Scores,
    direction: Direction,
    *,
    rows: Sequence[int] | None = None,
    microbatch: int = 8,
) -> dict[str, Tensor]:
    """v_j = -P c J_j^T coef_j of some update rollouts (or all), stacked: [n, *shape] by name.

    Over all rollouts they sum to the gradient part of the step.
    """
    scale = _scale(direction)
    chosen_N = _rows(range(len(batch.rollouts)) if rows is None else rows, batch.rollouts)

    def shares(at_N: Tensor, columns: slice, part: Rollouts) -> dict[str, Tensor]:
        cut = Scores(*(x_NS[chosen_N[at_N], columns] for x_NS in coefficient))
        (gradients,) = rollout_gradients(trained, part, [cut])
        return {name: scale[name].to(g) * g for name, g in gradients.items()}

    return stacked_rows(trained.params, batch.rollouts.take(chosen_N), shares, microbatch)


def update_direction(
    trained: Policy,
    batch: UpdateBatch,
    coefficient: Scores,
    direction: Direction,
    *,
    row: int,
    microbatch: int = 8,
) -> dict[str, Tensor]:
    """v_j of one update rollout, by a backward of its own: for a model cut over ranks, too."""
    scale = _scale(direction)
    rows_N = _rows([row], batch.rollouts)
    gradient = weighted_gradient(
        trained,
        batch.rollouts.take(rows_N),
        Scores(*(x_NS[rows_N] for x_NS in coefficient)),
        microbatch=microbatch,
    )
    return {name: scale[name].to(g.dtype) * g for name, g in gradient.items()}


def _scale(direction: Direction) -> dict[str, Tensor]:
    """-P c: what a gradient becomes in the step."""
    if direction.preconditioner is None:
        raise ValueError(
            f"This direction has the parts {sorted(direction.parts)} and no preconditioner; "
            "expected one, which says what a rollout's gradient becomes in the step. An observed "
            "step has none: rebuild it with compute_update_vector_adamw."
        )
    return {name: -direction.clip_factor * p for name, p in direction.preconditioner.items()}


class _Sum:
    """The update rollouts' directions added up, which must be the gradient part of the step."""

    def __init__(self) -> None:
        self.total: dict[str, Tensor] = {}
        self.size = 0.0

    def add(self, block: Mapping[str, Tensor], count: int) -> None:
        for name, x in block.items():
            more = x[:count].sum(0)
            self.total[name] = self.total[name] + more if name in self.total else more
            self.size += float(x[:count].flatten(1).norm(dim=1).sum())

    def check(self, direction: Direction) -> None:
        gap = norm({n: x - direction.gradient[n].to(x) for n, x in self.total.items()})
        if not gap <= SUM_RULE * (self.size + norm(direction.gradient)):
            raise ValueError(
                f"The rollouts' shares miss the step's gradient part by {gap:.3g}, of "
                f"{norm(direction.gradient):.3g}. Expected their sum: the direction was made from "
                "another batch, loss, or policy (for DoRA, give `as_trained()` as trained)."
            )


def _directions(
    names: Sequence[Column],
    extra: Mapping[str, Params],
    trained: Policy,
    batch: UpdateBatch,
    coefficient: Scores,
    direction: Direction,
    microbatch: int,
) -> dict[str, Tensor]:
    """The block of these columns."""
    rows = [name for name in names if isinstance(name, int)]
    others = [extra[name] for name in names if isinstance(name, str)]
    blocks = []
    if rows:
        directions = update_directions(
            trained, batch, coefficient, direction, rows=rows, microbatch=microbatch
        )
        blocks.append(directions)
    if others:
        blocks.append(stacked(others))
    if len(blocks) == 1:
        return blocks[0]
    return {name: torch.cat([b[name].to(x) for b in blocks]) for name, x in blocks[0].items()}


def _rows(rows: Iterable[int], rollouts: Rollouts) -> Tensor:
    indices = [int(row) for row in rows]
    outside = [row for row in indices if not 0 <= row < len(rollouts)]
    if outside or not indices:
        raise ValueError(
            f"rows is {indices[:8]}; expected one or more of the update rollouts 0 to "
            f"{len(rollouts) - 1}."
        )
    return torch.tensor(indices, device=rollouts.tokens_NS.device)


def _sums_and_cotangents(
    base: Scores, rollouts: Rollouts, estimand: Estimand
) -> tuple[tuple[Tensor, Tensor], list[Scores]]:
    """A_i and B_i, and the cotangents of each token's scores in them; B's may be zero."""
    leaves = Scores(*(x_NS.detach().double().requires_grad_() for x_NS in base))
    with torch.enable_grad():
        moved_NS = leaves.logprob_NS - drawn_with(base, rollouts)
        sums = ratio_sums(payload(leaves, estimand), moved_NS, rollouts, estimand)
    cotangents = []
    for sum_N in sums:
        if not sum_N.requires_grad:  # per sequence and per decision, B_i is 1
            continue
        grads = torch.autograd.grad(sum_N.sum(), leaves, retain_graph=True, allow_unused=True)
        cotangents.append(
            Scores(
                *(
                    torch.zeros_like(leaf) if grad is None else grad
                    for leaf, grad in zip(leaves, grads, strict=True)
                )
            )
        )
    return (sums[0].detach(), sums[1].detach()), cotangents


def _shares(rollouts: Rollouts, top_N: Tensor, bottom_N: Tensor) -> tuple[Tensor, Tensor]:
    """w_i / B and H."""
    weight_N = rollouts.weight_N
    bottom = (weight_N * bottom_N).sum()
    return weight_N / bottom, (weight_N * top_N).sum() / bottom


def _slope(dtop: Tensor, dbottom: Tensor, top: Tensor, bottom: Tensor) -> Tensor:
    return (dtop - top / bottom * dbottom) / bottom
