"""Broken and hostile DCP shards: refused by file and key, and nothing in them is executed."""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from entropy_experiments.checkpoints.dcp import read_sharded
from entropy_experiments.checkpoints.dcp_state import read_sharded_optimizer, read_sharded_weights
from entropy_experiments.checkpoints.layout import find_checkpoint
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.stored_weights import (
    load_sharded_causal_lm,
    read_stored_weights,
)
from oracles.dcp_pieces import read_metadata, save_dcp, write_metadata, write_pieces
from oracles.tiny_models import save_tiny_checkpoint, tiny_model

pytestmark = pytest.mark.faults

WHOLE = torch.arange(35.0).reshape(7, 5)
ROWS = [((0, 0), (4, 5)), ((4, 0), (3, 5))]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two ranks' rows of one tensor."""
    write_pieces(tmp_path / "shards", {"model.w": (WHOLE, ROWS)})
    return tmp_path / "shards"


def refused(folder: Path, *parts: str, kind=ValueError) -> None:
    with pytest.raises(kind, match="(?s)" + ".*".join(re.escape(part) for part in parts)):
        read_sharded_weights(folder)["w"]


def edited(folder: Path, change) -> None:
    metadata = read_metadata(folder)
    change(metadata)
    write_metadata(folder, metadata)


