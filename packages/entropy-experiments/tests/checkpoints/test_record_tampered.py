"""A recorded checkpoint whose files were edited, exchanged or lost: each is named, none is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from entropy_experiments.artifacts import sha256
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.config import parse_config
from entropy_experiments.findings import MadeCheck
from entropy_experiments.pipelines.probe_inputs import gather
from entropy_experiments.pipelines.training_facts import training_facts
from entropy_experiments.update.certificate import FingerprintCertificate
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


def test_another_step_s_batch_is_refused(run):
    place = _checkpoint(run) / "update_batch"
    shutil.rmtree(place)
    shutil.copytree(run / "run" / "record" / f"step_{STEP - 1}" / "update_batch", place)
    with pytest.raises(ValueError, match=rf"update_batch is of step {STEP - 1}; .* step {STEP},"):
        _gathered(run)


def test_another_step_s_fingerprint_is_refused(run):
    place = _checkpoint(run) / "made_step"
    shutil.rmtree(place)
    shutil.copytree(run / "run" / "record" / f"step_{STEP + 1}" / "made_step", place)
    with pytest.raises(ValueError, match=rf"made_step is of step {STEP + 1}; .* step {STEP},"):
        _gathered(run, evaluation_rollouts="recorded")


def _counting(run: Path, steps: int) -> None:
    """The optimizer counts so many steps, and no record says which file it was."""
    file = _checkpoint(run) / "optimizer.pt"
    stored = torch.load(file, weights_only=True)
    for entry in stored["state"].values():
        entry["step"].fill_(steps)
    torch.save(stored, file)
    record = json.loads((_checkpoint(run) / RECORD).read_text())
    del record["files"]["optimizer.pt"]
    (_checkpoint(run) / RECORD).write_text(json.dumps(record))


def test_a_later_step_s_optimizer_is_refused(run):
    _counting(run, STEP + 15)
    says = f"optimizer.pt counts {STEP + 15} steps and trainer_state.json {STEP}: it is of a later"
    with pytest.raises(ValueError, match=says):
        _gathered(run)


@pytest.mark.parametrize("fingerprint", [True, False])
def test_an_earlier_step_s_optimizer_is_not_trusted(run, fingerprint):
    """Adam's moments with another count make another step, which a fingerprint shows."""
    _counting(run, STEP - 1)
    if not fingerprint:
        shutil.rmtree(_checkpoint(run) / "made_step")
    results, split = probed(run)
    why = results["estimates"]["deltaH1"]["why_not"]
    if fingerprint:
        assert any("this is not the step that training made" in reason for reason in why)
    else:
        says = f"optimizer.pt counts {STEP - 1} steps and trainer_state.json {STEP}"
        assert any(says in reason for reason in why)
        assert says in split["unchecked"]


def test_a_count_is_no_reason_where_the_step_is_certified():
    same = FingerprintCertificate(relative_error=1e-5, cosine=1.0)
    assert MadeCheck(other_count="counts 2").doubt(same) == ""
    assert MadeCheck(other_count="counts 2").doubt(None) == "counts 2"


def test_a_count_that_the_record_vouches_for_is_no_reason(run):
    """A trainer that trains twice keeps its optimizer, and its steps begin at 0 again."""
    assert _loaded(run).other_count == ""
    _counting(run, STEP + 1)
    assert "carried over from an earlier training" in _loaded(run).other_count
    own = sha256(_checkpoint(run) / "optimizer.pt")
    _edit(_checkpoint(run) / RECORD, files={"optimizer.pt": own})
    assert _loaded(run).other_count == ""
