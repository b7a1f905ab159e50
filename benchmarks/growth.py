"""How time and memory grow with the number and length of rollouts, the vocabulary and the rank.

    python -m benchmarks.growth [--rounds 5] [--axes N_E N_U S V r memory] [--small] [--json FILE]

The random llama of 30M parameters (benchmarks.models), fully trained; with LoRA for r. Prompts have
8 tokens and 8 responses each, which share them. Along each axis one size grows, the others stay:

    N_E   evaluation rollouts   N_U   update rollouts   S   response tokens
    V     vocabulary            r     rank of LoRA

    pass         score_all(E)
    prediction   first_order(E, direction), jvp, with its standard error
    measurement  measured_many(E, direction, one eta), the base pass given
    tokens       token_influence(E, U, direction, folds=2): g_H of E, slopes of U's scores

    exponent     slope of the least-squares line of log seconds over log size, in every round

Constant costs make an exponent smaller than the growth at its end: `last` is that of the two
largest sizes alone. CPU time on one thread; sizes in turn within a round, so that a slow minute
bends no single size in all rounds.

Memory from N_E = 128 to 2048: the largest sum of tensor storages alive at once that were made
during the call. `all` is that sum. What is one or more numbers per token or rollout ([N_E, S], the
answer itself and what it is made of) is proportional to N_E by nature: `working` leaves out the
storages made for tensors that have N_E, or as many as E has response tokens, as one of their sizes.
`rollouts` are the bytes of E, which the caller holds: in neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from benchmarks.counting import LiveBytes, WorkingBytes
from benchmarks.models import GROUP, random_llama, random_prompts, rollouts_of
from benchmarks.tables import conditions, options, seconds, spread, told, write
from entropy_experiments.attribution.tokens import token_influence
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.measured import measured_many
from entropy_experiments.estimate.options import slope_estimand
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.call_conditions import causal_lm
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.types import Direction, Rollouts, UpdateBatch
from entropy_experiments.update.gradient import loss_gradient
from entropy_experiments.update.objective import Objective

ETA = 1e-4
PROMPT = 8
MICROBATCH = 16
USUAL = {"N_E": 16, "N_U": 16, "S": 4, "V": 32_768, "r": 0}
BESIDE: Mapping[str, Mapping[str, int]] = {"V": {"S": 8}, "r": {"S": 16}}
"""What else differs from the usual along an axis: enough tokens to outweigh constant costs."""
SIZES: Mapping[str, Sequence[int]] = {
    "N_E": (16, 32, 64, 128, 256),
    "N_U": (16, 32, 64, 96, 128),
    "S": (4, 8, 16, 32, 48),
    "V": (4_096, 8_192, 16_384, 32_768, 65_536),
    "r": (2, 4, 8, 16, 32, 64),
}
SMALL: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("N_E", "N_U"), (16, 32)),
    "S": (4, 8),
    "V": (1_024, 2_048),
    "r": (2, 4),
}
WAYS_OF: Mapping[str, Sequence[str]] = {
    "N_E": ("pass", "prediction", "measurement", "tokens"),
    "N_U": ("tokens",),  # nothing else looks at U
    **dict.fromkeys(("S", "V", "r"), ("pass", "prediction", "measurement", "tokens")),
}
MEMORY, MEMORY_SMALL = (128, 512, 2048), (56, 112)
"""None is a size of the model or of a microbatch, nor is 4 times it: see `working`."""
MEMORY_WAYS = ("pass", "prediction", "measurement", "tokens")
PER_TOKEN = 4
"""Numbers that a result may hold for every token before it counts as work."""
LIMITS = {"exponent": 1.1, "memory": 0.05}


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    policy: SequenceProcessor
    evaluation: Rollouts
    batch: UpdateBatch
    direction: Direction
    objective: Objective

    def ways(self) -> dict[str, Callable[[], Any]]:
        policy, evaluation = self.policy, self.evaluation
        base = score_all(policy, policy.params, evaluation, microbatch=MICROBATCH)
        common: dict[str, Any] = {"microbatch": MICROBATCH, "repackings": 0}
        estimand = slope_estimand(policy, form="matched")
        return {
            "pass": lambda: score_all(policy, policy.params, evaluation, microbatch=MICROBATCH),
            "prediction": lambda: first_order(policy, evaluation, self.direction, **common),
            "measurement": lambda: measured_many(
                policy, evaluation, {"step": self.direction}, [ETA], base=base, **common
            ),
            "tokens": lambda: token_influence(
                policy,
                evaluation,
                policy.as_trained(),
                self.batch,
                self.objective,
                self.direction,
                estimand=estimand,
                microbatch=MICROBATCH,
                base=base,
            ),
        }


def rollouts(count: int, length: int, vocabulary: int, seed: int) -> Rollouts:
    """`count` / 8 prompts of one length; their responses have from half to one and a half S."""
    if count % GROUP or count < 2 * GROUP:
        raise ValueError(f"{count} rollouts; expected a multiple of {GROUP}, two prompts at least.")
    prompts = random_prompts(count // GROUP, vocabulary, (PROMPT, PROMPT))
    ends = (max(1, length // 2), length + length // 2)
    return rollouts_of(prompts, group=GROUP, vocabulary=vocabulary, seed=seed, responses=ends)


def problem(policy: SequenceProcessor, size: Mapping[str, int]) -> Problem:
    """The step is plain SGD on these very rollouts, which token influences are checked against."""
    evaluation = rollouts(size["N_E"], size["S"], size["V"], seed=0)
    asked = rollouts(size["N_U"], size["S"], size["V"], seed=1)
    draw = torch.Generator().manual_seed(2)
    advantage_NS = torch.randn(len(asked), 1, generator=draw).expand(asked.tokens_NS.shape)
    batch = UpdateBatch(rollouts=asked, advantage_NS=advantage_NS.clone())
    objective = Objective()
    found = loss_gradient(policy, batch, objective, microbatch=MICROBATCH)
    direction = Direction(
        parts={"gradient": {name: -g for name, g in found.gradient.items()}},
        lr=ETA,
        preconditioner={n: torch.ones(()).expand(g.shape) for n, g in found.gradient.items()},
    )
    return Problem(
        policy=policy,
        evaluation=evaluation,
        batch=batch,
        direction=direction,
        objective=objective,
    )


def fitted_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """b of the least-squares line log y = a + b log x."""
    if len(sizes) != len(values) or len(set(sizes)) < 2:
        raise ValueError(
            f"{len(sizes)} sizes and {len(values)} values; expected as many of each, of two or "
            "more different sizes."
        )
    if min(*sizes, *values) <= 0:
        raise ValueError(
            f"The smallest number is {min(*sizes, *values):g}; expected all above 0: they are "
            "drawn on logarithmic axes."
        )
    x, y = [math.log(v) for v in sizes], [math.log(v) for v in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return across / sum((a - mean_x) ** 2 for a in x)


def along(axis: str, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Seconds of every way and size in every round, and the exponents."""
    policies: dict[tuple[int, int], SequenceProcessor] = {}
    made: dict[int, dict[str, Callable[[], Any]]] = {}
    for value in sizes:
        size = {**USUAL, **BESIDE.get(axis, {}), axis: value}
        key = (size["V"], size["r"])
        if key not in policies:
            policies[key] = random_llama(size["V"], rank=size["r"] or None)
        ways = problem(policies[key], size).ways()
        made[value] = {name: ways[name] for name in WAYS_OF[axis]}
    for run in made[sizes[0]].values():
        run()  # first calls load what later ones find loaded
    taken = {way: {value: [] for value in sizes} for way in WAYS_OF[axis]}
    for i in range(rounds):
        for value in sizes if i % 2 else sizes[::-1]:
            for way, run in made[value].items():
                taken[way][value].append(seconds(run))
    return {way: grown(times) for way, times in taken.items()}


