"""The documents' dialect means what it meant: against the version that had it for its schema.

`data/documents_dialect.json` was written by commit 5d85394, whose fields were the documents' keys:
every key alone, second names, retired keys, mixtures and templates, each with every value that
version gave the run. Studies and interrupted runs are identified by these very values.
"""

import json
import random
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from entropy_experiments.cli import app
from entropy_experiments.config import (
    DOCUMENTS_TEMPLATES,
    TRAINING_TEMPLATES,
    ConfigError,
    load_config,
    load_training,
    migrated_yaml,
    parse_config,
    renamed,
    template_text,
)
from entropy_experiments.config.documents import ALIASES, FIELDS
from entropy_experiments.config.keys import copied, look, put

pytestmark = pytest.mark.contract

STORED = json.loads((Path(__file__).parents[1] / "data/documents_dialect.json").read_text())


def before(case):
    """Every value that the version before gave the run."""
    out = copied(STORED["default"])
    for key, value in case["changed"].items():
        put(out, key, value)
    return out


def test_the_stored_cases_reach_every_key():
    changed = {key for case in STORED["cases"] for key in case["changed"]}
    assert changed >= set(FIELDS)
    assert len(STORED["cases"]) > 200


def test_every_document_means_what_it_meant():
    assert json.dumps(parse_config({}).documents()) == json.dumps(STORED["default"])
    for case in STORED["cases"]:
        # as text: the order of keys and 1 beside 1.0 are part of what is hashed
        assert json.dumps(parse_config(case["given"]).documents()) == json.dumps(before(case))


def test_the_comparison_has_teeth():
    case = next(c for c in STORED["cases"] if c["given"] == {"importance": {"is_mode": "snis"}})
    found = parse_config({"importance": {"is_mode": "per_decision"}}).documents()
    assert json.dumps(found) != json.dumps(before(case))


def test_both_dialects_and_the_way_back_are_one_configuration():
    for case in STORED["cases"]:
        config = parse_config(case["given"])
        for again in (config.written, config.dump(), config.documents()):
            assert parse_config(again).dump() == config.dump()
        assert parse_config(config.written).translation is None
        assert renamed(config.documents()) == config.dump()


def test_a_mixture_of_both_is_the_same():
    """Each key of a document under either name, by the toss of a coin."""
    coin = random.Random(0)
    for case in STORED["cases"]:
        mixed = {}
        for old, new in FIELDS.items():
            value = look(case["given"], old)
            if isinstance(value, (dict | list | str | int | float)) and "report_per" not in old:
                put(mixed, coin.choice([old, new]), value)
        for old in ("importance", "true_delta_h"):
            if (value := case["given"].get(old, {}).get("report_per_token")) is not None:
                put(mixed, f"{old}.report_per_token", value)
        for name in ("microbatch_size", "tf_micro_batch", "rollout_batch_size"):
            if name in case["given"]:
                mixed[name] = case["given"][name]
        if "rollout_batch_size" in case["given"].get("batch_config", {}):
            put(mixed, "batch_config.rollout_batch_size", 12)
        assert parse_config(mixed).dump() == parse_config(case["given"]).dump()


@pytest.mark.parametrize("name", DOCUMENTS_TEMPLATES)
def test_templates_in_both_forms_and_migrated(name, tmp_path):
    load = load_training if name in TRAINING_TEMPLATES else load_config
    old, new = load(name), load(DOCUMENTS_TEMPLATES[name])
    assert old.dump() == new.dump()
    (tmp_path / "new.yaml").write_text(migrated_yaml(name)[0])
    migrated = load(tmp_path / "new.yaml")
    assert migrated.dump() == old.dump()
    # nothing more is set than the file said
    assert migrated.model_dump(exclude_unset=True) == old.model_dump(exclude_unset=True)
    if name not in TRAINING_TEMPLATES:
        assert migrated.translation is None


