"""Shards of two saves and damaged bytes: what is noticed, and what cannot be."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from checkout import DOCS
from entropy_experiments.checkpoints.dcp import newer_shards, read_sharded
from entropy_experiments.checkpoints.dcp_state import read_sharded_weights
from entropy_experiments.checkpoints.layout import find_checkpoint
from entropy_experiments.checkpoints.load import load_checkpoint
from oracles.dcp_pieces import save_dcp, write_pieces
from oracles.tiny_models import save_tiny_checkpoint

pytestmark = pytest.mark.faults

WHOLE = torch.arange(35.0).reshape(7, 5) + 0.1
ROWS = [((0, 0), (4, 5)), ((4, 0), (3, 5))]
NOTE = "whether the shards are of one save: "


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two ranks' rows of one tensor."""
    write_pieces(tmp_path / "shards", {"model.w": (WHOLE, ROWS)})
    return tmp_path / "shards"


def at(path: Path, beside: Path, *, seconds: int) -> None:
    time = beside.stat().st_mtime_ns + seconds * 10**9
    os.utime(path, ns=(time, time))


def test_a_shard_of_another_save_with_the_same_sizes(folder, tmp_path):
    """It cannot be refused: only its time can tell, and that only if it is the later one."""
    write_pieces(tmp_path / "later", {"model.w": (WHOLE + 1, ROWS)})
    assert newer_shards(folder) == ()
    shutil.copy(tmp_path / "later" / "__1_0.distcp", folder)
    mixed = torch.cat((WHOLE[:4], WHOLE[4:] + 1))
    at(folder / "__1_0.distcp", folder / ".metadata", seconds=60)
    (note,) = newer_shards(folder)
    assert note.startswith(f"{NOTE}shards/__1_0.distcp (1 in all) is newer than .metadata")
    assert torch.equal(read_sharded_weights(folder)["w"], mixed)
    at(folder / "__1_0.distcp", folder / ".metadata", seconds=-60)
    assert newer_shards(folder) == ()  # not noticed, and the docs say so
    assert torch.equal(read_sharded_weights(folder)["w"], mixed)


@pytest.mark.parametrize("which", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_newer_shards_are_among_what_is_not_verifiable(tmp_path, which):
    saved = save_tiny_checkpoint(tmp_path, "full", "hf")
    save_dcp({"model": saved.model.state_dict()}, saved.path / "pytorch_model_fsdp_0")
    save_dcp({"optimizer": saved.optimizer.state_dict()}, saved.path / "optimizer_0")
    (saved.path / "model.safetensors").unlink()
    (saved.path / "optimizer.pt").unlink()

    def notes() -> list[str]:
        return [n for n in load_checkpoint(saved.path).not_verifiable if n.startswith(NOTE)]

    assert notes() == []
    (shard,) = (saved.path / which).glob("*.distcp")
    at(shard, saved.path / which / ".metadata", seconds=1)
    (note,) = notes()
    assert f"{which}/{shard.name}" in note


def test_the_docs_promise_no_more():
    page = (DOCS / "howto_checkpoint.md").read_text("utf-8")
    (row,) = (line for line in page.splitlines() if "of another save with the same sizes" in line)
    assert "**not noticed**" in row


def test_a_flipped_byte_among_the_numbers(folder):
    """torch.load would give back another number."""
    shard = folder / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    start = content.index(WHOLE[:4].contiguous().numpy().tobytes())
    content[start + 17] ^= 0x40
    shard.write_bytes(content)
    free = torch.load(shard, weights_only=True)
    assert int((free != WHOLE[:4]).sum()) == 1
    with pytest.raises(
        ValueError,
        match=r"(?s)__0_0\.distcp: 'model\.w', .*the CRC of '[^']*data/0' is another one.*earlier",
    ):
        read_sharded_weights(folder)["w"]


def test_any_flipped_byte_is_refused_or_changes_nothing(folder):
    shard = folder / "__0_0.distcp"
    whole = shard.read_bytes()
    places = [0, *random.Random(4).sample(range(1, len(whole)), 299)]
    said: list[str] = []
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        shard.write_bytes(content)
        try:
            found = read_sharded_weights(folder)["w"]
        except ValueError as error:
            said.append(str(error))
        else:
            assert torch.equal(found, WHOLE)
    assert all("__0_0.distcp" in one for one in said)
    assert 100 < len(said) < 300


def test_a_flipped_byte_in_a_setting(tmp_path):
    save_dcp({"optimizer": {"state": {}, "param_groups": [{"lr": 0.125, "params": []}]}}, tmp_path)
    files = read_sharded(tmp_path)
    where = files.values["optimizer.param_groups.0.lr"]
    path = tmp_path / where.file
    content = bytearray(path.read_bytes())
    place = content.index(b"\x3f\xc0\x00\x00\x00\x00\x00\x00", where.start)
    content[place + 1] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"param_groups\.0\.lr.*the CRC of '[^']*data\.pkl'"):
        files.value("optimizer.param_groups.0.lr")


def test_shards_saved_without_sums_are_read(tmp_path):
    sums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        write_pieces(tmp_path, {"model.w": (WHOLE, ROWS)})
    finally:
        torch.serialization.set_crc32_options(sums)
    assert torch.equal(read_sharded_weights(tmp_path)["w"], WHOLE)
    shard = tmp_path / "__0_0.distcp"
    content = shard.read_bytes()
    for changed in (
        b"Q" + content[1:],
        content.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"),
    ):
        shard.write_bytes(changed)
        with pytest.raises(ValueError, match=r"__0_0\.distcp"):
            read_sharded_weights(tmp_path)["w"]


def test_the_weights_twice(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "full", "hf")
    weights = saved.model.state_dict()
    save_dcp({"model": weights}, saved.path / "pytorch_model_fsdp_0")
    torch.save(weights, saved.path / "pytorch_model_fsdp.bin")
    (saved.path / "model.safetensors").unlink()
    said = r"twice, in pytorch_model_fsdp_0/ and pytorch_model_fsdp\.bin; expected one.*Move the"
    for path in (saved.path, saved.path / "pytorch_model_fsdp.bin"):
        with pytest.raises(ValueError, match=said):
            find_checkpoint(path)
    shards = saved.path / "pytorch_model_fsdp_0"
    assert find_checkpoint(shards).sharded == shards
    shutil.rmtree(shards)
    file = saved.path / "pytorch_model_fsdp.bin"
    assert find_checkpoint(saved.path).sharded == file
