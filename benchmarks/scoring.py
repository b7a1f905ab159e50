"""Scoring rollouts: ours beside the plain way, in time, memory and the machine's own speed.

    python -m benchmarks.scoring [--rounds 5] [--models smollm2 random] [--threads 1 2]

4 prompts (50 to 100 tokens) x 8 responses (20 to 64 tokens): log-prob and entropy of every response
token, without gradients.

    plain     model(input_ids, attention_mask).logits, fp32 log_softmax, gather, -sum p log p, in
              batches of 8 and of 1, in the order given, right-padded to the longest of the batch
    ours      estimate.ratio.score_all with microbatches of 16, as the commands have it

On one thread time is CPU time, which other people's work disturbs least; on more it is the wall
clock. Each number of threads is a section of its own. *Of the peak*: what the model's own matrix
products would take alone, at the row counts that ours has, over the time of ours
(benchmarks.products). Memory is the largest sum of tensor storages alive at once that were made
during the call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.counting import counted
from benchmarks.models import PROMPTS, problem
from benchmarks.products import Products
from benchmarks.tables import alternately, conditions, options, ratio, spread, told, write
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.types import Rollouts, Scores

MICROBATCH = 16
TARGETS = {"plain_8": 3.0, "plain_1": 3.0, "memory": 0.25, "of_peak": 0.75}
PLAIN = {"plain_8": 8, "plain_1": 1}
"""Batch sizes."""


def plain(policy: SequenceProcessor, rollouts: Rollouts, batch: int) -> Scores:
    logprob_NS = torch.zeros(rollouts.tokens_NS.shape)
    entropy_NS = torch.zeros_like(logprob_NS)
    with torch.no_grad():
        for rows_N in torch.arange(len(rollouts)).split(batch):
            width = int(rollouts.attention_NS[rows_N].sum(1).max())
            tokens_NS = rollouts.tokens_NS[rows_N, :width]
            mask_NS = rollouts.attention_NS[rows_N, :width]
            logits_NSV = policy.model(input_ids=tokens_NS, attention_mask=mask_NS.long()).logits
            logp_NSV = logits_NSV[:, :-1].float().log_softmax(-1)
            drawn_NS1 = tokens_NS[:, 1:, None]
            logprob_NS[rows_N, 1:width] = logp_NSV.gather(-1, drawn_NS1).squeeze(-1)
            entropy_NS[rows_N, 1:width] = -(logp_NSV.exp() * logp_NSV).sum(-1)
    return Scores(*(x.where(rollouts.response_NS, 0.0) for x in (logprob_NS, entropy_NS)))


def ours(policy: SequenceProcessor, rollouts: Rollouts) -> Scores:
    return score_all(policy, policy.params, rollouts, microbatch=MICROBATCH)


def examine(
    policy: SequenceProcessor, rollouts: Rollouts, rounds: int, threads: Sequence[int]
) -> dict[str, Any]:
    ways = {
        "ours": lambda: ours(policy, rollouts),
        **{name: lambda n=n: plain(policy, rollouts, n) for name, n in PLAIN.items()},
    }
    products, mine = Products.of(policy.model, lambda: counted(ways["ours"]))  # and warm
    counts = {"ours": mine, **{name: counted(ways[name]) for name in PLAIN}}
    error = max(
        float((x_NS - other_NS).abs().max())
        for name in PLAIN
        for x_NS, other_NS in zip(mine.found, counts[name].found, strict=True)
    )
    if error > 1e-3:
        raise RuntimeError(f"ours and the plain way differ by {error:.2g}: nothing to compare.")
    memory = {name: one.peak_bytes for name, one in counts.items()}
    found: dict[str, Any] = {
        "rollouts": len(rollouts),
        "attended_tokens": int(rollouts.attention_NS.sum()),
        "response_tokens": int(rollouts.response_NS.sum()),
        "tokens_through": products.tokens(policy.model),
        "largest_difference": error,
        "peak_bytes": memory,
        "memory": memory["ours"] / memory["plain_8"],
        "flops": {
            **{name: one.flops for name, one in counts.items()},
            "ours_base_products": products.operations,
            "ours_adapters": products.other,
        },
    }
    for count in threads:
        torch.set_num_threads(count)
        found[f"threads_{count}"] = _timed(ways, products, rounds, count)
    return found


def _timed(ways: Any, products: Products, rounds: int, threads: int) -> dict[str, Any]:
    clock = time.process_time if threads == 1 else time.perf_counter
    alone: list[float] = []
    every = {**ways, "products": lambda: alone.append(products.alone(clock))}
    taken = alternately(every, rounds, clock)
    taken["products"] = alone  # the sum over all of them, not the time that sampling them took
    return {
        "clock": "CPU" if threads == 1 else "wall",
        "seconds": {name: spread(values) for name, values in taken.items()},
        "speedup": {name: ratio(taken[name], taken["ours"]) for name in PLAIN},
        "products_per_second": products.operations / spread(alone)["median"],
        "of_peak": ratio(alone, taken["ours"]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    default = torch.get_num_threads()
    parser = options(__doc__, "scoring")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, default}))
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of 8 rollouts each")
    asked = parser.parse_args(argv)
    found: dict[str, Any] = {**conditions(asked.rounds), "targets": TARGETS, "models": {}}
    for name in asked.models:
        torch.set_num_threads(1)
        one = examine(*problem(name, asked.prompts), asked.rounds, asked.threads)
        found["models"][name] = one
        print(f"{name}: {one['rollouts']} rollouts, {one['attended_tokens']} tokens")
        print(f"  peak memory {one['memory']:.2f} of plain_8; target {TARGETS['memory']:g}")
        for count in asked.threads:
            part = one[f"threads_{count}"]
            print(f"  {count} thread(s), {part['clock']} time")
            for way, times in part["seconds"].items():
                print(f"    {way:9} {told(times)} s")
            for way, times in part["speedup"].items():
                print(f"    {way:9} {told(times)} times ours; target {TARGETS[way]:g}")
            print(f"    {told(part['of_peak'])} of the peak; target {TARGETS['of_peak']:g}")
        write(asked.json, found)


if __name__ == "__main__":
    main()
