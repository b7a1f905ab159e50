"""`entropy-probe arc`: options, spellings, endings, streams."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from typer.testing import CliRunner

from arc_refine import command, contracts
from arc_refine.metrics import read_rows
from entropy_experiments.cli import app

from .small import write_tasks

NARROW = [
    *("--prompt-width", 16, "--agent-width", 8, "--agent-steps", 2),
    *("--batch-size", 4, "--eval-batches", 1),
]


def arc(*words):
    return CliRunner().invoke(app, ["arc", *map(str, words)])


@pytest.fixture(scope="module")
def run(tasks, tmp_path_factory):
    """Made with the flags of document 003, as it spells them."""
    out = tmp_path_factory.mktemp("command") / "run"
    document = ["--epochs", 1, "--agent_lr", 1e-5, "--qwen_lr", 5e-5]
    document += ["--device", "cpu", "--max_batches", 2]
    done = arc("train", *document, "--data", tasks, *NARROW, "--doctor", 0, "--out", out)
    assert done.exit_code == 0, done.output
    assert "batch    0  loss" in done.stdout
    assert "2 steps in" in done.stdout
    return out


def test_the_flags_of_document_003(run):
    config = json.loads((run / "header.json").read_text())["config"]
    assert (config["lr_agent"], config["lr_lm"], config["max_batches"]) == (1e-5, 5e-5, 2)
    assert len(read_rows(run / "metrics.jsonl")) == 2


@pytest.mark.parametrize("spelling", ["--agent-lr", "--agent_lr", "--lr-agent", "--lr_agent"])
def test_both_spellings(spelling, monkeypatch, tmp_path):
    from arc_refine import train as module

    seen = []
    monkeypatch.setattr(module, "train", lambda config, place, say: seen.append(config))
    done = arc("train", spelling, "2e-4", "--reward_scale", "5", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert (seen[0].lr_agent, seen[0].reward_scale) == (2e-4, 5.0)


def test_every_option_of_the_configuration_can_be_typed():
    from arc_refine.config import TrainConfig

    help_ = arc("train", "--help").stdout
    for name in TrainConfig().to_dict():
        assert f"--{name.replace('_', '-')}" in help_, name


def test_json_alone_on_stdout(run, tasks):
    done = arc("eval", run, "--data", "held-out", "--json")
    found = json.loads(done.stdout)
    assert found["tasks"] == 2
    assert len(found["exact_after_wilson"]) == 2
    done = arc("eval", run, "--data", tasks / "task00.json")
    assert "after refinement:" in done.stdout
    assert "of 1 tasks solved (95 % interval" in done.stdout


def test_resume_by_command(run):
    done = arc("train", "--resume", run, "--epochs", 2, "--quiet", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["steps"] == 4
    done = arc("train", "--resume", run, "--seed", 5)
    assert done.exit_code == 2
    assert "got other values for --seed" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--refine", "sideways"], "--refine is 'sideways', expected one of off"),
        (["train", "--data", "nowhere.json"], "nowhere.json"),
        (["train", "--lm", "no_such_folder", "--max-batches", "1"], "no_such_folder"),
        (["eval", "no_such_run"], "holds no run: header.json is missing"),
        (["train", "--device", "cuda"], "no CUDA device"),
        (["train", "--resume", "a", "--out", "b"], "Leave --out out"),
        (["train", "--tracker", "wandb"], "not installed"),
    ],
)
def test_bad_input_is_code_2_without_traceback(words, said, tasks, tmp_path, monkeypatch):
    import torch

    from arc_refine import metrics

    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has one")
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    data = [] if "--data" in words or words[0] == "eval" else ["--data", tasks]
    done = arc(*words, *data)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_malformed_task_is_named(tmp_path):
    folder = write_tasks(tmp_path / "tasks", count=3)
    (folder / "bad.json").write_text('{"train": [{"input": [[1, 2], [3]], "output": [[1]]}]}')
    done = arc("train", "--data", folder)
    assert done.exit_code == 2
    assert "bad.json: train[0].input, row 1 has 1 cells; expected 2" in done.stderr


def test_a_broken_contract_is_code_3(tasks, tmp_path, monkeypatch):
    from arc_refine import live

    breach = contracts.Breach("G12", "made for a test.", "nothing to do.")
    monkeypatch.setattr(live, "same_embedding", lambda *_: [breach])
    done = arc("train", "--data", tasks, *NARROW, "--out", tmp_path / "run")
    assert done.exit_code == 3
    assert "broken: G12" in done.stderr
    assert "Traceback" not in done.stderr
    (row,) = read_rows(tmp_path / "run" / "errors.jsonl")
    assert row["error"] == "ContractError"


def test_interrupted_is_code_130_and_says_how_to_go_on(tasks, tmp_path, monkeypatch):
    from arc_refine import train as module

    true = module.train_step

    def interrupted(training, *rest):
        if training.step == 3:
            raise KeyboardInterrupt
        return true(training, *rest)

    monkeypatch.setattr(module, "train_step", interrupted)
    words = ["train", "--data", tasks, *NARROW, "--doctor", 0, "--checkpoint-every", 2]
    done = arc(*words, "--out", tmp_path / "run")
    assert done.exit_code == 130
    assert f"step_000002 is kept; go on with --resume {tmp_path / 'run'}" in done.stderr


def test_a_bug_is_code_1_with_its_traceback(tasks, tmp_path, monkeypatch):
    from arc_refine import train as module

    monkeypatch.setattr(module, "begin", lambda config: 1 / 0)
    done = arc("train", "--data", tasks, "--out", tmp_path / "run")
    assert done.exit_code == 1
    assert "ZeroDivisionError" in done.stderr


def test_as_a_module_and_without_torch():
    code = (
        "import sys; sys.argv = ['arc_refine', 'train', '--help']\n"
        "import runpy\n"
        "try: runpy.run_module('arc_refine', run_name='__main__')\n"
        "finally: print('heavy:', {'torch', 'numpy', 'transformers'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "heavy: set()" in done.stdout
    assert "Usage: arc_refine train" in done.stdout


def test_the_mount_is_the_same_app():
    (point,) = entry_points(group="entropy_probe.commands", name="arc")
    assert point.load() is command.app