def test_random_documents_migrate_to_the_same_configuration(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    for case in STORED["cases"][-63::3]:
        old.write_text(yaml.safe_dump(case["given"]))
        text, notes = migrated_yaml(old)
        new.write_text(text or "{}")
        config = load_config(old)
        assert load_config(new).dump() == config.dump()
        assert notes == config.notes
        assert (load_config(new).notes, load_config(new).translation) == ((), None)


def test_migrate_as_a_command(tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("batch_config: {B_E: 7}\nprobe_rework: {weighting_mode: x, master_seed: 3}\n")
    result = CliRunner().invoke(app, ["config", "migrate", str(old)])
    assert result.exit_code == 0
    assert result.stdout == "data:\n  evaluation_prompts: 7\nsampling:\n  seed: 3\n"
    assert "note: left out: probe_rework.weighting_mode: has no effect" in result.stderr
    result = CliRunner().invoke(app, ["config", "migrate", str(old), "--out", str(new), "--json"])
    assert json.loads(result.stdout)["written"] == str(new)
    assert load_config(new).dump() == load_config(old).dump()
    again = CliRunner().invoke(app, ["config", "migrate", str(old), "--out", str(new)])
    assert again.exit_code == 2
    assert "overwrite it with --force" in again.stderr
    bad = CliRunner().invoke(app, ["config", "migrate", str(tmp_path / "none.yaml")])
    assert bad.exit_code == 2


def test_training_files_migrate(tmp_path):
    old = tmp_path / "old.yaml"
    old.write_text("total_steps: 10\nmicrobatch_size: 4\nsimple_entropy_probe: {every: 2}\n")
    text, _ = migrated_yaml(old)
    assert yaml.safe_load(text) == {"microbatch_size": 4, "max_steps": 10, "probe": {"every": 2}}


def test_what_is_said_once(tmp_path):
    file = tmp_path / "old.yaml"
    file.write_text(template_text("detailed_logging_example.yaml"))
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    (line,) = [one for one in result.stdout.splitlines() if "documents' keys" in one]
    assert "checkpoint.checkpoint_path is checkpoint.path" in line
    assert "and 25 more. `entropy-probe config migrate FILE` writes today's." in line
    assert "documents" not in CliRunner().invoke(app, ["config", "check", "quick_start"]).stdout


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["data.evaluation_prompts=1"], "data.evaluation_prompts: got 1, expected 2 or more"),
        (["batch_config.B_E=1"], "batch_config.B_E: got 1, expected 2 or more"),
        (["data.evaluation_prompts=3", "batch_config.B_E=4"], "one setting"),
        (["sampling.sed=4"], "Did you mean sampling.seed"),
    ],
)
def test_overrides_in_either_dialect_are_judged_alike(overrides, match):
    with pytest.raises(ConfigError, match=match):
        load_config("quick_look").with_overrides(overrides)


@pytest.mark.parametrize("key", ["data.evaluation_prompts", "batch_config.B_E"])
@pytest.mark.parametrize("name", ["quick_look", "test_deltaH1"])
def test_an_override_replaces_the_other_dialects_key(name, key):
    changed = load_config(name).with_overrides([f"{key}=9"])
    assert changed.data.evaluation_prompts == 9
    assert load_config(name).data.evaluation_prompts == 32


@pytest.mark.parametrize("key", ["influence.workspace", "influence.update_batch"])
def test_a_nested_section_is_replaced_as_a_whole(key):
    config = parse_config(
        {"influence": {"workspace": {"kind": "prompt_ids"}}, "microbatch_size": 3}
    )
    changed = config.replaced({key: {"load_path": "w"}})
    assert changed.influence.update_batch.model_dump() == {
        "kind": "update",
        "params": {},
        "load_path": "w",
        "save_path": None,
    }
    assert changed.memory.microbatch_size == 3


def test_names_of_stored_settings_are_translated_without_judging_them():
    stored = {"batch_config": {"B_E": "many", "gone": 1}, "importance": {"report_per_token": False}}
    assert renamed(stored) == {
        "data": {"evaluation_prompts": "many"},
        "batch_config": {"gone": 1},
        "entropy": {"unit": "per_sequence"},
    }
    assert {alias.canonical for alias in ALIASES} <= set(FIELDS.values())