def grown(times: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Of one way: size -> seconds of every round."""
    sizes = list(times)
    each = list(zip(*times.values(), strict=True))
    return {
        "cpu_seconds": {str(size): spread(found) for size, found in times.items()},
        "exponent": spread(fitted_exponent(sizes, one) for one in each),
        "last": spread(fitted_exponent(sizes[-2:], one[-2:]) for one in each),
    }


def memory(policy: SequenceProcessor, sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes are the same every time, so one call each will do."""
    vocabulary = causal_lm(policy.model).config.vocab_size
    found: dict[str, Any] = {way: {"all": {}, "working": {}} for way in MEMORY_WAYS}
    held: dict[str, int] = {}
    for value in sizes:
        made = problem(policy, {**USUAL, "N_E": value, "V": vocabulary})
        evaluation, ways = made.evaluation, made.ways()
        held[str(value)] = sum(
            x.untyped_storage().nbytes()
            for x in (getattr(evaluation, field.name) for field in fields(evaluation))
            if isinstance(x, Tensor)
        )
        by_nature = {len(evaluation), int(evaluation.response_NS.sum())}
        most = PER_TOKEN * evaluation.tokens_NS.numel()
        for way in MEMORY_WAYS:
            with LiveBytes() as seen, WorkingBytes(by_nature, most) as working:
                ways[way]()
            found[way]["all"][str(value)] = seen.peak
            found[way]["working"][str(value)] = working.peak
    first, last = str(sizes[0]), str(sizes[-1])
    for parts in found.values():
        parts["growth"] = {kind: parts[kind][last] / parts[kind][first] - 1 for kind in parts}
    return {**found, "rollouts": held}


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "growth", models=False)
    parser.add_argument("--axes", nargs="+", choices=[*SIZES, "memory"], default=[*SIZES, "memory"])
    parser.add_argument("--small", action="store_true", help="two tiny sizes each, to try it")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        **conditions(
            asked.rounds, usual=USUAL, beside=BESIDE, prompt_tokens=PROMPT, microbatch=MICROBATCH
        ),
        "targets": LIMITS,
        "axes": {},
    }
    for axis in asked.axes:
        if axis == "memory":
            sizes = MEMORY_SMALL if asked.small else MEMORY
            found["memory"] = memory(random_llama(USUAL["V"]), sizes)
            for way in MEMORY_WAYS:
                more = found["memory"][way]["growth"]
                print(f"memory {way:12} working {more['working']:+.1%}, all {more['all']:+.1%}")
        else:
            sizes = (SMALL if asked.small else SIZES)[axis]
            found["axes"][axis] = along(axis, sizes, asked.rounds)
            for way, one in found["axes"][axis].items():
                print(
                    f"{axis:4} {way:12} exponent {told(one['exponent'])}, last {told(one['last'])}"
                )
        print(end="", flush=True)
        write(asked.json, found)


if __name__ == "__main__":
    main()
