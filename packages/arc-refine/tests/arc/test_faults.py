"""The six faults of document 003, injected one by one: each is caught in the first steps.

Its gradients were blocked (no_grad on the refinement), its policy loss made a constant (RL info
detached), a projection drawn anew in every forward, half-precision parameters scaled, one graph
used by two backwards, and colours given as floats.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from arc_refine import efe as efe_module
from arc_refine import step as step_module
from arc_refine.contracts import ContractError
from arc_refine.live import LiveContracts
from gradient_doctor import Doctor

from .small import Small


def watched(small, steps=2):
    """As `train` does it: what is checked before, in and after the first steps."""
    live = LiveContracts(small.training, steps, small.data.batch)
    try:
        live.before(small.episodes())
        for number in range(steps):
            live.run(lambda observer: small.step(number, observer))
        live.after(small.episodes())
    finally:
        live.close()


def caught(small):
    with pytest.raises(ContractError) as caught:
        watched(small)
    return caught.value


def first_step(small):
    """The error of the first step, without what is checked before it."""
    live = LiveContracts(small.training, 2, small.data.batch)
    try:
        with pytest.raises(ContractError) as caught:
            live.run(lambda observer: small.step(0, observer))
    finally:
        live.close()
    return caught.value


def contracts(error):
    return [b.contract for b in error.breaches]


def test_no_grad_on_the_refinement(tasks, monkeypatch):
    monkeypatch.setattr(step_module, "refine", torch.no_grad()(step_module.refine))
    error = caught(Small(tasks))
    (breach,) = error.breaches
    assert breach.contract == "G1"
    assert "encoder.lm.embed_tokens.weight" in breach.parameters
    assert "encoder.text.weight" in breach.parameters
    assert not any(name.startswith("agent.") for name in breach.parameters)


def detach_rl_info(small, monkeypatch):
    policy = small.networks.policy
    true = type(policy).log_prob
    monkeypatch.setattr(policy, "log_prob", lambda s, u: true(policy, s, u).detach())


def test_detached_rl_info(tasks, monkeypatch):
    small = Small(tasks)
    detach_rl_info(small, monkeypatch)
    error = caught(small)
    assert contracts(error) == ["G11"]
    assert "its loss is a constant" in str(error)


def test_detached_rl_info_in_the_step(tasks, monkeypatch):
    """With the entropy bonus the loss still has a gradient; the mean is left untrained."""
    small = Small(tasks)
    detach_rl_info(small, monkeypatch)
    (breach,) = first_step(small).breaches
    assert breach.contract == "G2"
    assert "policy.mean.weight" in breach.parameters


def test_detached_rl_info_without_a_bonus(tasks, monkeypatch):
    """As in the document: backward itself refuses, and the doctor names the class."""
    small = Small(tasks, entropy_weight=0.0)
    detach_rl_info(small, monkeypatch)
    monkeypatch.setattr(small.networks.policy, "entropy", lambda s: torch.zeros(len(s)))
    error = first_step(small)
    assert contracts(error) == ["G14"]
    assert "does not require grad" in str(error)
    assert "constant-loss" in error.report or "explicit-cut" in error.report


def test_throwaway_projection(tasks):
    small = Small(tasks)
    encoder = small.networks.encoder
    true = type(encoder).forward
    encoder.forward = lambda inputs: nn.Linear(16, 16)(true(encoder, inputs))
    assert contracts(caught(small)) == ["G12"]


def test_throwaway_projection_seen_by_the_doctor(tasks):
    small = Small(tasks)
    encoder = small.networks.encoder
    true = type(encoder).forward
    encoder.forward = lambda inputs: nn.Linear(16, 16)(true(encoder, inputs))
    live = LiveContracts(small.training, 2, small.data.batch)
    with pytest.raises(ContractError, match="6 throwaway-module"):
        _two(live, small)


def _two(live, small):
    try:
        for number in range(2):
            live.run(lambda observer: small.step(number, observer))
    finally:
        live.close()


def test_fp16_parameters_with_a_scaler(tasks):
    small = Small(tasks)
    small.networks.encoder.lm.half()
    small.training.precision.scaler = torch.amp.GradScaler("cpu")
    error = caught(small)
    assert contracts(error) == ["G6"]
    assert all(name.startswith("encoder.lm.") for name in error.breaches[0].parameters)


def test_fp16_parameters_with_a_scaler_seen_by_the_doctor():
    """The same two facts without the contract in front: the doctor's own finding."""
    half = nn.Linear(4, 1).half()
    sgd = torch.optim.SGD(half.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with Doctor({"lm": half}, {"sgd": sgd}, scaler) as doctor:
        loss = half(torch.randn(8, 4).half()).float().square().mean()
        scaler.scale(loss).backward()
        with pytest.raises(ValueError, match="unscale FP16"):
            scaler.unscale_(sgd)
        doctor.step()
    assert 15 in [finding.number for finding in doctor.findings]


def test_one_graph_for_two_backwards(tasks, monkeypatch):
    small = Small(tasks)
    policy = small.networks.policy
    monkeypatch.setattr(policy, "state", lambda e, f: torch.cat([e, f], dim=-1))
    error = caught(small)
    assert contracts(error) == ["G14"]
    assert "second time" in str(error)
    assert "second-backward" in error.report


def as_floats(small):
    true = small.data.batch

    def batch(episodes, *numbers):
        found = true(episodes, *numbers)
        floats = found.targets.target_BHW.float()
        return replace(found, targets=replace(found.targets, target_BHW=floats))

    object.__setattr__(small.data, "batch", batch)


def test_float_targets(tasks):
    small = Small(tasks)
    as_floats(small)
    with pytest.raises(TypeError, match=r"targets are torch.float32; expected torch.int64 class"):
        watched(small)


def test_float_targets_behind_the_check(tasks, monkeypatch):
    """Should somebody remove the check: the step itself fails, as G14."""
    small = Small(tasks)
    as_floats(small)
    monkeypatch.setattr(efe_module, "check_targets", lambda targets: targets.target_BHW)
    monkeypatch.setattr(small.networks.efe, "observe", lambda targets: None)
    assert contracts(caught(small)) == ["G14"]


def test_the_report_says_what_to_do(tasks, monkeypatch):
    monkeypatch.setattr(step_module, "refine", torch.no_grad()(step_module.refine))
    text = str(caught(Small(tasks)))
    assert text.startswith("Training stopped, broken: ")
    assert "fix: " in text
    assert "parameters (" in text
