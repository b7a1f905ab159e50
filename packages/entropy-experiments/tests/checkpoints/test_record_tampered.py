"""A recorded checkpoint whose files were edited, exchanged or lost: each is named, none is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.config import parse_config
from entropy_experiments.pipelines.probe_inputs import gather
from entropy_experiments.pipelines.training_facts import training_facts
from online.test_trl_matrix import probed, trained
from oracles.trl_matrix import STEP, Case

pytestmark = pytest.mark.faults

FACTS, RECORD = "entropy_probe.json", "entropy_probe_record.json"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    assert trained(folder, Case(name="plain", setting="none")).off is None
    return folder


@pytest.fixture
def run(recorded, tmp_path) -> Path:
    shutil.copytree(recorded, tmp_path / "copy")
    return tmp_path / "copy"


def _checkpoint(run: Path) -> Path:
    return run / "run" / f"checkpoint-{STEP}"


def _edit(file: Path, **changes: Any) -> None:
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def _loaded(run: Path) -> Any:
    return load_checkpoint(_checkpoint(run), base=run / "base")


def _gathered(run: Path, **data: Any) -> Any:
    config = {"checkpoint": {"base": str(run / "base")}, "data": data}
    return gather(parse_config(config), _checkpoint(run))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": 0.5}, "temperature is 0.5 and was 1.0 in training"),
        ({"max_completion_length": 4}, "max_completion_length is 4 and was 12 in training"),
        ({"delta": 2.0}, "delta is 2.0 and was missing in training"),
        ({"loss": ...}, "loss is missing and was 'dapo' in training"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_edited_facts_are_refused_with_the_value_that_differs(run, changes, says):
    _edit(_checkpoint(run) / FACTS, **changes)
    with pytest.raises(ValueError, match=f"{FACTS} is not the file that training wrote: {says}"):
        _loaded(run)


def test_a_record_of_before_has_no_facts_to_compare_with(run):
    _edit(_checkpoint(run) / RECORD, facts=...)
    _edit(_checkpoint(run) / FACTS, temperature=0.5)
    assert _loaded(run).facts["temperature"] == 0.5


def test_lost_facts_are_read_from_the_record(run):
    whole = _loaded(run).facts
    (_checkpoint(run) / FACTS).unlink()
    (run / "run" / FACTS).write_text('{"temperature": 0.25}')  # of the run, farther than the record
    assert dict(_loaded(run).facts) == dict(whole)
    (run / "run" / FACTS).unlink()
    _edit(_checkpoint(run) / RECORD, facts=...)  # as earlier versions wrote it: TRL's options
    left = _loaded(run).facts
    assert {name: whole[name] for name in left} == dict(left)
    assert set(whole) - set(left) == {"B_U"}


def test_without_its_record_no_other_dataset_or_reward_is_taken(run):
    (_checkpoint(run) / RECORD).unlink()
    lost = f"{RECORD} is missing, and .*evaluation shows that the run was recorded; copy it back"
    with pytest.raises(ValueError, match=f"own prompts are not in its record: {lost}"):
        _gathered(run)
    for name in ("evaluation", "made_step", "update_batch"):
        shutil.rmtree(_checkpoint(run) / name)
    with pytest.raises(ValueError, match=r"record.*shows that the run was recorded"):
        _gathered(run)
    facts = training_facts(parse_config({"data": {"dataset": "countdown"}}), *_facts(run))
    assert facts["dataset_name"] == "countdown"
    assert "copy it back" in facts["reward_absent"]  # nor is Countdown's reward assumed


def _facts(run: Path) -> tuple[Any, Any]:
    loaded = _loaded(run)
    return loaded.facts, loaded.fact_sources


def test_a_checkpoint_that_never_had_a_record_assumes_as_ever(run):
    (_checkpoint(run) / RECORD).unlink()
    for name in ("evaluation", "made_step"):
        shutil.rmtree(_checkpoint(run) / name)
    (_checkpoint(run) / FACTS).unlink()
    for beside in list((run / "run").glob(f"*/{RECORD}")):
        shutil.rmtree(beside.parent)
    assert "dataset_name" not in _loaded(run).facts


def test_untouched_it_is_trusted(run):
    results, _ = probed(run)
    assert results["verdict"][0].startswith("The update that training made")
    assert all(results["estimates"][name]["trusted"] for name in ("deltaH1", "deltaH_true"))
