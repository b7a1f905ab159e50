"""The Fisher kernel: how much raising one rollout's log-prob raises another's.

    K_ij = (grad S_i)^T P (grad S_j),     S_i = sum_k l_ik

For a loss whose gradient is sum_j coef_j grad S_j, the gradient part of the step moves S_i by

    eta D S_i = -eta c sum_j K_ij coef_j

exactly to first order; where token coefficients differ within a rollout, `cotangent` puts
sum_k (coef_l l + coef_h h) in the place of S_j, and the sum over j has coefficient 1.

P is multiplied into the right side, once. centred: each side's weighted mean gradient
sum_i w_i grad S_i is subtracted first (for rollouts of the policy its expectation is 0, so what is
subtracted is noise shared by all pairs). cosine: divided by sqrt(K_ii K_jj) of the gradients as
they stand, centred or not; a zero gradient has cosine 0 with everything. Both need P > 0 to be
what their names say; the kernel itself takes any P.

Where the loss sees another policy than the one asked about (another temperature, the full softmax),
the right side's gradients are those of `trained`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from entropy_experiments.distributed import current
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.numerics.derivatives import (
    GradientSum,
    as_gradients,
    require_full_precision,
    shifted,
)
from entropy_experiments.numerics.rollout_gradients import (
    BLOCK_BYTES,
    fitting,
    products,
    rollout_gradients,
    stacked_rows,
)
from entropy_experiments.numerics.sums import whole
from entropy_experiments.types import (
    Direction,
    Params,
    Policy,
    Rollouts,
    Scores,
    check_direction,
    check_params,
)

CONSTANT = 1e-6
"""Spread of a rollout's token coefficients, relative to the largest, that still is none."""

Stack = dict[str, Tensor]


class Contributor(NamedTuple):
    rollout: int
    value: float


class Kernel(NamedTuple):
    """K of every pair, and of each rollout with itself, in fp64."""

    value_NM: Tensor
    own_N: Tensor
    """K_ii of the left rollouts."""
    own_M: Tensor
    """K_jj of the right ones."""

    @property
    def cosine_NM(self) -> Tensor:
        scale_NM = (self.own_N[:, None] * self.own_M).sqrt()
        some_NM = scale_NM > 0
        return torch.where(some_NM, self.value_NM / torch.where(some_NM, scale_NM, 1.0), 0.0)


def fisher_kernel(
    policy: Policy,
    left: Rollouts,
    right: Rollouts,
    preconditioner: Params | None = None,
    *,
    cosine: bool = False,
    trained: Policy | None = None,
    cotangent: Scores | None = None,
    centred: bool = False,
    block_bytes: int = BLOCK_BYTES,
    microbatch: int = 8,
) -> Tensor:
    """[N_left, N_right] in fp64; other options are those of `fisher_blocks`."""
    if cosine and preconditioner is not None:
        check_cosine(preconditioner)
    kernel = fisher_blocks(
        policy,
        left,
        right,
        preconditioner,
        trained=trained,
        cotangent=cotangent,
        centred=centred,
        block_bytes=block_bytes,
        microbatch=microbatch,
    )
    return kernel.cosine_NM if cosine else kernel.value_NM


