"""`verify`: what verl's merger would have written, and what it would not. tests/wild runs it."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from entropy_experiments.checkpoints.verl_merger import compare_with_merger
from entropy_experiments.cli import app
from oracles.rank_files import save_rank_checkpoint
from oracles.tiny_models import save_tiny_checkpoint

pytestmark = pytest.mark.faults


def merge(saved, folder, **changes):
    """As verl writes it: bfloat16, a tied head left out, an adapter beside its base."""
    tensors, adapter = {}, {}
    for name, value in saved.model.state_dict().items():
        if "lora_" in name:
            adapter[name.replace(".default.weight", ".weight")] = value.bfloat16()
        else:
            own = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            tensors[own] = value.bfloat16().clone()
    del tensors["lm_head.weight"]
    (folder / "lora_adapter").mkdir(parents=True)
    save_file({**tensors, **changes}, folder / "model.safetensors")
    if adapter:
        save_file(adapter, folder / "lora_adapter" / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_the_same_model(tmp_path, kind):
    saved = save_rank_checkpoint(tmp_path, kind, size=2)
    merged = merge(saved, tmp_path / "merged")
    comparison = compare_with_merger(saved.path, merged=merged)
    assert comparison.same
    assert comparison.ours == comparison.theirs
    done = CliRunner().invoke(app, ["verify", str(saved.shards), "--merged", str(merged)])
    assert done.exit_code == 0
    assert "verl's merger makes the same model" in done.output
    assert comparison.ours[:16] in done.output
    done = CliRunner().invoke(app, ["verify", str(saved.path), "--merged", str(merged), "--json"])
    assert json.loads(done.output)["same"] is True


def test_another_model(tmp_path):
    saved = save_rank_checkpoint(tmp_path, size=2)
    weights = saved.model.state_dict()
    other = weights["model.norm.weight"].bfloat16() + 1
    merged = merge(saved, tmp_path / "merged", **{"model.norm.weight": other})
    done = CliRunner().invoke(app, ["verify", str(saved.path), "--merged", str(merged)])
    assert done.exit_code == 3
    assert "makes another model: 1 of" in done.output
    assert "'model.norm.weight'" in done.output
    more = merge(saved, tmp_path / "more", extra=torch.zeros(2))
    assert compare_with_merger(saved.path, merged=more).different == ("extra",)


def test_what_cannot_be_compared(tmp_path, monkeypatch):
    saved = save_rank_checkpoint(tmp_path, size=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no safetensors; expected what verl's merger"):
        compare_with_merger(saved.path, merged=tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match=r"model.safetensors cannot be read .* Merge again"):
        compare_with_merger(saved.path, merged=tmp_path / "empty")
    plain = save_tiny_checkpoint(tmp_path / "trl", "full", "hf")
    with pytest.raises(ValueError, match=r"holds no model_world_size_.*expected a checkpoint of"):
        compare_with_merger(plain.path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    done = CliRunner().invoke(app, ["verify", str(saved.path)])
    assert done.exit_code == 2
    assert "verl's merger failed on" in done.output
    assert "--merged FOLDER" in done.output
