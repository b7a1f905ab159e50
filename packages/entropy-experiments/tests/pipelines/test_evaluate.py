"""`entropy-probe evaluate`: numbers against plain sums, files, resuming, and errors before work."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import get_type_hints

import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from entropy_experiments import parse_config
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.runs import embedded_trajectory
from entropy_experiments.cli import app
from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.pipelines import evaluate as checkpoint_evaluation
from entropy_experiments.pipelines.evaluate import evaluate_checkpoints
from entropy_experiments.pipelines.evaluation_measures import measures, rollout_rows
from entropy_experiments.pipelines.evaluation_request import EvaluationRequest
from entropy_experiments.results import (
    EvaluatedCheckpoint,
    EvaluationResult,
    EvaluationSettings,
    HighEntropyToken,
    read_evaluation,
)
from entropy_experiments.sampling.datasets import load_problems
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.sampling.rewards import build_reward
from entropy_experiments.types import Estimand
from oracles.tiny_models import save_tiny_checkpoint
from tolerances import assert_exact

pytestmark = pytest.mark.contract

PROMPTS, SAMPLES = 8, 4
SMALL = EvaluationRequest(prompts=PROMPTS, samples=SAMPLES, ks=(1, 2, 4))
TWO = [embedded_trajectory() / f"checkpoint-{n}" for n in (0, 40)]
OPTIONS = ["--prompts", str(PROMPTS), "--samples", str(SAMPLES), "--k", "1,2,4"]


def invoke(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def lasting(result):
    """All but how long it took, and where."""
    kept = {k: v for k, v in result.items() if k not in ("folder", "checkpoints")}
    rows = [{k: v for k, v in c.items() if k != "seconds"} for c in result["checkpoints"]]
    return json.loads(json.dumps({**kept, "checkpoints": rows}))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """(folder, result) of two checkpoints of the embedded run."""
    folder = tmp_path_factory.mktemp("evaluation") / "out"
    return folder, evaluate_checkpoints(TWO, request=SMALL, out=folder, quiet=True)


def test_files(evaluated):
    folder, result = evaluated
    written = read_evaluation(folder)
    assert written == json.loads(json.dumps(result))
    for value, of in (
        (written, EvaluationResult),
        (written["settings"], EvaluationSettings),
        (written["checkpoints"][0], EvaluatedCheckpoint),
        (written["checkpoints"][0]["high_entropy_tokens"][0], HighEntropyToken),
    ):
        assert {*value, "sharding"} == {*get_type_hints(of), "sharding"}  # of a model that is cut
    assert (folder / result["plot"]).read_bytes().startswith(b"\x89PNG")
    assert (folder / result["plot"]).stat().st_size > 10_000
    assert not list(folder.rglob("*.partial"))
    assert [c["label"] for c in result["checkpoints"]] == ["step_0", "step_40"]
    for checkpoint in result["checkpoints"]:
        rows = pyarrow.parquet.read_table(folder / checkpoint["rows"])
        assert len(rows) == PROMPTS * SAMPLES
        assert set(rows["checkpoint"].to_pylist()) == {checkpoint["label"]}
        assert not any("optimizer" in name for name in checkpoint["files"])


def test_numbers_are_plain_sums_of_the_rows(evaluated):
    folder, result = evaluated
    for checkpoint in result["checkpoints"]:
        rows = pyarrow.parquet.read_table(folder / checkpoint["rows"]).to_pandas()
        found = {name: one["value"] for name, one in checkpoint["measures"].items()}
        assert_exact(found["pass_rate"], rows["passed"].mean())
        assert_exact(found["pass@1"], rows["passed"].mean())
        assert_exact(found["pass@4"], rows.groupby("prompt")["passed"].any().mean())
        assert_exact(found["format_rate"], rows["well_formed"].mean())
        assert_exact(found["truncated"], rows["truncated"].mean())
        assert_exact(found["length"], rows["tokens"].mean())
        assert_exact(found["entropy"], rows["entropy_sum"].sum() / rows["tokens"].sum())
        assert_exact(found["surprisal"], rows["surprisal_sum"].sum() / rows["tokens"].sum())
        assert checkpoint["length_quantiles"]["0.5"] == rows["tokens"].median()
        for one in checkpoint["measures"].values():
            assert one["interval"] is None or one["interval"][0] <= one["value"]
    change = result["differences"][0]["measures"]
    for name in ("pass_rate", "entropy", "length"):
        first, last = (c["measures"][name]["value"] for c in result["checkpoints"])
        assert_exact(change[name]["value"], last - first)
    assert change["entropy"]["interval"][1] < 0  # the embedded run collapses
    unpaired = sum(c["measures"]["length"]["stderr"] ** 2 for c in result["checkpoints"]) ** 0.5
    assert change["length"]["stderr"] != unpaired


@pytest.fixture(scope="module")
def drawn():
    """(policy, rollouts, problems) of one checkpoint, drawn again beside the command."""
    checkpoint = load_checkpoint(TWO[0], read_optimizer=False)
    assert checkpoint.optimizer is None
    policy = SequenceProcessor(checkpoint.model)
    problems = load_problems("countdown", count=PROMPTS)
    generator = SampleGenerator(policy, checkpoint.tokenizer, max_new_tokens=30)
    return policy, generator.generate_evaluation_batch(problems, group=SAMPLES), problems


def rows_of(drawn, temperature):
    policy, rollouts, problems = drawn
    scorer = SequenceProcessor(policy.model, temperature=temperature)
    return rollout_rows(
        rollouts,
        scorer.score_all(rollouts),
        problems,
        build_reward(["countdown"]),
        samples=SAMPLES,
        threshold=0.5,
    )


def test_the_command_draws_what_the_sampler_draws(evaluated, drawn):
    folder, result = evaluated
    policy, rollouts, _ = drawn
    rows = pyarrow.parquet.read_table(folder / result["checkpoints"][0]["rows"]).to_pydict()
    assert rows["response"] == list(rollouts.text)
    level = entropy_level(policy, rollouts)
    found = result["checkpoints"][0]["measures"]["entropy"]
    assert found["value"] == pytest.approx(level.value, rel=1e-5)  # fp32 scores
    assert found["interval"] == pytest.approx(level.interval, rel=1e-4)
    table = {t["id"]: t for t in result["checkpoints"][0]["high_entropy_tokens"]}
    for token, one in table.items():
        assert one["count"] == int((rollouts.tokens_NS[rollouts.response_NS] == token).sum())
    shares = [t["mean_entropy"] for t in table.values()]
    assert shares == sorted(shares, reverse=True)


def test_surprisal_agrees_with_entropy_and_the_check_has_teeth(drawn):
    options = {"samples": SAMPLES, "ks": (1,), "sampled": Estimand()}
    for temperature, agrees in ((1.0, True), (2.0, False)):
        found = measures(rows_of(drawn, temperature), **options)["surprisal_minus_entropy"]
        assert found.covers(0) == agrees


def test_in_words(evaluated):
    folder, _ = evaluated
    done = invoke(*TWO, *OPTIONS, "--out", folder, "--quiet")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    for said in ("pass@4", "step_40", "Change from step_0", "Surprisal minus entropy", "truncated"):
        assert said in done.stdout
    assert "countdown: 8 prompts, 4 responses each" in done.stdout
    as_json = invoke(*TWO, *OPTIONS, "--out", folder, "--quiet", "--json")
    assert json.loads(as_json.stdout)["settings"]["prompts"] == PROMPTS


@pytest.fixture
def loads(monkeypatch):
    """Names of the checkpoints that were loaded."""
    seen = []

    def spied(path, **options):
        seen.append(path.name)
        return load_checkpoint(path, **options)

    monkeypatch.setattr(checkpoint_evaluation, "load_checkpoint", spied)
    return seen


def test_what_is_finished_is_not_done_again(evaluated, loads, tmp_path):
    folder, result = evaluated
    again = tmp_path / "out"
    shutil.copytree(folder, again)
    (again / "evaluation.json").unlink()
    found = evaluate_checkpoints(TWO, request=SMALL, out=again, quiet=True)
    assert loads == []
    assert lasting(found) == lasting(result)
    # A damaged or missing table is made again, and nothing else.
    (again / "checkpoints" / "step_40.parquet").write_bytes(b"PAR1")
    found = evaluate_checkpoints(TWO, request=SMALL, out=again, quiet=True)
    assert loads == ["checkpoint-40"]
    assert lasting(found) == lasting(result)
    # Other k need no model.
    other = EvaluationRequest(prompts=PROMPTS, samples=SAMPLES, ks=(3,))
    found = evaluate_checkpoints(TWO[:1], request=other, out=again, quiet=True)
    assert loads == ["checkpoint-40"]
    assert "pass@3" in found["checkpoints"][0]["measures"]


def test_another_evaluation_is_not_mixed_in(evaluated, tmp_path):
    folder, _ = evaluated
    done = invoke(*TWO, *OPTIONS, "--seed", "7", "--out", folder)
    assert done.exit_code == 2
    assert "holds an evaluation with other settings (problems, seed)" in done.stderr
    (tmp_path / "note.txt").write_text("mine")
    done = invoke(*TWO, *OPTIONS, "--out", tmp_path)
    assert done.exit_code == 2
    assert "is not empty, and holds no evaluation" in done.stderr
    again = tmp_path / "out"
    shutil.copytree(folder, again)
    swapped = tmp_path / "runs" / "checkpoint-40"
    swapped.parent.mkdir()
    shutil.copytree(TWO[0], swapped)
    (swapped / "trainer_state.json").write_text('{"global_step": 40}')
    shutil.copytree(TWO[0].parent / "base", swapped.parent / "base")
    shutil.copy(TWO[0].parent / "entropy_probe.json", swapped.parent)
    done = invoke(swapped, *OPTIONS, "--out", again)
    assert done.exit_code == 2
    assert "holds another step_40, with other weights" in done.stderr
    done = invoke(swapped, *OPTIONS, "--out", again, "--overwrite", "--json", "--quiet")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["checkpoints"]) == 1


@pytest.mark.slow
def test_a_killed_evaluation_continues(evaluated, tmp_path):
    _, result = evaluated
    out = tmp_path / "out"
    words = [sys.executable, "-m", "entropy_experiments.cli", "evaluate", *map(str, TWO)]
    words += [*OPTIONS, "--out", str(out)]
    child = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    first = out / "checkpoints" / "step_0.json"
    deadline = time.monotonic() + 120
    while not first.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert first.exists()
    assert not (out / "evaluation.json").exists()
    kept = first.read_bytes()
    found = evaluate_checkpoints(TWO, request=SMALL, out=out, quiet=True)
    assert first.read_bytes() == kept
    assert lasting(found) == lasting(result)


@pytest.fixture
def runs(tmp_path):
    """A run's folder with two tiny checkpoints, and a JSONL task that fits their alphabet."""
    facts = {"dataset_name": "jsonl", "max_completion_length": 12}
    for step in (3, 6):
        at = tmp_path / "runs"
        shutil.rmtree(at / "base", ignore_errors=True)
        save_tiny_checkpoint(at, step=step, facts=facts)
    task = tmp_path / "sums.jsonl"
    lines = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(9)]
    task.write_text("\n".join(map(json.dumps, lines)))
    return tmp_path / "runs", task


