"""The new user: own prompts, own reward, TRL; then the offline commands with nothing but a folder.

No socket may be opened, and every number is about the run's own prompts and reward.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from typer.testing import CliRunner

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.training_record import RECORD_FILE
from entropy_experiments.cli import app
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.report.html.data import gather
from entropy_experiments.sampling.rollout_files import (
    load_rollouts,
    load_update_batch,
    recorded_meta,
)
from oracles.new_user import STEPS, imported, trainer_of, written
from oracles.tiny_models import tiny_tokenizer

pytestmark = pytest.mark.contract

STEP = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, EntropyProbeCallback]:
    folder = tmp_path_factory.mktemp("user")
    reward = written(folder)
    callback = EntropyProbeCallback(
        max_overhead=None, prompts=6, microbatch=4, record=folder / "run" / "record"
    )
    with torch.random.fork_rng(devices=[]):
        trainer_of(folder, reward, callback, max_grad_norm=0.1).train()
    assert callback.off is None
    assert len(callback.rows) == STEPS
    for name in ("my_reward", "liking"):  # another process would not have them
        sys.modules.pop(name, None)
    return folder, callback


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was tried")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


def _command(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, f"{done.output}\n{done.exception}"
    return done.output


def _row(callback: EntropyProbeCallback) -> dict[str, Any]:
    return next(row for row in callback.rows if row["step"] == STEP)


def _size(row: dict[str, Any]) -> float:
    """A change may cancel to nearly nothing; its error bar tells what it was made of, and both
    entropies of which it is the difference are rounded to fp32."""
    bar = (row["predicted_high"] - row["predicted_low"]) / 2
    return max(abs(row["predicted"]), bar) + 1.2e-2 * row["entropy"]


SAME = ("--set", "batch_config.evaluation=recorded", "--set", "memory_config.microbatch_size=4")


def test_run_speaks_of_the_step_that_training_made(run, tmp_path):
    folder, callback = run
    out = tmp_path / "out"
    checkpoint = folder / "run" / f"checkpoint-{STEP}"
    said = _command("run", "--checkpoint", checkpoint, "--out", out, *SAME)
    assert f"The update that training made after step_{STEP}" in said
    assert "ASSUMED" not in said
    assert "none is assumed" in said
    assert "training's own, after clipping: 0.1)" in said
    # Of what is on record, and compared, nothing is called open.
    flat = said.replace("\n", " ")
    assert "base: compared with the recorded one by a sketch" in flat
    for verified in ("nothing records the weights", "lora_alpha: nothing", "optimizer order"):
        assert verified not in flat
    found = json.loads((out / "results.json").read_text())
    row = _row(callback)
    for key, name in (("deltaH1", "predicted"), ("deltaH_true", "measured"), ("H_orig", "entropy")):
        assert abs(found[key] - row[name]) <= 1e-5 * _size(row), name
        interval = found["estimates"][key]["interval"]
        online = [row[f"{name}_low"], row[f"{name}_high"]]
        assert interval == pytest.approx(online, abs=1e-5 * _size(row))
    assert found["step_certificate"]["passed"]
    assert found["step_certificate"]["relative_error"] < 1e-4
    assert found["made_step"]["of_recorded_gradient"]
    assert found["made_step"]["gradient_distance"] < 1e-4
    batch, _ = load_update_batch(checkpoint / "update_batch")
    assert batch.reward_N is not None
    assert found["avg_reward"] == pytest.approx(float(batch.reward_N.mean()))


@pytest.mark.slow
def test_run_draws_the_run_s_own_prompts(run, tmp_path):
    folder, _ = run
    out = tmp_path / "out"
    _command("run", "--checkpoint", folder / "run" / f"checkpoint-{STEP}", "--out", out)
    found = json.loads((out / "results.json").read_text())
    assert any("prompts for the evaluation batch, and all are used" in n for n in found["notes"])
    (log,) = out.rglob("*_summary.json")
    assert found["B_E"] < 49
    assert json.loads(log.read_text())


def test_a_run_of_few_prompts_has_some_for_both_batches(run, tmp_path):
    """49 prompts, no recorded batch: training's four are left for the update."""
    import shutil

    folder, _ = run
    checkpoint = tmp_path / "run" / f"checkpoint-{STEP}"
    shutil.copytree(folder / "run", tmp_path / "run")
    for name in ("update_batch", "made_step", "evaluation"):
        shutil.rmtree(checkpoint / name)
    shutil.rmtree(tmp_path / "run" / "record" / f"step_{STEP}")
    out = tmp_path / "out"
    options = ("--set", "approx_delta_h.curvature=false", "--set", "importance.enabled=false")
    said = _command("run", "--checkpoint", checkpoint, "--out", out, *options)
    found = json.loads((out / "results.json").read_text())
    assert found["update"] == "hypothetical"
    assert (found["B_E"], found["B_U"]) == (45, 4)
    assert "training had data.update_prompts" not in said


