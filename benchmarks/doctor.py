"""What the doctor costs: a training step of a 10M-parameter model with it and without.

    python -m benchmarks.doctor [--rounds 41] [--json FILE]

Four kinds of step, in turn and in this one process, the order turning from round to round: without
the doctor, in light mode when it does not look, in light mode when it does, and fully traced. The
cost of a kind is the median over rounds of its CPU time over that of a plain step in the same
round, so that other work on the machine, which lasts longer than a round, meets both. Light mode
that looks at every n-th step is n - 1 of the one and one of the other. One thread: threads that
wait for each other spend CPU time, too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradient_doctor import Doctor

VOCABULARY, WIDTH, LAYERS, HEADS = 4096, 320, 6, 5
ROWS, LENGTH = 8, 64
OUT = Path(__file__).parents[1] / "docs" / "benchmarks" / "doctor.json"
KINDS: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "light": {"mode": "light", "every": 10**9},
    "look": {"mode": "light", "every": 1},
    "trace": {"mode": "trace"},
}
LIGHT_LIMIT = 0.05


class Decoder(nn.Module):
    """A small causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class Training:
    """A model and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Decoder()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=self.generator)
        self.optimizer.zero_grad()
        logits = self.model(tokens)
        nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def seconds(self, options: dict[str, Any], steps: int = 2) -> float:
        """CPU seconds per step; the first one under a doctor is special, and not counted."""
        modules, optimizers = {"model": self.model}, {"optimizer": self.optimizer}
        with Doctor(modules, optimizers, trace_steps=1, **options) as doctor:
            self.step()
            doctor.step()
            start = time.process_time()
            for _ in range(steps):
                self.step()
                doctor.step()
            return (time.process_time() - start) / steps


def measure(rounds: int) -> dict[str, Any]:
    training = Training()
    training.step()
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    names = list(KINDS)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            times[name].append(training.seconds(KINDS[name]))
    off, light, look, trace = times.values()
    every = 50
    overhead = {
        f"light, every={every}": [
            ((every - 1) * a + b) / every / o - 1 for o, a, b in zip(off, light, look)
        ],
        "light, every=1": [b / o - 1 for o, b in zip(off, look)],
        "trace": [t / o - 1 for o, t in zip(off, trace)],
    }
    parameters = list(training.model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "tensors": len(parameters),
        "batch": [ROWS, LENGTH],
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu_ms_per_step": {n: round(1e3 * statistics.median(t), 1) for n, t in times.items()},
        "overhead": {name: _cost(values) for name, values in overhead.items()},
    }


def _cost(values: list[float]) -> dict[str, Any]:
    """The median over rounds, and its 95 % interval, which order statistics give without a law."""
    ordered = sorted(values)
    low = max(0, math.floor((len(values) - 1.96 * math.sqrt(len(values))) / 2))
    interval = ordered[low], ordered[-1 - low]
    return {
        "median": round(statistics.median(values), 4),
        "interval_95": [round(bound, 4) for bound in interval],
    }


def table(found: dict[str, Any]) -> str:
    rows = [f"{'CPU ms of a step':20} {found['cpu_ms_per_step']}"]
    rows.append(f"{'mode':20} {'overhead':>9}   95 % interval of the median")
    for name, cost in found["overhead"].items():
        low, high = cost["interval_95"]
        rows.append(f"{name:20} {cost['median']:9.1%}   {low:.1%} to {high:.1%}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.rounds)
    print(f"{found['parameters'] / 1e6:.1f}M parameters, batch {ROWS} x {LENGTH}")
    print(table(found))
    light = found["overhead"]["light, every=50"]["median"]
    verdict = "within" if light <= LIGHT_LIMIT else "above"
    print(f"light mode: {light:.1%}, {verdict} the limit of {LIGHT_LIMIT:.0%}")
    arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