def fisher_blocks(
    policy: Policy,
    left: Rollouts,
    right: Rollouts,
    preconditioner: Params | None = None,
    *,
    trained: Policy | None = None,
    cotangent: Scores | None = None,
    centred: bool = False,
    block_bytes: int = BLOCK_BYTES,
    microbatch: int = 8,
) -> Kernel:
    """The kernel and its diagonals, blocks of right rollouts at a time; no preconditioner: P is 1.

    `cotangent`: token coefficients of the right rollouts, in place of 1 for every log-prob.
    `trained`: the policy of the right side, if it is another.
    """
    whole(left)
    whole(right)
    require_full_precision(policy.params)
    trained, p = trained or policy, preconditioner
    check_params("the trained policy", trained.params, policy.params)
    if p is not None:
        check_params("preconditioner", p, policy.params)
    size = fitting(policy.params, block_bytes)
    at_once = min(microbatch, size)
    left_worth, right_worth = _sum_of_logprobs(left), cotangent or _sum_of_logprobs(right)
    shift_left = shift_right = None
    if centred:
        shift_left = _mean_gradient(policy, left, left_worth, at_once)
        same = right is left and cotangent is None and trained is policy
        shift_right = shift_left if same else _mean_gradient(trained, right, right_worth, at_once)

    ranks, columns_M = current(), []
    own_N, own_M = (torch.zeros(len(side), dtype=torch.float64) for side in (left, right))
    for rows_M in torch.arange(len(right)).split(size):
        block = _block(trained, right, right_worth, rows_M, shift_right, at_once)
        own_M[rows_M] = _weigh(block, p)

        def local() -> list[Tensor]:
            """Of the left rollouts: products with the block, and with themselves."""
            out_NM = own_N.new_zeros(len(left), len(rows_M))
            square_N = torch.zeros_like(own_N)
            for rows_N, columns, part in ranks.shard(left.split(at_once)):
                found = _gradients(policy, part, left_worth, rows_N, columns)
                gradients = _centred(found, shift_left)
                out_NM[rows_N.cpu()] = products(gradients, block).cpu()
                if int(rows_M[0]) == 0:
                    square_N[rows_N.cpu()] = _weigh(dict(gradients), p)
            return [out_NM, square_N]

        out_NM, square_N = ranks.all_reduce(local)
        columns_M.append(out_NM)
        own_N = own_N + square_N
    return Kernel(torch.cat(columns_M, 1), own_N, own_M)


def top_contributors(kernel_M: Tensor, count: int) -> list[Contributor]:
    """The entries of one row (or of row times coefficients) that are largest by size."""
    if kernel_M.dim() != 1 or count < 1:
        raise ValueError(
            f"Got a kernel of shape {tuple(kernel_M.shape)} and count {count}; expected one row "
            "[N_right] and a count of at least 1."
        )
    order = kernel_M.abs().argsort(descending=True, stable=True)[:count]
    return [Contributor(int(i), float(kernel_M[i])) for i in order]


def rollout_coefficients(coefficient: Scores, rollouts: Rollouts) -> Tensor:
    """coef_j where dL/dl_jk is the same for all tokens of a rollout and dL/dh_jk is 0."""
    mean_N, off_N = _spread(coefficient, rollouts)
    if float(off_N.max()) > CONSTANT:
        raise ValueError(
            f"Rollout {int(off_N.argmax())} has token coefficients that differ (clipping, a KL "
            "term), or an entropy bonus; expected one number per rollout. Give them to "
            "fisher_kernel as cotangent=, and ones as coefficients."
        )
    return mean_N


def one_per_rollout(coefficient: Scores, rollouts: Rollouts) -> bool:
    """Whether `rollout_coefficients` says all that the token coefficients do."""
    return float(_spread(coefficient, rollouts)[1].max()) <= CONSTANT


