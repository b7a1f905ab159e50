"""`entropy-probe train` on a small scale: what it leaves behind, and that nothing disturbs it."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.runs import embedded_trajectory
from entropy_experiments.cli import app
from entropy_experiments.config import (
    TRAINING_TEMPLATES,
    Config,
    load_preset,
    load_training,
    parse_training,
    training_yaml,
)
from entropy_experiments.config.training_batch import batch_plan
from entropy_experiments.config.training_reading import (
    TRAINING_ALIASES,
    known_training_fields,
    replaced,
)
from entropy_experiments.online.rows import read_rows
from entropy_experiments.online.train import callbacks, summary
from entropy_experiments.online.train.trainer import (
    PartwiseGRPOTrainer,
    load_task,
    reward_functions,
)
from entropy_experiments.pipelines.training_facts import training_facts
from entropy_experiments.results import DoctorSummary, TrainingResult, read_training_summary
from entropy_experiments.sampling.rollout_files import load_update_batch

pytestmark = pytest.mark.contract

SMALL = """\
lora: {r: 2, alpha: 8, target_modules: [q_proj, v_proj]}
eval_prompts: 8
buffer_size: 6          # 6 / (1 x 3) = 2 backward passes a step
microbatch_size: 3
rollout_batch_size: 4   # two parts: 4 and 2 prompts
tf_micro_batch: 12
num_generations: 4
max_completion_length: 30
total_steps: 4
learning_rate: 3e-3
save_steps: 2
simple_entropy_probe: {prompts: 6, max_overhead: null}
doctor: {mode: auto, trace_steps: 1}
"""


def invoke(*words: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        return CliRunner().invoke(app, ["train", *words])


def adapter(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "adapter_model.safetensors")


def assert_same_weights(a: Path, b: Path) -> None:
    one, other = adapter(a), adapter(b)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
    states = [torch.load(path / "optimizer.pt", weights_only=True)["state"] for path in (a, b)]
    for key, entry in states[0].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][key][name]))


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def run(file, tmp_path_factory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("train") / "run"
    result = invoke("--config", str(file), "--out", str(out))
    assert result.exit_code == 0, result.output
    return out, result


def test_it_says_where_everything_is(run):
    out, result = run
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"4 steps in \d+ s\.", lines[0])
    for line in lines[1:3]:  # reward, entropy
        assert line.endswith("(mean of the first 2 / last 2 steps)")
    for place in (out, out / "entropy_probe.jsonl", out / "record", out / "checkpoint-4"):
        assert any(line.endswith(str(place)) for line in lines), place
        assert place.exists()
    assert f"entropy-probe run --checkpoint {out / 'checkpoint-2'}" in lines[-1]
    shown = [line for line in result.stderr.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in shown] == ["1/4", "2/4", "3/4", "4/4"]
    assert all("predicted" in line and "measured" in line for line in shown)
    found = read_training_summary(out)
    assert found.keys() == get_type_hints(TrainingResult).keys()
    assert found["doctor"].keys() == get_type_hints(DoctorSummary).keys()
    assert found["steps"] == found["steps_now"] == 4
    assert found["probe"]["off"] is None
    assert found["probe"]["probed_steps"] == 4
    assert (out / "doctor.json").is_file()


def test_it_learned_and_was_probed(run):
    out, _ = run
    rows = read_rows(out / "entropy_probe.jsonl")
    top = math.log(len(load_checkpoint(out / "checkpoint-4").tokenizer))
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(0 < row["entropy"] < top for row in rows)
    assert any(row["measured"] != 0 for row in rows)
    before, after = adapter(out / "checkpoint-0"), adapter(out / "checkpoint-4")
    assert any(not torch.equal(value, after[name]) for name, value in before.items())


def test_the_facts_are_the_same_wherever_they_are_written(run):
    out, _ = run
    places = (out, out / "record", *(out / f"checkpoint-{step}" for step in (0, 2, 4)))
    assert len({(place / "entropy_probe.json").read_bytes() for place in places}) == 1


def test_the_offline_probe_assumes_nothing(run):
    """Each checkpoint says how it was trained, on what, and for what reward."""
    out, _ = run
    for step in (0, 2, 4):
        found = load_checkpoint(out / f"checkpoint-{step}")
        facts = training_facts(Config(), found.facts, found.fact_sources)
        assert facts.assumed == {}
        assert facts["loss"] == "dr_grpo"
        assert facts["advantage"] == "none"
        assert facts["dataset_name"] == "countdown"
        assert facts["reward_functions"] == ["countdown"]
        assert facts["max_completion_length"] == 30
    for folder in (out, out / "record"):
        assert json.loads((folder / "entropy_probe.json").read_text())["dataset_name"]


def test_every_step_is_on_record(run):
    out, _ = run
    for step in range(4):
        batch, meta = load_update_batch(out / "record" / f"step_{step}" / "update_batch")
        assert meta["step"] == step
        assert len(batch.rollouts) == 6 * 4
    assert (out / "checkpoint-2" / "update_batch").is_dir()


def test_the_probe_changes_no_weight(run, file, tmp_path):
    out, _ = run
    result = invoke("--config", str(file), "--out", str(tmp_path / "off"), "--no-probe", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["probe"] is None
    assert not (tmp_path / "off" / "entropy_probe.jsonl").exists()
    assert_same_weights(out / "checkpoint-4", tmp_path / "off" / "checkpoint-4")
    found = load_checkpoint(tmp_path / "off" / "checkpoint-4")
    assert training_facts(Config(), found.facts, found.fact_sources).assumed == {}


def test_without_the_doctors_package_training_goes_on_and_says_so(file, tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks, "find_spec", lambda name: None)
    out = tmp_path / "run"
    done = invoke("--config", str(file), "--out", str(out), "--steps", "1", "--no-probe")
    assert done.exit_code == 0, done.stderr
    assert callbacks.NOT_INSTALLED in done.stderr
    told = json.loads((out / summary.SUMMARY_FILE).read_text())["doctor"]
    assert told == {"examined": False, "findings": 0, "worst": []}
    assert not (out / "doctor.json").exists()


def test_a_doctor_that_should_end_a_training_must_be_there(file, tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks, "find_spec", lambda name: None)
    words = ("--config", str(file), "--out", str(tmp_path / "run"), "--steps", "1")
    done = invoke(*words, "--set", "doctor.raise_on=error")
    assert done.exit_code == 2
    assert "doctor.raise_on is 'error', and gradient-doctor is not installed" in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_training_batch_may_judge_itself(file, tmp_path):
    changes = ("probe.evaluation=batch", "doctor.enabled=false", "save_first=false")
    words = [word for change in changes for word in ("--set", change)]
    out = tmp_path / "own"
    result = invoke("--config", str(file), "--out", str(out), "--steps", "2", *words)
    assert result.exit_code == 0, result.output
    rows = read_rows(out / "entropy_probe.jsonl")
    assert [row["rollouts"] for row in rows] == [6 * 4] * 2  # the batch, not the 6 of fresh ones


@pytest.mark.slow
def test_a_longer_run_continues_a_shorter_one(run, file, tmp_path):
    """Bit for bit; the configuration is the one that the run was begun with."""
    out, _ = run
    short = tmp_path / "short"
    assert invoke("--config", str(file), "--out", str(short), "--steps", "2").exit_code == 0
    assert not (short / "checkpoint-4").exists()
    result = invoke("--out", str(short), "--resume", "--steps", "4", "--json", "--quiet")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["resumed_from"] == str(short / "checkpoint-2")
    assert json.loads(result.stdout)["steps_now"] == 2
    assert (short / "checkpoint-2" / "update_batch").is_dir()
    assert_same_weights(out / "checkpoint-4", short / "checkpoint-4")
    with pytest.raises(AssertionError):  # it has teeth
        assert_same_weights(out / "checkpoint-2", short / "checkpoint-4")


def test_a_resumed_run_is_the_same_run(run, file):
    out, _ = run
    result = invoke("--config", str(file), "--out", str(out), "--resume", "--set", "seed=1")
    assert result.exit_code == 2
    assert "was begun with seed: 0; now it is 1, which would be another run" in result.stderr


def test_what_a_resume_would_continue_from(run, file, tmp_path):
    out, _ = run
    words = ["--out", str(out), "--resume", "--dry-run"]
    result = invoke(*words, "--steps", "6")
    assert result.exit_code == 0, result.output
    assert f"would continue from {out / 'checkpoint-4'}" in result.stdout
    told = json.loads(invoke(*words, "--steps", "6", "--json").stdout)
    assert told["resumes_from"] == str(out / "checkpoint-4")
    assert "4 steps are made already; max_steps 4 asks for no more" in invoke(*words).stdout
    result = invoke(*words, "--set", "seed=1")
    assert result.exit_code == 2
    assert "which would be another run" in result.stderr
    early = tmp_path / "early"  # killed before its first checkpoint
    early.mkdir()
    (early / "entropy_probe_train.yaml").write_text((out / "entropy_probe_train.yaml").read_text())
    result = invoke("--out", str(early), "--resume", "--dry-run")
    assert f"{early} has no whole checkpoint yet: it would begin from the" in result.stdout


def test_no_more_steps_than_are_made(run):
    out, _ = run
    before = {path: path.read_bytes() for path in out.glob("*.*") if path.is_file()}
    assert {path.name for path in before} >= {"entropy_probe_train.yaml", "train_summary.json"}
    result = invoke("--out", str(out), "--resume", "--steps", "2")
    assert result.exit_code == 0, result.output
    said = "4 steps are made already; --steps 2 asks for no more: nothing to do\n"
    assert result.stdout == said
    result = invoke("--out", str(out), "--resume", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["steps"], told["steps_now"], told["nothing_to_do"]) == (4, 0, True)
    assert {path: path.read_bytes() for path in out.glob("*.*") if path.is_file()} == before


def test_ends_say_what_they_are():
    rows = [{"reward": float(value)} for value in range(12)]
    said = summary._ends_words(summary._ends(rows, "reward"), " nats", 1)
    assert said == "2 -> 9 nats (mean of the first 5 / last 5 steps)"
    said = summary._ends_words(summary._ends(rows, "reward"), "", 10)
    assert said == "2 -> 9 (mean of the first 5 / last 5 rows of 10 steps)"
    said = summary._ends_words(summary._ends(rows[:3], "reward"), "", 1)
    assert said == "0 -> 2 (first / last step)"
    assert summary._ends_words(summary._ends(rows[:1], "reward"), "", 1) == "0 (one step)"


def test_a_torn_checkpoint_is_passed_over(file, run, tmp_path):
    out, _ = run
    torn = tmp_path / "torn"
    subprocess.run(["cp", "-r", str(out), str(torn)], check=True)
    (torn / "checkpoint-4" / "trainer_state.json").unlink()
    result = invoke("--config", str(file), "--out", str(torn), "--resume")
    assert result.exit_code == 0, result.output
    assert "checkpoint-4 was cut off and is written again." in result.stderr
    assert f"continuing from {torn / 'checkpoint-2'}" in result.stderr
    assert re.match(r"2 steps in \d+ s, 4 in all\.", result.stdout)
    assert_same_weights(out / "checkpoint-4", torn / "checkpoint-4")


@pytest.mark.slow
def test_after_a_kill(run, file, tmp_path):
    out, _ = run
    place = tmp_path / "killed"
    command = [sys.executable, "-m", "entropy_experiments.cli", "train", "--out", str(place)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    victim = subprocess.Popen([*command, "--config", str(file), "--quiet"], env=environment)
    until = time.monotonic() + 120
    while not (place / "checkpoint-2" / "trainer_state.json").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert not (place / "train_summary.json").exists()
    subprocess.run([*command, "--resume", "--quiet"], env=environment, check=True, timeout=300)
    assert_same_weights(out / "checkpoint-4", place / "checkpoint-4")


def test_all_weights_and_a_reward_of_ones_own(tmp_path):
    result = invoke(
        *("--out", str(tmp_path / "full"), "--steps", "1", "--quiet"),
        *("--set", "lora=null", "--set", "buffer_size=2", "--set", "microbatch_size=2"),
        *("--set", "reward_functions=['oracles.tiny_grpo:reward']", "--set", "eval_prompts=8"),
        *("--set", "max_completion_length=8", "--set", "probe.prompts=6"),
        *("--set", "doctor.enabled=false"),
    )
    assert result.exit_code == 0, result.output
    found = load_checkpoint(tmp_path / "full" / "checkpoint-1")
    assert found.optimizer is not None
    assert "reward_functions" not in found.facts  # a file beside weights names no code
    assert "oracles.tiny_grpo:reward" in found.facts["note"][0]


# The configuration


@pytest.mark.parametrize("name", TRAINING_TEMPLATES)
def test_templates(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_training(name)
    assert config.notes == ()
    assert load_training(f"rl_training/cfg/{name}").dump() == config.dump()
    assert load_training(name.removesuffix(".yaml")).dump() == config.dump()
    for ranks in (1, 2):
        if name == "train_tiny.yaml" and ranks == 2:  # as its comment says
            config = replaced(config, {"microbatch_size": 24})
        assert batch_plan(config, ranks=ranks).prompts_per_step == config.buffer_size
    (tmp_path / "again.yaml").write_text(training_yaml(config))
    assert load_training("again.yaml").dump() == config.dump()


def test_document_001_and_trl_say_the_same():
    """12 per rank, buffer 64, microbatch 4, ten steps, on two ranks."""
    old = load_training("entropy_probe_test_optimized")
    assert (old.rollout_batch_size, old.tf_micro_batch, old.max_steps) == (12, 12, 10)
    assert old.probe.enabled
    plan = batch_plan(old, ranks=2)
    assert (plan.accumulation, plan.sequences_per_backward) == (8, 32)
    assert batch_plan(old, ranks=1).accumulation == 16
    trl = replaced(
        old,
        {
            "buffer_size": None,
            "microbatch_size": None,
            "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": 8,
        },
    )
    assert batch_plan(trl, ranks=2) == plan


@pytest.mark.parametrize("alias", TRAINING_ALIASES, ids=lambda alias: alias.spelling)
def test_other_names(alias):
    values: dict[str, Any] = {
        "max_steps": 3,
        "model": "smollm2",
        "reward_functions": ["format"],
        "lora.alpha": 5.0,
        "lora.dropout": 0.1,
        "probe.enabled": False,
        "probe.every": 7,
        "probe.max_overhead": 0.3,
        "probe.evaluation": "half",
        "probe.prompts": 9,
        "probe.group": 2,
        "probe.uses": 3,
        "probe.microbatch": 4,
        "probe.ledger_every": 6,
        "probe.noise_scale": True,
        "probe.parts": False,
        "probe.order": 2,
        "probe.record": False,
        "probe.seed": 11,
    }

    def nested(key: str) -> dict[str, Any]:
        value: Any = values[alias.canonical]
        for part in reversed(key.split(".")):
            value = {part: value}
        return value

    by_alias = parse_training(nested(alias.spelling))
    assert by_alias.dump() == parse_training(nested(alias.canonical)).dump()
    assert by_alias.dump() != parse_training({}).dump()


def test_defaults():
    config = parse_training({})
    assert (config.loss_type, config.scale_rewards) == ("dr_grpo", "none")
    assert parse_training({"scale_rewards": True}).scale_rewards == "group"
    assert parse_training({"lora": None}).lora is None
    assert parse_training({"probe": None}).probe.enabled
    assert (
        parse_training({"simple_entropy_probe": {"debug": True}})
        .notes[0]
        .startswith("simple_entropy_probe.debug: has no effect")
    )
    assert (
        parse_training({"simple_entropy_probe": {"max_overhead": None}}).probe.max_overhead is None
    )
    assert set(known_training_fields()) == set(type(config).model_fields)


# The task


def test_a_longer_run_asks_the_same_first():
    config = replaced(load_preset("tiny"), {"buffer_size": 4, "microbatch_size": 4})
    short, long = (
        load_task(replaced(config, {"max_steps": n}), batch_plan(config)) for n in (3, 9)
    )
    assert short.training == long.training[:12]
    assert short.held_out == long.held_out
    assert not {p.prompt for p in long.training} & {p.prompt for p in long.held_out}
    assert short.sequence(30)[:12] == list(range(12))
    again = short.sequence(30)[12:24]
    assert sorted(again) == list(range(12))
    assert again != list(range(12))


def test_rewards_find_their_problem():
    config = replaced(load_preset("tiny"), {"buffer_size": 4, "microbatch_size": 4, "max_steps": 1})
    task = load_task(config, batch_plan(config))
    (score,) = reward_functions(task)
    assert score.__name__ == "countdown"
    numbers = task.training[2].facts["numbers"]
    wrong = f"<answer> {numbers[0]} </answer>"
    assert score(completions=[wrong, ""], problem=[2, 0], prompts=["", ""]) == [0.0, 0.0]


# What of TRL's is relied upon


@pytest.mark.parametrize(
    "name", ["_generate_single_turn", "_get_per_token_logps_and_entropies", "_save_checkpoint"]
)
def test_trl_has_the_methods_relied_upon(name):
    from trl import GRPOTrainer

    assert callable(getattr(GRPOTrainer, name))


def test_generation_and_scoring_in_parts(tmp_path, file, monkeypatch):
    from trl import GRPOTrainer

    asked: list[int] = []
    original = GRPOTrainer._generate_single_turn

    def counted(self, prompt_ids, *args, **kwargs):
        asked.append(len(prompt_ids))
        return original(self, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", counted)
    scored: list[int] = []
    score = GRPOTrainer._get_per_token_logps_and_entropies

    def noted(self, *args, batch_size=None, **kwargs):
        scored.append(-1 if batch_size is None else batch_size)
        return score(self, *args, batch_size=batch_size, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", noted)
    result = invoke(
        *("--config", str(file), "--out", str(tmp_path / "parts"), "--steps", "2", "--quiet"),
        *("--set", "num_iterations=2", "--set", "tf_micro_batch=5", "--no-probe"),
        *("--set", "doctor.enabled=false"),
    )
    assert result.exit_code == 0, result.output
    assert asked == [16, 8]  # 6 prompts x 4 responses, 4 prompts at once; one generation, two steps
    assert scored[0] == 5  # old log-probs, without gradient
    assert scored[1:] == [-1] * 4  # two passes in each of two steps, whole
    assert issubclass(PartwiseGRPOTrainer, GRPOTrainer)


def test_the_preset_is_the_recipe_of_the_embedded_default(tmp_path):
    """The same adapter before the first step, of the same shape and seed."""
    out = tmp_path / "tiny"
    result = invoke(
        *("--preset", "tiny", "--out", str(out), "--steps", "1", "--quiet", "--no-probe"),
        *("--set", "buffer_size=2", "--set", "microbatch_size=2", "--set", "doctor.enabled=false"),
    )
    assert result.exit_code == 0, result.output
    ours, shipped = adapter(out / "checkpoint-0"), adapter(embedded_trajectory() / "checkpoint-0")
    assert ours.keys() == shipped.keys()
    for name, value in ours.items():
        assert torch.equal(value, shipped[name])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("dataset_name=countdwn", "Unknown dataset 'countdwn'"),
        ("reward_functions=[countdwn]", "Unknown reward 'countdwn'"),
    ],
)
def test_a_dry_run_looks_names_up(change, said):
    result = invoke("--preset", "tiny", "--set", change, "--dry-run")
    assert result.exit_code == 2
    assert said in result.output
    assert "Did you mean 'countdown'?" in " ".join(result.output.split())


def test_deepspeed_is_for_trainings_without_the_probe():
    words = ("--preset", "tiny", "--set", "trl.deepspeed=zero2.json", "--dry-run")
    refused = invoke(*words)
    assert refused.exit_code == 2
    assert "has deepspeed, under which" in " ".join(refused.output.split())
    assert invoke(*words, "--no-probe").exit_code == 0
