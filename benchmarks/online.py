"""What the probe costs a training: TRL's GRPO on SmolLM2-135M with LoRA, with it and without.

    make smollm2
    python -m benchmarks.online [--rounds 2] [--prompts 8 4] [--length 24] [--json FILE]

The preset `smollm2-gsm8k`, 8 prompts x 8 responses a step, or other batches; short questions and
short responses, so that a run takes minutes. The probe looks at every 5th step with 16 fresh
rollouts, as long as training's, and nothing throttles it. A reward that differs within groups makes
every step a real one; so small a model solves nothing.

Each run is a process of its own, with and without in turn, the order turning from round to round.
Time is the CPU time of `trainer.train()` on one thread: threads that wait for each other, and other
people's work, would count otherwise. Memory is the process's peak. Both runs draw the same random
numbers and must end with the same weights, which is checked: they did the same work.

    time       median CPU time with the probe over the median without it, minus 1
    inside     the same from within one run: CPU seconds in the probe over those of the rest, which
               other processes disturb less
    enough     responses a step from which on the probe takes at most a tenth. Its cost does not
               depend on the batch, and training's is proportional to it: from `inside`
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.tables import STORED, conditions, write

ROOT = Path(__file__).parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train_1000.jsonl"
EVERY, ROLLOUTS = 5, 16
LIMITS = {"time": 0.10, "inside": 0.10, "memory": 0.15}
PROMPTS, LENGTH = 8, 24
QUESTIONS = 128
LONGEST = 140
"""Letters of a question."""


def spread(completions: list[str], **_: Any) -> list[float]:
    """A reward that is hardly ever equal within a group."""
    return [sum(ord(letter) % 7 for letter in text) / (1 + len(text)) for text in completions]


def one_run(kind: str, *, steps: int, length: int, prompts: int, folder: Path) -> dict[str, Any]:
    """A training in this process; seconds, peak memory, and a fingerprint of its weights."""
    import torch

    from entropy_experiments.config import load_preset
    from entropy_experiments.config.training_batch import batch_plan
    from entropy_experiments.config.training_reading import replaced
    from entropy_experiments.online.train.trainer import build_trainer, load_policy, load_task
    from entropy_experiments.online.trl import EntropyProbeCallback

    torch.set_num_threads(1)
    config = replaced(
        load_preset("smollm2-gsm8k"),
        {
            "max_steps": steps,
            "max_completion_length": length,
            "buffer_size": prompts,
            "dataset_name": "gsm8k",
            "dataset_path": str(questions(folder)),
            "reward_functions": ["benchmarks.online:spread"],
            "reward_weights": None,
            "eval_prompts": 2 * ROLLOUTS,
            "output_dir": str(folder / "run"),
            "save_steps": 10**6,
            "report_to": [],
            "use_cpu": True,
        },
    )
    plan = batch_plan(config, ranks=1)
    policy = load_policy(config)
    task = load_task(config, plan, tokenizer=policy[1])
    probe = EntropyProbeCallback(every=EVERY, max_overhead=None, prompts=ROLLOUTS)
    callbacks = [probe] if kind == "on" else []
    trainer = build_trainer(
        config, plan, task, policy, Path(config.output_dir), callbacks=callbacks
    )
    spent: dict[str, float] = {}
    with _stages(spent):
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.train()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if probe.off is not None:
        raise RuntimeError(f"The probe switched itself off: {probe.off}")
    digest = hashlib.sha256()
    trained: Any = trainer.model
    for parameter in trained.parameters():
        if parameter.requires_grad:
            digest.update(parameter.detach().numpy().tobytes())
    return {
        "kind": kind,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "probed_steps": len(probe.rows),
        "evaluation_rollouts": [row.get("rollouts") for row in probe.rows],
        "probe_cpu_seconds": spent,
        "weights": digest.hexdigest(),
        "rollouts_per_step": prompts * config.num_generations,
    }


@contextmanager
def _stages(spent: dict[str, float]) -> Iterator[None]:
    """CPU seconds of the probe's stages, and of all of it, while the block runs."""
    from entropy_experiments.online import probe as core
    from entropy_experiments.online import trl
    from entropy_experiments.sampling.generate import SampleGenerator

    places = [
        ("all", trl.EntropyProbeCallback, "on_train_begin"),
        ("all", trl.EntropyProbeCallback, "on_pre_optimizer_step"),
        ("all", trl.EntropyProbeCallback, "on_optimizer_step"),
        ("sampling", SampleGenerator, "generate"),
        ("predicting", core, "scores_along"),
        ("measuring", core, "score_all"),
    ]
    kept = [(place, name, getattr(place, name)) for _, place, name in places]

    def timed(stage: str, work: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return work(*args, **options)
            finally:
                spent[stage] = spent.get(stage, 0.0) + time.process_time() - began

        return run

    for stage, place, name in places:
        setattr(place, name, timed(stage, getattr(place, name)))
    try:
        yield
    finally:
        for place, name, original in kept:
            setattr(place, name, original)


def questions(folder: Path) -> Path:
    """GSM8K's short questions where they are to be had; sums in the same format elsewhere."""
    file = folder / "questions.jsonl"
    if GSM8K.is_file():
        found = [json.loads(line) for line in GSM8K.read_text("utf-8").splitlines()]
        lines = [line for line in found if len(line["question"]) <= LONGEST]
    else:
        lines = [_sum(n) for n in range(QUESTIONS)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def _sum(n: int) -> dict[str, str]:
    boxes, each, extra = 3 + n % 7, 4 + n // 7, 1 + n % 5
    return {
        "question": f"A shop has {boxes} boxes of {each} pens and {extra} more on a table. How "
        "many pens does it have in all?",
        "answer": f"There are {boxes * each} pens in boxes.\n#### {boxes * each + extra}",
    }


def measure(*, rounds: int, steps: int, length: int, prompts: int) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for number in range(rounds):
        for kind in ("off", "on") if number % 2 == 0 else ("on", "off"):
            found = _in_a_process(kind, steps=steps, length=length, prompts=prompts)
            runs.append(found)
            print(
                f"round {number + 1}, probe {kind:3}: {found['cpu_seconds']:.0f} s CPU, "
                f"{found['wall_seconds']:.0f} s, peak {found['peak_bytes'] / 2**20:.0f} MiB",
                file=sys.stderr,
                flush=True,
            )
    return summary(runs, steps=steps, length=length)


def _in_a_process(kind: str, *, steps: int, length: int, prompts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.online", "--one", kind, "--json", str(file)]
        command += ["--steps", str(steps), "--length", str(length), "--prompts", str(prompts)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"A run failed with code {done.returncode}: {done.stderr[-2000:]}")
        return json.loads(file.read_text())


def summary(runs: list[dict[str, Any]], *, steps: int, length: int) -> dict[str, Any]:
    on, off = ([run for run in runs if run["kind"] == kind] for kind in ("on", "off"))
    if len({run["weights"] for run in runs}) != 1:
        raise RuntimeError("Runs ended with different weights; expected the same: not comparable.")

    def middle(part: list[dict[str, Any]], name: str) -> float:
        return statistics.median(run[name] for run in part)

    stages = {
        stage: statistics.median(run["probe_cpu_seconds"][stage] for run in on)
        for stage in on[0]["probe_cpu_seconds"]
    }
    own = [
        run["probe_cpu_seconds"]["all"] / (run["cpu_seconds"] - run["probe_cpu_seconds"]["all"])
        for run in on
    ]
    return {
        "model": "SmolLM2-135M, LoRA r=16",
        "steps": steps,
        "probed_steps": on[0]["probed_steps"],
        "every": EVERY,
        "rollouts_per_step": on[0]["rollouts_per_step"],
        "evaluation_rollouts": on[0]["evaluation_rollouts"],
        "max_completion_length": length,
        "rounds": len(on),
        "cpu_seconds": {"off": middle(off, "cpu_seconds"), "on": middle(on, "cpu_seconds")},
        "wall_seconds": {"off": middle(off, "wall_seconds"), "on": middle(on, "wall_seconds")},
        "peak_mib": {
            kind: round(middle(part, "peak_bytes") / 2**20)
            for kind, part in (("off", off), ("on", on))
        },
        "overhead": {
            "time": middle(on, "cpu_seconds") / middle(off, "cpu_seconds") - 1,
            "inside": statistics.median(own),
            "memory": middle(on, "peak_bytes") / middle(off, "peak_bytes") - 1,
        },
        "limits": LIMITS,
        "enough_rollouts_per_step": math.ceil(
            on[0]["rollouts_per_step"] * statistics.median(own) / LIMITS["inside"]
        ),
        "probe_cpu_seconds": stages,
        "same_weights": True,
    }


def table(found: dict[str, Any]) -> str:
    cpu, peak, cost = found["cpu_seconds"], found["peak_mib"], found["overhead"]
    rows = [
        f"{found['model']}: {found['steps']} steps of {found['rollouts_per_step']} rollouts, "
        f"{found['max_completion_length']} tokens each; {found['probed_steps']} probed with "
        f"{found['evaluation_rollouts'][0]}; the same weights with and without",
        f"{'':16}{'off':>10}{'on':>10}{'more':>9}{'limit':>8}",
        f"{'CPU seconds':16}{cpu['off']:10.1f}{cpu['on']:10.1f}{cost['time']:9.1%}"
        f"{LIMITS['time']:8.0%}",
        f"{'from inside':16}{'':20}{cost['inside']:9.1%}{LIMITS['inside']:8.0%}",
        f"{'peak MiB':16}{peak['off']:10}{peak['on']:10}{cost['memory']:9.1%}"
        f"{LIMITS['memory']:8.0%}",
    ]
    stages = found["probe_cpu_seconds"]
    shares = ", ".join(f"{k} {v:.1f}" for k, v in stages.items() if k != "all")
    rows.append(f"the probe's {stages['all']:.1f} s: {shares}")
    rows.append(f"enough for a tenth: {found['enough_rollouts_per_step']} responses a step")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=EVERY)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a response")
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="+",
        default=[PROMPTS],
        help="prompts of a step, 8 responses each; each number is measured by itself",
    )
    parser.add_argument("--one", choices=["on", "off"], help="one run in this process")
    parser.add_argument("--json", type=Path, default=STORED / "online.json")
    given = parser.parse_args()
    sizes = {"steps": given.steps, "length": given.length}
    if given.one:
        with tempfile.TemporaryDirectory() as folder:
            one = one_run(given.one, **sizes, prompts=given.prompts[0], folder=Path(folder))
        write(given.json, one)
        return
    found: dict[str, Any] = {**conditions(given.rounds), "batches": {}}
    for prompts in given.prompts:
        one = measure(rounds=given.rounds, **sizes, prompts=prompts)
        found["batches"][str(one["rollouts_per_step"])] = one
        print(table(one), flush=True)
        write(given.json, found)


if __name__ == "__main__":
    main()
