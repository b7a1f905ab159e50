"""Keys of studies and experiments: whatever decides a batch is in them, by content."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from entropy_experiments import EntropyMeasurements, ExperimentPlan
from entropy_experiments.config import parse_config
from entropy_experiments.output_folder import _settings
from entropy_experiments.pipelines.influence.runner import _study_key
from entropy_experiments.pipelines.probe_sampling import open_checkpoint

pytestmark = pytest.mark.invariant

SMALL = {
    "batch_config": {"B_E": 4, "B_U": 2, "G": 4},
    "memory_config": {"microbatch_size": 32},
    "update": {"batch": "drawn"},
    "generation": {"max_new_tokens": 10},
}


@pytest.fixture(scope="module")
def probed():
    return open_checkpoint(parse_config(SMALL), None)


def keys(config, probed):
    """(of an experiment, of a study)."""
    experiment = EntropyMeasurements(config, quiet=True)._key(ExperimentPlan(), [0.1], probed)
    return experiment, _study_key(config, probed)


def changed(config, probed, path, text):
    """Whether each key is another one after `text` is written to `path`."""
    before = keys(config, probed)
    assert keys(config, probed) == before
    path.write_text(text)
    return [a != b for a, b in zip(before, keys(config, probed), strict=True)]


def test_a_study_is_not_its_spelling(probed, tmp_path, monkeypatch):
    """The documents' keys, the schema's and the version before: one study, one folder."""
    old = parse_config({**SMALL, "importance": {"is_mode": "snis"}})
    new = parse_config(old.written)
    assert "batch_config" not in old.written
    assert keys(old, probed) == keys(new, probed)
    assert _settings(old) == _settings(new)
    # 5d85394 stored these values of the same document, and hashed them
    stored = Path(__file__).parents[1] / "data/documents_dialect.json"
    before = json.loads(stored.read_text())["default"]
    now = keys(parse_config({}), probed)
    assert _settings(parse_config({}))["importance.is_mode"] == "per_decision"
    monkeypatch.setattr(type(old), "documents", lambda self: json.loads(json.dumps(before)))
    assert keys(parse_config({}), probed) == now


def test_the_dataset_file(probed, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    asked = {**SMALL["batch_config"], "dataset_path": str(path)}
    config = parse_config({**SMALL, "batch_config": asked})
    assert changed(config, probed, path, '{"prompt": "a", "answer": "c"}\n') == [True, True]


def test_the_dataset_file_that_the_checkpoint_names(probed, tmp_path):
    path = tmp_path / "theirs.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    facts = replace(probed.facts, values={**probed.facts.values, "dataset_path": str(path)})
    found = replace(probed, facts=facts)
    other = '{"prompt": "a", "answer": "c"}\n'
    assert changed(parse_config(SMALL), found, path, other) == [True, True]


def test_splits_that_change_places(probed, tmp_path):
    """The same contents under other names are other problems."""
    for name, text in (("train", "1"), ("test", "2")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    asked = {**SMALL["batch_config"], "dataset_path": str(tmp_path)}
    config = parse_config({**SMALL, "batch_config": asked})
    before = keys(config, probed)
    (tmp_path / "train.jsonl").rename(tmp_path / "a.jsonl")
    assert not set(before) & set(keys(config, probed))


def test_the_rollouts_that_are_loaded(probed, tmp_path):
    path = tmp_path / "evaluation" / "manifest.json"
    path.parent.mkdir()
    path.write_text("{}")
    config = parse_config({**SMALL, "rollouts": {"load": str(tmp_path)}})
    assert changed(config, probed, path, json.dumps({"kind": "rollouts"})) == [True, True]


def test_the_recorded_batch(probed, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text("{}")
    found = replace(probed, checkpoint=replace(probed.checkpoint, recorded=tmp_path))
    assert changed(parse_config(SMALL), found, path, "[]") == [True, True]


def test_a_reward_function_of_your_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "my_rewards_of_keys.py"
    text = "def score(completions, problems):\n    return [{}] * len(completions)\n"
    path.write_text(text.format(0.0))
    config = parse_config({**SMALL, "reward": {"functions": ["my_rewards_of_keys:score"]}})
    found = open_checkpoint(config, None)
    assert changed(config, found, path, text.format(1.0)) == [True, True]
    assert "my_rewards_of_keys" not in sys.modules  # a key runs nobody's code
    missing = parse_config({**SMALL, "reward": {"functions": ["no_such_module.at_all:score"]}})
    assert keys(missing, open_checkpoint(missing, None))  # refused where the reward is built


def test_a_stale_repeat_is_not_used_again(tmp_path):
    """`entropy-probe measure` after the dataset has changed in place."""
    path = tmp_path / "problems.jsonl"

    def measured(numbers):
        lines = [
            {"prompt": f"numbers {a} 3 4 target {24 + a} :", "answer": str(24 + a)} for a in numbers
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        asked = {"dataset_name": "jsonl", "dataset_path": str(path), "B_E": 3, "B_U": 1, "G": 2}
        asked["filter_zero_advantage_prompts"] = False
        settings = {**SMALL, "batch_config": asked, "reward": {"functions": ["answer_exact"]}}
        config = parse_config(settings).under(tmp_path / "out")
        plan = ExperimentPlan(compute_true=False)
        (repeat,) = EntropyMeasurements(config, quiet=True).run_experiments(plan)["repeats"]
        return repeat["evaluation_rollouts"]

    first = measured(range(1, 6))
    assert measured(range(1, 6)) == first
    assert measured(range(6, 11)) != first
