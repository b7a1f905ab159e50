"""Two ranks under FSDP save, one process reads: the ordinary checkpoint's tensors and results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from entropy_experiments.checkpoints.dcp import read_sharded
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.cli import app
from oracles.fsdp_trainer import RANK, SIZES, save_sharded
from oracles.trl_ranks import on_trl_ranks

pytestmark = [pytest.mark.invariant, pytest.mark.slow]
ASIDE = {"timing", "log_path"}
BASE = {"not_verifiable", "verdict"}
"""Accelerate saves the base with the adapter, so what it was is no longer untold."""


@pytest.fixture(scope="module", params=["full", "lora"])
def saved(request, tmp_path_factory) -> tuple[str, Path, list[str]]:
    folder = tmp_path_factory.mktemp(request.param)
    forms, _ = on_trl_ranks(2, save_sharded, str(folder), request.param, patience=240)
    return request.param, folder, forms


def where(folder: Path, form: str) -> Path:
    (found,) = (folder / form).iterdir()
    return found


def groups(checkpoint) -> list:
    """But for order and the Trainer's group without members, which a flattened state has not."""
    filled = [group for group in checkpoint.optimizer.groups if group.names]
    return [replace(group, names=tuple(sorted(group.names))) for group in filled]


def test_every_form_is_the_gathered_one_bit_for_bit(saved):
    kind, folder, forms = saved
    expected = load_checkpoint(where(folder, "ordinary"))
    for form in forms:
        loaded = load_checkpoint(where(folder, form))
        assert (loaded.kind, loaded.step) == (kind, 3), form
        ours, theirs = loaded.model.state_dict(), expected.model.state_dict()
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), form
        assert loaded.coverage == expected.coverage
        assert loaded.coverage["order"] == "names in the file"
        assert groups(loaded) == groups(expected), form
        assert set(loaded.optimizer.state) == set(expected.optimizer.state)
        for name, entry in expected.optimizer.state.items():
            for key, value in entry.items():
                got = loaded.optimizer.state[name][key]
                assert torch.equal(torch.as_tensor(got), torch.as_tensor(value)), (form, name, key)


def test_the_pieces_are_uneven(saved):
    """Otherwise the test above would say little."""
    kind, folder, _ = saved
    tensors = read_sharded(where(folder, "accelerate") / "pytorch_model_fsdp_0").tensors
    word, rows = ("lora_A", RANK) if kind == "lora" else ("gate_proj", SIZES["intermediate_size"])
    one = next(tensor for name, tensor in tensors.items() if word in name)
    assert one.shape[0] == rows
    assert sorted(piece.size[0] for piece in one.pieces) == [rows // 2, rows // 2 + 1]
    assert len({piece.where.file for piece in one.pieces}) == 2


def test_a_run_gives_the_same_numbers(saved, tmp_path):
    kind, folder, _ = saved
    lines = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(9) for b in range(3)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = {
        "batch_config.dataset_name": "jsonl",
        "batch_config.dataset_path": tmp_path / "sums.jsonl",
        "batch_config.B_E": 6,
        "batch_config.B_U": 4,
        "batch_config.G": 4,
        "generation.max_new_tokens": 5,
        "reward.functions": "[answer_exact]",
    }
    more = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    found = {}
    for form in ("ordinary", "accelerate"):
        out = tmp_path / form
        run = ["run", "--checkpoint", where(folder, form), "--out", out, "--json", "--quiet"]
        done = CliRunner().invoke(app, [str(word) for word in (*run, *more)])
        assert done.exit_code == 0, done.output
        found[form] = json.loads(done.stdout)
    differ = {k for k, v in found["ordinary"].items() if v != found["accelerate"].get(k)}
    assert differ <= (ASIDE | BASE if kind == "lora" else ASIDE)
    assert found["ordinary"]["estimates"] == found["accelerate"]["estimates"]
    assert abs(found["accelerate"]["deltaH1"]) > 1e-5
    assert abs(found["accelerate"]["deltaH_true"]) > 1e-5