def test_a_training_resumed_with_other_options_is_described_by_these(run, tmp_path):
    """And no gradient of the earlier training stays beside the new batch."""
    import shutil

    folder, _ = run
    checkpoint = tmp_path / "user" / "run" / f"checkpoint-{STEP}"
    shutil.copytree(folder, tmp_path / "user")
    before = json.loads((checkpoint / RECORD_FILE).read_text())
    assert (checkpoint / "made_step" / "gradient.safetensors").is_file()
    callback = EntropyProbeCallback(
        max_overhead=None,
        prompts=6,
        microbatch=4,
        record=checkpoint.parent / "record",
        record_gradient=False,
    )
    reward = imported(folder / "project" / "my_reward.py")
    options = {"loss_type": "dr_grpo", "epsilon": 0.05, "max_steps": STEP + 1}
    with torch.random.fork_rng(devices=[]):
        trainer = trainer_of(tmp_path / "user", reward, callback, **options)
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert callback.off is None
    facts = json.loads((checkpoint / "entropy_probe.json").read_text())
    assert (facts["loss"], facts["clip_low"], facts["max_grad_norm"]) == ("dr_grpo", 0.05, 1.0)
    after = json.loads((checkpoint / RECORD_FILE).read_text())
    assert after["options"]["loss_type"] == "dr_grpo"
    assert after["files"] == before["files"]
    assert not (checkpoint / "made_step" / "gradient.safetensors").exists()
    _command("run", "--checkpoint", checkpoint, "--out", tmp_path / "out", *SAME)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["made_step"]["gradient_distance"] < 1e-4


def test_other_questions_are_asked_in_the_form_of_training_s(run, tmp_path):
    """A run on conversations: plain prompts of a file go through the chat template, or it is
    said beside the headline that they do not."""
    import shutil

    folder, _ = run
    checkpoint = tmp_path / "run" / f"checkpoint-{STEP}"
    shutil.copytree(folder / "run", tmp_path / "run")
    file = checkpoint / "tokenizer_config.json"
    template = "1{% for m in messages %}{{ m.content }}{% endfor %}2"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    record = json.loads((checkpoint / RECORD_FILE).read_text())
    assert record["prompts"]["messages"] is False
    record["prompts"]["messages"] = True
    del record["files"]["tokenizer_config.json"]
    (checkpoint / RECORD_FILE).write_text(json.dumps(record))
    rows = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a in (3, 5) for b in (3, 7)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--set", f"batch_config.dataset_path={tmp_path / 'other.jsonl'}"]
    for more in (
        "batch_config.B_E=4",
        "importance.enabled=false",
        "approx_delta_h.curvature=false",
    ):
        options += ["--set", more]

    def asked(*more: str) -> tuple[str, set[str]]:
        saved = tmp_path / f"rollouts{len(more)}"
        keep = ("--set", f"rollouts.save={saved}")
        said = _command("run", "--checkpoint", checkpoint, *options, *keep, *more)
        rollouts, _ = load_rollouts(saved / "evaluation")
        ids = (rollouts.attention_NS & ~rollouts.response_NS).nonzero(as_tuple=True)
        lines: dict[int, list[int]] = {}
        for n, s in zip(*(index.tolist() for index in ids), strict=True):
            lines.setdefault(n, []).append(int(rollouts.tokens_NS[n, s]))
        tokenizer = tiny_tokenizer()
        return said, {tokenizer.decode(line).replace(" ", "") for line in lines.values()}

    said, prompts = asked()
    assert prompts == {f"1{row['prompt']}2" for row in rows}
    assert "NOT AS TRAINING ASKED" not in said
    said, prompts = asked("--set", "batch_config.chat_template=false")
    assert prompts == {row["prompt"] for row in rows}
    assert "NOT AS TRAINING ASKED: prompts are asked without the chat template" in said


