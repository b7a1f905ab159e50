"""A finished run directory of a ledger with invented numbers that add up, for readers' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from entropy_experiments.pipelines.run_ledger.files import StoredStep, table_bytes, write_run_ledger
from entropy_experiments.results import RUN_LEDGER
from entropy_experiments.results.run_ledger import TOKEN_TABLE, RunLedgerResult

WORDS = ("7", "+", "so", "<answer>", "<|endoftext|>", " ", "red", "=")
PROMPTS = ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc")


def example_run_ledger(folder: Path, *, steps: int = 4, rewards: bool = True) -> Path:
    """`steps` steps of 6 rollouts with 5 tokens; prompt b recurs in every step."""
    generator = np.random.default_rng(0)
    stored, rows = [], []
    for step in range(steps):
        columns = _tokens(step, generator, rewards=rewards)
        stored.append(
            StoredStep(
                tokens=table_bytes(TOKEN_TABLE, columns),
                prompts={p: f"Use {p[:2]} to make {i}." for i, p in enumerate(PROMPTS)},
                solved={p: (i % 3, 2) for i, p in enumerate(PROMPTS)} if rewards else None,
                layers=_layers(step, columns, rewards=rewards),
                special=["<|endoftext|>"],
            )
        )
        rows.append(_step(step, columns, rewards=rewards))
    write_run_ledger(folder, "example", _summary(rows, rewards=rewards), stored)
    return folder


def _tokens(step: int, generator: np.random.Generator, *, rewards: bool) -> dict[str, Any]:
    rollout = np.repeat(np.arange(6), 5)
    count = len(rollout)
    token = generator.integers(0, len(WORDS), count)
    reward = np.repeat(generator.integers(0, 2, 6).astype(float), 5)
    halves = {name: 1e-3 * generator.normal(-0.3, 1, count) for name in ("dH_a", "dH_b")}
    gains = {name: 1e-3 * generator.normal(0.5, 1, count) for name in ("dR_a", "dR_b")}
    absent = np.full(count, np.nan)
    return {
        "step": np.full(count, step),
        "rollout": rollout,
        "uid": [f"{step}-{i}" for i in rollout],
        "prompt": [PROMPTS[i // 2] for i in rollout],
        "position": np.tile(np.arange(5), 6),
        "token_id": token,
        "text": [WORDS[i] for i in token],
        "advantage": 2 * reward - 1,
        "reward": reward if rewards else absent,
        "logprob": -generator.exponential(1, count),
        "entropy": generator.exponential(1, count),
        "coefficient_logprob": generator.normal(0, 1e-2, count),
        "coefficient_entropy": np.zeros(count),
        "dH": halves["dH_a"] + halves["dH_b"],
        **halves,
        "dR": gains["dR_a"] + gains["dR_b"] if rewards else absent,
        **(gains if rewards else dict.fromkeys(gains, absent)),
        "dH_tangent": absent,
    }


def _layers(step: int, columns: dict[str, Any], *, rewards: bool) -> dict[str, Any]:
    total = float(columns["dH"].sum())
    gain = float(columns["dR"].sum()) if rewards else np.nan
    share = np.array([0.7, 0.5, -0.2])
    return {
        "step": [step] * 3,
        "layer": ["model.layers.0", "model.layers.0", "model.layers.1"],
        "module": ["self_attn.q_proj", "mlp.up_proj", "self_attn.q_proj"],
        "dH": share * total,
        "dH_stderr": abs(share * total) / 5,
        "dR": share * gain,
        "dR_stderr": abs(share * gain) / 5,
    }


def _estimate(value: float, stderr: float, **more: Any) -> dict[str, Any]:
    return {
        "value": value,
        "stderr": stderr,
        "interval": [value - 2 * stderr, value + 2 * stderr],
        "bias": 0.0,
        "noise_floor": None,
        "k_hat": None,
        "trusted": True,
        "why_not": [],
        **more,
    }


def _step(step: int, columns: dict[str, Any], *, rewards: bool) -> dict[str, Any]:
    dH = float(columns["dH"].sum())
    dR = float(columns["dR"].sum()) if rewards else None
    return {
        "step": step,
        "entropy": 0.5 - 0.03 * step,
        "entropy_stderr": 0.01,
        "reward": 0.2 + 0.05 * step if rewards else None,
        "batch_reward": 0.25 + 0.05 * step if rewards else None,
        "rollouts": 6,
        "tokens": 30,
        "dH_path": dH - 0.001,
        "dH_tangent": None,
        "dR_path": dR,
        "dH_batches": dH,
        "dR_batches": dR,
        "dH_decay": -0.001,
        "dR_decay": 0.0 if rewards else None,
        "dH_uncovered": 0.0,
        "dR_uncovered": 0.0 if rewards else None,
        "replayed": step % 2 == 1,
        "gradient_distance": 1e-6,
        "step_distance": 1e-6,
        "clip_factor": 1.0,
        "lr": 3e-3,
    }


def _summary(steps: list[dict[str, Any]], *, rewards: bool) -> RunLedgerResult:
    def total(name: str) -> float:
        return sum(step[name] for step in steps)

    def line(dH: float, dR: float) -> dict[str, float | None]:
        gain = (dR, 0.002) if rewards else (None, None)
        return {"dH": dH, "stderr": 0.003, "dR": gain[0], "dR_stderr": gain[1]}

    path = total("dH_path")
    gain = total("dR_path") if rewards else 0.0
    count = len(steps)
    summary: Any = {
        **RUN_LEDGER.stamp,
        "key": "example",
        "run": "runs/example",
        "window": {"from": 0, "to": count, "steps": count, "every": 1},
        "entropy": {
            "start": _estimate(0.5, 0.01),
            "end": _estimate(0.5 + path + 0.001, 0.01),
            "unit": "token",
        },
        "reward": {"start": _estimate(0.2, 0.02), "end": _estimate(0.2 + gain, 0.02)}
        if rewards
        else None,
        "total": {
            "path": _estimate(path, 0.004),
            "tangent": None,
            "reward": _estimate(gain, 0.01) if rewards else None,
        },
        "lines": {
            "batches": line(total("dH_batches"), gain),
            "decay": line(total("dH_decay"), 0.0),
            "momentum_before_record": line(0.0, 0.0),
            "uncovered": line(0.0, 0.0),
        },
        "memo": {"unfinished": {"dH": -0.004, "dR": 0.003 if rewards else None}},
        "measured": _estimate(path + 0.001, 0.006),
        "measured_reward": _estimate(gain, 0.02) if rewards else None,
        "unexplained": _estimate(0.001, 0.005),
        "unexplained_reward": _estimate(0.0, 0.02) if rewards else None,
        "steps": steps,
        "replays": [{"start": 0, "end": 2, "distance": 1e-6}],
        "evaluation": {"prompts": 64, "rollouts": 64, "tokens": 1800},
        "trusted": True,
        "why_not": [],
        "notes": [],
        "assumed": {},
        "provenance": {},
    }
    return summary
