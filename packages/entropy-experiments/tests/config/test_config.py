"""The YAML that users know: document 002 as printed, the templates, aliases, overrides, the schema.

The lists of keys are written out: renaming one breaks users' files and must be deliberate.
"""

import copy
import json
from itertools import pairwise

import pytest
import yaml

from entropy_experiments.config import (
    DOCUMENTS_TEMPLATES,
    TRAINING_TEMPLATES,
    Config,
    ConfigError,
    config_yaml,
    documented_yaml,
    every_key,
    json_schema,
    known_fields,
    load_config,
    parse_config,
    template,
    template_names,
    template_text,
)
from entropy_experiments.config.documents import (
    ALIASES,
    BARE_NAMES,
    FIELDS,
    RETIRED,
    document_keys,
)
from entropy_experiments.config.keys import look

pytestmark = pytest.mark.contract

DOCUMENT_002 = """\
# Model checkpoint
checkpoint:
  checkpoint_path: "/path/to/checkpoint/model"
  backbone: "qwen2_5_15"
  dtype: "bfloat16"

# Batch settings
batch_config:
  dataset_name: "gsm8k_r1_template"
  split: "test"
  B_E: 64    # Evaluation batch size
  B_U: 16    # Update batch size
  G: 8       # Responses per prompt (U batch)

# Enable both prediction and ground truth
probe_rework:
  compute_delta_h1: true         # Phase 1-3: prediction

importance:
  enabled: true                  # Phase 5: ground truth
  is_mode: "snis"
  report_per_token: true

# Detailed logging
detailed_logging:
  enabled: true
  level: "standard"              # Choose your detail level
  log_sequences: true
  output_directory: "entropy_experiments/logs"
  compress: true
"""

KEYS = {
    "checkpoint": "path adapter optimizer base backbone dtype device sharding",
    "data": "dataset file split evaluation_split update_split chat_template evaluation_prompts "
    "update_prompts responses_per_prompt evaluation_rollouts update_rollouts "
    "resample_equal_rewards zero_advantage_tolerance max_resamples reward_functions reward_weights "
    "reward_seconds",
    "sampling": "temperature top_p max_new_tokens batch_size stop seed save load",
    "update": "loss advantage ratio clip_low clip_high delta sapo_positive sapo_negative beta "
    "kl_ratio entropy_coef max_grad_norm max_completion_length num_iterations lr amp_dtype",
    "entropy": "unit surprisal",
    "predict": "enabled method baseline noise_floor curvature",
    "measure": "enabled weighting clip_log_weights learning_rates sweep learning_rate measured "
    "first_order second_order repeats more_clips",
    "influence": "update_batch.kind update_batch.params update_batch.load_path "
    "update_batch.save_path evaluation_batches learning_rates rollout_learning_rates "
    "directions_per_pass measured_rollouts measured_matrix leave_one_out fisher fisher_centred "
    "folds gradient_block_mb reward ranked_tokens what_if confirm entropy_budget plots folder",
    "memory": "microbatch_size forward_batch_size gradient_checkpointing",
    "output": "log level log_sequences log_tokens log_raw_tensors folder compress max_logs "
    "results_file",
}
DOCUMENT_KEYS = {
    "checkpoint": "checkpoint_path adapter_path optimizer_path base backbone dtype device_map "
    "sharding",
    "batch_config": "dataset_name dataset_path split E_split U_split chat_template B_E "
    "B_U G evaluation filter_zero_advantage_prompts advantage_filter_tol max_resample_attempts",
    "generation": "temperature top_p max_new_tokens gen_batch_size tf_batch_size stop",
    "update": "loss advantage ratio clip_low clip_high delta sapo_positive sapo_negative beta "
    "kl_ratio entropy_coef max_grad_norm "
    "max_completion_length num_iterations lr amp_dtype batch",
    "reward": "functions weights seconds",
    "rollouts": "save load",
    "probe_rework": "compute_delta_h1 master_seed",
    "importance": "enabled is_mode report_per_token clip_c",
    "estimator": "eta_list eta_sweep single_eta use_simple_entropy_for_x",
    "approx_delta_h": "method normalize microbatch_size baseline variance curvature",
    "true_delta_h": "enabled is_mode report_per_token clip_c microbatch_size tf_batch_size",
    "memory_config": "microbatch_size gradient_checkpointing",
    "influence": "workspace.kind workspace.params workspace.load_path workspace.save_path "
    "evaluation_requests etas per_sequence_etas grad_chunk_size microbatch_size measured_rollouts "
    "finite leave_one_out fisher fisher_centred folds block_mb reward ranked_tokens what_if "
    "confirm entropy_budget plots run_directory",
    "experiment": "compute_true compute_linear compute_linquad eta_list repeats clip_overrides",
    "precision": "runtime_dtype allow_tf32 matmul_precision",
    "detailed_logging": "enabled level log_sequences log_tokens log_raw_tensors output_directory "
    "compress max_files",
    "output": "results_path",
}
ACCEPTED_OUTSIDE_THE_SCHEMA = {
    "microbatch_size",
    "tf_micro_batch",
    "rollout_batch_size",
    "batch_config.rollout_batch_size",
}


