"""Damaged, mixed and hostile checkpoints of verl and SkyRL: refused by file, nothing executed."""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from entropy_experiments.checkpoints.layout import find_checkpoint
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.torch_contents import read_torch_contents
from entropy_experiments.checkpoints.verl_state import (
    adapter_from_names,
    read_rank_optimizer,
    read_rank_weights,
)
from oracles.rank_files import RankCheckpoint, save_rank_checkpoint, write_ranks

pytestmark = pytest.mark.faults

WHOLE = torch.arange(35.0).reshape(7, 5)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, RankCheckpoint]:
    return {
        kind: save_rank_checkpoint(tmp_path_factory.mktemp(kind), kind, size=2)
        for kind in ("full", "lora")
    }


@pytest.fixture
def actor(made, tmp_path) -> Path:
    """A copy to be damaged: the folder with the shards of a full fine-tune."""
    return shutil.copytree(made["full"].path, tmp_path / "run" / "global_step_3") / "actor"


@pytest.fixture
def lora(made, tmp_path) -> Path:
    return shutil.copytree(made["lora"].path, tmp_path / "run" / "global_step_3") / "actor"


def refused(path: Path, *parts: str, kind: type[Exception] = ValueError, **options) -> None:
    with pytest.raises(kind, match="(?s)" + ".*".join(re.escape(part) for part in parts)):
        load_checkpoint(path, **options)


def one_tensor(folder: Path, content, *, size=2, **options) -> None:
    write_ranks(folder, content, size=size, **options)


def refused_tensor(folder: Path, *parts: str, size=2) -> None:
    with pytest.raises(ValueError, match="(?s)" + ".*".join(re.escape(part) for part in parts)):
        read_rank_weights(folder / f"model_world_size_{size}_rank_0.pt")["w"]


# Files


@pytest.mark.parametrize("part", ["model", "optim", "extra_state"])
def test_a_missing_rank(actor, part):
    """Also of the extra state, which is not read: saving was interrupted."""
    (actor / f"{part}_world_size_2_rank_1.pt").unlink()
    for path in (actor, actor.parent):
        words = (f"lacks ranks [1] of {part}_world_size_2", "Saving was interrupted")
        refused(path, *words, kind=FileNotFoundError)


def test_a_rank_too_many(actor):
    shutil.copy(actor / "model_world_size_2_rank_1.pt", actor / "model_world_size_2_rank_2.pt")
    refused(actor, "has ranks [2] of model_world_size_2", kind=FileNotFoundError)


def test_two_world_sizes_in_one_folder(actor):
    shutil.copy(actor / "model_world_size_2_rank_1.pt", actor / "model_world_size_3_rank_1.pt")
    refused(actor, "model files of world sizes 2, 3", "saved into twice")


def test_parts_of_two_saves(actor):
    for file in actor.glob("optim_*"):
        file.unlink()
    one_tensor(actor, lambda cut, _: {}, size=3, part="optim")
    refused(actor, "files of different world sizes (model of 2, optim of 3", "one save")


def test_another_world_size_in_the_config(actor):
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
    refused(actor, "says world_size 4", "files of 2 ranks")


@pytest.mark.parametrize("text", ['{"FSDP_version"', "[2]"])
def test_a_damaged_config(actor, text):
    (actor / "fsdp_config.json").write_text(text)
    refused(actor, "fsdp_config.json", "JSON")


def test_the_optimizer_without_a_model(actor):
    for file in actor.glob("model_*"):
        file.unlink()
    words = ("holds the optimizer's files and no model_world_size", "checkpoint.save_contents")
    refused(actor.parent, *words, kind=FileNotFoundError)


def test_the_critic_has_no_entropy(actor):
    critic = actor.rename(actor.with_name("critic"))
    for path in (critic, critic.parent):
        refused(path, "critic holds a critic: a value model has no policy", "actor/")


def test_a_run_is_not_a_checkpoint(actor):
    refused(
        actor.parent.parent, "It holds global_step_3: give one of those", kind=FileNotFoundError
    )


