"""One flipped bit in weights whose sha256 a record holds is refused; without a record it is told.

safetensors files have no checksum: a flipped bit is another weight, and a number like any other.
The callback writes the sha256 of every file of a checkpoint into `entropy_probe_record.json`.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from entropy_experiments.artifacts import sha256
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.recorded_step import GRADIENT_FILE, MADE_STEP
from entropy_experiments.checkpoints.training_record import RECORD_FILE
from entropy_experiments.cli import app

pytestmark = pytest.mark.faults

WEIGHTS = {"lora": "adapter_model.safetensors", "full": "model.safetensors"}
UNVERIFIED = "weights: nothing in the files records their sha256"
SMALL = (
    *("--steps", "1", "--quiet", "--set", "doctor.enabled=false"),
    *("--set", "reward_functions=['oracles.tiny_grpo:reward']"),
    *("--set", "buffer_size=2", "--set", "microbatch_size=2", "--set", "num_generations=4"),
    *("--set", "max_completion_length=8", "--set", "eval_prompts=5", "--set", "probe.prompts=5"),
)


def invoke(*words: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        return CliRunner().invoke(app, [*words])


def probe(checkpoint: Path) -> Any:
    settings = ("batch_config.B_E=8", "generation.max_new_tokens=8")
    words = [word for setting in settings for word in ("--set", setting)]
    return invoke("run", "--checkpoint", str(checkpoint), "--json", *words)


def flip(file: Path, where: int, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[where] ^= 1 << bit
    file.write_bytes(content)


def first_weight(file: Path) -> int:
    """Where the numbers begin: behind the header's length and the header."""
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


@pytest.fixture(scope="module", params=WEIGHTS)
def recorded(request, tmp_path_factory) -> tuple[str, Path]:
    """(kind, the checkpoint before the only step of a recorded training)."""
    out = tmp_path_factory.mktemp(request.param) / "run"
    full = ("--set", "lora=null") if request.param == "full" else ()
    result = invoke("train", "--out", str(out), *SMALL, *full)
    assert result.exit_code == 0, result.output
    return request.param, out / "checkpoint-0"


@pytest.fixture
def copied(recorded, tmp_path) -> tuple[Path, Path]:
    """(a copy that may be damaged, its weights)."""
    kind, checkpoint = recorded
    run = tmp_path / "run"
    shutil.copytree(checkpoint.parent, run)
    return run / checkpoint.name, run / checkpoint.name / WEIGHTS[kind]


@pytest.mark.parametrize("flips", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_no_flip_is_loaded(copied, flips):
    checkpoint, file = copied
    record = json.loads((checkpoint / RECORD_FILE).read_text())
    original, draw = file.read_bytes(), random.Random(27)
    assert record["files"][file.name] == sha256(file)
    for _ in range(flips):
        flip(file, draw.randrange(len(original)), draw.randrange(8))
        with pytest.raises(ValueError, match=file.name):
            load_checkpoint(checkpoint, read_optimizer=False)
        file.write_bytes(original)
    load_checkpoint(checkpoint, read_optimizer=False)


def test_the_flips_have_teeth(copied):
    """Without the record the same bit gives other weights and another number, which is told."""
    checkpoint, file = copied
    whole = {name: value.clone() for name, value in load_file(file).items()}  # of mapped memory
    before = json.loads(probe(checkpoint).stdout)
    assert UNVERIFIED not in " ".join(before["verdict"])
    flip(file, first_weight(file) + 3, 5)  # an exponent's: 2^32 or 2^-32 times the weight
    changed = load_file(file)
    assert any(not torch.equal(value, changed[name]) for name, value in whole.items())
    refused = probe(checkpoint)
    assert refused.exit_code == 2
    assert f"{file.name} in {checkpoint} is not the file that training saved" in refused.stderr
    assert "Traceback" not in refused.stderr
    # All that names the weights: the record, and the batch that was drawn from them.
    for record in checkpoint.parent.glob(f"*/{RECORD_FILE}"):
        record.unlink()
    for folder in ("update_batch", "evaluation", MADE_STEP):
        shutil.rmtree(checkpoint / folder)
    result = probe(checkpoint)
    assert result.exit_code == 0, result.output
    assert UNVERIFIED in " ".join(json.loads(result.stdout)["verdict"])


@pytest.mark.parametrize("seed", range(4))
def test_the_command_refuses_it(copied, seed):
    checkpoint, file = copied
    draw, start = random.Random(seed), first_weight(file)
    flip(file, draw.randrange(start, file.stat().st_size), draw.randrange(8))
    result = probe(checkpoint)
    assert result.exit_code == 2, result.output
    assert file.name in result.stderr
    assert "Traceback" not in result.stderr


def test_a_recorded_gradient_is_the_recorded_one(copied):
    """Its fingerprint is a sketch, which a last bit hardly moves; its sha256 is exact."""
    checkpoint, _ = copied
    file = checkpoint / MADE_STEP / GRADIENT_FILE
    flip(file, file.stat().st_size - 4, 0)  # the last bit of the last number
    result = probe(checkpoint)
    assert result.exit_code == 2, result.output
    assert f"{file} is not the gradient that was recorded" in result.stderr
