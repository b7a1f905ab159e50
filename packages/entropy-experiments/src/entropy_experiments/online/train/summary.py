"""What a training run came to, as JSON and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entropy_experiments.artifacts import json_bytes, write_whole
from entropy_experiments.checkpoints.runs import checkpoints_by_step
from entropy_experiments.online.record_files import UPDATE
from entropy_experiments.online.train.folder import (
    CONFIG_FILE,
    steps_made,
    whole,
)
from entropy_experiments.online.trl_noise import NOISE_ROWS
from entropy_experiments.results import (
    LEDGERS_FOLDER,
    ROWS_FILE,
    SUMMARY_FILE,
    TRAINING,
    DoctorSummary,
    Ends,
    TrainingResult,
    TrainingUnchanged,
    read_rows,
)

EDGE = 5
"""Rows at either end whose mean is shown: single rows are noisy."""


def run_summary(
    trainer: Any,
    out: Path,
    *,
    probe: Any,
    doctor: DoctorSummary,
    resumed_from: Path | None,
    seconds: float,
    loss: float | None,
) -> TrainingResult:
    """What a run came to; train_summary.json holds it."""
    state = trainer.state
    before = 0 if resumed_from is None else steps_made(resumed_from)
    history = [row for row in state.log_history if "reward" in row]
    kept = [path for path in checkpoints_by_step(out) if whole(path)]
    # The step made from such a checkpoint is on record, so the offline commands rebuild it.
    recorded = [path for path in kept if (path / UPDATE).is_dir()]
    summary: TrainingResult = {
        **TRAINING.stamp,
        "folder": str(out),
        "steps": state.global_step,
        "steps_now": state.global_step - before,
        "max_steps": state.max_steps,
        "seconds": round(seconds, 3),
        "loss": _mean_loss(state.log_history, loss),
        "resumed_from": None if resumed_from is None else str(resumed_from),
        "logging_steps": state.logging_steps,
        "reward": _ends(history, "reward"),
        "entropy": _ends(history, "entropy"),
        "checkpoints": [str(path) for path in kept],
        "replayable": str(recorded[-1]) if recorded else None,
        "config": str(out / CONFIG_FILE),
        "doctor": doctor,
        "probe": None,
    }
    if probe is not None:
        rows = read_rows(out / ROWS_FILE) if (out / ROWS_FILE).is_file() else []
        summary["probe"] = {
            "rows": str(out / ROWS_FILE),
            "record": None if probe._recorder is None else str(probe._recorder.folder),
            "probed_steps": len(rows),
            "predicted": sum(row["predicted"] or 0.0 for row in rows),
            "measured": sum(row["measured"] or 0.0 for row in rows),
            "overhead": rows[-1]["overhead"] if rows else None,
            "ledgers": [str(path) for path in checkpoints_by_step(out / LEDGERS_FOLDER)],
            "noise_scale": str(out / NOISE_ROWS) if (out / NOISE_ROWS).is_file() else None,
            "off": None if probe.off is None else f"{type(probe.off).__name__}: {probe.off}",
        }
    return summary


def _mean_loss(history: Sequence[Mapping[str, Any]], loss: float | None) -> float | None:
    """Over all logged steps, those before a resume too; `loss` (of this process) without any."""
    total, before = 0.0, 0
    for row in history:
        if "loss" in row and row.get("step", 0) > before:
            total += float(row["loss"]) * (row["step"] - before)
            before = row["step"]
    return total / before if before else loss


def nothing_to_do(out: Path, checkpoint: Path, *, max_steps: int) -> TrainingUnchanged:
    """The summary of a resume that asks for no more steps than are made."""
    return {
        **TRAINING.stamp,
        "folder": str(out),
        "steps": steps_made(checkpoint),
        "steps_now": 0,
        "max_steps": max_steps,
        "resumed_from": str(checkpoint),
        "nothing_to_do": True,
    }


def nothing_line(steps: int, max_steps: int, *, option: str) -> str:
    return (
        f"{_steps(steps)} {'is' if steps == 1 else 'are'} made already; {option} {max_steps} asks "
        "for no more: nothing to do"
    )


def _ends(history: Sequence[Mapping[str, Any]], name: str) -> Ends:
    """Means of the first and of the last `rows` of all `of` rows."""
    values = [float(row[name]) for row in history if name in row]
    if not values:
        return {"first": None, "last": None, "rows": 0, "of": 0}
    few = max(1, min(EDGE, len(values) // 2))
    first, last = sum(values[:few]) / few, sum(values[-few:]) / few
    return {"first": first, "last": last, "rows": few, "of": len(values)}


def write_summary(out: Path, summary: TrainingResult) -> None:
    write_whole(out / SUMMARY_FILE, json_bytes(summary) + b"\n")


def _ends_words(ends: Ends, unit: str, logging_steps: int) -> str:
    few, row = ends["rows"], "step" if logging_steps == 1 else f"row of {logging_steps} steps"
    if ends["of"] == 1:
        return f"{ends['first']:.4g}{unit} (one {row})"
    which = f"first / last {row}"
    if few > 1:
        rows = row.replace(" of", "s of") if logging_steps > 1 else f"{row}s"
        which = f"mean of the first {few} / last {few} {rows}"
    return f"{ends['first']:.4g} -> {ends['last']:.4g}{unit} ({which})"


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def summary_words(
    summary: TrainingResult | TrainingUnchanged, *, option: str = "max_steps"
) -> list[str]:
    """`option`: by what name the number of steps was asked for."""
    if "nothing_to_do" in summary:
        return [nothing_line(summary["steps"], summary["max_steps"], option=option)]
    in_all = "" if summary["resumed_from"] is None else f", {summary['steps']} in all"
    lines = [f"{_steps(summary['steps_now'])} in {summary['seconds']:.0f} s{in_all}."]
    for name, unit, ends in (
        ("reward", "", summary["reward"]),
        ("entropy", " nats per token", summary["entropy"]),
    ):
        if ends["first"] is not None:
            lines.append(f"  {name:<8} {_ends_words(ends, unit, summary['logging_steps'])}")
    probe = summary["probe"]
    if probe is not None:
        lines.append(
            f"  probe    {_steps(probe['probed_steps'])}: predicted {probe['predicted']:+.4g}, "
            f"measured {probe['measured']:+.4g} nats in all"
        )
        if probe["off"] is not None:
            lines.append(f"  The probe switched itself off: {probe['off']}")
    doctor = summary["doctor"]
    if doctor["findings"]:
        lines.append(f"  doctor   {doctor['findings']} warnings or errors: {doctor['worst'][0]}")
    last = summary["checkpoints"][-1] if summary["checkpoints"] else None
    replayed = summary["replayable"] or last
    lines += ["", f"Run:         {summary['folder']}"]
    if probe is not None:
        lines.append(f"Probe rows:  {probe['rows']}")
        if probe["record"] is not None:
            lines.append(f"Every step:  {probe['record']}")
        if probe["noise_scale"] is not None:
            lines.append(f"Noise scale: {probe['noise_scale']}")
        if probe["ledgers"]:
            lines.append(f"Ledgers:     entropy-probe report {probe['ledgers'][-1]}")
    if last is not None:
        lines += [f"Checkpoint:  {last}", f"Ask it:      entropy-probe run --checkpoint {replayed}"]
    return lines