@pytest.mark.parametrize("config", [{"FSDP_version": 1}, {"fsdp_strategy": "fsdp"}])
def test_fsdp1_by_its_config(actor, config):
    (actor / "fsdp_config.json").write_text(json.dumps({**config, "world_size": 2}))
    ways = ("actor.strategy=fsdp2", "python -m verl.model_merger merge --backend fsdp")
    refused(actor, "was saved under FSDP1", *ways, "loses the optimizer", "hypothetical step")


def test_fsdp1_by_its_tensors(actor):
    """Older verl writes no fsdp_config.json."""
    (actor / "fsdp_config.json").unlink()
    pickled = b"\x80\x02}X\x01\x00\x00\x00wctorch.distributed._shard.sharded_tensor.api\n"
    pickled += b"ShardedTensor\n)\x81}X\x05\x00\x00\x00_specK\x01sbs."
    for rank in range(2):
        _write_pickle(actor / f"model_world_size_2_rank_{rank}.pt", pickled)
    refused(actor, "was saved under FSDP1 ('w' is a ShardedTensor)", "Nothing was executed")


def _write_pickle(path: Path, pickled: bytes) -> None:
    """A zip file as torch.save writes it, with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")


# Bytes


def test_a_truncated_file(actor):
    path = actor / "model_world_size_2_rank_1.pt"
    path.write_bytes(path.read_bytes()[:-200])
    refused(actor, "model_world_size_2_rank_1.pt cannot be read", "truncated or damaged")


@pytest.mark.parametrize("part", ["model", "optim"])
def test_a_flipped_bit(actor, part):
    path = actor / f"{part}_world_size_2_rank_1.pt"
    first, length = read_torch_contents(path).records["1"]
    content = bytearray(path.read_bytes())
    content[first + length // 2] ^= 1
    path.write_bytes(content)
    refused(actor, f"{part}_world_size_2_rank_1.pt cannot be read")


def test_no_zip_file(actor):
    path = actor / "model_world_size_2_rank_0.pt"
    path.write_bytes(b"\x80\x02}q\x00.")
    refused(actor, "it is not a zip file, as torch.save writes")


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("part", ["model", "optim"])
def test_code_is_not_run(actor, tmp_path, part):
    marker = tmp_path / "marker"
    torch.save({"w": Touch(marker)}, actor / f"{part}_world_size_2_rank_1.pt")
    words = (
        f"{part}_world_size_2_rank_1.pt was refused: it asks for",
        "system",
        "nothing in it was",
    )
    refused(actor, *words)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["torch.load", "builtins.eval", "torch._utils._rebuild_qtensor"])
def test_names_beside_those_allowed(tmp_path, name):
    module, _, function = name.rpartition(".")
    path = tmp_path / "model_world_size_1_rank_0.pt"
    _write_pickle(path, f"c{module}\n{function}\n(S'1'\ntR.".encode())
    refused_tensor(tmp_path, f"it asks for {name}", size=1)


def test_a_class_of_torch_distributed_is_a_record_and_no_tensor(tmp_path):
    """Whatever its name: nothing of it is imported."""
    path = tmp_path / "model_world_size_1_rank_0.pt"
    _write_pickle(path, b"\x80\x02}X\x01\x00\x00\x00wctorch.distributed.nothing\nThing\n)Rs.")
    refused_tensor(tmp_path, "'w' is a Thing; expected tensors by name", size=1)


def test_a_storage_that_is_too_short(tmp_path):
    """The pickle may ask for more numbers than the file has."""
    torch.save({"w": torch.arange(4.0)}, path := tmp_path / "model_world_size_1_rank_0.pt")
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in held.items():
            archive.writestr(name, content[:8] if name.endswith("data/0") else content)
    refused_tensor(tmp_path, "storage '0' of 4 numbers is not in the file", size=1)


# What ranks say


def test_ranks_with_other_names(tmp_path):
    one_tensor(tmp_path, lambda cut, rank: {"w": cut(WHOLE), **({"x": WHOLE} if rank else {})})
    refused_tensor(tmp_path, "rank_1.pt holds other tensors than rank 0", "extra ['x']")


def test_ranks_with_other_dtypes(tmp_path):
    one_tensor(tmp_path, lambda cut, rank: {"w": cut(WHOLE.half() if rank else WHOLE)})
    refused_tensor(tmp_path, "'w' is float16 (7, 5) Shard(0); expected float32 (7, 5) Shard(0)")


def test_ranks_with_other_shapes(tmp_path):
    one_tensor(tmp_path, lambda cut, rank: {"w": cut(WHOLE[:5] if rank else WHOLE)})
    refused_tensor(tmp_path, "'w' is float32 (5, 5) Shard(0); expected float32 (7, 5) Shard(0)")


def test_a_part_of_another_size(tmp_path):
    def short(cut, rank):
        part = cut(WHOLE)
        local = part.to_local()[:2] if rank else part.to_local()
        more = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
        return {
            "w": DTensor.from_local(local, part.device_mesh, [Shard(0)], run_check=False, **more)
        }

    one_tensor(tmp_path, short)
    refused_tensor(tmp_path, "rank_1.pt: the part of 'w' has shape (2, 5)", "expected (3, 5)")


@pytest.mark.parametrize(
    ("placement", "words"),
    [(Partial(), "Partial"), (_StridedShard(0, split_factor=2), "_StridedShard")],
)
def test_placements_that_fsdp2_does_not_use(tmp_path, placement, words):
    def placed(cut, rank):
        mesh = cut(WHOLE).device_mesh
        more = {"run_check": False, "shape": WHOLE.shape, "stride": WHOLE.stride()}
        return {"w": DTensor.from_local(WHOLE, mesh, [placement], **more)}

    one_tensor(tmp_path, placed)
    refused_tensor(tmp_path, "'w' is placed as", words, "expected Shard and Replicate")


def test_tensor_parallelism(tmp_path):
    both = {"mesh_shape": (2, 2), "placements": (Shard(1), Shard(0))}
    one_tensor(tmp_path, lambda cut, _: {"w": cut(WHOLE)}, size=4, **both)
    refused_tensor(tmp_path, "is cut along 2 dimensions of the device mesh", size=4)


def test_copies_that_differ(tmp_path):
    one_tensor(tmp_path, lambda cut, rank: {"w": cut(WHOLE + rank)}, placements=(Replicate(),))
    refused_tensor(tmp_path, "'w' is not cut over these ranks, and differs from the copy")
    one_tensor(tmp_path, lambda cut, rank: {"w": WHOLE + rank})
    refused_tensor(tmp_path, "differs from the copy", "FSDP1")


def test_one_place_of_the_mesh_twice(tmp_path):
    one_tensor(tmp_path, lambda cut, _: {"w": cut(WHOLE)})
    shutil.copy(
        tmp_path / "model_world_size_2_rank_0.pt", tmp_path / "model_world_size_2_rank_1.pt"
    )
    refused_tensor(tmp_path, "is on the places [(0,)] of a device mesh", "2 ranks once")


def test_no_place_in_a_mesh_of_two_dimensions(tmp_path, monkeypatch):
    monkeypatch.setattr(DeviceMesh, "__getstate__", lambda mesh: {"mesh_dim_names": None})
    both = {"mesh_shape": (2, 1), "placements": (Replicate(), Shard(0))}
    one_tensor(tmp_path, lambda cut, _: {"w": cut(WHOLE)}, **both)
    refused_tensor(tmp_path, "has 2 placements, and its rank the place None")


def test_a_tensor_beside_a_dtensor(tmp_path):
    one_tensor(tmp_path, lambda cut, rank: {"w": WHOLE if rank else cut(WHOLE)})
    refused_tensor(tmp_path, "'w' is a tensor, and a DTensor on rank 0")


@pytest.mark.parametrize("content", [[], {}, 3])
def test_no_mapping_of_tensors(tmp_path, content):
    one_tensor(tmp_path, lambda cut, _: content)
    refused_tensor(tmp_path, "expected the tensors of a model by name")


def test_one_name_twice(tmp_path):
    one_tensor(tmp_path, lambda cut, _: {"w": cut(WHOLE), "_orig_mod.w": cut(WHOLE)})
    refused_tensor(tmp_path, "one name once wrappers are taken off")


# Against the model


def test_names_that_do_not_fit(actor, made):
    weights = made["full"].model.state_dict()
    more = {**weights, "model.extra.weight": WHOLE}
    one_tensor(actor, lambda cut, _: {n: cut(v) for n, v in more.items()})
    refused(actor, "does not fit its config", "extra tensors ['model.extra.weight']")
    less = {n: v for n, v in weights.items() if n != "model.norm.weight"}
    one_tensor(actor, lambda cut, _: {n: cut(v) for n, v in less.items()})
    refused(actor, "missing tensors ['model.norm.weight']")


def test_shapes_that_do_not_fit(actor, made):
    weights = {**made["full"].model.state_dict(), "model.norm.weight": torch.ones(7)}
    one_tensor(actor, lambda cut, _: {n: cut(v) for n, v in weights.items()})
    refused(actor, "model.norm.weight has shape (7,)", "another size")


def test_weights_that_are_not_finite(actor, made):
    weights = {n: v.clone() for n, v in made["full"].model.state_dict().items()}
    weights["model.norm.weight"][3] = float("nan")
    one_tensor(actor, lambda cut, _: {n: cut(v) for n, v in weights.items()})
    refused(actor, "1 non-finite values")


def test_no_config(actor):
    shutil.rmtree(actor / "huggingface")
    refused(actor, "no config.json beside the weights", "checkpoint.base")


def test_no_rank_and_alpha(lora):
    (lora / "lora_train_meta.json").unlink()
    words = ("The weights are an adapter's", "adapter_config.json is missing")
    refused(lora, *words, kind=FileNotFoundError)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 0}, "r is 0; expected a positive integer"),
        ({"lora_alpha": None}, "lora_alpha is missing"),
        ({"use_rslora": True}, "has the keys ['use_rslora']; expected r, lora_alpha"),
        ({"r": 5}, "expected"),
    ],
)
def test_rank_and_alpha(lora, change, words):
    path = lora / "lora_train_meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    refused(lora, words)


def test_modules_that_were_saved_whole(tmp_path):
    names = [
        "base_model.model.a.q.lora_A.default.weight",
        "base_model.model.e.lora_embedding_A.default",
    ]
    names += ["base_model.model.head.modules_to_save.default.weight"]
    config = adapter_from_names(tmp_path, {"r": 2, "lora_alpha": 4}, names)
    assert config["target_modules"] == ["a.q", "e"]
    assert config["modules_to_save"] == ["head"]


# The optimizer


def optimizer_of(folder: Path, content) -> None:
    write_ranks(folder, content, size=2, part="optim")


def refused_optimizer(folder: Path, *parts: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + ".*".join(re.escape(part) for part in parts)):
        read_rank_optimizer(folder / "optim_world_size_2_rank_0.pt")


def state(cut, *, step: float = 3.0, lr: float = 1e-3):
    entry = {"step": torch.tensor(step), "exp_avg": cut(WHOLE), "exp_avg_sq": cut(WHOLE)}
    return {"state": {0: entry}, "param_groups": [{"lr": torch.tensor(lr), "params": [0]}]}


def test_the_fixture_is_whole(tmp_path):
    optimizer_of(tmp_path, lambda cut, _: state(cut))
    read = read_rank_optimizer(tmp_path / "optim_world_size_2_rank_0.pt")
    assert torch.equal(read["state"][0]["exp_avg"], WHOLE)
    assert read["param_groups"] == [{"lr": pytest.approx(1e-3), "params": [0]}]


def test_ranks_of_two_steps(tmp_path):
    optimizer_of(tmp_path, lambda cut, rank: state(cut, step=3.0 + rank))
    refused_optimizer(tmp_path, "'step of parameter 0' is not cut", "different saves")


def test_ranks_of_two_rates(tmp_path):
    optimizer_of(tmp_path, lambda cut, rank: state(cut, lr=1e-3 + rank))
    refused_optimizer(tmp_path, "param_groups is", "as on rank 0")


def test_the_flat_pieces_of_fsdp1(tmp_path):
    """Plain tensors of one dimension, each rank's own."""

    def flat(cut, rank):
        entry = {"step": torch.tensor(3.0), "exp_avg": torch.arange(17.0) + rank}
        return {"state": {0: entry}, "param_groups": [{"params": [0]}]}

    optimizer_of(tmp_path, flat)
    refused_optimizer(
        tmp_path, "'exp_avg of parameter 0' is not cut", "FSDP1", "actor.strategy=fsdp2"
    )


