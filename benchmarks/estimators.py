"""Prediction, measurement and influences on a real model, in forward passes and against plain ways.

    python -m benchmarks.estimators [--rounds 5] [--models smollm2 random] [--json FILE]

Rollouts as in benchmarks.scoring; the direction is +1 or -1 in every parameter, as Adam's first
step is.

    pass        estimate.ratio.score_all: one forward of E without gradients, the unit
    prediction  first_order by jvp, with its standard error
    measurement measured_many at one more eta, the base pass given
    tokens      influence of every token and rollout of U given u = P g_H: slopes of the scores
                along u (influence.jacobian.score_slopes), times the loss's coefficients
    many        estimate.first_order.scores_along for 4 directions at once, on 8 rollouts

Plain ways, each through policy.score; in (b) and (c) every rollout has a row of its own (no prompt
is shared), in (d) not:

    (b)         scores = policy.score(leaves, 8 rollouts), then for each of them
                torch.autograd.grad(loss_i, leaves, retain_graph=True), its product with u
    (c)         policy.score(theta + eta v_i, E) for every rollout's direction and eta: 32 x 3
    (d)         torch.func.jvp(policy.score, theta, v_k) for each of the 4 directions, on 8 rollouts

E and U are the same 4 prompts x 8 responses. (b), (c) and (d) in full would take most of an hour.
Timed are: of (b) one graph of 8 rollouts and 2 of its 8 gradients, of (c) one pass over these 8
rollouts, of (d) one direction, another in each round. The rest is taken to cost the same per padded
token, gradient and direction; `scaled_by` has the factors.

CPU time on one thread, the ways in turn; ratios of the same round, median and range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from benchmarks.counting import flops
from benchmarks.models import PROMPTS, problem
from benchmarks.scoring import MICROBATCH
from benchmarks.tables import alternately, conditions, options, ratio, seconds, spread, told, write
from entropy_experiments.attribution.jacobian import score_slopes
from entropy_experiments.estimate.first_order import first_order, scores_along
from entropy_experiments.estimate.measured import measured_many
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.types import Direction, Params, Rollouts, Scores

ETAS = (1e-4, 2e-4, 4e-4)
DIRECTIONS = 4
GRADIENTS = 2
"""Of the 8 of a graph, timed in (b)."""
LIMITS = {"prediction": 3.5, "measurement": 1.1, "b": 4.0, "c": 30.0}


class Work:
    """One model, one batch, all ways."""

    def __init__(self, policy: SequenceProcessor, rollouts: Rollouts) -> None:
        self.policy, self.rollouts = policy, rollouts
        self.alone = policy.without_sharing()
        draw = torch.Generator().manual_seed(2)
        self.advantage_N = torch.randn(len(rollouts), generator=draw)
        self.many: list[Params] = [
            {
                name: torch.randn(p.shape, generator=draw).sign().to(p.dtype)
                for name, p in policy.params.items()
            }
            for _ in range(DIRECTIONS)
        ]
        self.u = self.many[0]
        self.direction = Direction(parts={"gradient": self.u}, lr=ETAS[0])
        self.rows_N, self.share = _typical(rollouts)
        self.few = _batch_of_its_own(rollouts.take(self.rows_N))
        self.base = self.forward()
        self._next = cycle(range(DIRECTIONS))

    def forward(self) -> Scores:
        return score_all(self.policy, self.policy.params, self.rollouts, microbatch=MICROBATCH)

    def predict(self) -> Any:
        return first_order(
            self.policy, self.rollouts, self.direction, microbatch=MICROBATCH, repackings=0
        )

    def measure(self) -> Any:
        return measured_many(
            self.policy,
            self.rollouts,
            {"step": self.direction},
            ETAS[:1],
            base=self.base,
            microbatch=MICROBATCH,
            repackings=0,
        )

    def tokens(self) -> Tensor:
        """[N] influences: -sum_k A dl_k along u; every token's own is in the sum."""
        slope_K = score_slopes(
            self.policy, self.rollouts, [self.u], mode="jvp", microbatch=MICROBATCH
        ).slope_K
        return -(self.advantage_N[:, None] * slope_K.logprob_NS[0]).sum(1)

    def along_many(self) -> list[Scores]:
        return scores_along(self.policy, self.few, self.many, mode="jvp", microbatch=MICROBATCH)[1]

    def graph(self) -> tuple[dict[str, Tensor], Tensor]:
        """(b), its forward: the losses of 8 rollouts."""
        leaves = {name: p.detach().requires_grad_() for name, p in self.policy.params.items()}
        with torch.enable_grad():
            scores = self.alone.score(leaves, self.few)
            loss_N = -(self.advantage_N[self.rows_N, None] * scores.logprob_NS).sum(1)
        return leaves, loss_N

    def gradients(self, leaves: dict[str, Tensor], loss_N: Tensor) -> Tensor:
        """(b), its backwards: influences of the first few."""
        out = []
        for loss in loss_N[:GRADIENTS]:
            grads = torch.autograd.grad(loss, tuple(leaves.values()), retain_graph=True)
            pairs = zip(grads, self.u.values(), strict=True)
            out.append(torch.stack([(g * v).sum() for g, v in pairs]).sum())
        return torch.stack(out).detach()

    def b_seconds(self) -> float:
        """All of (b): the rest of the graph's gradients, and the other rollouts, cost the same."""
        kept: list[Any] = []
        forward = seconds(lambda: kept.append(self.graph()))
        backward = seconds(lambda: self.gradients(*kept[0]))
        return self.share * (forward + backward * len(self.few) / GRADIENTS)

    def one_pass(self) -> None:
        """(c), for one direction and eta, on the 8 rollouts."""
        moved = {n: p + ETAS[0] * self.u[n] for n, p in self.policy.params.items()}
        with torch.no_grad():
            self.alone.score(moved, self.few)

    def one_direction(self) -> tuple[int, Scores]:
        """(d), for the direction whose turn it is."""
        k = next(self._next)
        with torch.no_grad():
            _, slope = jvp(
                lambda p: self.policy.score(p, self.few),
                (self.policy.params,),
                (self.many[k],),
            )[:2]
        return k, slope