def test_a_batch_that_is_not_beside_its_checkpoint_is_the_record_s(run, tmp_path):
    import shutil

    folder, callback = run
    checkpoint = tmp_path / "run" / f"checkpoint-{STEP}"
    shutil.copytree(folder / "run", tmp_path / "run")
    for name in ("update_batch", "made_step", "evaluation"):
        shutil.rmtree(checkpoint / name)
    _command("run", "--checkpoint", checkpoint, "--out", tmp_path / "out", *SAME)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["update"] == "recorded"
    assert found["step_certificate"]["relative_error"] < 1e-3
    row = _row(callback)
    assert abs(found["deltaH1"] - row["predicted"]) <= 1e-5 * _size(row)
    assert any("nothing records the weights it was drawn" in n for n in found["not_verifiable"])


def test_the_folder_of_a_record_is_no_list_of_checkpoints(run):
    folder, _ = run
    said = _command("run", "--checkpoint", folder / "run" / "record", code=2).replace("\n", " ")
    assert "It holds what training recorded of ..., step_4" in said
    assert "give one of those" in said
    said = _command("run", "--checkpoint", folder / "run", code=2).replace("\n", " ")
    assert "It holds checkpoint-5, checkpoint-10, checkpoint-12: give one of those" in said


@pytest.mark.slow
def test_influence_splits_the_same_step(run, tmp_path):
    folder, callback = run
    out = tmp_path / "study"
    checkpoint = folder / "run" / f"checkpoint-{STEP}"
    _command("influence", "--checkpoint", checkpoint, "--out", out, *SAME)
    summary = json.loads((out / "summary.json").read_text())
    (evaluation,) = summary["evaluations"]
    row = _row(callback)
    ledger = evaluation["ledger"]["entropy"]
    assert summary["update"]["certified"]["step_distance"] < 1e-3
    assert abs(ledger["predicted"]["value"] - row["predicted"]) <= 1e-5 * _size(row)
    assert abs(ledger["measured"]["value"] - row["measured"]) <= 1e-5 * _size(row)
    assert evaluation["ledger"]["reward"] is not None  # the run's own reward scored E
    tokens = parquet.read_table(out / "tokens.parquet")
    meta = recorded_meta(checkpoint / "update_batch")
    assert len(meta["rewards"]["liked_digits"]) == len(set(tokens["rollout"].to_pylist()))


def test_evaluate_asks_the_run_s_own_prompts_and_reward(run, tmp_path):
    folder, _ = run
    out = tmp_path / "evaluation"
    said = _command("evaluate", folder / "run", "--out", out, "--samples", "2", "--prompts", "8")
    assert "liked_digits" in said
    result = json.loads((out / "evaluation.json").read_text())
    assert [one["step"] for one in result["checkpoints"]] == [5, 10, 12]
    rows = parquet.read_table(out / "checkpoints" / "step_5.parquet").to_pydict()
    known = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    columns = {row["prompt"]: row for row in known}
    reward = imported(folder / "project" / "my_reward.py")
    for text, prompt, value in zip(
        rows["response"], rows["prompt_text"], rows["reward:liked_digits"], strict=True
    ):
        asked = columns[prompt]
        length = round((value - reward([0], [text], [[]], [asked["digit"]], [0.0])[0]) * 100, 6)
        assert 0 <= length / asked["bonus"] <= 12  # the tokens, as the reward counts them


def test_report_draws_the_training(run, tmp_path):
    folder, callback = run
    page = tmp_path / "report.html"
    said = _command("report", folder / "run", "--html", page)
    assert "Training from step 0 to step 11" in said
    assert page.stat().st_size < 2_000_000
    drawn = gather(folder / "run")["trajectory"]
    assert [one["step"] for one in drawn["probed"]] == list(range(STEPS))
    for one, row in zip(drawn["probed"], callback.rows, strict=True):
        for name in ("predicted", "measured"):
            assert one[name]["value"] == row[name]
            assert one[name]["interval"] == [row[f"{name}_low"], row[f"{name}_high"]]
    assert len(drawn["logged"]["reward"]) == STEPS
    said = _command("report", folder / "run" / "record", code=2)
    assert "Traceback" not in said


