"""A config that describes more than FSDP's files hold is refused before a model is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from entropy_experiments.checkpoints import stored_weights
from entropy_experiments.checkpoints.load import load_checkpoint
from oracles.dcp_pieces import save_dcp
from oracles.tiny_models import save_tiny_checkpoint

pytestmark = pytest.mark.faults

SHARDS, FILE = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"


@pytest.fixture(params=[SHARDS, FILE])
def saved(request, tmp_path):
    """A full fine-tune whose weights are in shards, or in the one file of FULL_STATE_DICT."""
    made = save_tiny_checkpoint(tmp_path, "full", "hf")
    weights = made.model.state_dict()
    if request.param == SHARDS:
        save_dcp({"model": weights}, made.path / SHARDS)
    else:
        torch.save(weights, made.path / FILE)
    (made.path / "model.safetensors").unlink()
    return made


def edit(saved: Any, **changes: Any) -> str:
    file = saved.path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(file)


@pytest.fixture
def made(monkeypatch) -> list[Any]:
    """Configs that a model was made of, in memory."""
    configs: list[Any] = []
    real = stored_weights.AutoModelForCausalLM

    class Watched:
        @staticmethod
        def from_config(config: Any, **more: Any) -> Any:
            configs.append(config)
            return real.from_config(config, **more)

    monkeypatch.setattr(stored_weights, "AutoModelForCausalLM", Watched)
    return configs


def test_the_config_that_was_saved(saved, made):
    load_checkpoint(saved.path, read_optimizer=False)
    assert len(made) == 1


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size", "hidden_size"])
def test_a_larger_model(saved, made, key):
    size = json.loads((saved.path / "config.json").read_text())[key]
    file = edit(saved, **{key: 64 * size})
    with pytest.raises(ValueError, match=r"describes a model of [\d,]+ parameters; the wei") as e:
        load_checkpoint(saved.path, read_optimizer=False)
    assert file in str(e.value)
    assert made == []


def test_more_layers_than_tensors(saved, made):
    """Ten million of them would keep the reader of configs busy for minutes."""
    file = edit(saved, num_hidden_layers=10**7)
    with pytest.raises(ValueError, match=r"num_hidden_layers is 10000000, but the weights") as e:
        load_checkpoint(saved.path, read_optimizer=False)
    assert file in str(e.value)
    assert made == []


def test_a_number_that_is_repeated_without_end(tmp_path, made):
    """One number on disk, ten thousand million in its shape: the bytes of the file count."""
    saved = save_tiny_checkpoint(tmp_path, "full", "hf")
    weights = {
        name: torch.zeros(1).expand(64 * value.numel())
        for name, value in saved.model.state_dict().items()
    }
    (saved.path / "model.safetensors").unlink()
    torch.save(weights, saved.path / FILE)
    vocabulary = json.loads((saved.path / "config.json").read_text())["vocab_size"]
    edit(saved, vocab_size=512 * vocabulary)
    with pytest.raises(ValueError, match="describes a model of"):
        load_checkpoint(saved.path, read_optimizer=False)
    assert made == []
