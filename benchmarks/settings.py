"""Several settings of adapters in one pass, against a pass for each.

    python -m benchmarks.settings [--rounds 5] [--models smollm2 random] [--json FILE]

LoRA of rank 16; 8 rollouts of one prompt (50 to 100 tokens, responses of 20 to 64), 8 settings
theta + eta v_k with v_k = +1 or -1 in every parameter.

    each        policy.score(theta + eta v_k, part) for every setting and every microbatch
    together    policy.score_many of the 8 settings, for every microbatch

in microbatches of 1, 2, 4 and 8 rollouts. `equal` says whether all scores were the same bits,
`memory` is the largest live memory of *together* over that of *each*.

CPU time on one thread, the ways in turn; ratios of the same round, median and range.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.counting import counted
from benchmarks.models import GROUP, questions, random_llama, random_prompts, rollouts_of, smollm2
from benchmarks.tables import alternately, conditions, options, ratio, spread, told, write
from entropy_experiments.models.call_conditions import causal_lm
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import shifted
from entropy_experiments.types import Params, Rollouts, Scores

SETTINGS, ETA, RANK = 8, 1e-4, 16
MICROBATCHES = (1, 2, 4, 8)


def problem(name: str) -> tuple[SequenceProcessor, Rollouts]:
    """A policy trained by LoRA, and 8 rollouts of one prompt."""
    if name == "smollm2":
        policy, tokenizer = smollm2()
        asked, size = questions(tokenizer, 1), len(tokenizer)
    else:
        policy = random_llama(rank=RANK)
        size = causal_lm(policy.model).config.vocab_size
        asked = random_prompts(1, size)
    return policy, rollouts_of(asked, group=GROUP, vocabulary=size)


def settings(policy: SequenceProcessor) -> list[Params]:
    draw = torch.Generator().manual_seed(2)
    steps = [
        {n: torch.randn(p.shape, generator=draw).sign().to(p) for n, p in policy.params.items()}
        for _ in range(SETTINGS)
    ]
    return [shifted(policy.params, step, ETA) for step in steps]


@torch.no_grad()
def each(policy: SequenceProcessor, many: Sequence[Params], parts: Sequence[Rollouts]) -> list:
    return [[policy.score(params, part) for params in many] for part in parts]


@torch.no_grad()
def together(policy: SequenceProcessor, many: Sequence[Params], parts: Sequence[Rollouts]) -> list:
    return [policy.score_many(many, part) for part in parts]


def examine(
    policy: SequenceProcessor, rollouts: Rollouts, microbatch: int, rounds: int
) -> dict[str, Any]:
    parts = [part for _, _, part in rollouts.split(microbatch, policy)]
    given = (policy, settings(policy), parts)
    one, many = (counted(partial(way, *given)) for way in (each, together))  # and warm
    taken = alternately(
        {"each": partial(each, *given), "together": partial(together, *given)}, rounds
    )
    return {
        "equal": _equal(one.found, many.found),
        "memory": many.peak_bytes / one.peak_bytes,
        "operations": one.flops / many.flops,
        "cpu_seconds": {name: spread(found) for name, found in taken.items()},
        "speedup": ratio(taken["each"], taken["together"]),
    }


def _equal(one: list[list[Scores]], two: list[list[Scores]]) -> bool:
    pairs = ((a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))
    return all(torch.equal(u, v) for a, b in pairs for u, v in zip(a, b, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    asked = options(__doc__, "settings").parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, Any] = {**conditions(asked.rounds, settings=SETTINGS), "models": {}}
    for name in asked.models:
        one: dict[str, Any] = {}
        found["models"][name] = one
        policy, rollouts = problem(name)
        for size in MICROBATCHES:
            case = f"microbatch_{size}"
            one[case] = examine(policy, rollouts, size, asked.rounds)
            print(
                f"{name}, {case}: {told(one[case]['speedup'])} times faster, memory "
                f"{one[case]['memory']:.2f}, "
                + ("the same bits" if one[case]["equal"] else "not the same bits"),
                flush=True,
            )
            write(asked.json, found)


if __name__ == "__main__":
    main()
