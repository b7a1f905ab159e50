"""Every setting of the table: right online and offline, or refused with its reason."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from checkout import DOCS
from entropy_experiments import OfflineEntropyProbe
from entropy_experiments.attribution.step import StepOptions, rebuild_step, step_inputs
from entropy_experiments.config import parse_config
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.pipelines.influence.certified import certified_step
from entropy_experiments.pipelines.probe_inputs import gather
from entropy_experiments.pipelines.run_conditions import analysis_conditions
from oracles.tiny_grpo import grpo
from oracles.tiny_models import tiny_model, tiny_tokenizer
from oracles.trl_matrix import CASES, STEP, STEPS, Case, kinds, record_folder, table
from oracles.trl_ranks import on_trl_ranks

pytestmark = pytest.mark.contract

PAGE = DOCS / "howto_online.md"
ROUNDING = 1.2e-7
"""Of an entropy in fp32, of which a change is the difference of two."""
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def test_the_page_has_the_table():
    text = PAGE.read_text(encoding="utf-8")
    inside = text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    assert inside == table(), "write the lines of oracles.trl_matrix.table() into the page"


def trained(folder: Path, case: Case) -> EntropyProbeCallback:
    changes = dict(case.changes)
    if "kind" in changes:
        changes["kind"] = kinds()[changes["kind"]]
    if os.environ.get("RANK", "0") == "0":
        stored = changes.get("dtype", torch.float32)
        tiny_model().to(stored).save_pretrained(folder / "base")
        tiny_tokenizer().save_pretrained(folder / "base")
    callback = EntropyProbeCallback(
        max_overhead=None,
        prompts=6,
        microbatch=4,
        record=record_folder(folder),
        **case.options,
    )
    settings = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": STEP,
        "lr_scheduler_type": "constant",
    }
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(folder / "run", callbacks=[callback], **(settings | changes))
        trainer.train()
    return callback


def _rows(folder: str, case: Case) -> list[dict[str, Any]]:
    callback = trained(Path(folder), case)
    assert callback.off is None
    return callback.rows


def probed(folder: Path, **sections: Any) -> tuple[dict[str, Any], Any]:
    """(results of `run`, what a study says of its split) of the step after the checkpoint."""
    config = {
        "checkpoint": {"base": str(folder / "base")},
        "batch_config": {"evaluation": "recorded"},
        "memory_config": {"microbatch_size": 4},
        "approx_delta_h": {"curvature": False},
        "detailed_logging": {"enabled": False, "output_directory": str(folder / "logs")},
        **sections,
    }
    checkpoint = folder / "run" / f"checkpoint-{STEP}"
    found = OfflineEntropyProbe(config, quiet=True).run_mixed_probe(checkpoint)
    with analysis_conditions():
        inputs = gather(parse_config(config), checkpoint)
        options = StepOptions(
            objective=inputs.facts.objective,
            max_grad_norm=inputs.facts["max_grad_norm"] or None,
            estimator=EstimatorOptions(microbatch=4),
        )
        step = step_inputs(
            inputs.policy, inputs.optimizer, inputs.update, options, trained=inputs.trained
        )
        rebuilt, gradient = rebuild_step(step)
        try:
            split = certified_step(inputs, rebuilt.direction, gradient)
        except ValueError as refused:
            split = str(refused)
    return found, split


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_setting(case, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    if case.online == "refused":
        with pytest.raises(ValueError, match=case.why):
            trained(tmp_path, case)
        return
    if case.ranks > 1:
        rows, _ = on_trl_ranks(case.ranks, _rows, str(tmp_path), case, patience=200)
    else:
        rows = _rows(str(tmp_path), case)
    assert len(rows) == STEPS
    check_online(case, rows, [record.getMessage() for record in caplog.records])
    if case.run == "refused":
        with pytest.raises(ValueError, match=case.why):
            probed(tmp_path)
        return
    found, split = probed(tmp_path)
    if case.run == "not trusted":
        check_doubted(case, found)
    else:
        row = next(row for row in rows if row["step"] == STEP)
        check_right(case, found, row)
    check_split(case, found, split)


def check_online(case: Case, rows: list[dict[str, Any]], said: list[str]) -> None:
    warned = [text for text in said if "Training samples with" in text]
    assert len(warned) == (1 if case.online == "noted" else 0)
    assert all(case.why in text for text in warned)
    for row in rows:
        assert row["policy"] == "full softmax, temperature 1"
        assert row["sampling"] == ([case.why] if case.online == "noted" else [])
    if case.online == "not trusted":
        assert all(row["trusted"] == 0 for row in rows)
        assert all(any(case.why in why for why in row["why_not"]) for row in rows)
    if case.run != "not trusted":
        # What was predicted is the step that the optimizer made, whatever the loss.
        assert all(row["step_mismatch"] < 1e-4 for row in rows)


def check_right(case: Case, found: dict[str, Any], row: dict[str, Any]) -> None:
    """The offline numbers of the same rollouts, and what the headline claims."""
    if case.online != "not trusted":  # those were computed with fewer digits
        size = max(abs(row["predicted"]), (row["predicted_high"] - row["predicted_low"]) / 2)
        near = 1e-5 * size + ROUNDING * row["entropy"]
        for key, name in (("deltaH1", "predicted"), ("deltaH_true", "measured")):
            assert abs(found[key] - row[name]) <= near, name
        baseline = found["estimates"]["baseline"]["value"]
        assert abs(baseline - row["baseline"]) <= near
    assert found["made_step"]["of_recorded_gradient"]
    assert found["step_certificate"]["relative_error"] < 1e-4
    first = found["verdict"][0]
    assert first.startswith(f"The update that training made after step_{STEP}")
    level = next(line for line in found["verdict"] if "entropy now" in line)
    says = f"of the full softmax (training sampled with {case.why})"
    assert (says in level) == (case.run == "noted")
    assert any(case.why in note for note in found["notes"]) or case.run != "noted"


def check_doubted(case: Case, found: dict[str, Any]) -> None:
    assert found["verdict"][0].startswith("This is not the step that training made")
    assert case.why in found["verdict"][0]
    for name in ("deltaH1", "deltaH_true"):
        assert not found["estimates"][name]["trusted"]
    assert found["step_certificate"]["relative_error"] > 0.05


def check_split(case: Case, found: dict[str, Any], split: Any) -> None:
    distance = found["made_step"]["gradient_distance"]
    if case.split == "right":
        assert distance < 1e-4
        assert split["step_distance"] < 1e-3
    elif case.split == "marked":
        assert 1e-4 < distance < 0.05
        assert split["gradient_distance"] == pytest.approx(distance)
        assert 1e-4 < split["step_distance"] < 0.05
        assert any("training computed in bfloat16" in note for note in found["notes"])
    else:
        assert "he step rebuilt here is not the step that training made" in split
        assert case.why in split
        if case.run != "not trusted":
            assert distance > 0.05
            assert case.why in found["verdict"][1]
            assert "so there is no split by rollout or token" in found["verdict"][1]
