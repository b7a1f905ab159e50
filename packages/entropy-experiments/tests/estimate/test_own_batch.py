"""A step judged by its own batch: across prompts it is unbiased, in sample it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entropy_experiments import Objective
from entropy_experiments.estimate.own_batch import OwnBatch
from entropy_experiments.online.evaluation_rollouts import Supplied
from entropy_experiments.online.probe import OnlineProbe
from entropy_experiments.types import UpdateBatch
from entropy_experiments.update.gradient import loss_gradient
from oracles.markov import MarkovPolicy

pytestmark = pytest.mark.statistical

PROMPTS, GROUP, BATCHES = 8, 2, 250
LR = 1e-4


def _batch(policy: Any, generator: torch.Generator) -> UpdateBatch:
    """Rewards that the policy can do something about: how many 2s a response has."""
    rollouts = policy.draw(PROMPTS, GROUP, generator)
    hits_N = ((rollouts.tokens_NS == 2) & rollouts.response_NS).sum(1).double()
    reward_NG = hits_N.view(-1, GROUP)
    advantage_N = (reward_NG - reward_NG.mean(1, keepdim=True)).flatten()
    advantage_NS = torch.where(rollouts.response_NS, advantage_N[:, None], 0.0)
    return UpdateBatch(rollouts=rollouts, advantage_NS=advantage_NS)


@pytest.mark.slow
def test_across_prompts_it_is_unbiased_and_in_sample_it_is_not():
    """Plain SGD: the step is linear in the gradient, so the truth is the mean gradient's slope."""
    policy: Any = MarkovPolicy.random(1, horizon=12, stop=0.1)
    table = policy.params["table"]
    generator = torch.Generator().manual_seed(0)
    objective = Objective(loss="reinforce")
    across, in_sample, gradients = [], [], []
    for _ in range(BATCHES):
        batch = _batch(policy, generator)
        gradient = loss_gradient(policy, batch, objective, microbatch=64).gradient
        optimizer = torch.optim.SGD([table], lr=LR)
        probe = OnlineProbe(policy, Supplied(), microbatch=64)
        own = OwnBatch(batch=batch, objective=objective)
        found = probe.before_step(gradient, optimizer, own=own)
        across.append(found.change.value / LR)
        assert isinstance(probe.buffer, Supplied)
        probe.skip()
        probe.buffer.put(batch.rollouts)
        in_sample.append(probe.before_step(gradient, optimizer).change.value / LR)
        gradients.append(gradient["table"])
    leaf = table.detach().requires_grad_()
    (g_H,) = torch.autograd.grad(policy.exact_entropy({"table": leaf}), leaf)
    truth_B = torch.stack([-(g_H * g).sum() for g in gradients])
    # Batch by batch against its own true slope: much less noisy than the mean alone.
    for values, biased in ((across, False), (in_sample, True)):
        gap_B = torch.tensor(values, dtype=torch.float64) - truth_B
        z = float(gap_B.mean() / (gap_B.std() / BATCHES**0.5))
        assert (abs(z) > 5) == biased, z
        assert abs(z) < 3.9 or biased


def test_the_step_is_measured_without_its_own_part_too():
    policy: Any = MarkovPolicy.random(2, horizon=12, stop=0.1)
    table = policy.params["table"]
    batch = _batch(policy, torch.Generator().manual_seed(3))
    objective = Objective(loss="reinforce")
    gradient = loss_gradient(policy, batch, objective, microbatch=64).gradient
    table.grad = gradient["table"]
    optimizer = torch.optim.SGD([table], lr=LR)
    probe = OnlineProbe(policy, Supplied(), microbatch=64)
    own = OwnBatch(batch=batch, objective=objective)
    prediction = probe.before_step(gradient, optimizer, own=own)
    optimizer.step()
    found = probe.after_step()
    # A tiny step: the bend is second order, whatever the linear part was corrected by.
    assert abs(found.bend.value) < 0.02 * abs(prediction.change.value)


def test_second_order_takes_only_the_bend_in_sample():
    """Across prompts the slope, in sample the even part: the same even part as of the batch."""
    policy: Any = MarkovPolicy.random(2, horizon=12, stop=0.1)
    batch = _batch(policy, torch.Generator().manual_seed(3))
    objective = Objective(loss="reinforce")
    gradient = loss_gradient(policy, batch, objective, microbatch=64).gradient
    optimizer = torch.optim.SGD([policy.params["table"]], lr=100 * LR)
    probe = OnlineProbe(policy, Supplied(), microbatch=64, order=2)
    assert isinstance(probe.buffer, Supplied)
    own = probe.before_step(gradient, optimizer, own=OwnBatch(batch=batch, objective=objective))
    probe.skip()
    probe.buffer.put(batch.rollouts)
    seen = probe.before_step(gradient, optimizer)
    assert own.second_order is not None
    assert seen.second_order is not None
    assert abs(own.change.value - seen.change.value) > 0.01 * abs(seen.change.value)
    bend, bend_seen = own.second_order - own.change, seen.second_order - seen.change
    assert bend.value == pytest.approx(bend_seen.value, rel=1e-9)
    assert bend.value != 0


def test_another_loss_than_the_trainer_s_is_refused():
    policy: Any = MarkovPolicy.random(2, horizon=12, stop=0.1)
    batch = _batch(policy, torch.Generator().manual_seed(3))
    gradient = loss_gradient(policy, batch, Objective(loss="reinforce"), microbatch=64).gradient
    probe = OnlineProbe(policy, Supplied(), microbatch=64)
    other = OwnBatch(batch=batch, objective=Objective(loss="grpo"))
    optimizer = torch.optim.SGD(list(policy.params.values()), lr=LR)
    with pytest.raises(ValueError, match=r"differs from the trainer's by \d+\.\d%"):
        probe.before_step(gradient, optimizer, own=other)
    one = batch.take(torch.arange(GROUP), slice(None))
    with pytest.raises(ValueError, match="one prompt; expected at least 2"):
        OwnBatch(batch=one, objective=other.objective)
