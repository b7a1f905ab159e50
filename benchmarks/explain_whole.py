"""The shipped run explained whole: against fresh rollouts, and from every fifth checkpoint.

    python -m benchmarks.explain_whole [--from 0 --to 56] [--every 5] [--evaluation 256]
                                       [--work FOLDER] [--json FILE]

`entropy-probe explain` in processes of their own, first with every checkpoint, then with every
fifth, the states between replayed from their batches. A finished ledger in WORK is read, not
computed again; one that was killed goes on.

    path         the ledger's sum, with its interval
    measured     H_T - H_0 of fresh rollouts, with its interval
    unexplained  measured minus path; of the path: at most 5 %
    differences  between the two ledgers, the largest: of the lines, of a batch, of a prompt, of a
                 token, and of the entropy at a checkpoint: at most 1e-5

Evaluation responses are drawn from each state. A replayed state differs from the stored one by
rounding, so a response may take another turn where two tokens are nearly equally likely; `redrawn`
counts the checkpoints whose responses differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.explain_smollm2 import in_a_process
from benchmarks.tables import STORED, conditions, write
from entropy_experiments.results.run_ledger import PROMPT_TABLE, TOKEN_TABLE, read_ledger_table

LIMITS = {"unexplained": 0.05, "difference": 1e-5}
HALVES = ("dH", "dH_a", "dH_b", "dR", "dR_a", "dR_b")


def ledger(work: Path, every: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """The summary, and what the process took that computed it."""
    out, log = work / f"every_{every}", work / f"every_{every}.log"
    cost = work / f"every_{every}.cost.json"
    if not cost.is_file():
        words = ["-m", "entropy_experiments.cli", "explain", "--every", str(every)]
        words += ["--from", str(chosen.start), "--to", str(chosen.end), "--out", str(out)]
        settings = {
            "data.evaluation_prompts": chosen.evaluation,
            "memory.microbatch_size": chosen.microbatch,
        }
        words += [word for name, x in settings.items() for word in ("--set", f"{name}={x}")]
        write(cost, in_a_process(words, log))
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    return {**summary, "cost": json.loads(cost.read_text("utf-8"))}


def facts(summary: dict[str, Any]) -> dict[str, Any]:
    names = ("window", "entropy", "reward", "total", "lines", "memo", "measured", "unexplained")
    names += ("measured_reward", "unexplained_reward", "replays", "evaluation")
    names += ("trusted", "why_not", "notes", "cost")
    path, rest = summary["total"]["path"], summary["unexplained"]
    share = [abs(x) / abs(path["value"]) for x in (rest["value"], *rest["interval"])]
    low, high = summary["measured"]["interval"]
    return {
        **{name: summary[name] for name in names},
        "path_in_measured_interval": low <= path["value"] <= high,
        "unexplained_share": {"value": share[0], "interval_reaches": max(share[1:])},
        "step_distance": max(step["step_distance"] for step in summary["steps"]),
    }


def differences(work: Path, dense: dict[str, Any], sparse: dict[str, Any], every: int) -> Any:
    """The largest, by what they are of."""

    def tables(name: str, column: str) -> list[np.ndarray]:
        read = [read_ledger_table(work / f"every_{n}", name) for n in (1, every)]
        if name == PROMPT_TABLE:  # its rows are in the order of their sums
            read = [table.sort_by("prompt") for table in read]
        return [np.array(table.column(column).to_pylist(), dtype=float) for table in read]

    def apart(pairs: Any) -> float:
        return max(abs(a - b) for a, b in pairs)

    steps = list(zip(dense["steps"], sparse["steps"], strict=True))
    levels = [abs(a["entropy"] - b["entropy"]) for a, b in steps]

    def largest(name: str, columns: tuple[str, ...]) -> dict[str, float]:
        return {x: float(np.abs(np.subtract(*tables(name, x))).max()) for x in columns}

    names = list(dense["lines"])
    return {
        "lines": {
            column: apart((dense["lines"][n][column], sparse["lines"][n][column]) for n in names)
            for column in ("dH", "dR")
        },
        "path": abs(dense["total"]["path"]["value"] - sparse["total"]["path"]["value"]),
        "batch": {
            column: apart((a[column], b[column]) for a, b in steps)
            for column in ("dH_batches", "dR_batches", "dH_path", "dR_path", "dH_uncovered")
        },
        "prompt": largest(PROMPT_TABLE, ("dH", "dR")),
        "token": largest(TOKEN_TABLE, HALVES),
        "largest_token": float(np.abs(tables(TOKEN_TABLE, "dH")[0]).max()),
        "entropy": max(levels),
        "redrawn": [a["step"] for (a, _), level in zip(steps, levels, strict=True) if level > 1e-4],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="start", type=int, default=0)
    parser.add_argument("--to", dest="end", type=int, default=56)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--evaluation", type=int, default=256, help="evaluation prompts")
    parser.add_argument("--microbatch", type=int, default=64)
    parser.add_argument("--work", type=Path, default=Path("build") / "explain_whole")
    parser.add_argument("--json", type=Path, default=STORED / "explain_whole.json")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {**conditions(1), "limits": LIMITS}
    both = {}
    for every in (1, chosen.every):
        both[every] = ledger(chosen.work, every, chosen)
        content[f"every_{every}"] = facts(both[every])
        write(chosen.json, content)
    content["differences"] = differences(chosen.work, both[1], both[chosen.every], chosen.every)
    write(chosen.json, content)
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
