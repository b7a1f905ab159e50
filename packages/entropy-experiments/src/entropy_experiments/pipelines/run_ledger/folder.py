"""Whose run directory it is: what decides a ledger's numbers, and whether it is finished."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from entropy_experiments.artifacts import (
    digest_of,
    json_bytes,
    read_json_object,
    sha256,
    sweep_partials,
    write_changed,
)
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.recorded_run import RecordedRun
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.config import Config
from entropy_experiments.pipelines.probe_sampling import named_contents
from entropy_experiments.pipelines.run_conditions import own_device
from entropy_experiments.pipelines.run_ledger.evaluation import FRESH
from entropy_experiments.pipelines.run_ledger.window import ExplainOptions, Window
from entropy_experiments.pipelines.training_facts import training_facts
from entropy_experiments.results import RUN_LEDGER
from entropy_experiments.results.run_ledger import MANIFEST_FILE
from entropy_experiments.study_files import PAGE

IDENTITY = "explain.json"
VERSION = 4
"""Raise it when a stage changes its meaning: earlier ones are then computed again."""
NOT_RESULTS = ("detailed_logging", "output", "training", "experiment", "influence", "rollouts")
"""Sections of the configuration that change no number."""


def ledger_key(config: Config, run: RecordedRun, window: Window, options: ExplainOptions) -> str:
    """Everything that decides the numbers, known before anything is drawn."""
    settings = {
        name: value for name, value in config.documents().items() if name not in NOT_RESULTS
    }
    settings["checkpoint"] = {"dtype": settings["checkpoint"]["dtype"]}
    batches = {step: run.batch(step) for step in window.steps}
    loaded = load_checkpoint(
        run.checkpoints[window.start],
        base=config.checkpoint.base,
        backbone=config.checkpoint.backbone,
        dtype=config.checkpoint.dtype,
        device_map=own_device(config.checkpoint.device),
        need_optimizer=False,
        read_optimizer=False,
    )
    facts = training_facts(config, loaded.facts, loaded.fact_sources)
    return digest_of(
        {"format": RUN_LEDGER.stamp, "version": VERSION, "fresh": FRESH},
        settings,
        {**asdict(options), "start": window.start, "end": window.end},
        {name: value for name, value in provenance().items() if name != "git"},
        dict(loaded.hashes),  # the base's files, too
        named_contents(facts, [config.data.file or facts.values.get("dataset_path")]),
        {str(step): _hashes(run.checkpoints[step]) for step in window.anchors},
        {str(step): [] if path is None else _hashes(path) for step, path in batches.items()},
    )


def _hashes(folder: Path) -> list[str]:
    """Of every file below a folder."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return [f"{p.relative_to(folder)} {sha256(p)}" for p in files]


def bind(folder: Path, key: str, *, overwrite: bool) -> None:
    """Declare whose folder this is, or refuse another ledger's."""
    path = folder / IDENTITY
    identity = read_json_object(path, advice=f"Delete {folder}.")
    others = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    if identity is None and others:
        raise ValueError(
            f"{folder} has files that are no ledger's ({', '.join(sorted(others)[:4])}); expected "
            "an empty or a new folder, or one of an earlier `entropy-probe explain`."
        )
    # A command that was refused before its first stage leaves a name and nothing to lose.
    holds = (folder / MANIFEST_FILE).exists() or any((folder / "stages").glob("*"))
    if identity is not None and identity.get("key") != key and holds and not overwrite:
        raise ValueError(
            f"{folder} holds another ledger: another run, window or setting, or another version of "
            "the package. Give another folder, or let this one replace it with --overwrite."
        )
    folder.mkdir(parents=True, exist_ok=True)
    sweep_partials(folder)
    if identity is None or identity.get("key") != key:
        (folder / PAGE).unlink(missing_ok=True)  # it showed the ledger that was here
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        for stage in (folder / "stages").glob("*"):
            stage.unlink()
    write_changed(path, json_bytes({**RUN_LEDGER.stamp, "key": key}))


def is_finished(folder: Path, key: str) -> bool:
    """Whether every file of this very ledger is there, bit by bit."""
    manifest = read_json_object(folder / MANIFEST_FILE, advice=f"Delete {folder}.")
    if manifest is None or manifest.get("key") != key:
        return False
    return all(
        (folder / name).is_file() and sha256(folder / name) == facts["sha256"]
        for name, facts in manifest["files"].items()
    )