def test_an_empty_optimizer(actor):
    """SkyRL writes one where it has none."""
    optimizer_of(actor, lambda cut, _: {})
    refused(actor, "is not an optimizer's state: got []", "SkyRL writes an empty file")


def test_other_parameters_and_other_moments(tmp_path):
    def other(cut, rank):
        held = state(cut)
        return held if not rank else {**held, "state": {1: held["state"][0]}}

    optimizer_of(tmp_path, other)
    refused_optimizer(tmp_path, "holds other parameters than rank 0: missing [0], extra [1]")

    def fewer(cut, rank):
        held = state(cut)
        if rank:
            del held["state"][0]["exp_avg"]
        return held

    optimizer_of(tmp_path, fewer)
    refused_optimizer(tmp_path, "holds other moments of parameter 0 than rank 0")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"state": [], "param_groups": []}, "state is a list, not a mapping"),
        ({"state": {0: 3}, "param_groups": []}, "the state of parameter 0 is a int"),
    ],
)
def test_another_structure(tmp_path, content, words):
    optimizer_of(tmp_path, lambda cut, _: content)
    refused_optimizer(tmp_path, words)


def test_a_dtensor_in_a_group(tmp_path):
    optimizer_of(tmp_path, lambda cut, _: {"state": {}, "param_groups": [{"lr": cut(WHOLE)}]})
    refused_optimizer(tmp_path, "a parameter group has a LocalPart; expected plain settings")