def _spread(coefficient: Scores, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Mean coefficient of each rollout, and how far its tokens are from it: 1 is the largest."""
    response_NS, (l_NS, h_NS) = rollouts.response_NS, coefficient
    mean_N = torch.where(response_NS, l_NS, 0.0).sum(1) / rollouts.tokens_N
    off_NS = torch.where(response_NS, (l_NS - mean_N[:, None]).abs() + h_NS.abs(), 0.0)
    largest = l_NS.abs().max().clamp(min=torch.finfo(l_NS.dtype).tiny)
    return mean_N, off_NS.amax(1) / largest


def predicted_logprob_changes(
    kernel_NM: Tensor, coefficient_M: Tensor, *, clip_factor: float = 1.0, eta: float
) -> Tensor:
    """-eta c sum_j K_ij coef_j: what the gradient part of a step does to each S_i, first order."""
    if kernel_NM.shape[1:] != coefficient_M.shape:
        raise ValueError(
            f"The kernel has shape {tuple(kernel_NM.shape)} and there are "
            f"{tuple(coefficient_M.shape)} coefficients; expected one per right rollout."
        )
    return -eta * clip_factor * (kernel_NM @ coefficient_M.to(kernel_NM))


def logprob_changes(
    policy: Policy,
    rollouts: Rollouts,
    direction: Direction,
    eta: float,
    *,
    microbatch: int = 8,
    base: Scores | None = None,
) -> Tensor:
    """S_i(theta + eta v) - S_i(theta), measured."""
    check_direction(policy, direction)
    base = base or score_all(policy, policy.params, rollouts, microbatch=microbatch)
    there = shifted(policy.params, direction.total, eta)
    moved = score_all(policy, there, rollouts, microbatch=microbatch)
    gap_NS = moved.logprob_NS - base.logprob_NS
    return torch.where(rollouts.response_NS, gap_NS, 0.0).sum(1)


def check_cosine(preconditioner: Params) -> None:
    """Refuse a P that gives no cosine."""
    for name, value in preconditioner.items():
        if not bool((value >= 0).all()):
            raise ValueError(
                f"The preconditioner of {name!r} has negative entries, as an optimizer that "
                "maximizes has; a cosine needs P >= 0. Give minus the preconditioner."
            )


def _sum_of_logprobs(rollouts: Rollouts) -> Scores:
    one_NS = rollouts.response_NS.double()
    return Scores(one_NS, torch.zeros_like(one_NS))


def _mean_gradient(policy: Policy, rollouts: Rollouts, cotangent: Scores, microbatch: int) -> Stack:
    """sum_i w_i g_i of the whole batch."""
    ranks = current()

    def local() -> list[Tensor]:
        total = GradientSum(policy.params)
        for rows_N, columns, part in ranks.shard(rollouts.split(microbatch)):
            gradients = _gradients(policy, part, cotangent, rows_N, columns)
            total.add(
                {
                    name: torch.tensordot(rollouts.weight_N[rows_N].to(g), g, dims=1)
                    for name, g in gradients.items()
                }
            )
        return total.sums

    return as_gradients(ranks.all_reduce(local), policy.params)


def _block(
    policy: Policy,
    rollouts: Rollouts,
    cotangent: Scores,
    rows_M: Tensor,
    shift: Stack | None,
    microbatch: int,
) -> Stack:
    """Gradients of some rollouts, stacked in the order of `rows_M`."""
    rows_M = rows_M.to(rollouts.tokens_NS.device)
    chosen = Scores(*(x_NS[rows_M.to(x_NS.device)] for x_NS in cotangent))

    def gradients(at_N: Tensor, columns: slice, part: Rollouts) -> Stack:
        return _centred(_gradients(policy, part, chosen, at_N, columns), shift)

    return stacked_rows(policy.params, rollouts.take(rows_M), gradients, microbatch)


def _gradients(
    policy: Policy, part: Rollouts, cotangent: Scores, rows_N: Tensor, columns: slice
) -> Stack:
    cut = Scores(*(x_NS[rows_N, columns] for x_NS in cotangent))
    return rollout_gradients(policy, part, [cut])[0]


def _centred(gradients: Stack, shift: Stack | None) -> Stack:
    return gradients if shift is None else {n: g - shift[n] for n, g in gradients.items()}


def _weigh(stack: Stack, p: Params | None) -> Tensor:
    """Put P g for every g of the stack; [n] g.P g in fp64."""
    square_N = torch.zeros((), dtype=torch.float64)
    for name, g in stack.items():
        stack[name] = g if p is None else p[name].to(g) * g
        square_N = square_N + (g.double() * stack[name].double()).flatten(1).sum(1).cpu()
    return square_N