def test_keys_are_frozen():
    expected = [f"{section}.{key}" for section, keys in KEYS.items() for key in keys.split()]
    assert list(every_key(known_fields())) == expected


def test_the_documents_keys_are_frozen():
    expected = [
        f"{section}.{key}" for section, keys in DOCUMENT_KEYS.items() for key in keys.split()
    ]
    assert list(document_keys()) == expected
    assert set(BARE_NAMES) == ACCEPTED_OUTSIDE_THE_SCHEMA
    assert set(FIELDS.values()) == set(every_key(known_fields()))  # nothing is without a name there


def test_document_002_validates_as_printed(tmp_path):
    file = tmp_path / "my_config.yaml"
    file.write_text(DOCUMENT_002)
    config = load_config(file)
    assert config.checkpoint.path == "/path/to/checkpoint/model"
    assert config.checkpoint.dtype == "bfloat16"
    assert (
        config.data.evaluation_prompts,
        config.data.update_prompts,
        config.data.responses_per_prompt,
    ) == (64, 16, 8)
    assert config.measure.weighting == "snis"
    assert config.entropy.unit == "per_token"
    assert config.output.folder == "entropy_experiments/logs"
    assert parse_config(yaml.safe_load(DOCUMENT_002)).dump() == config.dump()


def test_documented_defaults():
    config = parse_config({})
    batch = config.data
    assert (batch.evaluation_prompts, batch.update_prompts, batch.responses_per_prompt) == (
        64,
        16,
        8,
    )
    assert batch.resample_equal_rewards
    assert config.memory.microbatch_size == 2
    assert config.forward_batch_size == 16
    assert config.sampling.top_p is None  # 1.0, unless something else is said
    assert not batch.chat_template
    assert parse_config({"generation": {"top_p": 0.9}}).sampling.top_p == 0.9


def test_snippets_of_document_002_on_plain_dicts():
    config = template("detailed_logging_example.yaml")
    config["detailed_logging"] = {
        "enabled": True,
        "level": "debug",
        "log_sequences": True,
        "log_tokens": True,
        "log_raw_tensors": True,
    }
    assert parse_config(config).output.level == "debug"
    config["probe_rework"]["compute_delta_h1"] = False
    config["importance"]["enabled"] = True
    assert not parse_config(config).predict.enabled
    for B_E in [16, 32, 64, 128]:
        config["batch_config"]["B_E"] = B_E
        assert parse_config(config).data.evaluation_prompts == B_E
    memory = {"batch_config": {"B_E": 16, "B_U": 8}, "memory_config": {"microbatch_size": 1}}
    assert parse_config(memory).memory.microbatch_size == 1


def test_the_users_dict_is_not_touched():
    given = {"approx_delta_h": {"microbatch_size": 4}, "probe_rework": {"weighting_mode": "x"}}
    before = copy.deepcopy(given)
    parse_config(given).with_overrides(["batch_config.B_E=8"])
    assert given == before


