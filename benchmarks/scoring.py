"""Scoring rollouts: ours beside the plain way, in time, memory and the machine's own speed.

    python -m benchmarks.scoring [--rounds 5] [--models smollm2 random] [--json FILE]

4 prompts (50 to 100 tokens) x 8 responses (20 to 64 tokens): log-prob and entropy of every response
token, without gradients.

    plain     model(input_ids, attention_mask).logits, fp32 log_softmax, gather, -sum p log p, in
              batches of 8 and of 1, in the order given, right-padded to the longest of the batch
    ours      estimate.ratio.score_all with microbatches of 8

Time is CPU time on one thread, the ways in turn; ratios are medians over rounds of the same round's
times. *Of the peak*: the floating-point operations of ours over its time, as a share of what plain
matrix products of the same shapes (every linear layer and the head, on as many rows) reach. Memory
is the largest sum of tensor storages alive at once that were made during the call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.counting import flops, peak_bytes
from benchmarks.models import GROUP, PROMPTS, questions, random_llama, random_prompts, rollouts_of
from benchmarks.models import smollm2 as load_smollm2
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.policy.calling import causal_lm
from entropy_experiments.policy.scoring import SequenceProcessor
from entropy_experiments.types import Rollouts, Scores

OUT = Path(__file__).parents[1] / "docs" / "benchmarks" / "scoring.json"
MICROBATCH = 8
TARGETS = {"plain_8": 3.0, "plain_1": 3.0, "memory": 0.25, "of_peak": 0.75}


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


def matmul_rate(policy: SequenceProcessor, rows: int, predicted: int, rounds: int) -> float:
    """Operations per second of bare matrix products of the model's own shapes."""
    head = causal_lm(policy.model).get_output_embeddings()
    shapes = [
        m.weight for m in policy.model.modules() if isinstance(m, nn.Linear) and m is not head
    ]
    inputs: dict[tuple[int, int], Tensor] = {}

    def product(count: int, weight: Tensor) -> int:
        x = inputs.setdefault((count, weight.shape[1]), torch.randn(count, weight.shape[1]))
        torch.matmul(x, weight.mT)
        return 2 * count * weight.numel()

    def run() -> int:
        body = sum(product(rows, weight) for weight in shapes)
        return body + product(predicted, head.weight)

    with torch.no_grad():
        done = run()
        return done / statistics.median(_seconds(run) for _ in range(rounds))


def _seconds(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def examine(policy: SequenceProcessor, rollouts: Rollouts, rounds: int) -> dict[str, Any]:
    ways = {
        "ours": lambda: ours(policy, rollouts),
        "plain_8": lambda: plain(policy, rollouts, 8),
        "plain_1": lambda: plain(policy, rollouts, 1),
    }
    results = {name: way() for name, way in ways.items()}  # and warm
    error = max(
        float((mine - other).abs().max())
        for name in ("plain_8", "plain_1")
        for mine, other in zip(results["ours"], results[name], strict=True)
    )
    if error > 1e-3:
        raise RuntimeError(f"ours and the plain way differ by {error:.2g}: nothing to compare.")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds):
        order = list(ways) if i % 2 else list(ways)[::-1]
        for name in order:
            seconds[name].append(_seconds(ways[name]))
    memory = {name: peak_bytes(way) for name, way in ways.items()}
    counted = flops(ways["ours"])
    per_part = _tokens_of(policy, rollouts)
    rate = matmul_rate(policy, per_part["rows"], per_part["predicted"], rounds)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    ratios = {
        name: sorted(a / b for a, b in zip(seconds[name], seconds["ours"], strict=True))
        for name in ("plain_8", "plain_1")
    }
    return {
        "tokens": {
            **per_part,
            "rollouts": len(rollouts),
            "attended": int(rollouts.attention_NS.sum()),
        },
        "largest_difference": error,
        "cpu_seconds": median,
        "speedup": {name: statistics.median(found) for name, found in ratios.items()},
        "speedup_range": {name: [found[0], found[-1]] for name, found in ratios.items()},
        "peak_bytes": memory,
        "memory": memory["ours"] / memory["plain_8"],
        "flops": counted,
        "matmul_rate": rate,
        "of_peak": counted / median["ours"] / rate,
    }


def _tokens_of(policy: SequenceProcessor, rollouts: Rollouts) -> dict[str, int]:
    """Rows that go through the layers and through the head in one microbatch, on average."""
    from entropy_experiments.policy.shared_prompts import shared_rows

    parts = list(rollouts.split(MICROBATCH, policy))
    widths = []
    for part in parts:
        rows = shared_rows(part.rollouts) if policy.shares_prompts else None
        plain_width = part.rollouts.tokens_NS[:, 1:].numel()
        widths.append(plain_width if rows is None else rows.tokens_RS.numel())
    return {
        "rows": round(sum(widths) / len(parts)),
        "predicted": round(int(rollouts.response_NS.sum()) / len(parts)),
        "through_the_layers": sum(widths),
    }


def problem(name: str) -> tuple[SequenceProcessor, Rollouts]:
    if name == "smollm2":
        policy, tokenizer = load_smollm2()
        prompts = questions(tokenizer, PROMPTS)
        size = len(tokenizer)
    else:
        policy = random_llama()
        size = causal_lm(policy.model).config.vocab_size
        prompts = random_prompts(PROMPTS, size)
    return policy, rollouts_of(prompts, group=GROUP, vocabulary=size)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["smollm2", "random"])
    parser.add_argument("--json", type=Path, default=OUT)
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"rounds": asked.rounds, "torch": torch.__version__, "models": {}}
    for name in asked.models:
        one = examine(*problem(name), asked.rounds)
        found["models"][name] = one
        ends = one["speedup_range"]
        print(f"{name}: {one['tokens']}")
        print(f"  CPU seconds { ({k: round(v, 2) for k, v in one['cpu_seconds'].items()}) }")
        for way in ("plain_8", "plain_1"):
            low, high = ends[way]
            print(
                f"  {way}: {one['speedup'][way]:.2f} times ours ({low:.2f} to {high:.2f}); "
                f"target {TARGETS[way]:g}"
            )
        print(f"  peak memory {one['memory']:.2f} of plain_8; target {TARGETS['memory']:g}")
        print(
            f"  {one['of_peak']:.0%} of the matmul peak; target {TARGETS['of_peak']:.0%}",
            flush=True,
        )
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
