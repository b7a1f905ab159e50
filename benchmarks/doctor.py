"""What the doctor costs: a training step of a 10M-parameter model with it and without.

    python -m benchmarks.doctor [--rounds 41] [--json FILE]

Four kinds of step, in turn and in this one process, the order turning from round to round: without
the doctor, in light mode when it does not look, in light mode when it does, and fully traced. The
cost of a kind is the median over rounds of its CPU time over that of a plain step in the same
round, so that other work on the machine, which lasts longer than a round, meets both. Light mode
that looks at every n-th step is n - 1 of the one and one of the other. One thread: threads that
wait for each other spend CPU time, too.

Sampling in traced steps is measured by itself, in the same way: `generate` of a tiny Llama and of
SmolLM2-135M, and 256 steps of a cart and pole (plain Python) with a categorical policy under
no_grad, in one region and in one of its own for each step. The first traced step follows a round of
the loop and is told apart from the others.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

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


class CartPole:
    """The usual environment, in plain Python."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def reset(self) -> list[float]:
        self.state, self.steps = [self.generator.uniform(-0.05, 0.05) for _ in range(4)], 0
        return self.state

    def step(self, right: int) -> tuple[list[float], float, bool]:
        x, speed, angle, turn = self.state
        sine, cosine = math.sin(angle), math.cos(angle)
        push = ((10.0 if right else -10.0) + 0.05 * turn**2 * sine) / 1.1
        bend = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        speed, turn = speed + 0.02 * (push - 0.05 * bend * cosine / 1.1), turn + 0.02 * bend
        self.state = [x + 0.02 * speed, speed, angle + 0.02 * turn, turn]
        self.steps += 1
        return self.state, 1.0, abs(x) > 2.4 or abs(angle) > 0.21 or self.steps >= 200


class Rollout:
    """A categorical policy that acts, and learns from what it did."""

    def __init__(self, *, regions: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        )
        self.environment = CartPole()
        self.sample = self._regions if regions else self._region

    def _act(self, state: list[float], kept: list[tuple[Tensor, ...]]) -> list[float]:
        observation = torch.tensor(state)
        law = Categorical(logits=self.model(observation))
        action = law.sample()
        kept.append((observation, action, law.log_prob(action)))
        state, _, done = self.environment.step(int(action.item()))
        return self.environment.reset() if done else state

    def _region(self) -> list[Tensor]:
        state, kept = self.environment.reset(), []
        with torch.no_grad():
            for _ in range(256):
                state = self._act(state, kept)
        return [torch.stack(column) for column in zip(*kept)]

    def _regions(self) -> list[Tensor]:
        state, kept = self.environment.reset(), []
        for _ in range(256):
            with torch.no_grad():
                state = self._act(state, kept)
        return [torch.stack(column) for column in zip(*kept)]

    def loss(self, batch: list[Tensor]) -> Tensor:
        observations, actions, before = batch
        log_prob = Categorical(logits=self.model(observations)).log_prob(actions)
        weight = torch.linspace(1, -1, len(actions))
        return -((log_prob - before).exp() * weight).mean()


class Generation:
    """`generate` of a language model, and REINFORCE on the response."""

    def __init__(self, model: Any, tokens: int) -> None:
        torch.manual_seed(0)
        self.model, self.tokens = model, tokens
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0

    def sample(self) -> Tensor:
        ids = torch.randint(1, self.model.config.vocab_size, (4, 8))
        mask = torch.ones_like(ids)
        return self.model.generate(
            ids, attention_mask=mask, max_new_tokens=self.tokens, do_sample=True, top_k=50
        )

    def loss(self, ids: Tensor) -> Tensor:
        log_prob = self.model(ids).logits[:, :-1].log_softmax(-1)
        log_prob = log_prob.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return -(log_prob[:, 7:] * torch.tensor([[1.0], [-1.0], [0.5], [-0.5]])).mean()


def tiny_llama() -> Generation:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return Generation(LlamaForCausalLM(config), tokens=64)


def smollm2() -> Generation:
    from entropy_experiments.checkpoints.base import from_gguf, load_causal_lm, smollm2_gguf

    model, _ = load_causal_lm(from_gguf(smollm2_gguf()), dtype=torch.float32)
    return Generation(model, tokens=16)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "rollout in one region": lambda: Rollout(regions=False),
    "rollout, a region a step": lambda: Rollout(regions=True),
    "generate, tiny Llama": tiny_llama,
    "generate, SmolLM2-135M": smollm2,
}


def sampling(rounds: int, make: Callable[[], Any]) -> dict[str, Any]:
    """How many times the CPU time of a plain rollout one in a traced step takes."""
    sampler = make()
    optimizer = torch.optim.SGD(sampler.model.parameters(), lr=1e-3)

    def seconds(mode: str) -> list[float]:
        times = []
        with Doctor({"model": sampler.model}, {"optimizer": optimizer}, mode=mode) as doctor:
            for _ in range(3):
                start = time.process_time()
                batch = sampler.sample()
                times.append(time.process_time() - start)
                optimizer.zero_grad()
                sampler.loss(batch).backward()
                optimizer.step()
                doctor.step()
        return times

    seconds("off")
    pairs = []
    for number in range(rounds):
        modes = ("off", "auto") if number % 2 else ("auto", "off")
        times = {mode: seconds(mode) for mode in modes}
        pairs.append((statistics.median(times["off"]), times["auto"]))
    return {
        "cpu_ms_plain": round(1e3 * statistics.median(plain for plain, _ in pairs), 1),
        "first_traced_step": _cost([traced[0] / plain for plain, traced in pairs]),
        "later_traced_steps": _cost([sum(traced[1:]) / 2 / plain for plain, traced in pairs]),
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
    for name, cost in found.get("sampling", {}).items():
        first, later = cost["first_traced_step"]["median"], cost["later_traced_steps"]["median"]
        rows.append(f"{name:26} {later:5.2f} times plain; the first traced step {first:.2f}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--only-sampling", action="store_true", help="keep the rest of the json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(arguments.json.read_text()) if arguments.only_sampling else {}
    found = found or measure(arguments.rounds)
    found["sampling"] = {
        name: sampling(min(arguments.rounds, 5 if "SmolLM2" in name else 41), make)
        for name, make in SAMPLERS.items()
    }
    print(f"{found['parameters'] / 1e6:.1f}M parameters, batch {ROWS} x {LENGTH}")
    print(table(found))
    light = found["overhead"]["light, every=50"]["median"]
    verdict = "within" if light <= LIGHT_LIMIT else "above"
    print(f"light mode: {light:.1%}, {verdict} the limit of {LIGHT_LIMIT:.0%}")
    arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