def test_checkpoints_of_the_package_have_their_short_names(tmp_path):
    words = ["embedded/checkpoint-13", "--prompts", "2", "--samples", "2", "--k", "1", "--json"]
    told = invoke(*words, "--out", tmp_path / "short")
    assert told.exit_code == 0, told.output
    (found,) = json.loads(told.stdout)["checkpoints"]
    assert found["label"] == "step_13"
    result = invoke("embedded/checkpoint-99", "--out", tmp_path / "none")
    assert result.exit_code == 2
    assert "the run in the package has embedded/checkpoint-0 to" in result.stderr


def test_a_folder_of_a_run_and_a_jsonl_task(runs, tmp_path):
    folder, task = runs
    options = ["--prompts", 6, "--samples", 2, "--out", tmp_path / "out", "--json", "--quiet"]
    done = invoke(folder, "--task", task, "--reward", "answer_exact", *options)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [c["step"] for c in found["checkpoints"]] == [3, 6]
    assert found["k"] == [1]
    assert found["settings"]["rewards"] == {"answer_exact": None}
    # Nothing passes here: the interval is like 0 of 6, and a difference of nothing has none.
    assert found["checkpoints"][0]["measures"]["pass_rate"]["interval"][1] > 0.3
    assert found["differences"][0]["measures"]["pass_rate"]["interval"] is None


