"""Run directories for the tests of the HTML report: a small study, and changed copies of it."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from entropy_experiments import BatchRequest, EntropyInfluencePlan, EntropyInfluenceRunner
from entropy_experiments import WorkspaceSpec as Workspace
from entropy_experiments.artifacts import described, digest_of_json

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "x" * 10_000,
    "😀👩‍👩‍👧‍👦",
    "שלום עולם مرحبا",
    "\u202eevil\u202c",
    "{{ 7 * 7 }} {% raw %}",
    "\x00\x1b[31m\n\t",
    "\u2028\u2029 &amp; &lt;b&gt;",
)


def small_study(folder: Path) -> Path:
    """8 update rollouts, 6 evaluation prompts: seconds."""
    plan = EntropyInfluencePlan(
        workspace=Workspace(kind="update", params={"batch": "drawn", "prompts": 2, "group": 4}),
        evaluation_requests=[
            BatchRequest(kind="evaluation", params={"group": 2}),
            BatchRequest(kind="update", params={"fresh": True}),
        ],
        etas=(0.003, 0.001),
        per_sequence_etas=[0.001],
        microbatch_size=32,
        measured_rollouts=[0],
        what_if=["drop=p<0.5", "lr=0.001"],
        entropy_budget=-0.01,
        run_directory=folder,
    )
    settings = {"batch_config": {"B_E": 6}, "rollouts": {"save": str(folder / "rollouts")}}
    EntropyInfluenceRunner(settings, quiet=True).run(plan)
    return folder


def changed(run: Path, to: Path, files: dict[str, bytes | None]) -> Path:
    """A copy with these files in place of its own (None: without it), and a manifest that fits."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("stages", "rollouts", "report.html"))
    manifest = json.loads((to / "manifest.json").read_text())
    manifest.pop("digest")
    for name, data in files.items():
        if data is None:
            (to / name).unlink()
            del manifest["files"][name]
        else:
            (to / name).write_bytes(data)
            manifest["files"][name] = described(data)
    digest = digest_of_json(manifest)
    (to / "manifest.json").write_text(json.dumps({**manifest, "digest": digest}))
    return to


def rows_of(run: Path, name: str = "eval_00_tokens.parquet") -> dict[str, list]:
    return pyarrow.parquet.read_table(run / name).to_pydict()


def parquet(columns: dict[str, list | np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def hostile_run(run: Path, to: Path) -> Path:
    """The policy wrote all of HOSTILE, in its responses and in its prompts."""
    rows = rows_of(run)
    rows["piece"] = [HOSTILE[k % len(HOSTILE)] for k in range(len(rows["piece"]))]
    texts = json.loads((run / "update_rollouts.json").read_text())
    for i, text in enumerate(texts):
        text["prompt_text"] = HOSTILE[i % len(HOSTILE)]
    texts[0]["gaps"] = {"1": HOSTILE[1]}
    summary = json.loads((run / "summary.json").read_text())
    summary["checkpoint"] = HOSTILE[1]
    summary["notes"] = list(HOSTILE)
    summary["evaluations"][0]["what_if"][0]["name"] = HOSTILE[0]
    files = {
        "eval_00_tokens.parquet": parquet(rows),
        "update_rollouts.json": json.dumps(texts).encode(),
        "summary.json": json.dumps(summary).encode(),
    }
    return changed(run, to, files)


def large_run(run: Path, to: Path, rollouts: int = 2_000, length: int = 200) -> Path:
    """A batch of the size people train with: the small study's numbers, random influences."""
    draw, count = np.random.default_rng(0), rollouts * length
    rollout_T = np.repeat(np.arange(rollouts), length)
    influence_T = 1e-6 * draw.standard_t(3, count)
    logprob_T = -draw.exponential(0.5, count)
    words = np.array([f" word{i}" for i in range(30_000)])
    advantage_N = draw.normal(size=rollouts)
    columns = {
        "rollout": rollout_T,
        "prompt": rollout_T // 8,
        "k": np.tile(np.arange(length), rollouts),
        "logprob": logprob_T,
        "probability": np.exp(logprob_T),
        "entropy": draw.exponential(0.5, count),
        "advantage": advantage_N[rollout_T],
        "reward": (advantage_N > 0).astype(float)[rollout_T],
        "influence": influence_T,
        "stderr": np.abs(influence_T) * draw.random(count),
        "stable": draw.random(count) > 0.3,
        "counted": np.ones(count, dtype=bool),
        "fold_0": influence_T / 2,
        "fold_1": influence_T / 2,
        "piece": words[draw.integers(0, len(words), count)],
    }
    summary = json.loads((run / "summary.json").read_text())
    total_N = influence_T.reshape(rollouts, length).sum(1)
    summary["evaluations"][0]["groups"]["rollout"] = {
        str(i): {"value": v, "stderr": abs(v) / 2, "tokens": length, "stable": i % 3 > 0}
        for i, v in enumerate(total_N.tolist())
    }
    texts = [
        {"rollout": i, "prompt": i // 8, "prompt_text": f"question {i // 8}", "truncated": False}
        for i in range(rollouts)
    ]
    buffer = io.BytesIO()
    np.save(buffer, draw.normal(size=(128, rollouts)) * 1e-8)
    files = {
        "eval_00_tokens.parquet": parquet(columns),
        "tokens.parquet": None,
        "eval_00_delta_matrix.npy": buffer.getvalue(),
        "summary.json": json.dumps(summary).encode(),
        "update_rollouts.json": json.dumps(texts).encode(),
    }
    return changed(run, to, files)


def read(page):
    """A page's markup as it is read: one space where there is any, terms without their mark."""
    return re.sub(r'<span class="term"[^>]*>([^<]*)</span>', r"\1", " ".join(page.split()))