def _typical(rollouts: Rollouts) -> tuple[Tensor, float]:
    """The batch of 8 whose padded size is nearest to the mean, and all batches' size over its."""
    batches = torch.arange(len(rollouts)).split(8)
    sizes = [len(b) * int(rollouts.attention_NS[b].sum(1).max()) for b in batches]
    mean = sum(sizes) / len(sizes)
    k = min(range(len(sizes)), key=lambda k: abs(sizes[k] - mean))
    return batches[k], sum(sizes) / sizes[k]


def _batch_of_its_own(part: Rollouts) -> Rollouts:
    """Without columns of padding alone."""
    width = int(part.attention_NS.sum(1).max())
    part = part.take(torch.arange(len(part)), slice(0, width))
    return replace(part, weight_N=None, share=1.0)


def differences(work: Work) -> dict[str, float]:
    """How far ours and the plain ways are apart, relative to the largest number."""
    theirs_N = work.gradients(*work.graph())
    ours_N = work.tokens()[work.rows_N[:GRADIENTS]]
    k, slope = work.one_direction()
    ours = work.along_many()[k].logprob_NS
    inside_NS = torch.where(work.few.response_NS, slope.logprob_NS.double(), 0.0)
    out = {
        "b": float((ours_N - theirs_N).abs().max() / theirs_N.abs().max()),
        "d": float((ours - inside_NS).abs().max() / inside_NS.abs().max()),
    }
    if max(out.values()) > 1e-3:
        raise RuntimeError(f"ours and the plain ways differ by {out}: nothing to compare.")
    return out


def examine(policy: SequenceProcessor, rollouts: Rollouts, rounds: int) -> dict[str, Any]:
    work = Work(policy, rollouts)
    apart = differences(work)  # and warm
    cheap: Mapping[str, Callable[[], Any]] = {
        "pass": work.forward,
        "prediction": work.predict,
        "measurement": work.measure,
    }
    counted = {name: flops(way) for name, way in cheap.items()}
    taken = alternately(cheap, rounds)
    b: list[float] = []
    dear: Mapping[str, Callable[[], Any]] = {
        "tokens": work.tokens,
        "many": work.along_many,
        "b": lambda: b.append(work.b_seconds()),
        "c": work.one_pass,
        "d": work.one_direction,
    }
    again = alternately(dear, rounds)
    again["b"] = b
    scaled = {"c": work.share * len(rollouts) * len(ETAS), "d": float(DIRECTIONS)}
    for name, factor in scaled.items():
        again[name] = [factor * found for found in again[name]]
    return {
        "rollouts": len(rollouts),
        "scaled_by": {**scaled, "b_graphs": work.share, "b_gradients": len(work.few) / GRADIENTS},
        "largest_difference": apart,
        "cpu_seconds": {name: spread(found) for name, found in (taken | again).items()},
        "in_passes": {
            name: ratio(taken[name], taken["pass"]) for name in ("prediction", "measurement")
        },
        "operations_in_passes": {name: n / counted["pass"] for name, n in counted.items()},
        "b": ratio(again["b"], again["tokens"]),
        "c": ratio(again["c"], again["tokens"]),
        "d": ratio(again["d"], again["many"]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "estimators")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of U, 8 rollouts each")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, Any] = {**conditions(asked.rounds), "targets": LIMITS, "models": {}}
    for name in asked.models:
        one = examine(*problem(name, asked.prompts), asked.rounds)
        found["models"][name] = one
        print(name)
        for kind in ("prediction", "measurement"):
            counted = one["operations_in_passes"][kind]
            print(
                f"  {kind}: {told(one['in_passes'][kind])} passes ({counted:.2f} by operations); "
                f"limit {LIMITS[kind]:g}"
            )
        print(f"  (b) takes {told(one['b'])} times as long as all tokens; target {LIMITS['b']:g}")
        print(f"  (c) takes {told(one['c'])} times as long; target {LIMITS['c']:g}")
        print(f"  (d) takes {told(one['d'])} times as long as {DIRECTIONS} together", flush=True)
        write(asked.json, found)


if __name__ == "__main__":
    main()
