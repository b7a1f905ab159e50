"""Whether memory stays flat: a thousand probes in one process, and ever more evaluation rollouts.

    python -m benchmarks.memory [--json FILE] [--probes 1000] [--offline 50]

    online     `LoopProbe` around every step of a training of the embedded policy
    offline    `OfflineEntropyProbe`, the checkpoint loaded anew each time, with no log kept
    rollouts   one offline probe with B_E evaluation rollouts, each in a process of its own: peak

The first two read the resident memory of the process after every tenth of the probes; the first
tenth warms it up. `growth` is the median of the last three readings minus that of the first three
after it. Exit code 1 if one of them grows by more than 16 MB, or if 4,096 rollouts take more
than their own tokens and scores over what 512 take (see `ALLOWED`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables import conditions

ROLLOUTS = (512, 4096)
LENGTH = 4
GROWTH_MB = 16.0
ALLOWED = 16 * 1024
"""Bytes for each further rollout: its tokens, scores and sums in fp64, its text, its JSON. The
activations of one rollout of the embedded policy are many times that."""


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def readings(probes: int, probe: Callable[[int], object]) -> dict[str, Any]:
    """Resident memory after each tenth of so many probes."""
    held, start = [], time.perf_counter()
    for number in range(probes):
        probe(number)
        if (number + 1) % (probes // 10) == 0:
            gc.collect()
            held.append(round(resident_mb(), 2))
    took = time.perf_counter() - start
    growth = median(held[-3:]) - median(held[1:4])
    return {"probes": probes, "mb": held, "growth_mb": round(growth, 2), "seconds": round(took, 1)}


def online(probes: int) -> dict[str, Any]:
    import torch

    from entropy_experiments.checkpoints.load import load_checkpoint
    from entropy_experiments.checkpoints.runs import embedded_trajectory
    from entropy_experiments.online.loop import LoopProbe
    from entropy_experiments.sampling.datasets import load_problems

    checkpoint = load_checkpoint(embedded_trajectory() / "checkpoint-13", read_optimizer=False)
    model = checkpoint.model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    prompts = [p.prompt for p in load_problems("countdown", count=64, seed=0)]
    probe = LoopProbe(
        model,
        optimizer,
        checkpoint.tokenizer,
        prompts=prompts,
        max_new_tokens=LENGTH,
        drawn=5,
        uses=10,  # drawing takes most of the time
        max_overhead=None,
    )
    batch = checkpoint.tokenizer(prompts[:4], padding=True, return_tensors="pt")

    def step(_: int) -> None:
        model(**batch, labels=batch["input_ids"]).loss.backward()
        with probe.step():
            optimizer.step()
        optimizer.zero_grad()

    table = readings(probes, step)
    if len(probe.rows) != probes:
        raise SystemExit(f"{len(probe.rows)} of {probes} steps were probed: the probe is off")
    return table


def offline_settings(rollouts: int) -> dict[str, Any]:
    return {
        "data": {"evaluation_prompts": rollouts},
        "sampling": {"max_new_tokens": LENGTH, "batch_size": 64},
        "memory": {"microbatch_size": 64, "forward_batch_size": 64},
        "output": {"log": False},
    }


def offline(probes: int) -> dict[str, Any]:
    from entropy_experiments.checkpoints.runs import embedded_trajectory
    from entropy_experiments.offline_entropy_probe import OfflineEntropyProbe

    path = embedded_trajectory() / "checkpoint-13"
    return readings(
        probes,
        lambda _: OfflineEntropyProbe(offline_settings(8), quiet=True).run_mixed_probe(path),
    )


def peak_mb(rollouts: int) -> dict[str, Any]:
    """Of a process of its own: the largest resident memory so far, by the kernel's count."""
    from entropy_experiments.checkpoints.runs import embedded_trajectory
    from entropy_experiments.offline_entropy_probe import OfflineEntropyProbe

    path, start = embedded_trajectory() / "checkpoint-13", time.perf_counter()
    OfflineEntropyProbe(offline_settings(rollouts), quiet=True).run_mixed_probe(path)
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    took = round(time.perf_counter() - start, 1)
    return {"rollouts": rollouts, "peak_mb": round(int(peak.split()[1]) / 1024, 1), "seconds": took}


def in_a_process(part: str, number: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.memory", "--part", part, "--number", str(number)]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        where = os.pathsep.join([os.getcwd(), environment.get("PYTHONPATH", "")])
        done = subprocess.run(
            words,
            cwd=folder,
            env={**environment, "PYTHONPATH": where},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(f"{part} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


PARTS = {"online": online, "offline": offline, "rollouts": peak_mb}


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether memory stays flat.")
    parser.add_argument("--probes", type=int, default=1000)
    parser.add_argument("--offline", type=int, default=50)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        print(json.dumps(PARTS[options.part](options.number)))
        return
    faults = []
    table = conditions(1)
    for part, number in (("online", options.probes), ("offline", options.offline)):
        row = table[part] = in_a_process(part, number)
        held = " ".join(f"{mb:.0f}" for mb in row["mb"])
        print(
            f"{part:8s} {number} probes in {row['seconds']:.0f} s: {held} MB; growth "
            f"{row['growth_mb']:+.1f} MB"
        )
        if row["growth_mb"] > GROWTH_MB:
            faults.append(f"{part} grew by {row['growth_mb']} MB, allowed {GROWTH_MB}")
    rows = table["rollouts"] = [in_a_process("rollouts", number) for number in ROLLOUTS]
    for row in rows:
        print(f"B_E {row['rollouts']:5d}: peak {row['peak_mb']:.0f} MB, {row['seconds']:.0f} s")
    more = (rows[-1]["peak_mb"] - rows[0]["peak_mb"]) * 2**20 / (ROLLOUTS[-1] - ROLLOUTS[0])
    table["bytes_per_rollout"] = round(more)
    print(f"each further rollout: {more / 1024:.1f} KB")
    if more > ALLOWED:
        faults.append(f"each rollout takes {more:.0f} bytes, allowed {ALLOWED}")
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=1) + "\n")
    if faults:
        raise SystemExit("; ".join(faults))


if __name__ == "__main__":
    main()
