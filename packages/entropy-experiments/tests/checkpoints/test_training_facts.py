"""Files beside a checkpoint: held to the config's rules, no code, nothing dropped silently."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest

from entropy_experiments.checkpoints import training_facts as module
from entropy_experiments.checkpoints.training_facts import read_facts
from entropy_experiments.config.sections import Update
from entropy_experiments.online import trl_trainer
from entropy_experiments.pipelines.training_facts import ASSUMED, OPTIONAL
from entropy_experiments.sampling.datasets import DATASETS
from entropy_experiments.sampling.rewards import NAMED
from entropy_experiments.update.objective import LOSS_SETTINGS

pytestmark = pytest.mark.faults


def own(folder, **values):
    (folder / "entropy_probe.json").write_text(json.dumps(values))
    return read_facts((folder,))[0]


def trl(folder, text):
    (folder / "trl.yaml").write_text(text)
    return read_facts((folder,))[0]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("loss", "ppo", "'luspo', 'cispo', 'sapo' or 'rloo'"),
        ("advantage", True, "'group', 'batch' or 'none'"),
        ("ratio", "tokens", "'token' or 'sequence'"),
        ("clip_low", 1.5, "less than or equal to 1"),
        ("clip_high", -0.1, "greater than or equal to 0"),
        ("beta", True, "a valid number"),
        ("beta", "lots", "a valid number"),
        ("beta", float("nan"), "a finite number"),
        ("max_grad_norm", [1], "a valid number"),
        ("max_completion_length", 30.5, "a valid integer"),
        ("num_iterations", 0, "greater than or equal to 1"),
        ("num_iterations", True, "a valid integer"),
        ("lr", 0, "greater than 0"),
        ("amp_dtype", "bf16", "'float32', 'bfloat16' or 'float16'"),
        ("temperature", 0.0, "greater than 0"),
        ("top_p", 1.2, "less than or equal to 1"),
        ("stop", 3, "a list"),
        ("dataset_name", "gsm", "one of gsm8k_r1_template"),
        ("dataset_name", 3, "a valid string"),
        ("dataset_path", {}, "a valid string"),
        ("B_U", 0, "greater than or equal to 1"),
        ("G", 1, "greater than or equal to 2"),
        ("reward_functions", [], "at least 1 item"),
        ("reward_functions", ["math_verfy"], "one of math_verify"),
        ("reward_weights", [1.0], "one for each of the 0 reward_functions"),
        ("load_in_4bit", "yes", "a valid boolean"),
        ("note", 3, "a list"),
    ],
)
def test_values_that_cannot_be(tmp_path, key, value, expected):
    got = value[0] if value == ["math_verfy"] else value
    says = f"entropy_probe.json: {key} is {got!r}; expected "
    with pytest.raises(ValueError, match=re.escape(says) + ".*" + re.escape(expected)):
        own(tmp_path, **{key: value})


def test_values_that_can(tmp_path):
    found = own(tmp_path, lr="8e-7", beta=0, reward_functions="format", stop=["a"], note="mine")
    assert found == {
        "lr": 8e-7,
        "beta": 0,
        "reward_functions": ["format"],
        "stop": ["a"],
        "note": ("mine",),
    }
    assert own(tmp_path, loss=None, dataset_name="reasoning_gym:x") == {
        "dataset_name": "reasoning_gym:x"
    }


def test_every_known_name_has_a_rule(tmp_path):
    for name in module.KNOWN_FACTS:
        with pytest.raises(ValueError, match=f"entropy_probe.json: {name} is"):
            own(tmp_path, **{name: {"no": "such"}})


def test_every_setting_of_the_loss_is_read_everywhere():
    """A setting added to the loss and forgotten on its way there is named here."""
    settings = set(LOSS_SETTINGS)
    assert settings <= set(Update.model_fields)  # the config sets it
    assert settings <= set(module.KNOWN_FACTS)  # entropy_probe.json states it
    assert settings <= {fact for fact, _ in module.FROM_TRL.values()}  # a TRL YAML does
    assert settings <= {*ASSUMED, *OPTIONAL}  # it is resolved
    trainer = SimpleNamespace(args=EverySetting())
    assert settings <= set(trl_trainer.trainer_facts(trainer))  # and the callback records it


class EverySetting:
    """A trainer's arguments, all of them set."""

    def __getattr__(self, name):
        return 1


