"""Ledgers written in training: the online prediction, split; and what the offline command says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from entropy_experiments import EntropyInfluenceRunner
from entropy_experiments.cli import app
from entropy_experiments.online import trl
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.results import LEDGERS_FOLDER
from entropy_experiments.sampling.rollout_files import load_rollouts
from oracles.tiny_grpo import assert_same_outcome, grpo, outcome
from oracles.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.contract

STEPS, EVERY = 6, 2
HELD_OUT = ["5+5=", "(8-2)=", "3*3*3=", "6/2=", "11-4=", "0=", "77+1="]
"""None of them is trained on: the offline command refuses shared prompts."""


def _trained(folder: Path, callback: EntropyProbeCallback | None, **changes: Any) -> Any:
    from datasets import Dataset

    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": EVERY} | changes
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(folder, callbacks=[] if callback is None else [callback], **settings)
        trainer.eval_dataset = Dataset.from_list([{"prompt": text} for text in HELD_OUT])
        trainer.train()
        trainer.kept = outcome(trainer)
    return trainer


def _probe(**options: Any) -> EntropyProbeCallback:
    usual = {"max_overhead": None, "prompts": 6, "ledger_every": EVERY, "microbatch": 4}
    return EntropyProbeCallback(**(usual | options))


def _summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"lora": False, "learning_rate": 1e-3},
    "reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


@pytest.fixture(
    scope="module",
    params=["lora", *(pytest.param(k, marks=pytest.mark.slow) for k in ("full", "reentrant"))],
)
def run(request, tmp_path_factory) -> tuple[Path, EntropyProbeCallback, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model().save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    callback = _probe(record=folder / "record")
    trainer = _trained(folder / "run", callback, **KINDS[request.param])
    assert callback.off is None
    without = _trained(folder / "off", None, **KINDS[request.param])
    assert_same_outcome(trainer.kept, without.kept)
    return folder, callback, request.param


def _size(row: dict[str, Any]) -> float:
    """A change may cancel to nearly nothing; its error bar tells what it was made of."""
    return max(abs(row["predicted"]), (row["predicted_high"] - row["predicted_low"]) / 2)


def test_a_ledger_is_the_online_prediction_split(run):
    folder, callback, _ = run
    assert [path.name for path in callback.ledgers] == ["step_2", "step_4"]
    for path in callback.ledgers:
        found, step = _summary(path), int(path.name.removeprefix("step_"))
        row = next(row for row in callback.rows if row["step"] == step)
        ledger, lines = found["ledger"], found["ledger"]["lines"]
        size = _size(row)
        assert abs(ledger["predicted"]["value"] - row["predicted"]) < 1e-5 * size
        assert abs(ledger["measured"]["value"] - row["measured"]) < 1e-4 * size
        assert {"momentum", "decay", "positive", "negative"} <= set(lines)
        total = sum(line["this_step"] for line in lines.values())
        assert abs(total - row["predicted"]) < 1e-5 * size
        rollouts_N = np.load(path / "eval_00_rollout_influence.npy")
        assert rollouts_N.shape == (16,)
        baseline = lines["momentum"]["this_step"] + lines["decay"]["this_step"]
        assert abs(rollouts_N.sum() + baseline - row["predicted"]) < 1e-5 * size
        tokens = pyarrow.parquet.read_table(path / "tokens.parquet").to_pydict()
        assert abs(sum(tokens["influence"]) - rollouts_N.sum()) < 1e-5 * size
        assert "differs from the trainer's own by" in found["notes"][-1]
        assert float(found["notes"][-1].split(" by ")[1].split()[0]) < 1e-4
        told = found["notes"][-2].split("online prediction of this step is ")[1]
        assert float(told) == pytest.approx(row["predicted"], rel=1e-5)
        assert not (path / "stages").exists()
    assert not (folder / "run" / LEDGERS_FOLDER / "step_0").exists()


def test_another_step_s_ledger_is_not_the_prediction(run):
    """The comparison above has teeth."""
    _, callback, _ = run
    found = _summary(callback.ledgers[0])["ledger"]["predicted"]["value"]
    row = next(row for row in callback.rows if row["step"] == 4)
    assert abs(found - row["predicted"]) > 1e-3 * _size(row)  # a hundred times the tolerance


def test_the_offline_command_gives_the_same_ledger(run, tmp_path):
    folder, callback, _ = run
    offline = EntropyInfluenceRunner(
        {
            "checkpoint": {"base": str(folder / "base")},
            "importance": {"is_mode": "per_decision"},
            "memory_config": {"microbatch_size": 4},
            "influence": {
                "plots": False,
                "measured_rollouts": 1,
                "run_directory": str(tmp_path / "offline"),
                "evaluation_requests": [
                    {
                        "kind": "from_file",
                        "params": {"path": str(folder / "record" / "step_4" / "evaluation")},
                    }
                ],
            },
        },
        quiet=True,
    ).run(checkpoint_path=folder / "run" / "checkpoint-4")
    online = _summary(callback.ledgers[1])
    row = next(row for row in callback.rows if row["step"] == 4)
    size = _size(row)
    one, other = online["ledger"], offline["ledger"]
    assert one["lines"].keys() == other["lines"].keys()
    for name, line in one["lines"].items():
        for number in ("this_step", "stderr"):
            assert line[number] == pytest.approx(other["lines"][name][number], abs=1e-5 * size)
    assert online["update"]["fingerprint"] == offline["update"]["fingerprint"]
    assert online["evaluations"][0]["fingerprint"] == offline["evaluations"][0]["fingerprint"]
    tables = [
        pyarrow.parquet.read_table(place / "tokens.parquet").to_pydict()["influence"]
        for place in (callback.ledgers[1], tmp_path / "offline")
    ]
    np.testing.assert_allclose(*tables, rtol=0, atol=1e-5 * size)
    assert max(np.abs(tables[0])) > 1e-3 * size


def test_the_report_reads_it(run, tmp_path):
    _, callback, _ = run
    page = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(callback.ledgers[0]), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "momentum" in done.output
    assert page.is_file()


@pytest.mark.slow
def test_in_double_precision_they_are_one_number(tmp_path):
    callback = _probe()
    _trained(tmp_path, callback, double=True, max_steps=5, save_strategy="no")
    assert callback.off is None
    found = _summary(callback.ledgers[1])
    row = next(row for row in callback.rows if row["step"] == 4)
    lines = found["ledger"]["lines"]
    total = sum(line["this_step"] for line in lines.values())
    assert abs(total - row["predicted"]) < 1e-7 * _size(row)
    rollouts_N = np.load(callback.ledgers[1] / "eval_00_rollout_influence.npy")
    baseline = lines["momentum"]["this_step"] + lines["decay"]["this_step"]
    assert abs(rollouts_N.sum() + baseline - row["predicted"]) < 1e-7 * _size(row)
    assert abs(found["ledger"]["measured"]["value"] - row["measured"]) < 1e-7 * _size(row)


@pytest.mark.slow
def test_a_ledger_step_is_probed_whatever_it_costs(tmp_path):
    callback = _probe(max_overhead=1e-6)
    _trained(tmp_path, callback, max_steps=5, save_strategy="no")
    assert [path.name for path in callback.ledgers] == ["step_2", "step_4"]
    assert [row["step"] for row in callback.rows] == [0, 2, 4]


def test_rollouts_of_an_earlier_step_are_kept_with_who_drew_them(tmp_path):
    callback = _probe(uses=2, ledger_every=3, record=tmp_path / "record")
    _trained(tmp_path / "run", callback, max_steps=4, save_strategy="no")
    fresh, stale = (
        load_rollouts(tmp_path / "record" / f"step_{step}" / "evaluation")[0] for step in (2, 3)
    )
    assert fresh.behaviour_logprob_NS is None
    assert stale.behaviour_logprob_NS is not None
    assert torch.equal(fresh.tokens_NS, stale.tokens_NS)
    row = next(row for row in callback.rows if row["step"] == 3)
    found = _summary(callback.ledgers[0])["ledger"]["predicted"]["value"]
    assert abs(found - row["predicted"]) < 1e-5 * _size(row)


def test_shared_prompts_are_noted(tmp_path):
    with torch.random.fork_rng(devices=[]):
        callback = _probe()
        trainer = grpo(tmp_path, callbacks=[callback], max_steps=3)  # no evaluation set
        trainer.train()
    notes = _summary(callback.ledgers[0])["evaluations"][0]["notes"]
    assert any("evaluation prompts are prompts of the update batch" in note for note in notes)


def test_a_failing_ledger_switches_the_probe_off_and_no_more(tmp_path, monkeypatch, caplog):
    error = OSError(28, "No space left on device")

    def full(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(trl, "write_ledger", full)
    callback = _probe()
    trainer = _trained(tmp_path / "on", callback, max_steps=4, save_strategy="no")
    without = _trained(tmp_path / "off", None, max_steps=4, save_strategy="no")
    assert callback.off is error
    assert_same_outcome(trainer.kept, without.kept)
    said = [r.getMessage() for r in caplog.records if "entropy probe failed" in r.getMessage()]
    assert len(said) == 1
    assert "explaining step 2" in said[0]


def test_what_can_have_no_ledger_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ledger_every is 0; expected at least 1"):
        EntropyProbeCallback(ledger_every=0)
    with pytest.raises(ValueError, match="would be judged by itself"):
        EntropyProbeCallback(ledger_every=5, evaluation="batch")
    with pytest.raises(ValueError, match="ledger_every with SGD: expected torch's Adam"):
        _trained(tmp_path, _probe(), optim="sgd")
    with pytest.raises(ValueError, match=r"facts has 'data_name'\. Did you mean 'dataset_name'\?"):
        EntropyProbeCallback(facts={"data_name": "gsm8k"})