def test_a_frozen_parameter_with_moments(lora, made):
    saved = made["lora"]
    optimizer = torch.optim.AdamW(saved.model.parameters())
    held = optimizer.state_dict()
    entry = {"step": torch.tensor(1.0)}
    held["state"] = {
        i: {**entry, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for i, p in enumerate(saved.model.parameters())
    }

    def cut_all(cut, _):
        entries = {
            i: {k: v if k == "step" else cut(v) for k, v in e.items()}
            for i, e in held["state"].items()
        }
        return {**held, "state": entries}

    optimizer_of(lora, cut_all)
    refused(lora, "has a state for", "parameters that are frozen here", "of its LoRA")


def test_an_optimizer_of_another_size(actor):
    groups = torch.optim.AdamW([torch.zeros(7, 5)]).state_dict()["param_groups"]
    optimizer_of(actor, lambda cut, _: {**state(cut), "param_groups": groups})
    refused(actor, "is the optimizer of a model of another size: it holds 1 parameters")


def test_the_layout_names_every_file(actor):
    layout = find_checkpoint(actor)
    assert layout.optimizer == actor / "optim_world_size_2_rank_0.pt"
    assert layout.sharded == actor / "model_world_size_2_rank_0.pt"
    assert [file.name for file in layout.files] == [
        f"model_world_size_2_rank_{rank}.pt" for rank in range(2)
    ]


def test_an_optimizer_that_counts_another_save_s_steps(tmp_path):
    """verl stores no hash; a count that is no multiple of the batches is at least named."""
    saved = save_rank_checkpoint(tmp_path, "full", size=2)

    def notes() -> list[str]:
        loaded = load_checkpoint(saved.path)
        return [note for note in loaded.not_verifiable if note.startswith("optimizer: it counts")]

    assert notes() == []  # three steps after three batches
    for file in saved.shards.glob("optim_*.pt"):
        state = torch.load(file, weights_only=True)
        for entry in state["state"].values():
            entry["step"] = entry["step"] + 2
        torch.save(state, file)
    (note,) = notes()
    assert note.startswith("optimizer: it counts 5 steps after 3 batches (global_step_3)")
