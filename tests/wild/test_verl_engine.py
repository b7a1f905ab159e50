"""verl's own engine on gloo ranks, several optimizer steps of each batch, recorded and resumed.

Of a batch of eight rollouts verl makes two mini-batches and two passes, so global_step_N is saved
after 4 N optimizer steps. The script asserts that training ends in the same bits with and without
the record, a resume between; what was recorded is read here by our commands.
"""

import json
from dataclasses import replace

import pytest
import torch

from entropy_experiments.config import parse_config
from entropy_experiments.pipelines.probe_inputs import gather
from entropy_experiments.update.gradient import loss_gradient
from wild.processes import entropy_probe, run_script

FOLLOWED = ("one", "bonus", "bonus_ranks")
STEPS_OF_A_BATCH = 4
SAME_GRADIENT = 1e-5
"""fp32 on both sides; another loss is a hundredth away and more."""
PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 6) for b in range(2, 6)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl_engine")
    report = run_script("verl", "verl_engine.py", folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder, report


def _settings(folder):
    return {
        "data.dataset": "jsonl",
        "data.file": str(folder / "prompts.jsonl"),
        "data.evaluation_prompts": 8,
        "sampling.max_new_tokens": 8,
    }


def _options(folder, **more):
    settings = {**_settings(folder), **more}
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def test_training_was_recorded_to_its_end(trained):
    for report in trained[1].values():
        assert report == {"off": [], "steps": 3 * STEPS_OF_A_BATCH}


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("name", FOLLOWED)
def test_the_step_after_a_checkpoint_is_rebuilt(trained, name, batches, tmp_path):
    """Of the first pass over a batch, before and after the resume."""
    folder, _ = trained
    checkpoint = folder / name / f"global_step_{batches}"
    done = entropy_probe(
        "run", "--checkpoint", checkpoint, "--out", tmp_path / "out", *_options(folder)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"The update that training made after global_step_{batches}" in done.stdout
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["step_certificate"]["passed"]
    assert result["made_step"]["gradient_distance"] < SAME_GRADIENT
    assert result["made_step"]["reasons"] == []


def test_an_entropy_bonus_by_sequences_is_named_as_not_followed(trained, tmp_path):
    folder, _ = trained
    checkpoint = folder / "bonus_sequences" / "global_step_1"
    done = entropy_probe(
        "run", "--checkpoint", checkpoint, "--out", tmp_path / "out", *_options(folder)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["made_step"]["gradient_distance"] > 100 * SAME_GRADIENT
    assert "entropy_coeff = 0.3 with loss_agg_mode = seq-mean-token-mean" in done.stdout


def test_the_bonus_is_no_mean_of_means(trained):
    """Teeth: by rank, as the record had it before, the gradient is another."""
    folder, _ = trained
    config = parse_config({}).replaced(_settings(folder), where="the test")
    probe = gather(config, folder / "bonus_ranks" / "global_step_1")
    assert probe.update.microbatch_N is None
    by_rank = replace(probe.update, microbatch_N=torch.tensor([0, 0, 1, 1]))

    def distance(batch):
        gradient = loss_gradient(
            probe.trained.as_trained(), batch, probe.facts.objective, microbatch=4
        ).gradient
        return probe.gradient_distance(gradient)

    assert distance(probe.update) < SAME_GRADIENT
    assert distance(by_rank) > 100 * SAME_GRADIENT


def test_influence_splits_it(trained, tmp_path):
    folder, _ = trained
    done = entropy_probe(
        *("influence", "--checkpoint", folder / "bonus_ranks" / "global_step_2"),
        *("--out", tmp_path / "out", *_options(folder, **{"influence.plots": "false"})),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["update"]["certified"]["gradient_distance"] < SAME_GRADIENT


def test_the_ledger_of_the_run_replays_the_steps_between(trained, tmp_path):
    folder, _ = trained
    done = entropy_probe(
        *("explain", folder / "one", "--out", tmp_path / "out"),
        *_options(folder, **{"data.reward_functions": "[answer_exact]"}),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "checkpoints 4 to 12, 8 steps" in done.stdout
    assert done.stderr.count("arrived at checkpoint") == 2
