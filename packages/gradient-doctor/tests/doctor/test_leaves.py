"""Bits of leaves: a long trace has no ever longer sets."""

import torch
from torch import nn

from gradient_doctor import Doctor


def test_inputs_with_a_gradient_give_their_place_back():
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with Doctor({"model": model}, {"sgd": sgd}, mode="trace") as doctor:
        registry, sizes = doctor.session.registry, []
        for _ in range(30):
            x = torch.randn(4, 3, requires_grad=True)
            model(x).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
            del x
            doctor.step()
            sizes.append(len(registry.leaves))
    assert max(sizes) == max(sizes[:6]) < 12
    assert doctor.findings == []


def test_places_of_parameters_are_not_given_away():
    """What was said of a parameter must not be taken for said of another."""
    registry = Doctor().session.registry
    parameter, owned = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    registry.add_optimizer(torch.optim.SGD([owned], lr=0.1), "sgd")
    used = registry.bits([parameter, owned]) | registry.owned
    dead = torch.ones(3, requires_grad=True)
    free = registry.bit(dead)
    registry.optimizers.clear()
    del parameter, owned, dead
    registry.sweep()
    again = torch.ones(4, requires_grad=True)
    assert registry.bit(again) == free
    assert not registry.bit(torch.ones(5, requires_grad=True)) & (used | free)


def test_layers_made_anew_are_one_leaf_once_that_is_said():
    model = nn.Linear(3, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    with Doctor({"model": model}, {"sgd": sgd}, mode="trace") as doctor:
        sizes = []
        for _ in range(20):
            head = nn.Linear(4, 1)
            head(model(torch.randn(4, 3))).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
            doctor.step()
            sizes.append(len(doctor.session.registry.leaves))
    assert max(sizes) == max(sizes[:8]) < 16
    assert [f.number for f in doctor.findings] == [6]