def test_a_checkpoint_cannot_name_code(tmp_path, monkeypatch):
    (tmp_path / "hostile_reward.py").write_text("def f(completions, problems): return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "hostile_reward:f"
    with pytest.raises(
        ValueError, match=r"entropy_probe.json.*'hostile_reward:f'.*set data\.reward_functions"
    ):
        own(tmp_path, reward_functions=["format", name])
    (tmp_path / "entropy_probe.json").unlink()
    assert "reward_functions" not in trl(tmp_path, f"reward_funcs: [{name}]\n")
    assert "hostile_reward" not in sys.modules


def test_trls_own_datasets_and_rewards_are_left_unread(tmp_path):
    assert trl(tmp_path, "dataset_name: openai/gsm8k\nreward_funcs: math_verify\n") == {
        "dataset_name": "gsm8k",
        "reward_functions": ["math_verify"],
    }
    found = trl(
        tmp_path,
        "dataset_name: trl-lib/DeepMath-103K\nreward_funcs: [accuracy_reward]\n"
        "reward_weights: [1.0]\n",
    )
    assert found == {
        "note": (
            "trl.yaml: dataset_name = trl-lib/DeepMath-103K is none of this program's; left unread",
            "trl.yaml: reward_funcs = ['accuracy_reward'] is none of this program's; left unread",
        )
    }
    # Where the project's own file says it, there is nothing to note.
    assert own(tmp_path, dataset_name="gsm8k", reward_functions=["format"]) == {
        "dataset_name": "gsm8k",
        "reward_functions": ["format"],
    }


@pytest.mark.parametrize(
    ("line", "noted"),
    [
        ("top_k: 50", True),
        ("top_k: 0", False),
        ("top_k: -1", False),
        ("top_k: null", False),
        ("min_p: 0.1", True),
        ("min_p: 0.0", False),
        ("repetition_penalty: 1.1", True),
        ("repetition_penalty: 1.0", False),
        ("generation_kwargs: {typical_p: 0.5}", True),
        ("mask_truncated_completions: true", True),
        ("mask_truncated_completions: false", False),
        ("top_entropy_quantile: 0.2", True),
        ("top_entropy_quantile: 1.0", False),
    ],
)
def test_what_is_not_followed_is_noted(tmp_path, line, noted):
    notes = trl(tmp_path, line + "\n").get("note", ())
    assert len(notes) == noted
    if noted:
        key = line.split(":")[0]
        assert notes[0].startswith(f"trl.yaml: training had {key} = ")
        assert notes[0].endswith("which this program does not follow")


def test_options_of_the_loss_that_are_not_followed_are_named_as_such(tmp_path):
    assert trl(tmp_path, "top_entropy_quantile: 0.2\n")["unfollowed"] == [
        "top_entropy_quantile = 0.2"
    ]
    assert "unfollowed" not in trl(tmp_path, "top_k: 50\n")


def test_two_sided_clipping_and_sapo_s_temperatures_are_read(tmp_path):
    found = trl(tmp_path, "delta: 2.0\nsapo_temperature_pos: 1.2\nsapo_temperature_neg: 0.9\n")
    assert found == {"delta": 2.0, "sapo_positive": 1.2, "sapo_negative": 0.9}


def test_notes_of_both_files_are_kept(tmp_path):
    (tmp_path / "trl.yaml").write_text("min_p: 0.1\n")
    (tmp_path / "entropy_probe.json").write_text('{"note": ["one", "two"]}')
    found, sources, _ = read_facts((tmp_path,))
    assert found["note"][:2] == ("one", "two")
    assert len(found["note"]) == 3
    assert sources["note"] == "entropy_probe.json, trl.yaml"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("beta: true", "beta is True; expected a number"),
        ("num_iterations: 1.5", "num_iterations is 1.5; expected a whole number"),
        ("temperature: 0", "temperature is 0.0; expected greater than 0"),
        ("num_generations: 1", "num_generations is 1; expected greater than or equal to 2"),
        ("load_in_4bit: maybe", "load_in_4bit is 'maybe'; expected a valid boolean"),
        ("scale_rewards: [1]", "scale_rewards is [1]; expected"),
        ("reward_funcs: format\nreward_weights: [x]", "reward_weights is ['x']; expected"),
    ],
)
def test_trl_values_that_cannot_be(tmp_path, line, says):
    with pytest.raises(ValueError, match=re.escape(f"trl.yaml: {says}")):
        trl(tmp_path, line + "\n")


def test_the_names_are_those_of_the_tasks():
    assert (*module.DATASETS, f"{module.GYM}<task>") == DATASETS
    assert set(module.REWARD_NAMES) == set(NAMED)
