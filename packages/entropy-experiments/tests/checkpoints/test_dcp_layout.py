"""Which files belong to an FSDP checkpoint, when the run's folder holds others so named."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch

from checkpoints.test_loading import assert_same_model, assert_same_optimizer
from entropy_experiments.checkpoints.layout import find_checkpoint
from entropy_experiments.checkpoints.load import load_checkpoint
from oracles.dcp_pieces import save_dcp
from oracles.tiny_models import TinyCheckpoint, save_tiny_checkpoint, tiny_model

pytestmark = pytest.mark.naive

SHARDS, FILE = "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin"
CONFIGS = {"lora": "adapter_config.json", "full": "config.json"}


def fsdp_checkpoint(run: Path, kind: str, form: str = SHARDS, **more) -> TinyCheckpoint:
    """As a Trainer leaves it, the config beside the shards."""
    saved = save_tiny_checkpoint(run, kind, "hf", **more)
    weights = saved.model.state_dict()
    if form == SHARDS:
        save_dcp({"model": weights}, saved.path / SHARDS)
        save_dcp({"optimizer": saved.optimizer.state_dict()}, saved.path / "optimizer_0")
    else:
        torch.save(weights, saved.path / FILE)
        torch.save(saved.optimizer.state_dict(), saved.path / "optimizer.bin")
    for name in ("adapter_model.safetensors", "model.safetensors", "optimizer.pt"):
        (saved.path / name).unlink(missing_ok=True)
    return saved


def rivals(run: Path, saved: TinyCheckpoint) -> None:
    """What a run's folder may hold when training is over: all of another step."""
    later = copy.deepcopy(saved.optimizer.state_dict())
    for group in later["param_groups"]:
        group["lr"] = 7.0
    torch.save(later, run / "optimizer.bin")
    save_dcp({"optimizer": later}, run / "optimizer_0")
    (run / "trainer_state.json").write_text('{"global_step": 999}')
    (run / "optimizer_param_names.json").write_text('["of another run"]')
    (run / "entropy_probe.json").write_text('{"beta": 0.9}')
    (run / "update_batch").mkdir()
    for place, length in ((run, 99), (saved.path, 77)):
        if place == run:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(saved.path / name, run)
        told = json.loads((place / "tokenizer_config.json").read_text())
        told["model_max_length"] = length
        (place / "tokenizer_config.json").write_text(json.dumps(told))


@pytest.mark.parametrize("form", [SHARDS, FILE])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_checkpoint_comes_before_the_run(tmp_path, kind, form):
    saved = fsdp_checkpoint(tmp_path, kind, form, facts={"beta": 0.1}, base_name="base")
    rivals(tmp_path, saved)
    (saved.path / "update_batch").mkdir()
    shutil.move(saved.path / CONFIGS[kind], tmp_path)
    for path in (saved.path, *([saved.path / SHARDS] if form == SHARDS else [])):
        loaded = load_checkpoint(path)
        assert (loaded.kind, loaded.path, loaded.step, loaded.lr) == (kind, saved.path, 3, 1e-3)
        assert loaded.recorded == saved.path / "update_batch"
        assert loaded.facts["beta"] == 0.1
        assert loaded.tokenizer.model_max_length == 77
        assert_same_model(loaded.model, saved.model)
        assert_same_optimizer(loaded, saved)
        # What was read is what is hashed: of the run, its config.
        outside = {name for name in loaded.hashes if name.startswith("../")}
        assert f"../{CONFIGS[kind]}" in outside
        assert not outside & {"../optimizer.bin", "../entropy_probe.json"}


@pytest.mark.parametrize("form", [SHARDS, FILE])
def test_of_the_run_only_what_holds_for_all_its_checkpoints(tmp_path, form):
    saved = fsdp_checkpoint(tmp_path, "full", form)
    rivals(tmp_path, saved)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (saved.path / name).replace(tmp_path / name)
    shutil.rmtree(saved.path / "optimizer_0", ignore_errors=True)
    (saved.path / "optimizer.bin").unlink(missing_ok=True)
    (saved.path / "trainer_state.json").unlink()
    path = saved.path.rename(tmp_path / "step_5")
    layout = find_checkpoint(path)
    assert (layout.config, layout.root) == (tmp_path, path)
    assert layout.weights == (path / SHARDS if form == SHARDS else path)
    assert (layout.step, layout.optimizer, layout.recorded) == (5, None, None)
    assert layout.param_names is None
    with pytest.raises(FileNotFoundError, match="No optimizer state for"):
        load_checkpoint(path)
    loaded = load_checkpoint(path, need_optimizer=False)
    assert loaded.facts["beta"] == 0.9
    assert loaded.tokenizer.model_max_length == 77
    assert_same_model(loaded.model, saved.model)
    (tmp_path / "update_batches" / "step_5").mkdir(parents=True)
    assert find_checkpoint(path).recorded == tmp_path / "update_batches" / "step_5"


