"""`run` and `influence` end in a verdict on checkpoints that forward mode alone does not serve.

Mixtures of experts, BLOOM, RecurrentGemma, a state space: tiny random full fine-tunes with real
optimizer states, through the very commands. No traceback, and the result says how it was
differentiated.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from entropy_experiments.cli import app
from oracles.tiny_models import save_tiny_checkpoint

pytestmark = pytest.mark.contract

MODES = {
    "qwen3_moe": "jvp",
    "gpt_oss": "jvp",
    "mixtral": "jvp",
    "deepseek_v2": "jvp",
    "bloom": "double_backward",
    "recurrent_gemma": "double_backward",
    "mamba2": "jvp",
}
QUICK = ("qwen3_moe", "bloom")
SETTINGS = {
    "batch_config.dataset_name": "countdown",
    "batch_config.B_E": 6,
    "batch_config.B_U": 2,
    "batch_config.G": 3,
    "generation.max_new_tokens": 6,
    "approx_delta_h.variance": False,
    "influence.plots": False,
    "memory_config.microbatch_size": 8,
    "reward.functions": "[uneven_reward:letters]",
}


@pytest.fixture
def uneven_reward(tmp_path, monkeypatch):
    """Groups with an advantage, whatever a random model writes."""
    (tmp_path / "uneven_reward.py").write_text(
        "def letters(completions):\n"
        "    return [float(sum(map(ord, str(text))) % 7) for text in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def command(verb: str, checkpoint, out, *more: str):
    sets = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    arguments = [verb, "--checkpoint", str(checkpoint), "--out", str(out), "--quiet", "--json"]
    return CliRunner().invoke(app, [*arguments, *sets, *more])


def check(found) -> dict:
    assert found.exit_code == 0, (found.stderr, found.exception)
    return json.loads(found.stdout)


def check_run(path, out, mode: str) -> None:
    results = check(command("run", path, out))
    assert results["mode"] == mode
    assert results["estimates"]["deltaH1"]["trusted"], results["estimates"]["deltaH1"]["why_not"]
    predicted, measured = results["deltaH1"], results["deltaH_true"]
    # lr 1e-5: the line is straight, and what the model did is what its derivative says.
    assert predicted == pytest.approx(measured, rel=0.05, abs=2e-7)
    assert results["verdict"]
    said = "\n".join(results["verdict"])
    assert ("Differentiated by two backward passes" in said) == (mode == "double_backward")


@pytest.mark.parametrize("name", QUICK)
def test_run(tmp_path, uneven_reward, name):
    made = save_tiny_checkpoint(tmp_path / "tiny", "full", architecture=name, lr=1e-5)
    check_run(made.path, tmp_path / "out", MODES[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), MODES.items())
def test_run_and_influence(tmp_path, uneven_reward, name, mode):
    made = save_tiny_checkpoint(tmp_path / "tiny", "full", architecture=name, lr=1e-5)
    check_run(made.path, tmp_path / "run", mode)
    more = ("--what-if", "drop=negative", "--confirm", "--set", "influence.leave_one_out=[1]")
    summary = check(command("influence", made.path, tmp_path / "study", *more))
    assert summary["mode"] == mode
    ledger = summary["ledger"]
    assert ledger["predicted"]["value"] == pytest.approx(
        sum(line["this_step"] for line in ledger["lines"].values()), rel=1e-6
    )
    assert ledger["measured"]["value"] == pytest.approx(
        ledger["predicted"]["value"], rel=0.05, abs=2e-7
    )
    (answer,) = summary["evaluations"][0]["what_if"]
    assert answer["confirmation"] is not None


@pytest.mark.slow
def test_adapters_of_a_mixture(tmp_path, uneven_reward):
    made = save_tiny_checkpoint(tmp_path / "tiny", "lora", architecture="qwen3_moe", lr=1e-5)
    check_run(made.path, tmp_path / "run", "jvp")
    summary = check(command("influence", made.path, tmp_path / "study"))
    assert summary["mode"] == "jvp"


def test_a_method_that_the_model_lacks_ends_in_one_line(tmp_path, uneven_reward):
    made = save_tiny_checkpoint(tmp_path / "tiny", "full", architecture="bloom", lr=1e-5)
    found = command("run", made.path, tmp_path / "out", "--set", "approx_delta_h.method=jvp")
    assert found.exit_code == 2
    assert "Traceback" not in found.stderr
    (line,) = [x for x in found.stderr.splitlines() if x.startswith("Error:")]
    assert "cannot be differentiated by 'jvp'" in line
    assert "predict.method: auto" in line