class Touch:
    """Unpickled freely, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class OpenCheckpoint(Touch):
    def __reduce__(self):
        return open, (str(self.path), "w")


def test_the_fixture_is_whole(folder):
    assert torch.equal(read_sharded_weights(folder)["w"], WHOLE)


# Code


@pytest.mark.parametrize("kind", [Touch, OpenCheckpoint])
@pytest.mark.parametrize("place", ["alone", "version", "planner_data", "checkpoint_id"])
def test_code_in_the_metadata_is_not_run(folder, tmp_path, kind, place):
    marker = tmp_path / "marker"
    hostile = kind(marker)

    def plant(metadata) -> None:
        if place == "planner_data":
            metadata.planner_data["model.w"] = hostile
        else:
            setattr(metadata, place, hostile)

    if place == "alone":
        write_metadata(folder, hostile)
    else:
        content = read_metadata(folder)
        plant(content)
        write_metadata(folder, content)
    names = {Touch: os.system.__module__ + ".system", OpenCheckpoint: "io.open"}
    refused(folder, ".metadata was refused: it asks for", names[kind], "nothing in it was executed")
    assert not marker.exists()


def test_torchs_own_reader_would_run_it(folder, tmp_path):
    """So the test above has teeth."""
    marker = tmp_path / "marker"
    write_metadata(folder, Touch(marker))
    read_metadata(folder)
    assert marker.exists()


@pytest.mark.parametrize(
    "name", ["torch.load", "torch.hub.load", "builtins.eval", "collections.namedtuple"]
)
def test_names_beside_those_allowed(folder, name):
    module, _, function = name.rpartition(".")
    code = f"c{module}\n{function}\n(S'1'\ntR.".encode()
    (folder / ".metadata").write_bytes(code)
    refused(folder, f"it asks for {name}")


def test_a_pickle_cannot_reach_through_a_dotted_name(folder):
    """Protocol 4 looks up attributes of attributes."""
    module, name = b"torch.distributed.checkpoint.metadata", b"os.system"
    words = b"".join(b"\x8c" + bytes([len(w)]) + w for w in (module, name))
    (folder / ".metadata").write_bytes(b"\x80\x04" + words + b"\x93.")
    refused(folder, "it asks for torch.distributed.checkpoint.metadata.os.system")


def test_code_in_a_shard_is_not_run(folder, tmp_path):
    marker = tmp_path / "marker"
    content = io.BytesIO()
    torch.save(Touch(marker), content)
    pieces = content.getvalue()

    def longer(metadata) -> None:
        info = metadata.storage_data[MetadataIndex("model.w", (0, 0))]
        metadata.storage_data[MetadataIndex("model.w", (0, 0))] = replace(info, length=len(pieces))

    (folder / "__0_0.distcp").write_bytes(pieces)
    edited(folder, longer)
    refused(folder, "__0_0.distcp was refused: 'model.w'", "nothing in it was executed")
    assert not marker.exists()


def test_code_in_a_value_is_not_run(tmp_path):
    marker = tmp_path / "marker"
    groups = [{"lr": Touch(marker), "params": [0]}]
    save_dcp({"optimizer": {"state": {}, "param_groups": groups}}, tmp_path / "optimizer_0")
    with pytest.raises(ValueError, match=r"(?s)param_groups\.0\.lr.*nothing in it was executed"):
        read_sharded_optimizer(tmp_path / "optimizer_0")
    assert not marker.exists()


# Files


def test_a_missing_shard(folder):
    (folder / "__1_0.distcp").unlink()
    refused(folder, "lacks ['__1_0.distcp'] (1 of 2 shards)", kind=FileNotFoundError)


def test_half_written(folder):
    shard = folder / "__1_0.distcp"
    kept = shard.read_bytes()
    shard.write_bytes(kept[:-40])
    refused(folder, f"__1_0.distcp has {len(kept) - 40} bytes; expected {len(kept)}")
    shard.write_bytes(kept)
    (folder / ".metadata.tmp").touch()
    refused(folder, "is half-written: .metadata.tmp")
    (folder / ".metadata.tmp").unlink()
    (folder / ".metadata").rename(folder / "__0.metadata")
    refused(folder, "without coordination of the ranks: it has __0.metadata")
    (folder / "__0.metadata").unlink()
    refused(folder, "has shards but no .metadata", "hidden files", kind=FileNotFoundError)


def test_shards_of_a_larger_run_are_left_over(folder):
    (folder / "__2_0.distcp").touch()  # a rank that had nothing to write
    read_sharded(folder)
    (folder / "__2_0.distcp").write_bytes(b"of another save")
    refused(folder, "['__2_0.distcp'] (1 in all), which .metadata does not name", "more ranks")


def test_shards_of_two_saves(folder, tmp_path):
    """The table fits the files, and what is in them is another tensor."""
    write_pieces(tmp_path / "half", {"model.w": (WHOLE.bfloat16(), ROWS)})

    def as_half(metadata) -> None:
        metadata.storage_data = read_metadata(tmp_path / "half").storage_data

    for rank in (0, 1):
        shutil.copy(tmp_path / "half" / f"__{rank}_0.distcp", folder)
    edited(folder, as_half)
    refused(folder, "a piece of 'model.w' is ((4, 5), torch.bfloat16); expected ((4, 5), torch.flo")


def test_damaged_content(folder):
    shard = folder / "__0_0.distcp"
    shard.write_bytes(b"\0" * len(shard.read_bytes()))
    with pytest.raises(ValueError, match=r"__0_0.distcp"):
        read_sharded_weights(folder)["w"]
    for content in (b"", b"no pickle", (folder / ".metadata").read_bytes()[:-30]):
        (folder / ".metadata").write_bytes(content)
        refused(folder, ".metadata: it cannot be read")
    (folder / ".metadata").write_bytes(pickle.dumps({"model.w": 1}))
    refused(folder, "it has a dict where a Metadata is expected")


# What the metadata says


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "sub/file", "..", ".", "a\\b", ""])
def test_a_path_that_leaves_the_folder(folder, path):
    def change(metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = path

    edited(folder, change)
    refused(folder, "is said to be in", "expected a file of the same folder")


def _first(metadata):
    return metadata.storage_data[MetadataIndex("model.w", (0, 0))]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: setattr(_first(m), "offset", -1), "size, offset or length (-1"),
        (lambda m: setattr(_first(m), "length", 10**6), "has 1"),
        (lambda m: setattr(_first(m), "offset", 8), "__0_0.distcp has a gap or an overlap"),
        (lambda m: setattr(_first(m), "length", True), "size, offset or length"),
        (lambda m: setattr(_first(m), "relative_path", 3), "storage_data has 'model.w' in 3"),
        (lambda m: setattr(_first(m), "transform_descriptors", ["zstd"]), "extension ['zstd']"),
        (lambda m: m.storage_data.pop(MetadataIndex("model.w", (4, 0))), "does not name"),
        (lambda m: setattr(m, "version", "9.0.0"), "DCP's version '9.0.0'; expected '1.0.0'"),
        (lambda m: setattr(m, "storage_data", None), "storage_data is a NoneType"),
        (lambda m: m.planner_data.update({"model.w": ("other", "w")}), "the path of 'model.w'"),
        (lambda m: m.state_dict_metadata.update({3: None}), "a key is 3; expected text"),
        (lambda m: m.state_dict_metadata.update({"x": None}), "it has a NoneType where a Tensor"),
    ],
)
def test_a_table_that_does_not_fit(folder, change, says):
    edited(folder, change)
    refused(folder, says)


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (4, 5))],
        [((0, 0), (4, 5)), ((4, 0), (4, 5))],
        [((0, 0), (4, 5)), ((3, 0), (3, 5))],
        [((0, 0), (5, 4)), ((2, 0), (3, 5))],
        [],
    ],
)
def test_pieces_that_do_not_tile_the_tensor(folder, boxes):
    def change(metadata) -> None:
        entry = metadata.state_dict_metadata["model.w"]
        entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in boxes]
        for offset, _ in boxes[1:]:
            spare = metadata.storage_data.pop(MetadataIndex("model.w", (4, 0)))
            metadata.storage_data[MetadataIndex("model.w", offset)] = spare

    edited(folder, change)
    refused(folder, "'model.w' has shape (7, 5)", "Expected every number once")


def test_a_few_bytes_cannot_ask_for_all_memory(folder):
    def change(metadata) -> None:
        huge = torch.Size((2**40, 5))
        entry = metadata.state_dict_metadata["model.w"]
        entry.size, entry.chunks = huge, [ChunkStorageMetadata(torch.Size((0, 0)), huge)]

    edited(folder, change)
    refused(folder, f"({2**40}, 5) numbers cannot lie in")


# What was saved


def test_folders_without_what_is_asked_for(tmp_path):
    save_dcp({"optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}, tmp_path / "a")
    refused(tmp_path / "a", "holds no model: its keys are ['optimizer.param_groups.0.lr']")
    with pytest.raises(ValueError, match=r"the parameter groups \[0\] are not whole"):
        read_sharded_optimizer(tmp_path / "a")
    save_dcp({"model": {"w": WHOLE}, "net": {"v": WHOLE}}, tmp_path / "b")
    with pytest.raises(ValueError, match=r"holds no optimizer: its keys are \['model.w', 'net.v'"):
        read_sharded_optimizer(tmp_path / "b")
    save_dcp({"net": {"v": WHOLE}}, tmp_path / "c")
    refused(tmp_path / "c", "holds no model: its keys are ['net.v']")
    save_dcp({"model": {"w": WHOLE, "extra": "text"}}, tmp_path / "d")
    refused(tmp_path / "d", "'model.extra' is not a tensor")
    save_dcp({"model": {"w": WHOLE, "module.w": WHOLE}}, tmp_path / "e")
    refused(tmp_path / "e", "'model.module.w' is there twice")
    save_dcp({"optimizer": {"ema": {"w": WHOLE}, "state": {}}}, tmp_path / "f")
    with pytest.raises(ValueError, match=r"'optimizer.ema.w' is no part of an optimizer's state"):
        read_sharded_optimizer(tmp_path / "f")


def test_another_model(tmp_path):
    model = tiny_model("llama")
    weights = dict(model.state_dict())

    def load(name: str, tree: dict) -> None:
        save_dcp({"model": tree}, tmp_path / name)
        load_sharded_causal_lm(tmp_path / name, model.config, dtype=torch.float32)

    load("whole", weights)
    with pytest.raises(ValueError, match=r"missing tensors \['lm_head.weight'\] \(1 in all\)"):
        load("short", {n: v for n, v in weights.items() if n != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"extra tensors \['v_head.weight'\]"):
        load("long", {**weights, "v_head.weight": WHOLE})
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(7,\); expected \(32,\)"):
        load("wide", {**weights, "model.norm.weight": torch.ones(7)})
    weights["model.norm.weight"] = torch.full((32,), float("nan"))
    with pytest.raises(ValueError, match=r"'model.norm.weight' has 32 non-finite values"):
        load("nan", weights)


def test_checkpoints_by_their_files(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf")
    (saved.path / "adapter_model.safetensors").unlink()
    save_dcp({"model": saved.model.state_dict()}, saved.path / "pytorch_model_fsdp_0")
    (saved.path / "optimizer.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"optimizer.pt or optimizer.bin \(FSDP: optimizer"):
        load_checkpoint(saved.path)
    (saved.path / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"(?s)adapter's, and .*adapter_config.json is mis"):
        load_checkpoint(saved.path, need_optimizer=False)
    for name in ("one", "two"):
        save_dcp({"model": {"w": WHOLE}}, tmp_path / "many" / name)
    with pytest.raises(ValueError, match=r"holds DCP shards in one, two; expected one folder"):
        find_checkpoint(tmp_path / "many")
    local = tmp_path / "local" / "pytorch_model_fsdp_0_rank1.bin"
    local.parent.mkdir()
    local.write_bytes(b"never opened")
    with pytest.raises(ValueError, match=r"one file of each rank's own \(pytorch_model_fsdp_0_ra"):
        find_checkpoint(local.parent)
    torch.save([1, 2], tmp_path / "pytorch_model_fsdp.bin")
    with pytest.raises(ValueError, match=r"pytorch_model_fsdp.bin does not hold tensors by name"):
        read_stored_weights(tmp_path / "pytorch_model_fsdp.bin")
    torch.save({"w": WHOLE, "module.w": WHOLE}, tmp_path / "pytorch_model_fsdp.bin")
    with pytest.raises(ValueError, match=r"holds 2 tensors under 1 names"):
        read_stored_weights(tmp_path / "pytorch_model_fsdp.bin")
