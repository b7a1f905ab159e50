"""Whatever a reader of files is given, it returns a value or raises a ValueError: never another."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entropy_experiments.checkpoints.adapter import check_adapter_config, check_patterns
from entropy_experiments.checkpoints.layout import read_json
from entropy_experiments.config import ConfigError, parse_config, parse_training
from entropy_experiments.config.yaml_dialect import parse_text, parse_value
from entropy_experiments.input_errors import printable, read_jsonl
from entropy_experiments.sampling.datasets import load_problems
from entropy_experiments.sampling.importers import from_jsonl
from oracles.tiny_models import tiny_tokenizer

pytestmark = pytest.mark.faults

FEW = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**30, -1, 0, 1, float("nan"), 2**31, 2**63]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
SECTIONS = st.sampled_from(["batch_config", "update", "checkpoint", "generation", "influence", "x"])
KEYS = st.sampled_from(["B_E", "lr", "base", "temperature", "etas", "workspace", "device_map", ""])
CONFIGS = st.dictionaries(SECTIONS, st.one_of(VALUES, st.dictionaries(KEYS, VALUES)), max_size=4)
RECORDS = st.dictionaries(st.sampled_from(["prompt", "answer", "id", "x"]), VALUES)
ADAPTER_KEYS = st.sampled_from(
    [
        *("r", "lora_alpha", "lora_dropout", "bias", "target_modules", "exclude_modules"),
        *("rank_pattern", "alpha_pattern", "layers_pattern", "modules_to_save", "revision"),
        *("use_rslora", "init_lora_weights", "megatron_config", "layer_replication", "task_type"),
        *("trainable_token_indices", "layers_to_transform", "base_model_name_or_path"),
    ]
)


def refusal(call, kind=ValueError):
    """What a reader says of its input; empty if it takes it. Other errors pass."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


@FEW
@given(st.text(max_size=200))
def test_any_text_as_yaml(text):
    for read in (parse_text, parse_value):
        said = refusal(lambda read=read: read(text, source="f.yaml"), ConfigError)
        assert not said or said.startswith("f.yaml: ")


@FEW
@given(CONFIGS)
def test_any_mapping_as_a_configuration(mapping):
    """As a dict, and as the YAML of it."""
    for read in (parse_config, parse_training):
        said = refusal(lambda read=read: read(mapping), ConfigError)
        assert not said or said.startswith("config: ")
        assert len(said) < 15_000
    text = yaml.safe_dump(mapping, allow_unicode=True)

    def written():
        found, _ = parse_text(text, source="f.yaml")
        parse_config(found, source="f.yaml")

    said = refusal(written, ConfigError)
    assert not said or said.startswith("f.yaml: ")


@FEW
@given(st.lists(st.text(max_size=60).map(str.encode) | st.binary(max_size=60), max_size=4))
def test_any_lines_as_problems(tmp_path, lines):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b"\n".join(lines))
    said = refusal(lambda: list(read_jsonl(file, "{}")))
    assert not said or str(file) in said


@FEW
@given(st.lists(RECORDS, max_size=4))
def test_any_records_as_problems(tmp_path, records):
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records))

    def read():
        for problem in load_problems("jsonl", path=file, count=3):
            assert isinstance(problem.prompt, str)
            assert isinstance(problem.answer, str)

    said = refusal(read)
    assert not said or str(file) in said


TOKENIZER = tiny_tokenizer()
ROLLOUT_KEYS = ("prompt", "completion", "advantage", "reward", "step", "input", "output", "score")
ROLLOUTS = st.dictionaries(st.sampled_from(ROLLOUT_KEYS), VALUES, max_size=8)
LIKELY = st.fixed_dictionaries(
    {"prompt": st.text("12+=", max_size=4), "completion": st.text("12<>", max_size=4)},
    optional={"reward": VALUES, "advantage": VALUES, "step": SCALARS},
)


@FEW
@given(st.lists(st.one_of(ROLLOUTS, LIKELY), min_size=1, max_size=4))
def test_any_records_as_rollouts(tmp_path, records):
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records))

    def read():
        assert len(from_jsonl(file, TOKENIZER).rollouts) == len(records)

    refusal(read)


@FEW
@given(st.binary(max_size=80))
def test_any_bytes_as_json(tmp_path, data):
    file = tmp_path / "config.json"
    file.write_bytes(data)
    said = refusal(lambda: read_json(file))
    assert not said or str(file) in said


@FEW
@given(st.dictionaries(ADAPTER_KEYS, VALUES, max_size=5))
def test_any_adapter_config(tmp_path, changes):
    path = tmp_path / "adapter_config.json"
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, **changes}

    def read():
        check_adapter_config(path, config)
        check_patterns(path, config, ["model.layers.0.q_proj", "lm_head"])

    said = refusal(read)
    assert not said or str(path) in said


@FEW
@given(st.text(max_size=100))
def test_nothing_printed_is_obeyed(text):
    shown = printable(text)
    assert all(c.isprintable() or c in "\n\t " or not c.isascii() for c in shown)
    assert "\x1b" not in shown
    shown.encode("utf-8")


def test_the_readers_have_teeth(tmp_path):
    """The strategies do reach what is refused."""
    with pytest.raises(ConfigError, match="batch_config"):
        parse_config({"batch_config": {"B_E": float("nan")}})
    with pytest.raises(ValueError, match="rank_pattern"):
        check_adapter_config(tmp_path, {"peft_type": "LORA", "r": 2, "rank_pattern": [1]})
