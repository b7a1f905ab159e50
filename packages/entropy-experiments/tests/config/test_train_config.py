"""Training configurations that are refused, by name, before torch is imported or a folder made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from entropy_experiments.cli import app
from entropy_experiments.config import ConfigError, load_preset, load_training, parse_training
from entropy_experiments.config.training_batch import batch_plan
from entropy_experiments.config.training_reading import replaced, with_overrides

pytestmark = pytest.mark.faults

REFUSED = {
    "misspelt key": ("learning_rat: 1e-5", "learning_rat: unknown key. Did you mean learning_rate"),
    "misspelt in a section": ("probe: {evry: 2}", "probe.evry: unknown key. Did you mean probe.ev"),
    "misspelt in the old section": (
        "simple_entropy_probe: {evry: 2}",
        "line 1: simple_entropy_probe.evry: unknown key. Did you mean probe.every?",
    ),
    "the old section as a switch": (
        "simple_entropy_probe: true",
        "simple_entropy_probe: got True, expected a section",
    ),
    "like no other key": ("qqqqqq: 1", "qqqqqq: unknown key. Keys: model, "),
    "two names": ("max_steps: 5\ntotal_steps: 6", "total_steps: got 6, but max_steps is 5"),
    "two names of a switch": (
        "probe: {enabled: true}\nsimple_entropy_probe: {enabled: false}",
        "simple_entropy_probe.enabled: got False, but probe.enabled is True",
    ),
    "a loss of TRL's that is not rebuilt": ("loss_type: cispo", "loss_type: got 'cispo', expected"),
    "a group of one": ("num_generations: 1", "num_generations: got 1, expected 2 or more"),
    "text for a number": ("learning_rate: '1'", "learning_rate: got '1', expected a number"),
    "weights without functions": ("reward_weights: [1.0]", "has 1 numbers for 0 reward_functions"),
    "code that is no name": (
        "reward_functions: ['os.system(1)']",
        "expected a name or module:function. Nothing of it was imported",
    ),
    "a key of its own in trl": ("trl: {beta: 0.1}", "trl: has beta, which is a key of its own"),
    "what the run decides": ("trl: {ignore_data_skip: true}", "which this command decides itself"),
    "a checkpoint inside a batch": (
        "num_iterations: 2\nsave_steps: 3",
        "save_steps: is 3 with num_iterations 2",
    ),
    "a ledger of rollouts that judge themselves": (
        "probe: {ledger_every: 5, evaluation: batch}",
        "probe.ledger_every: is 5 with probe.evaluation batch: every rollout of the ledger would "
        "be judged by itself. Set probe.evaluation to fresh or half",
    ),
    "DeepSpeed under the probe": (
        "trl: {deepspeed: zero2.json}",
        "trl: has deepspeed, under which parameters or gradients are not where the probe looks for "
        "them. Leave it out, or train with --no-probe",
    ),
    "no such rollouts to judge by": (
        "probe: {evaluation: whole}",
        "probe.evaluation: got 'whole', expected one of fresh, half, batch",
    ),
    "too few prompts for an error bar": ("probe: {prompts: 4}", "probe.prompts: got 4, expected 5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_key(name, tmp_path):
    text, said = REFUSED[name]
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_training(file)
    assert said in str(refused.value)
    assert str(refused.value).startswith(str(file))


SIZES = {
    "a remainder": (
        {"buffer_size": 64, "microbatch_size": 4},
        3,
        r"buffer_size: 64 prompts x 8 responses do not divide into passes of 32 sequences on each "
        r"of 3 ranks \(5.33 passes\). Make buffer_size a multiple of ranks x microbatch_size",
    ),
    "fewer than one pass": (
        {"buffer_size": 2, "microbatch_size": 4},
        1,
        r"do not divide .*\(0.5 passes\)",
    ),
    "two names of a pass": (
        {"microbatch_size": 4, "per_device_train_batch_size": 16},
        1,
        "got 16, but microbatch_size 4 x num_generations 8 is 32",
    ),
    "two names of a step": (
        {"buffer_size": 64, "microbatch_size": 4, "gradient_accumulation_steps": 8},
        1,
        "got 8, but buffer_size 64 on 1 ranks with 32 sequences a pass makes 16",
    ),
    "a group cut through": (
        {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1},
        1,
        "no whole groups of num_generations 8",
    ),
    "a generation inside a step": (
        {"buffer_size": 8, "microbatch_size": 2, "steps_per_generation": 6},
        1,
        "steps_per_generation: got 6, expected a multiple of the 4 backward passes",
    ),
    "a checkpoint between generations": (
        {"buffer_size": 8, "microbatch_size": 8, "steps_per_generation": 2, "save_steps": 3},
        1,
        "save_steps: got 3, but one generation serves 2 steps",
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_do_not_fit(name):
    given, ranks, said = SIZES[name]
    with pytest.raises(ConfigError, match=said):
        batch_plan(parse_training(given), ranks=ranks)


def test_presets_and_overrides_are_checked_too():
    with pytest.raises(ConfigError, match="got 'tinny', expected one of tiny, smollm2-gsm8k"):
        load_preset("tinny")
    with pytest.raises(ConfigError, match="--set: lr: unknown key"):
        with_overrides(load_preset("tiny"), ["lr=1"])
    with pytest.raises(ConfigError, match="expected key=value"):
        with_overrides(load_preset("tiny"), ["learning_rate"])
    with pytest.raises(ConfigError, match="max_steps: got 0, expected 1 or more"):
        replaced(load_preset("tiny"), {"max_steps": 0})


COMMANDS = {
    "two configurations": (["--config", "a.yaml", "--preset", "tiny"], "Leave one out"),
    "no such file": (
        ["--config", "nowhere.yaml"],
        "Configuration not found: nowhere.yaml. Templates of a training, which need no folder: "
        "entropy_probe_test_optimized.yaml, overnight_config.yaml, train_overnight.yaml, "
        "train_probe_test.yaml, train_qwen25_15b_lora.yaml, train_smollm2_gsm8k.yaml, "
        "train_tiny.yaml. Or --preset tiny, smollm2-gsm8k, ",
    ),
    "no such preset": (["--preset", "huge"], "got 'huge', expected one of tiny"),
    "a misspelt preset": (["--preset", "tyni"], "Did you mean tiny?"),
    "no step": (["--steps", "0"], "--steps is 0; expected 1 or more"),
    "nothing to resume": (
        ["--resume"],
        "run has no training to resume. Check --out, or leave out --resume.",
    ),
    "nothing to resume, dry": (["--resume", "--dry-run"], "run has no training to resume."),
    "no such model": (["--set", "model=smolm2"], "Did you mean 'smollm2'?"),
    "bf16 weights on a CPU": (["--set", "dtype=bfloat16"], "dtype is bfloat16 on a CPU"),
    "bf16 on a CPU": (["--set", "bf16=true"], "bf16 is true, and training is on a CPU"),
    "no such field of TRL's": (["--set", "trl={optm: sgd}"], "trl.optm: TRL's GRPOConfig has no"),
    "no such reward": (["--set", "reward_functions=[countdwn]"], "Did you mean 'countdown'?"),
    "no such dataset": (["--set", "dataset_name=gsm9k"], "Unknown dataset 'gsm9k'"),
    "too small a dataset": (["--set", "dataset_size=5"], "Lower eval_prompts or buffer_size"),
    "no such tracker": (["--set", "report_to=[wnb]"], "report_to: got 'wnb'"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_says_it_and_writes_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options, said = COMMANDS[name]
    result = CliRunner().invoke(app, ["train", "--out", "run", *options])
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert list(Path().iterdir()) == []


def test_a_folder_with_a_run_is_refused(tmp_path):
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    result = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert "has a training already. Continue it with --resume" in result.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-3"]
    result = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "run"), "--resume"])
    assert result.exit_code == 2
    assert "has checkpoints, but no entropy_probe_train.yaml" in result.stderr
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "file")])
    assert "is a file; expected a folder" in result.stderr


def test_a_noise_scale_needs_a_second_gradient(tmp_path):
    """Told by --dry-run; training tells it when it begins (tests/online/test_trl_noise.py)."""
    asked = ["--out", str(tmp_path / "run"), "--dry-run", "--set", "probe.noise_scale=true"]

    def told(*options: str) -> bool:
        result = CliRunner().invoke(app, ["train", *asked, *options])
        assert result.exit_code == 0, result.output
        return "there is no second gradient" in result.stdout

    one, two = ["--set", "buffer_size=8"], ["--set", "microbatch_size=4"]
    result = CliRunner().invoke(app, ["train", *asked, *one, "--set", "microbatch_size=8"])
    assert "lower microbatch_size" in result.stdout
    assert not told(*one, *two)
    assert not told(*one, "--set", "microbatch_size=8", "--no-probe")


def test_help_and_a_bad_file_need_no_torch(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("learning_rat: 1")
    code = (
        "import sys\n"
        "from entropy_experiments.cli import app\n"
        "try:\n"
        "    app(sys.argv[1:], prog_name='entropy-probe')\n"
        "finally:\n"
        "    assert not {'torch', 'transformers', 'trl'} & set(sys.modules)\n"
    )
    for options, status in ((["--help"], 0), (["--config", str(file)], 2), (["--dry-run"], 0)):
        done = subprocess.run(
            [sys.executable, "-c", code, "train", *options],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": "100"},
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert "AssertionError" not in done.stderr


def test_a_training_file_is_not_for_the_probe():
    result = CliRunner().invoke(app, ["run", "--config", "overnight_config"])
    assert result.exit_code == 2
    assert "is for training. Run it: entropy-probe train --config overnight_config" in result.stderr
