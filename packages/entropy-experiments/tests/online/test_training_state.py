"""Training around a probe goes on as without it, and the probe computes as without its autocast."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from entropy_experiments.online.loop import LoopProbe
from oracles.tiny_grpo import PROMPTS
from oracles.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.invariant


class _Counter(nn.Module):
    """A buffer that moves in every pass and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return x


class _Replaced(_Counter):
    """The same, by another tensor each time."""

    def forward(self, x):
        self.passes = self.passes + 1
        return x


class _RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(), 0.1)
        return x - self.mean


class _Random(nn.Module):
    """Noise that eval mode does not switch off."""

    def __init__(self, noise) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x):
        return self.noise(x)


STRANGE = {
    "dropout": lambda: _Random(lambda x: F.dropout(x, 0.05)),
    "python": lambda: _Random(lambda x: x * (1 + 0.01 * random.random())),
    "numpy": lambda: _Random(lambda x: x * (1 + 0.01 * np.random.rand())),
    "counter": _Counter,
    "replaced": _Replaced,
    "running mean": _RunningMean,
}


def _train(*, probed, layer=None, autocast=nullcontext):
    """Everything that training ends with: weights, buffers, the next random numbers; the probe."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model, tokenizer = tiny_model(), tiny_tokenizer()
    if layer is not None:
        model.add_module("strange", layer())
        embeddings = model.get_input_embeddings()
        embeddings.register_forward_hook(lambda _, inputs, out: model.strange(out))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    with autocast():
        probe = None
        if probed:
            options = {"prompts": PROMPTS, "max_new_tokens": 6, "drawn": 6, "max_overhead": None}
            probe = LoopProbe(model, optimizer, tokenizer, **options)
        for _ in range(2):
            with torch.autocast("cpu", enabled=False):
                model(**batch, labels=batch["input_ids"]).loss.backward()
            with nullcontext() if probe is None else probe.step():
                optimizer.step()
            optimizer.zero_grad()
    numbers = random.random(), np.random.rand(), float(torch.rand(()))
    return model.state_dict(), numbers, probe


@pytest.mark.parametrize("name", STRANGE)
def test_random_numbers_and_buffers_are_training_s_own(name):
    alone, numbers, _ = _train(probed=False, layer=STRANGE[name])
    watched, with_probe, probe = _train(probed=True, layer=STRANGE[name])
    assert alone.keys() == watched.keys()
    for key, value in alone.items():
        assert torch.equal(value, watched[key]), key
    assert with_probe == numbers
    counts = name in ("counter", "replaced")
    assert (probe.off is None) == counts
    assert counts or "gives two answers" in str(probe.off)


def test_autocast_around_the_probe_changes_no_number():
    rows = [
        _train(probed=True, autocast=around)[2].rows
        for around in (nullcontext, lambda: torch.autocast("cpu", torch.bfloat16))
    ]
    for plain, cast in zip(*rows, strict=True):
        for key in ("entropy", "predicted", "measured", "measured_low", "measured_high"):
            assert plain[key] == cast[key], key
