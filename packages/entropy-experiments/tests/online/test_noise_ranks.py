"""The noise scale between ranks, under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from entropy_experiments.distributed import Ranks
from entropy_experiments.online.noise_scale import NoiseScale, adam_preconditioner
from entropy_experiments.online.trl_noise import StepNoise
from oracles.processes import on_ranks

pytestmark = pytest.mark.invariant


def _between_ranks(parts: int) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """A DDP loop of `parts` backward passes a step; and the core on all the same gradients."""
    ranks = Ranks.all()
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3, bias=False, dtype=torch.float64)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    params = dict(model.named_parameters())
    noise = StepNoise(params, lambda: optimizer, ranks=ranks, window=None, rows=None)
    core = NoiseScale(params)
    draws = torch.Generator().manual_seed(1)
    row = None
    for step in range(6):
        data = torch.randn(ranks.size, parts, 4, 6, generator=draws, dtype=torch.float64)
        core.open_step(adam_preconditioner(optimizer, params))
        for rank in range(ranks.size):  # each rank's mean gradient, by hand
            loss = sum(model(x).square().sum(1).mean() for x in data[rank]) / parts
            core.add(
                {"weight": torch.autograd.grad(loss, model.weight)[0]},
                weight=4.0 * parts,
            )
        core.close_step(distributed=False)
        noise.open(4.0 * parts)
        for k, x in enumerate(data[ranks.rank]):
            passing = wrapped.no_sync() if k + 1 < parts else torch.enable_grad()
            with passing:
                (wrapped(x).square().sum(1).mean() / parts).backward()
        row = noise.close(step, 4.0 * parts)
        optimizer.step()
        optimizer.zero_grad()
    noise.stop()
    return row, {name: core.estimate(name).as_dict() for name in ("raw", "adam")}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_between_ranks_it_sees_each_rank_s_own_gradient(parts):
    """DDP has averaged `.grad` by then, and one pass a step is enough."""
    (row, expected), (nothing, _) = on_ranks(2, _between_ranks, parts)
    assert nothing is None
    for metric in ("raw", "adam"):
        for part in ("signal", "noise"):
            assert row[metric][part]["value"] == pytest.approx(
                expected[metric][part]["value"], rel=1e-10
            )
