"""Checkpoints that verl's own manager wrote on one, two and three ranks: read, rebuilt, verified.

The step that verl's optimizer made from global_step_3 is in global_step_4: the step rebuilt here
from the files and the recorded batch must be that one, and is then predicted, measured and split.
"""

import json

import pytest

from wild.environments import environment
from wild.processes import entropy_probe, run_script

DOUBLES = [f"{kind}_{size}_fp64" for kind in ("full", "lora") for size in (1, 2, 3)]
DIGITS = 1e-6
"""Of the step, relative to its size."""
PROMPTS = "".join(
    json.dumps({"prompt": f"{a} + {b} = ", "answer": str(a + b)}) + "\n"
    for a in range(2, 9)
    for b in range(2, 9)
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    (folder / "prompts.jsonl").write_text(PROMPTS)
    return {**run_script("verl", "verl_checkpoint.py", folder), "folder": folder}


def settings(written, **more):
    """Options of the offline commands: prompts of our own, a small study."""
    keys = {
        "data.dataset": "jsonl",
        "data.file": written["folder"] / "prompts.jsonl",
        "data.evaluation_prompts": 16,
        "sampling.max_new_tokens": 8,
        **more,
    }
    return [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]


def test_the_files_are_verls(written):
    for name in (*DOUBLES, "full_2_fp32"):
        kind, size, _ = name.split("_")
        files = set(written[name]["files"])
        shards = {
            f"actor/{part}_world_size_{size}_rank_{rank}.pt"
            for part in ("model", "optim", "extra_state")
            for rank in range(int(size))
        }
        assert shards | {"actor/fsdp_config.json", "actor/huggingface/config.json"} <= files
        assert ("actor/lora_train_meta.json" in files) == (kind == "lora")


@pytest.mark.parametrize("name", DOUBLES)
def test_the_step_that_verl_made_is_rebuilt_and_attributed(written, tmp_path, name):
    more = {"checkpoint.dtype": "float64", "influence.measured_rollouts": 2}
    more |= {"influence.plots": "false", "data.reward_functions": "[answer_exact]"}
    out = tmp_path / "study"
    done = entropy_probe(
        "influence", "--checkpoint", written[name]["checkpoint"], "--out", out,
        *settings(written, **more),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    certified = summary["update"]["certified"]
    assert certified["step_distance"] < DIGITS
    assert "is the step that was made" in certified["certificate"]
    (step,) = summary["aggregate"].values()
    assert step["full"]["value"] == pytest.approx(step["first_order"], abs=1e-4)
    lines = summary["ledger"]["lines"]
    parts = sum(line["this_step"] for line in lines.values())
    assert parts == pytest.approx(step["first_order"], rel=1e-6)


@pytest.mark.parametrize("name", ["full_2_fp32", "lora_3_fp64"])
def test_run_predicts_and_measures_it(written, tmp_path, name):
    done = entropy_probe(
        "run", "--checkpoint", written[name]["checkpoint"] + "/actor", "--out", tmp_path / "probe",
        "--json", *settings(written),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["update"] == "recorded"
    assert "is the step that was made" in json.dumps(results["verdict"])


@pytest.mark.parametrize("name", ["full_3_fp64", "lora_2_fp64", "full_2_fp32"])
def test_verls_merger_makes_the_same_model(written, name):
    """In its own environment, with both ours and verl's code."""
    python = environment("verl")
    done = entropy_probe("verify", written[name]["checkpoint"], python=python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verl's merger makes the same model" in done.stdout


def test_fsdp1_is_refused_with_both_ways_out(written, tmp_path):
    for place in ("", "/actor"):
        for command in ("run", "influence"):
            checkpoint = written["fsdp1_2_fp32"]["checkpoint"] + place
            done = entropy_probe(command, "--checkpoint", checkpoint, "--out", tmp_path / "out")
            assert done.returncode == 2, done.stderr
            assert done.stderr.startswith("Error: ")
            assert "was saved under FSDP1" in done.stderr
            assert "actor.strategy=fsdp2" in done.stderr
            assert "python -m verl.model_merger merge --backend fsdp" in done.stderr
            assert "Traceback" not in done.stderr
            assert not (tmp_path / "out").exists()