def test_one_dcp_folder_that_is_the_whole_checkpoint(tmp_path):
    """Called as weights inside a checkpoint are, too: the folder above it is a run all the same."""
    saved = fsdp_checkpoint(tmp_path / "made", "full")
    both = {"model": saved.model.state_dict(), "optimizer": saved.optimizer.state_dict()}
    run = tmp_path / "run"
    tiny_model(seed=9).save_pretrained(run)  # the run's own weights, of its end
    rivals(run, saved)
    save_dcp(both, run / "model")
    layout = find_checkpoint(run / "model")
    assert layout.root == layout.weights == layout.optimizer == run / "model"
    assert (layout.config, layout.param_names, layout.step) == (run, None, None)
    loaded = load_checkpoint(run / "model")
    assert_same_model(loaded.model, saved.model)
    assert_same_optimizer(loaded, saved)


def test_the_kind_says_which_config_is_looked_for(tmp_path):
    """A nearer config of the other kind is not the weights'."""
    lora = fsdp_checkpoint(tmp_path / "lora", "lora", base_name="base")
    shutil.move(lora.path / "adapter_config.json", tmp_path / "lora")
    other = tiny_model("llama")
    other.config.save_pretrained(lora.path)
    loaded = load_checkpoint(lora.path)
    assert loaded.kind == "lora"
    assert_same_model(loaded.model, lora.model)
    full = fsdp_checkpoint(tmp_path / "full", "full")
    shutil.move(full.path / "config.json", tmp_path / "full")
    shutil.copy(tmp_path / "lora" / "adapter_config.json", full.path)
    loaded = load_checkpoint(full.path)
    assert loaded.kind == "full"
    assert_same_model(loaded.model, full.model)


def test_shards_named_beside_their_adapter_config(tmp_path):
    saved = fsdp_checkpoint(tmp_path, "lora")
    layout = find_checkpoint(saved.path / SHARDS)
    assert (layout.root, layout.config, layout.step) == (saved.path, saved.path, 3)
    assert layout.optimizer == saved.path / "optimizer_0"


def test_shards_kept_elsewhere_and_linked(tmp_path):
    saved = fsdp_checkpoint(tmp_path / "run", "full")
    kept = tmp_path / "disk" / "shards"
    kept.parent.mkdir()
    shutil.move(saved.path / SHARDS, kept)
    (saved.path / SHARDS).symlink_to(kept)
    (kept.parent / "optimizer.bin").write_bytes(b"of somebody else")
    for path in (saved.path, saved.path / SHARDS):
        loaded = load_checkpoint(path)
        assert (loaded.path, loaded.step) == (saved.path, 3)
        assert_same_optimizer(loaded, saved)


def test_the_optimizers_folder_may_be_named_from_outside(tmp_path):
    saved = fsdp_checkpoint(tmp_path, "full")
    moved = tmp_path / "moments"
    moved.mkdir()
    shutil.move(saved.path / "optimizer_0", moved)
    for path in (moved, moved / "optimizer_0"):
        loaded = load_checkpoint(saved.path, optimizer_path=path)
        assert loaded.optimizer_path == moved / "optimizer_0"
        assert_same_optimizer(loaded, saved)
    with pytest.raises(FileNotFoundError, match=r"optimizer\.pt, optimizer\.bin or optimizer_0/"):
        load_checkpoint(saved.path, optimizer_path=tmp_path)


@pytest.mark.parametrize("wrapper", ["_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
def test_wrappers_in_the_names_of_weights_and_moments(tmp_path, wrapper):
    """As activation checkpointing leaves them when names are taken module by module."""
    saved = fsdp_checkpoint(tmp_path, "full")

    def wrapped(name: str) -> str:
        head, dot, tail = name.partition(".layers.0.")
        return f"{head}{dot}{wrapper}.{tail}" if dot else name

    names = {id(p): wrapped(name) for name, p in saved.model.named_parameters()}
    assert any(wrapper in name for name in names.values())
    order = [names[id(p)] for group in saved.optimizer.param_groups for p in group["params"]]
    plain = saved.optimizer.state_dict()
    groups = [{**g, "params": [order[i] for i in g["params"]]} for g in plain["param_groups"]]
    state = {order[i]: entry for i, entry in plain["state"].items()}
    weights = {wrapped(name): value for name, value in saved.model.state_dict().items()}
    for folder in (SHARDS, "optimizer_0"):
        shutil.rmtree(saved.path / folder)
    save_dcp({"model": weights}, saved.path / SHARDS)
    save_dcp({"optimizer": {"state": state, "param_groups": groups}}, saved.path / "optimizer_0")
    loaded = load_checkpoint(saved.path)
    assert loaded.coverage["order"] == "names in the file"
    assert_same_model(loaded.model, saved.model)
    assert_same_optimizer(loaded, saved)


def test_a_start_that_changes_the_base_is_told_unless_the_base_was_saved(tmp_path):
    saved = fsdp_checkpoint(tmp_path, "lora", lora={"init_lora_weights": "pissa"})
    loaded = load_checkpoint(saved.path)
    assert_same_model(loaded.model, saved.model)
    assert not any("init_lora_weights" in note for note in loaded.not_verifiable)
    adapter = {n: v for n, v in saved.model.state_dict().items() if "lora_" in n}
    shutil.rmtree(saved.path / SHARDS)
    save_dcp({"model": adapter}, saved.path / SHARDS)
    notes = load_checkpoint(saved.path).not_verifiable
    assert any("init_lora_weights is 'pissa'" in note for note in notes)
