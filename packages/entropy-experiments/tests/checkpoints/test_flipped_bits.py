"""One flipped bit in a file of torch.save is refused, or changes nothing; never another number."""

from __future__ import annotations

import random
import shutil

import pytest
import torch

from entropy_experiments.checkpoints.runs import embedded_trajectory
from entropy_experiments.checkpoints.torch_files import load_safely

pytestmark = pytest.mark.faults

FILE = embedded_trajectory() / "checkpoint-13" / "optimizer.pt"
FLIPS = 200


def flipped(path, where, bit, to):
    content = bytearray(path.read_bytes())
    content[where] ^= 1 << bit
    to.write_bytes(content)
    return to


def tensors(stored):
    return [value for entry in stored["state"].values() for value in entry.values()]


def same(a, b):
    return a["param_groups"] == b["param_groups"] and all(
        torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True)
    )


def test_no_flip_gives_another_number(tmp_path):
    original, draw = load_safely(FILE), random.Random(27)
    size, refused = FILE.stat().st_size, 0
    for _ in range(FLIPS):
        path = flipped(FILE, draw.randrange(size), draw.randrange(8), tmp_path / "optimizer.pt")
        try:
            stored = load_safely(path)
        except ValueError:
            refused += 1
        else:
            assert same(stored, original)  # padding between the records
    assert refused > FLIPS / 2


def test_the_flips_have_teeth(tmp_path):
    """torch.load alone gives a damaged moment back."""
    content = FILE.read_bytes()
    moment = max(tensors(torch.load(FILE, weights_only=True)), key=lambda value: value.numel())
    where = content.index(moment.numpy().tobytes()) + 3
    path = flipped(FILE, where, 6, tmp_path / "optimizer.pt")
    assert not same(torch.load(path, weights_only=True), load_safely(FILE))
    with pytest.raises(ValueError, match=r"truncated or damaged \(the CRC of .* is another"):
        load_safely(path)


def test_the_command_refuses_it(tmp_path):
    from typer.testing import CliRunner

    from entropy_experiments.cli import app

    source = embedded_trajectory()
    for name in ("base", "checkpoint-13"):
        shutil.copytree(source / name, tmp_path / name)
    damaged = tmp_path / "checkpoint-13" / "optimizer.pt"
    flipped(FILE, FILE.stat().st_size // 2, 5, damaged)
    result = CliRunner().invoke(app, ["run", "--checkpoint", str(tmp_path / "checkpoint-13")])
    assert result.exit_code == 2
    assert f"{damaged} cannot be read: it is truncated or damaged" in result.stderr
    assert "Traceback" not in result.stderr
