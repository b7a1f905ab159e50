"""verl's and SkyRL's files of single ranks give back the model and the optimizer, bit for bit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed.tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from checkpoints.test_loading import assert_same_model, assert_same_optimizer
from entropy_experiments.checkpoints import rank_shards
from entropy_experiments.checkpoints.layout import find_checkpoint
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.runs import next_checkpoint
from entropy_experiments.checkpoints.torch_contents import LocalPart, read_torch_contents
from entropy_experiments.checkpoints.verl_state import read_rank_weights
from oracles.rank_files import REPLICATED, save_rank_checkpoint, write_ranks
from oracles.tiny_models import tiny_model

pytestmark = pytest.mark.naive


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize(("size", "writer"), [(1, "verl"), (2, "verl"), (3, "verl"), (2, "skyrl")])
def test_ranks_make_the_model_and_its_optimizer(tmp_path, kind, size, writer):
    saved = save_rank_checkpoint(tmp_path, kind, size=size, writer=writer)
    for path in (saved.path, saved.shards):
        loaded = load_checkpoint(path)
        assert (loaded.kind, loaded.step, loaded.name, loaded.lr) == (kind, 3, "step_3", 1e-3)
        assert loaded.path == saved.path
        assert_same_model(loaded.model, saved.model)
        assert_same_optimizer(loaded, saved)
    trainable = {n for n, p in loaded.model.named_parameters() if p.requires_grad}
    assert trainable == {n for n, p in saved.model.named_parameters() if p.requires_grad}
    assert loaded.coverage["matched"] == loaded.coverage["parameters"] == len(trainable)
    assert loaded.coverage["order"] == "named_parameters"
    folder = saved.shards.name
    read = {
        f"{folder}/{p}_world_size_{size}_rank_{r}.pt"
        for p in ("model", "optim")
        for r in range(size)
    }
    assert read <= set(loaded.hashes)
    assert {n for n in read if "model" in n} == set(loaded.weights)
    assert f"{folder}/huggingface/config.json" in loaded.hashes
    notes = " ".join(loaded.not_verifiable)
    assert ("lora_train_meta.json" in notes) == (kind == "lora" and writer == "verl")
    assert "base:" not in notes
    assert loaded.tokenizer.decode(loaded.tokenizer("12+3")["input_ids"]) == "12+3"


@pytest.mark.parametrize(
    ("size", "mesh_shape", "placements"),
    [
        (4, (2, 2), REPLICATED),
        (6, (2, 3), REPLICATED),
        (2, None, (Shard(1),)),
        (3, None, (Shard(-1),)),
    ],
)
def test_other_ways_of_cutting(tmp_path, size, mesh_shape, placements):
    """Hybrid sharding, and another dimension; rows fall unevenly, and the last rank has none."""
    whole = {"a": torch.randn(7, 5), "b": torch.randn(2, 9).bfloat16(), "c": torch.randn(1, 4)}
    write_ranks(
        tmp_path,
        lambda cut, _: {**{n: cut(v) for n, v in whole.items()}, "buffer": torch.arange(3)},
        size=size,
        mesh_shape=mesh_shape,
        placements=placements,
    )
    stored = read_rank_weights(tmp_path / f"model_world_size_{size}_rank_0.pt")
    assert stored.shapes == {"a": (7, 5), "b": (2, 9), "c": (1, 4), "buffer": (3,)}
    for name, value in whole.items():
        assert torch.equal(stored[name], value)
        assert stored[name].dtype == value.dtype
    assert stored["buffer"].tolist() == [0, 1, 2]


@pytest.mark.contract
def test_torchs_own_safe_loader_agrees(tmp_path):
    """weights_only, with the DTensors of the installed torch: part by part the same numbers."""
    saved = save_rank_checkpoint(tmp_path, size=3)
    for part in ("model", "optim"):
        for rank in range(3):
            path = saved.shards / f"{part}_world_size_3_rank_{rank}.pt"
            contents, theirs = read_torch_contents(path), torch.load(path, weights_only=True)
            ours = contents.tree if part == "model" else contents.tree["state"][0]
            theirs = theirs if part == "model" else theirs["state"][0]
            assert list(ours) == list(theirs)
            for name, value in theirs.items():
                if isinstance(ours[name], LocalPart):
                    assert torch.equal(contents.tensor(ours[name].local), value.to_local())
                    assert ours[name].shape == tuple(value.shape)
                else:
                    assert torch.equal(contents.tensor(ours[name]), value)


def test_a_mesh_of_an_older_torch_and_of_gpus(tmp_path, monkeypatch):
    """torch 2.6 keeps its mesh as a tensor; storages of CUDA are read where there is none."""

    def older(mesh):
        state = {"device_type": "cuda", "mesh": mesh.mesh, "mesh_dim_names": ("fsdp",)}
        return {**state, "_coordinate_on_dim": list(mesh.get_coordinate()), "_thread_id": None}

    monkeypatch.setattr(DeviceMesh, "__getstate__", older)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    saved = save_rank_checkpoint(tmp_path, "lora", size=2)
    loaded = load_checkpoint(saved.path, device_map="cpu")
    assert_same_model(loaded.model, saved.model)
    assert_same_optimizer(loaded, saved)


def test_tied_weights_are_stored_twice(tmp_path):
    saved = save_rank_checkpoint(tmp_path, architecture="qwen2", size=2)
    names = set(find_checkpoint(saved.path).stored or ())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names
    assert_same_model(load_checkpoint(saved.path).model, saved.model)


def test_the_adapter_alone_needs_its_base(tmp_path):
    """verl's save_lora_only."""
    saved = save_rank_checkpoint(tmp_path, "lora", size=2)
    write_ranks(
        saved.shards,
        lambda cut, _: {n: cut(v) for n, v in saved.model.state_dict().items() if "lora_" in n},
        size=2,
    )
    with pytest.raises(ValueError, match="so the base is unknown"):
        load_checkpoint(saved.path)
    tiny_model().save_pretrained(tmp_path / "base")
    loaded = load_checkpoint(saved.path, base=tmp_path / "base")
    assert_same_model(loaded.model, saved.model)
    assert_same_optimizer(loaded, saved)
    assert any(note.startswith("base:") for note in loaded.not_verifiable)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_doubles_stay_doubles(tmp_path, kind):
    saved = save_rank_checkpoint(tmp_path, kind, size=2, double=True)
    loaded = load_checkpoint(saved.path, dtype="float64")
    ours, theirs = loaded.model.state_dict(), saved.model.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert any(not torch.equal(v, v.float().double()) for v in theirs.values())  # teeth
    assert_same_optimizer(loaded, saved)