@pytest.mark.parametrize("name", sorted(set(template_names()) - set(TRAINING_TEMPLATES)))
def test_templates(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(f"entropy_experiments/configs/{name}")
    assert config.notes == ()
    assert (config.translation is not None) == (name in DOCUMENTS_TEMPLATES)
    assert config.checkpoint.path is None
    for spelling in (name, f"configs/{name}", name.removesuffix(".yaml")):
        assert load_config(spelling).dump() == config.dump()
    # PyYAML reads 1e-4 as text; a user's own safe_load must give the same configuration
    assert parse_config(yaml.safe_load(template_text(name))).dump() == config.dump()
    (tmp_path / name).write_text("batch_config: {B_E: 7}")
    assert load_config(name).data.evaluation_prompts == 7  # the user's file before the template


def test_template_names_are_frozen():
    assert template_names() == (
        "all_keys.yaml",
        "config_template.yaml",
        "detailed_logging_example.yaml",
        "entropy_probe_test_optimized.yaml",
        "overnight_config.yaml",
        "quick_look.yaml",
        "quick_start.yaml",
        "test_deltaH1.yaml",
        "train_overnight.yaml",
        "train_probe_test.yaml",
        "train_qwen25_15b_lora.yaml",
        "train_smollm2_gsm8k.yaml",
        "train_tiny.yaml",
    )
    assert set(TRAINING_TEMPLATES) < set(template_names())
    assert {*DOCUMENTS_TEMPLATES, *DOCUMENTS_TEMPLATES.values()} < set(template_names())


def test_the_full_template_has_every_key_explained():
    text = template_text("all_keys.yaml")
    assert text == documented_yaml(), "all_keys.yaml is out of date: write documented_yaml() to it"
    assert list(every_key(template("all_keys.yaml"))) == list(every_key(known_fields()))
    old = "config_template.yaml"
    assert list(every_key(template(old))) == list(document_keys())
    assert load_config("all_keys.yaml").dump() == load_config(old).dump() == parse_config({}).dump()
    lines = [*text.splitlines(), "", *template_text(old).splitlines()]
    for above, line in pairwise(lines):
        if ":" in line and not line.lstrip().startswith("#"):
            assert above.lstrip().startswith(("# ", "#\n")), line


def test_every_field_has_its_description_in_the_schema():
    schema = json_schema()
    json.dumps(schema)
    assert schema["additionalProperties"] is False
    for section in schema["$defs"].values():
        assert section["description"]
        for name, entry in section["properties"].items():
            assert entry.get("description"), name


def test_the_schema_knows_what_is_accepted_besides_fields():
    schema = json_schema()
    old = schema["properties"]["probe_rework"]["properties"]
    assert old["mb_size_prompts"]["deprecated"]
    assert "memory.microbatch_size" in old["mb_size_prompts"]["description"]
    assert old["master_seed"] == {"deprecated": True, "description": "Read as sampling.seed."}
    assert schema["$defs"]["Checkpoint"]["properties"]["checkpoint_path"]["deprecated"]
    assert "deprecated" not in schema["$defs"]["Checkpoint"]["properties"]["path"]
    assert "entropy-probe train" in schema["properties"]["total_steps"]["description"]
    assert schema["properties"]["simple_entropy_probe"]["properties"]["enabled"]["deprecated"]


@pytest.mark.parametrize("text", ["8e-7", "8E-7", "8.0e-7", "8e-07", "+8e-7", ".8e-6", "0.0000008"])
def test_numbers(text, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(f"update: {{lr: {text}}}")
    assert load_config(file).update.lr == pytest.approx(8e-7, rel=1e-15)
    assert parse_config({}).with_overrides([f"update.lr={text}"]).update.lr == pytest.approx(8e-7)


def test_words_that_yaml_would_bend(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("rollouts: {save: 2025-01-15}\nimportance: {enabled: no}\noutput:\n")
    config = load_config(file)
    assert config.sampling.save == "2025-01-15"
    assert config.measure.enabled is False


def test_one_dialect_whatever_version_a_file_names(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("%YAML 1.1\n---\nupdate: {lr: 8e-7}\noutput: {log: off, folder: 2025-01-15}\n")
    config = load_config(file)
    assert (config.update.lr, config.output.log, config.output.folder) == (
        8e-7,
        False,
        "2025-01-15",
    )


def test_merged_keys_give_way_to_those_of_the_section(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("memory: &small {microbatch_size: 3}\nmemory_config:\n  <<: *small\n")
    assert load_config(file).memory.microbatch_size == 3
    file.write_text(
        "predict: &both {enabled: false}\nmeasure:\n  <<: *both\n  enabled: true\n  sweep: true\n"
    )
    config = load_config(file)
    assert (config.predict.enabled, config.measure.enabled, config.measure.sweep) == (
        False,
        True,
        True,
    )


def test_our_dialect_leaves_pyyaml_alone():
    load_config()
    assert yaml.safe_load("8e-7") == "8e-7"
    assert yaml.safe_load("2025-01-15").year == 2025


def nested(key, value):
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


EXAMPLES = {
    "checkpoint.dtype": "float64",
    "measure.enabled": False,
    "measure.weighting": "snis",
    "measure.clip_log_weights": 3.5,
    "measure.learning_rates": [1e-6, 2e-6],
    "memory.microbatch_size": 5,
    "memory.forward_batch_size": 96,
    "sampling.batch_size": 12,
}
SEVERAL = [alias for alias in ALIASES if alias.canonical in EXAMPLES]


@pytest.mark.parametrize("alias", SEVERAL, ids=lambda a: a.spelling)
def test_every_alias_fills_every_spelling(alias):
    value = EXAMPLES[alias.canonical]
    config = parse_config(nested(alias.spelling, value))
    assert config.dump() == parse_config(nested(alias.canonical, value)).dump()
    assert look(config.dump(), alias.canonical) == value
    for other in [old for old, new in FIELDS.items() if new == alias.canonical]:
        assert look(config.documents(), other) == value
    assert config.translation.startswith(
        f"written in the documents' keys: {alias.spelling} is {alias.canonical}. `entropy-probe "
    )
    assert config.notes == ()


def test_aliases_whose_values_differ():
    for section in ("importance", "true_delta_h"):
        config = parse_config({section: {"report_per_token": False}})
        assert config.entropy.unit == "per_sequence"
        assert config.documents()["importance"]["report_per_token"] is False
        assert config.documents()["true_delta_h"]["report_per_token"] is False
        assert config.documents()["approx_delta_h"]["normalize"] == "per_sequence"
    assert parse_config({}).documents()["importance"]["report_per_token"] is True


def test_aliases_name_fields():
    fields = set(every_key(known_fields()))
    assert {alias.canonical for alias in ALIASES} <= fields
    assert not {alias.spelling for alias in ALIASES} & fields


def test_agreeing_spellings_and_null_are_no_conflict():
    config = parse_config({"importance": {"clip_c": 5}, "true_delta_h": {"clip_c": 5.0}})
    assert config.measure.clip_log_weights == 5.0
    assert config.notes == ()
    config = parse_config({"importance": {"clip_c": None}, "true_delta_h": {"clip_c": 5.0}})
    assert config.measure.clip_log_weights == 5.0


def test_sizes_with_and_without_gradient_are_two_settings():
    config = parse_config({"memory_config": {"microbatch_size": 1}, "tf_micro_batch": 64})
    assert (config.memory.microbatch_size, config.forward_batch_size) == (1, 64)


@pytest.mark.parametrize("key", RETIRED)
def test_keys_without_meaning_are_accepted_and_explained(key):
    config = parse_config(nested(key, "anything"))
    assert config.dump() == parse_config({}).dump()
    (note,) = config.notes
    assert note.startswith(f"{key}: has no effect; ")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("precision.entropy_dtype", "sums over tokens always float64"),
        ("output.log_level", "--quiet, the log's detail is output.level"),
        ("precision.update_vector", "rebuilt in the parameters' precision, and the verdict notes"),
    ],
)
def test_what_is_said_of_keys_without_meaning(key, said):
    assert said in parse_config(nested(key, "x")).notes[0]
    assert said in parse_config({}).with_overrides([f"{key}=x"]).notes[0]


def test_full_precision_may_be_said():
    config = parse_config({"precision": {"allow_tf32": False, "matmul_precision": "highest"}})
    assert config.dump() == parse_config({}).dump()


def test_a_baseline_with_weights_of_each_tokens_past():
    for section in ("importance", "true_delta_h"):
        given = {"approx_delta_h": {"baseline": True}, section: {"is_mode": "per_decision"}}
        assert parse_config(given).predict.baseline


def test_keys_of_document_001():
    config = parse_config(
        {
            "rollout_batch_size": 12,
            "tf_micro_batch": 12,
            "buffer_size": 64,
            "microbatch_size": 4,
            "total_steps": 10,
            "simple_entropy_probe": {"enabled": True, "debug": True},
        }
    )
    assert config.sampling.batch_size == config.memory.forward_batch_size == 12
    assert config.memory.microbatch_size == 4
    assert len(config.notes) == 4  # those of training are without effect here
    assert "rollout_batch_size is sampling.batch_size" in config.translation


def test_round_trip_through_yaml(tmp_path):
    config = parse_config(
        {
            "update": {"lr": 8e-7, "loss": "dapo"},
            "estimator": {"eta_list": [1e-6, 2]},
            "reward": {"functions": ["math_verify", "mine:reward"], "weights": [1, 0.5]},
            "generation": {"stop": "</answer>"},
            "influence": {"evaluation_requests": [{"kind": "prompt_ids", "params": {"ids": [1]}}]},
            "true_delta_h": {"is_mode": "per_decision"},
        }
    )
    file = tmp_path / "again.yaml"
    file.write_text(config_yaml(config))
    again = load_config(file)
    assert again.dump() == config.dump()
    assert again.notes == ()
    assert again.translation is None
    assert again.sampling.stop == ("</answer>",)


def test_overrides():
    config = load_config("test_deltaH1")
    changed = config.with_overrides(
        [
            "batch_config.B_E=256",
            "estimator.eta_list=[1e-6, 2e-6]",
            "checkpoint.checkpoint_path=runs/a=b",
            "influence.workspace.kind=prompt_ids",
            "sampling.seed=4",
            "update.lr=null",
        ]
    )
    assert changed.data.evaluation_prompts == 256
    assert changed.measure.learning_rates == (1e-6, 2e-6)
    assert changed.checkpoint.path == "runs/a=b"
    assert changed.influence.update_batch.kind == "prompt_ids"
    assert changed.update.lr is None
    assert changed.sampling.seed == 4
    assert config.data.evaluation_prompts == 32
    assert config.with_overrides([]).dump() == config.dump()


def test_overrides_of_a_config_made_by_hand():
    config = Config.model_validate(
        {"data": {"evaluation_prompts": 8}, "measure": {"clip_log_weights": 3.0}}
    )
    changed = config.with_overrides(["update.batch=recorded"])
    assert (changed.data.evaluation_prompts, changed.data.update_rollouts) == (8, "recorded")
    assert changed.measure.clip_log_weights == 3.0
    assert changed.with_overrides(["batch_config.B_U=4"]).data.evaluation_prompts == 8
    assert Config().with_overrides([]).dump() == parse_config({}).dump()
    # and one that was read says no more than its file did
    assert parse_config({}).with_overrides(["batch_config.B_U=4"]).notes == ()


def test_an_override_replaces_every_spelling_of_the_file():
    config = parse_config({"true_delta_h": {"clip_c": 5.0, "is_mode": "per_decision"}})
    changed = config.with_overrides(["importance.clip_c=2.0"])
    assert changed.measure.clip_log_weights == 2.0
    assert changed.measure.weighting == "per_decision"
    full = parse_config(changed.dump()).with_overrides(["approx_delta_h.microbatch_size=7"])
    assert full.memory.microbatch_size == 7


def test_everything_below_one_folder(tmp_path):
    config = parse_config({}).under(tmp_path)
    assert config.output.folder == str(tmp_path / "logs")
    assert config.output.results_file == str(tmp_path / "results.json")
    assert config.rollout_folder == tmp_path / "rollouts"
    assert parse_config({}).rollout_folder.as_posix() == "logs/rollouts"


def test_step_sizes():
    def etas(**estimator):
        return parse_config({"estimator": estimator}).measure.etas(8e-6)

    assert etas() == (8e-6,)
    assert etas(eta_sweep=True) == (1e-6, 4e-6, 8e-6, 16e-6, 32e-6)
    assert etas(eta_list=[1e-6, 2e-6]) == (1e-6, 2e-6)
    assert etas(eta_list=[1e-6, 2e-6], eta_sweep=False, single_eta=3e-6) == (3e-6,)
    assert etas(single_eta="2e-5") == (2e-5,)


def test_frozen():
    config = parse_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.data.evaluation_prompts = 3
    with pytest.raises(ValueError, match="frozen"):
        config.data = config.data


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = parse_config({"checkpoint": {"checkpoint_path": "~/step_60"}})
    assert config.checkpoint.path == "/home/someone/step_60"


def test_a_bool_is_not_one():
    with pytest.raises(ConfigError, match="one setting"):
        parse_config(
            {"memory_config": {"microbatch_size": 1}, "approx_delta_h": {"microbatch_size": True}}
        )