def test_every_reward_is_recorded_as_the_function_gives_it(run):
    folder, _ = run
    reward = imported(folder / "project" / "my_reward.py")
    known = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    lines = (folder / "run" / "record" / "prompts" / "train.jsonl").read_text().splitlines()
    recorded = [json.loads(line) for line in lines]
    assert [{k: v for k, v in row.items() if k != "_prompt_ids"} for row in recorded] == known
    columns = {tuple(row["_prompt_ids"]): row for row in recorded}
    from oracles.tiny_models import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    for step in range(STEPS):
        place = folder / "run" / "record" / f"step_{step}" / "update_batch"
        batch, meta = load_update_batch(place)
        rollouts = batch.rollouts
        assert batch.reward_N is not None
        for n in range(len(rollouts)):
            start = int(rollouts.response_NS[n].nonzero()[0])
            before = rollouts.tokens_NS[n, :start][rollouts.attention_NS[n, :start]]
            asked = columns[tuple(before.tolist())]
            ids = rollouts.tokens_NS[n][rollouts.response_NS[n]].tolist()
            text = tokenizer.decode(ids, skip_special_tokens=True)
            (value,) = reward([0], [text], [ids], [asked["digit"]], [asked["bonus"]])
            assert float(batch.reward_N[n]) == pytest.approx(value, rel=1e-6)
            assert meta["rewards"]["liked_digits"][n] == pytest.approx(value, rel=1e-6)


def test_a_changed_file_of_the_checkpoint_is_refused_by_name(run, tmp_path):
    import shutil

    folder, _ = run
    copy = tmp_path / "run"
    shutil.copytree(folder / "run", copy)
    file = copy / f"checkpoint-{STEP}" / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    said = _command("run", "--checkpoint", file.parent, code=2)
    assert "adapter_config.json in" in said
    assert "is not the file that training saved" in said
    said = _command("evaluate", file.parent, code=2)
    assert "is not the file that training saved" in said


def _rotated_digits(file: Path) -> None:
    """The same tokens, the ids of the digits each one further."""
    found = json.loads(file.read_text())
    vocabulary = found["model"]["vocab"]
    ids = [vocabulary[digit] for digit in "0123456789"]
    for digit, other in zip("0123456789", [*ids[1:], ids[0]], strict=True):
        vocabulary[digit] = other
    file.write_text(json.dumps(found))


def _other_template(file: Path) -> None:
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": "{{ messages }}"}))


@pytest.mark.parametrize(
    ("name", "change"),
    [("tokenizer.json", _rotated_digits), ("tokenizer_config.json", _other_template)],
)
def test_another_tokenizer_is_refused_by_name(run, tmp_path, name, change):
    """Rewards are of decoded texts: with other ids they are of other texts."""
    import shutil

    folder, _ = run
    checkpoint = tmp_path / "run" / f"checkpoint-{STEP}"
    shutil.copytree(folder / "run", tmp_path / "run")
    change(checkpoint / name)
    for command in (("run", "--checkpoint"), ("evaluate",)):
        said = _command(*command, checkpoint, code=2).replace("\n", " ")
        assert f"{name} in" in said
        assert "is not the file that training saved" in said


def test_a_swapped_base_is_refused(run, tmp_path):
    from oracles.tiny_models import tiny_model

    folder, _ = run
    torch.manual_seed(7)
    other = tiny_model()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn_like(p))
    other.save_pretrained(tmp_path / "other")
    checkpoint = folder / "run" / f"checkpoint-{STEP}"
    base = f"checkpoint.base={tmp_path / 'other'}"
    said = _command("run", "--checkpoint", checkpoint, "--set", base, code=2)
    assert "is not the one that training used" in said