def test_nothing_is_done_before_everything_is_looked_at(runs, tmp_path, monkeypatch):
    folder, task = runs
    out = tmp_path / "out"
    drawn = []
    monkeypatch.setattr(
        SampleGenerator, "generate_evaluation_batch", lambda *a, **k: drawn.append(a)
    )

    def refused(*words, match):
        done = invoke(*words, "--samples", 2, "--out", out, "--prompts", 6)
        assert done.exit_code == 2, done.output
        assert match in done.stderr
        assert "Traceback" not in done.stderr
        assert not drawn
        assert not out.exists()

    good, other = folder / "checkpoint-3", folder / "checkpoint-6"
    refused(good, tmp_path / "gone", "--task", task, match="Checkpoint not found")
    refused(good, good, "--task", task, match="is named twice")
    refused(good, "--task", tmp_path / "none.jsonl", match="No such file")
    refused(good, "--task", task, "--data", task, match="--data")
    refused(good, "--task", task, "--split", "test", match="which is read whole")
    refused(good, "--task", "countdown", "--data", task, match="countdown reads no file")
    refused(good, "--task", "countdown", "--data", tmp_path / "no", match="countdown reads no file")
    refused(good, "--task", "countdown", "--split", "tset", match="splits are train and test")
    refused(good, "--task", "countdwn", match="Did you mean 'countdown'?")
    refused(good, "--task", "mine", match="--task questions.jsonl")
    (tmp_path / "empty").mkdir()
    refused(
        tmp_path / "empty",
        "--task",
        task,
        match="folder that holds checkpoint-N, step_N or global_step_N",
    )
    refused(good, "--task", task, "--reward", "exact", match="Unknown reward 'exact'")
    refused(good, "--task", task, "--k", "1,3", match="--k is 3; expected 1 to 2")
    refused(good, "--task", task, "--threshold", "-1", match="--threshold is -1")
    words = tmp_path / "words.jsonl"
    words.write_text('{"prompt": "1+0=", "answer": "@ @"}\n' + task.read_text())
    done = invoke(good, "--task", words, "--samples", 2, "--out", out, "--prompts", 10)
    assert "math-verify cannot read the answer '@ @'" in done.stderr
    done = invoke(good, "--task", task, "--samples", 2, "--out", out, "--prompts", 100)
    assert "has 9 different problems; 100 were asked for" in done.stderr
    long = tmp_path / "long.jsonl"
    long.write_text(
        "\n".join(json.dumps({"prompt": "1" * n, "answer": "1"}) for n in range(300, 310))
    )
    refused(good, other, "--task", long, match="exceeds the model's 256 positions")
    facts = json.loads((good / "entropy_probe.json").read_text())
    (other / "entropy_probe.json").write_text(json.dumps({**facts, "temperature": 0.5}))
    refused(good, other, "--task", task, match="--set sampling.temperature=1.0")
    (other / "entropy_probe.json").write_text(json.dumps(facts))
    weights = other / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused(good, other, "--task", task, match="is not a complete safetensors file")
    spoiled = torch.tensor(float("nan")).numpy().tobytes()
    weights.write_bytes(whole[:-4] + spoiled)
    refused(good, other, "--task", task, match="non-finite")


def test_an_optimizer_that_cannot_be_read_is_no_obstacle(runs, tmp_path):
    folder, task = runs
    (folder / "checkpoint-3" / "optimizer.pt").write_bytes(b"broken")
    config = parse_config({"batch_config": {"dataset_name": "jsonl", "dataset_path": str(task)}})
    request = EvaluationRequest(prompts=6, samples=1, rewards=("answer_exact",))
    found = evaluate_checkpoints(
        [folder / "checkpoint-3"], config, request=request, out=tmp_path / "out", quiet=True
    )
    assert found["differences"] == []
    assert found["checkpoints"][0]["measures"]["length"]["value"] > 0
