"""prime-rl's DCP folders: its keys, its names of a LoRA, what it leaves out."""

from __future__ import annotations

import re

import pytest
import torch

from checkpoints.test_loading import assert_same_model, assert_same_optimizer
from entropy_experiments.checkpoints.dcp import read_sharded
from entropy_experiments.checkpoints.load import load_checkpoint
from oracles.prime_rl_files import save_prime_rl
from oracles.tiny_models import save_tiny_checkpoint, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.naive


@pytest.fixture
def start(tmp_path):
    """The model that training began with, which gives config and tokenizer."""
    tiny_model(seed=7).save_pretrained(tmp_path / "start")
    tiny_tokenizer().save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def test_a_full_fine_tune(tmp_path, start):
    saved = save_tiny_checkpoint(tmp_path / "made", "full", "hf")
    step = save_prime_rl(tmp_path, saved.model, saved.optimizer)
    keys = set(read_sharded(step / "trainer").paths)
    assert {"app.model.model.norm.weight", "app.optimizers.state.model.norm.weight.exp_avg"} <= keys
    (step / "update_batch").mkdir()
    for path in (step, step / "trainer"):
        loaded = load_checkpoint(path, base=start)
        assert (loaded.kind, loaded.step, loaded.name, loaded.lr) == ("full", 3, "step_3", 1e-3)
        assert (loaded.path, loaded.recorded) == (step, step / "update_batch")
        assert_same_model(loaded.model, saved.model)
        assert_same_optimizer(loaded, saved)
        assert loaded.coverage["order"] == "names in the file"
        assert not any("optimizer order" in note for note in loaded.not_verifiable)


@pytest.mark.parametrize("place", ["step_3/trainer", "step_3", "."])
def test_its_own_lora_under_pefts_names(tmp_path, place):
    saved = save_tiny_checkpoint(tmp_path / "made", "lora", "hf")
    step = save_prime_rl(tmp_path, saved.model, saved.optimizer)
    keys = set(read_sharded(step / "trainer").paths)
    assert "app.model.model.layers.0.self_attn.q_proj.lora_A.0" in keys
    saved.model.peft_config["default"].save_pretrained(tmp_path / "checkpoints" / place)
    loaded = load_checkpoint(step, base=saved.base)
    assert loaded.kind == "lora"
    assert "with the weights saved beside the adapter" in loaded.base
    assert_same_model(loaded.model, saved.model)
    assert_same_optimizer(loaded, saved)


@pytest.mark.faults
def test_what_it_does_not_save(tmp_path):
    """Neither config nor tokenizer; of a LoRA neither rank nor alpha."""
    full = save_tiny_checkpoint(tmp_path / "made", "full", "hf")
    step = save_prime_rl(tmp_path / "full", full.model, full.optimizer)
    with pytest.raises(ValueError, match=r"no config.json beside the weights.*checkpoint.base"):
        load_checkpoint(step)
    lora = save_tiny_checkpoint(tmp_path / "other", "lora", "hf")
    step = save_prime_rl(tmp_path / "lora", lora.model, lora.optimizer)
    with pytest.raises(FileNotFoundError, match=r"adapter_config.json is missing.*rank and alpha"):
        load_checkpoint(step, base=lora.base)


@pytest.mark.faults
def test_another_optimizer_is_refused(tmp_path, start):
    """prime-rl's Muon and sign-SGD: no AdamW, no SGD of torch's."""
    saved = save_tiny_checkpoint(tmp_path / "made", "full", "hf")
    for group in saved.optimizer.param_groups:
        group["algorithm"] = "muon"
    step = save_prime_rl(tmp_path, saved.model, saved.optimizer)
    words = "optimizer that cannot be rebuilt: its option 'algorithm' is muon"
    with pytest.raises(ValueError, match=re.escape(words)):
        load_checkpoint(step, base=start)


@pytest.mark.faults
def test_a_model_that_prime_rl_rewrote(tmp_path, start):
    """Mixtures of experts have other tensors there: named, not guessed."""
    saved = save_tiny_checkpoint(tmp_path / "made", "full", "hf")
    saved.model.register_buffer("router", torch.zeros(2))
    step = save_prime_rl(tmp_path, saved.model, saved.optimizer)
    with pytest.raises(ValueError, match=r"extra tensors \['router'\]"):
        load_checkpoint(step, base=start)