def _named_by_a_relative_folder(run: Path, copy: Path) -> Path:
    """A copy of the checkpoint as a training on `base` would have left it."""
    import shutil

    shutil.copytree(run / "run", copy)
    checkpoint = copy / f"checkpoint-{STEP}"
    config = json.loads((checkpoint / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "base"
    (checkpoint / "adapter_config.json").write_text(json.dumps(config))
    record = json.loads((checkpoint / RECORD_FILE).read_text())
    record["base_location"]["name"] = "base"
    del record["files"]["adapter_config.json"]
    (checkpoint / RECORD_FILE).write_text(json.dumps(record))
    return checkpoint


def test_a_local_base_is_found_from_any_folder_and_never_looked_for_on_the_hub(
    run, tmp_path, monkeypatch
):
    folder, _ = run
    checkpoint = _named_by_a_relative_folder(folder, tmp_path / "run")
    record = json.loads((checkpoint / RECORD_FILE).read_text())
    assert record["base_location"]["folder"] == str((folder / "base").resolve())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    loaded = load_checkpoint(checkpoint, device_map="cpu")
    assert "folder base (adapter_config.json)" in loaded.base
    record["base_location"]["folder"] = str(tmp_path / "gone")
    (checkpoint / RECORD_FILE).write_text(json.dumps(record))
    for command in (("run", "--checkpoint"), ("evaluate",)):
        said = _command(*command, checkpoint, code=2).replace("\n", " ")
        assert "Base not found: training had it in the folder" in said
        assert "Set checkpoint.base" in said


def test_a_relative_base_is_recorded_with_its_folder(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from entropy_experiments.checkpoints.recorded_step import base_location

    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    config = {"default": SimpleNamespace(base_model_name_or_path="base")}
    found = base_location(SimpleNamespace(peft_config=config))
    assert found == {"name": "base", "folder": str((tmp_path / "base").resolve())}
    config["default"].base_model_name_or_path = "owner/model"
    found = base_location(SimpleNamespace(peft_config=config))
    assert found == {"name": "owner/model", "folder": None}
    assert base_location(SimpleNamespace()) is None


def test_a_reward_that_fails_ends_the_command_with_a_sentence(run, tmp_path):
    folder, _ = run
    (tmp_path / "bad.py").write_text("def fails(completions, **_):\n    return 1 / 0\n")
    options = ("--reward", f"{tmp_path / 'bad.py'}:fails", "--samples", "1", "--prompts", "2")
    checkpoint = folder / "run" / f"checkpoint-{STEP}"
    said = _command("evaluate", checkpoint, "--out", tmp_path / "out", *options, code=2)
    assert "failed (ZeroDivisionError: division by zero)" in said.replace("\n", " ")
    assert "Traceback" not in said


def test_missing_prompts_are_no_reason_for_other_ones(run, tmp_path):
    import shutil

    folder, _ = run
    shutil.copytree(folder / "run", tmp_path / "run", ignore=shutil.ignore_patterns("prompts"))
    checkpoint = tmp_path / "run" / f"checkpoint-{STEP}"
    said = _command("run", "--checkpoint", checkpoint, code=2)
    assert "there is no such file. Copy the record's folder" in said.replace("\n", " ")


@pytest.mark.slow
def test_a_reward_that_changed_is_not_called(run, tmp_path, monkeypatch):
    folder, _ = run
    record = json.loads((folder / "run" / f"checkpoint-{STEP}" / RECORD_FILE).read_text())
    (function,) = record["rewards"]["functions"]
    assert function["function"] == "liked_digits"
    file = folder / "project" / "my_reward.py"
    before = file.read_text()
    try:
        file.write_text(before + "\n# edited\n")
        said = _command("evaluate", folder / "run" / f"checkpoint-{STEP}", code=2)
        assert "my_reward.py has changed since training" in said.replace("\n", " ")
        out = tmp_path / "study"
        checkpoint = folder / "run" / f"checkpoint-{STEP}"
        _command("influence", "--checkpoint", checkpoint, "--out", out, *SAME)
        summary = json.loads((out / "summary.json").read_text())
        (evaluation,) = summary["evaluations"]
        assert evaluation["ledger"]["reward"] is None
        assert any("no reward column" in note for note in evaluation["notes"])
    finally:
        file.write_text(before)
