"""A run leaves everything as it was: model, optimizer, random states, precision, files."""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import pytest
import torch

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.runs import embedded_trajectory
from entropy_experiments.pipelines import probe_sampling
from entropy_experiments.pipelines.probe import OfflineEntropyProbe
from entropy_experiments.sampling.generate import model_hash

pytestmark = pytest.mark.invariant

TRAINING = ("base_model.model.model.layers.1", "base_model.model.lm_head")
"""Parts that a user might have left in training mode."""


def config(folder, **changes):
    return {
        # Drawn, so that sampling, rewards and both batches are in it.
        "update": {"batch": "drawn"},
        "batch_config": {"B_E": 8, "B_U": 2, "G": 4},
        "memory_config": {"microbatch_size": 16},
        "detailed_logging": {"level": "debug", "output_directory": str(folder)},
        **changes,
    }


def tensors_hash(value) -> str:
    """Of any nest of mappings, sequences, tensors and plain values, in order."""
    digest = hashlib.sha256()

    def visit(x):
        if isinstance(x, torch.Tensor):
            digest.update(f"{x.dtype}{tuple(x.shape)}".encode())
            digest.update(x.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        elif isinstance(x, dict):
            for key, inner in x.items():
                digest.update(repr(key).encode())
                visit(inner)
        elif isinstance(x, (list, tuple)):
            for inner in x:
                visit(inner)
        else:
            digest.update(repr(x).encode())

    visit(value)
    return digest.hexdigest()


def of_checkpoint(checkpoint) -> dict:
    model, optimizer = checkpoint.model, checkpoint.optimizer
    state = {name: dict(entry) for name, entry in optimizer.state.items()}
    return {
        "parameters": model_hash(model),
        "requires_grad": {n: p.requires_grad for n, p in model.named_parameters()},
        "grad": [n for n, p in model.named_parameters() if p.grad is not None],
        "training": {n: m.training for n, m in model.named_modules()},
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "forwards": [n for n, m in model.named_modules() if "forward" in vars(m)],
        "use_cache": model.config.use_cache,
        "optimizer": tensors_hash({"groups": list(optimizer.groups), "state": state}),
    }


def of_process() -> dict:
    return {
        "python": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "numpy": tensors_hash(repr(np.random.get_state(legacy=False))),
        "torch": tensors_hash(torch.get_rng_state()),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def of_files() -> dict[str, str]:
    folder = embedded_trajectory()
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture
def watched(monkeypatch):
    """What was loaded, with its state at that moment."""
    seen = []

    def watching(*args, **kwargs):
        checkpoint = load_checkpoint(*args, **kwargs)
        for name in TRAINING:
            checkpoint.model.get_submodule(name).train()
        seen.append((checkpoint, of_checkpoint(checkpoint)))
        return checkpoint

    monkeypatch.setattr(probe_sampling, "load_checkpoint", watching)
    return seen


@pytest.fixture
def matmul_high():
    """Not the precision that the probe wants, so that putting it back is seen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def comparable(results: dict) -> dict:
    return {k: v for k, v in results.items() if k not in ("timing", "log_path")}


def test_a_run_leaves_no_trace_and_a_second_one_says_the_same(tmp_path, watched, matmul_high):
    process, files = of_process(), of_files()
    first = OfflineEntropyProbe(config(tmp_path / "a"), quiet=True).run_mixed_probe()
    ((checkpoint, before),) = watched
    after = of_checkpoint(checkpoint)
    for name, value in before.items():
        assert after[name] == value, name
    assert sum(before["training"].values()) > len(TRAINING)  # it was really left in that mode
    assert of_process() == process
    assert of_files() == files

    random.random(), np.random.rand(), torch.rand(1)  # other random states, the same results
    # Another folder: nothing drawn before is found there.
    second = OfflineEntropyProbe(config(tmp_path / "b"), quiet=True).run_mixed_probe()
    assert json.dumps(comparable(second)) == json.dumps(comparable(first))
    assert {"deltaH1", "deltaH_true", "curvature_term"} <= first.keys()


def test_a_run_that_fails_restores_precision_and_random_state(tmp_path, matmul_high):
    process = of_process()
    broken = config(tmp_path, reward={"functions": ["json:nothing"]})
    with pytest.raises(ValueError, match="json has no such name under 'nothing'"):
        OfflineEntropyProbe(broken, quiet=True).run_mixed_probe()
    assert of_process() == process


def test_the_hashes_have_teeth():
    checkpoint = load_checkpoint(embedded_trajectory() / "checkpoint-10")
    before = of_checkpoint(checkpoint)
    with torch.no_grad():
        parameter = next(p for p in checkpoint.model.parameters() if p.requires_grad)
        parameter.view(-1)[0] = torch.nextafter(parameter.view(-1)[0], torch.tensor(9.0))
    entry = next(iter(checkpoint.optimizer.state.values()))
    entry["exp_avg"].view(-1)[0] += 1e-9
    after = of_checkpoint(checkpoint)
    assert {name for name in before if before[name] != after[name]} == {"parameters", "optimizer"}
