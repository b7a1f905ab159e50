"""The same thing in two forms in one checkpoint: what is read is said, with what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from entropy_experiments.checkpoints.load import load_checkpoint
from oracles.dcp_pieces import save_dcp
from oracles.tiny_models import TinyCheckpoint, save_tiny_checkpoint

pytestmark = pytest.mark.faults

WEIGHTS, OPTIMIZERS = (
    f"which of two saved {what} is meant: " for what in ("weights", "optimizers")
)
SHARDS, FILE, MOMENTS = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "optimizer_0"
PLAIN = {"lora": "adapter_model.safetensors", "full": "model.safetensors"}


def notes(path: Path, **more: Any) -> list[str]:
    found = load_checkpoint(path, **more).not_verifiable
    return [note for note in found if note.startswith((WEIGHTS, OPTIMIZERS))]


def said(read: str, other: str) -> str:
    return f"{read} was read; {other} was not, and may be of another save"


@pytest.fixture
def saved(tmp_path) -> TinyCheckpoint:
    return save_tiny_checkpoint(tmp_path, "full", "hf")


@pytest.mark.parametrize("layout", ["hf", "step"])
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("form", [SHARDS, FILE, "weights"])
def test_weights_beside_shards(tmp_path, kind, layout, form):
    saved = save_tiny_checkpoint(tmp_path, kind, layout)
    assert notes(saved.path) == []
    if form == FILE:
        torch.save(saved.model.state_dict(), saved.path / FILE)
    else:
        save_dcp({"model": saved.model.state_dict()}, saved.path / form)
    read = PLAIN[kind] if layout == "hf" else f"model/{PLAIN[kind]}"
    expected = [WEIGHTS + said(read, form if form == FILE else f"{form}/")]
    assert notes(saved.path) == expected
    if layout == "hf":
        assert notes(saved.path, adapter_path=saved.path) == []
        if form == SHARDS and kind == "full":
            assert notes(saved.path / SHARDS, need_optimizer=False) == []  # it was named


def test_two_optimizers(saved, tmp_path):
    state = saved.optimizer.state_dict()
    save_dcp({"optimizer": state}, saved.path / MOMENTS)
    assert notes(saved.path) == [OPTIMIZERS + said("optimizer.pt", f"{MOMENTS}/")]
    torch.save(state, saved.path / "optimizer.bin")
    both = f"optimizer.bin, {MOMENTS}/"
    assert notes(saved.path) == [OPTIMIZERS + said("optimizer.pt", both)]
    assert notes(saved.path, read_optimizer=False) == []
    # What is named is meant; of a folder's two, none was.
    assert notes(saved.path, optimizer_path=saved.path / MOMENTS) == []
    assert notes(saved.path, optimizer_path=saved.path / "optimizer.bin") == []
    elsewhere = tmp_path / "moments"
    save_dcp({"optimizer": state}, elsewhere / MOMENTS)
    assert notes(saved.path, optimizer_path=elsewhere) == []
    torch.save(state, elsewhere / "optimizer.bin")
    (note,) = notes(saved.path, optimizer_path=elsewhere)
    assert note == OPTIMIZERS + said("optimizer.bin", f"{MOMENTS}/")


def test_an_optimizer_in_the_models_shards_and_a_file(saved):
    both = {"model": saved.model.state_dict(), "optimizer": saved.optimizer.state_dict()}
    (saved.path / "model.safetensors").unlink()
    save_dcp(both, saved.path / SHARDS)
    assert notes(saved.path) == [OPTIMIZERS + said("optimizer.pt", f"{SHARDS}/")]
    (saved.path / "optimizer.pt").unlink()
    assert notes(saved.path) == []


def test_other_checkpoints_of_the_run_are_no_second_save(saved):
    save_dcp({"model": saved.model.state_dict()}, saved.path / "step_9")
    save_dcp({"model": saved.model.state_dict()}, saved.path.parent / SHARDS)
    save_dcp({"optimizer": saved.optimizer.state_dict()}, saved.path.parent / MOMENTS)
    assert notes(saved.path) == []


def test_shards_of_both_are_one_save(saved):
    save_dcp({"model": saved.model.state_dict()}, saved.path / SHARDS)
    save_dcp({"optimizer": saved.optimizer.state_dict()}, saved.path / MOMENTS)
    for name in ("model.safetensors", "optimizer.pt"):
        (saved.path / name).unlink()
    assert notes(saved.path) == []