def test_an_optimizer_elsewhere_and_weights_alone(tmp_path):
    saved = save_rank_checkpoint(tmp_path, size=2)
    other = tmp_path / "elsewhere"
    other.mkdir()
    for file in saved.shards.glob("optim_*"):
        shutil.move(file, other)
    with pytest.raises(FileNotFoundError, match="No optimizer state for"):
        load_checkpoint(saved.path)
    assert load_checkpoint(saved.path, need_optimizer=False).optimizer is None
    assert_same_optimizer(load_checkpoint(saved.path, optimizer_path=other), saved)


def test_sft_saves_without_a_folder_for_the_actor(tmp_path):
    saved = save_rank_checkpoint(tmp_path, size=2)
    for path in list(saved.shards.iterdir()):
        shutil.move(path, saved.path)
    saved.shards.rmdir()
    loaded = load_checkpoint(saved.path)
    assert (loaded.path, loaded.step) == (saved.path, 3)
    assert_same_model(loaded.model, saved.model)


def test_the_step_after(tmp_path):
    saved = save_rank_checkpoint(tmp_path, size=1)
    assert next_checkpoint(saved.path) is None
    shutil.copytree(saved.path, tmp_path / "global_step_4")
    assert next_checkpoint(saved.path) == tmp_path / "global_step_4"


def test_a_tensor_is_read_alone_and_once(tmp_path, monkeypatch):
    saved = save_rank_checkpoint(tmp_path, size=3)
    read, own = [], rank_shards.TorchContents.tensor
    monkeypatch.setattr(
        rank_shards.TorchContents, "tensor", lambda self, x: read.append(x) or own(self, x)
    )
    stored = find_checkpoint(saved.path).stored
    assert stored is not None
    assert not read
    stored["model.norm.weight"]
    assert len(read) == 3


def test_the_comparison_has_teeth(tmp_path):
    """One number of one rank, and another rank's part: the tests above would see them."""
    saved = save_rank_checkpoint(tmp_path, size=2)
    weights = {n: v.clone() for n, v in saved.model.state_dict().items()}
    weights["model.norm.weight"][3] += 1e-3
    write_ranks(saved.shards, lambda cut, _: {n: cut(v) for n, v in weights.items()}, size=2)
    with pytest.raises(AssertionError):
        assert_same_model(load_checkpoint(saved.path).model, saved.model)


def test_facts_beside_the_shards(tmp_path):
    saved = save_rank_checkpoint(tmp_path, size=1)
    (saved.path / "entropy_probe.json").write_text(json.dumps({"beta": 0.25}))
    (saved.path / "update_batch").mkdir()
    loaded = load_checkpoint(saved.path)
    assert loaded.facts["beta"] == 0.25
    assert loaded.recorded == saved.path / "update_batch"
