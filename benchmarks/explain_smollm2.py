"""The ledger of a real model's run: SmolLM2-135M with LoRA, 10 GRPO steps, then `explain`.

    python -m benchmarks.explain_smollm2 --questions gsm8k.jsonl [--work FOLDER] [--json FILE]

TRL's GRPO on short GSM8K questions with one callback, `EntropyProbeCallback(run_ledger=True)`, as
in the manual. TRL saves no checkpoint before its first step, so 11 steps are trained and the window
is checkpoint 1 to 11: 10 steps, and momentum from before the window is that of one step. The reward
is the share of digits in a response, which differs within groups and can be learned; so small a
model solves nothing in so few tokens.

Then `entropy-probe explain` in a process of its own, with every checkpoint, and with the first and
the last alone (nine states replayed). Seconds and peak memory are of these processes. A run folder
in WORK is explained again, not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tables import STORED, conditions, write
from entropy_experiments.results.run_ledger import TOKEN_TABLE, read_ledger_table

STEPS, FIRST = 11, 1
"""Trained steps; the first checkpoint that TRL saves."""
PROMPTS, GROUP, LENGTH = 3, 4, 16
"""Of a step: prompts, responses to each, tokens of a response."""
EVALUATION = 8
LEARNING_RATE = 5e-4
LONGEST = 130
"""Letters of a question."""
REWARD = "benchmarks.explain_smollm2:digits"


def digits(completions: list[str], **_: Any) -> list[float]:
    """The share of a response's letters that are digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def short_questions(file: Path, out: Path) -> Path:
    """The short ones of GSM8K, in the same format."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    kept = [row for row in rows if len(row["question"]) <= LONGEST]
    out.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return out


def train(work: Path, questions: Path) -> None:
    """TRL's GRPO with the callback; checkpoints of every step."""
    from entropy_experiments.config import load_preset
    from entropy_experiments.config.training_batch import batch_plan
    from entropy_experiments.config.training_reading import replaced
    from entropy_experiments.online.train.trainer import build_trainer, load_policy, load_task
    from entropy_experiments.online.trl import EntropyProbeCallback

    config = replaced(
        load_preset("smollm2-gsm8k"),
        {
            "max_steps": STEPS,
            "max_completion_length": LENGTH,
            "buffer_size": PROMPTS,
            "num_generations": GROUP,
            "learning_rate": LEARNING_RATE,
            "dataset_name": "gsm8k",
            "dataset_path": str(short_questions(questions, work / "questions.jsonl").absolute()),
            "reward_functions": [REWARD],
            "reward_weights": None,
            "eval_prompts": 5,
            "output_dir": str(work / "run"),
            "save_steps": 1,
            "report_to": [],
            "use_cpu": True,
        },
    )
    plan = batch_plan(config, ranks=1)
    policy = load_policy(config)
    task = load_task(config, plan, tokenizer=policy[1])
    facts = {"dataset_name": "gsm8k", "dataset_path": config.dataset_path}
    probe = EntropyProbeCallback(every=100, prompts=5, run_ledger=True, facts=facts)
    trainer = build_trainer(config, plan, task, policy, Path(config.output_dir), callbacks=[probe])
    trainer.train()
    if probe.off is not None:
        raise RuntimeError(f"The probe switched itself off: {probe.off}")


def in_a_process(words: list[str], log: Path) -> dict[str, float]:
    """Seconds and peak memory of a process; one that fails ends the benchmark."""
    began = time.perf_counter()
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=file)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} ended with status {status}; see {log}.")
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
    }


def explain(work: Path, every: int) -> dict[str, Any]:
    """`entropy-probe explain`, and what its summary says."""
    out = work / f"every_{every}"
    command = ["-m", "entropy_experiments.cli", "explain", str(work / "run")]
    settings = {
        "data.evaluation_prompts": EVALUATION,
        "data.reward_functions": f"[{REWARD}]",
        "memory.microbatch_size": 16,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    cost = in_a_process(
        [*command, "--every", str(every), "--out", str(out), *words], work / "explain.log"
    )
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    names = ("window", "entropy", "reward", "total", "lines", "memo", "measured", "unexplained")
    names += ("measured_reward", "unexplained_reward", "replays", "evaluation")
    names += ("trusted", "why_not", "notes")
    return {
        **{name: summary[name] for name in names},
        "step_distance": max(step["step_distance"] for step in summary["steps"]),
        "tokens": sum(step["tokens"] for step in summary["steps"]),
        "cost": {**cost, "seconds_per_step": cost["seconds"] / len(summary["steps"])},
    }


def token_difference(work: Path, every: int) -> float:
    """The largest difference of a token's share between the two ledgers."""
    one, other = (
        np.array(read_ledger_table(work / f"every_{n}", TOKEN_TABLE).column("dH").to_pylist())
        for n in (1, every)
    )
    return float(np.abs(one - other).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=Path, required=True, help="GSM8K, jsonl")
    parser.add_argument("--work", type=Path, default=Path("build") / "explain_smollm2")
    parser.add_argument("--train", action="store_true", help="train in this process, nothing else")
    parser.add_argument("--json", type=Path, default=STORED / "explain_smollm2.json")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.train:
        train(options.work, options.questions)
        return
    file = options.work / "training.json"
    if not file.is_file():
        words = ["-m", "benchmarks.explain_smollm2", "--train", "--work", str(options.work)]
        cost = in_a_process(
            [*words, "--questions", str(options.questions)], options.work / "train.log"
        )
        write(file, cost)
    content: dict[str, Any] = {
        **conditions(1, threads=os.environ.get("OMP_NUM_THREADS")),
        "model": "SmolLM2-135M, LoRA r=16 on q, k, v, o",
        "batch": {"prompts": PROMPTS, "group": GROUP, "max_completion_length": LENGTH},
        "training": json.loads(file.read_text("utf-8")),
    }
    for every in (1, STEPS - FIRST):
        content[f"every_{every}"] = explain(options.work, every)
        write(options.json, content)
    content["largest_token_difference"] = token_difference(options.work, STEPS - FIRST)
    write(options.json, content)
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
