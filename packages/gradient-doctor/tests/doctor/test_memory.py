"""The doctor keeps nothing of the user's alive: no tensor or node beyond its step, no model after.

Reference counts alone must do it: a graph that waits for the garbage collector is memory that a
training step has to find elsewhere.
"""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradient_doctor import Doctor

MODES = ("auto", "trace", "light", "off")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.deep, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.wide(x))
        # a dead part and a cut: what detectors keep in mind
        dead = torch.relu(self.deep(h) * 0.0)
        with torch.no_grad():
            shift = self.deep(h).mean()
        return self.head(h + dead + shift.detach())


class Ghost:
    pass


class Loop:
    """One of everything that is watched."""

    def __init__(self):
        self.net = Net()
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.seen = []

    def see(self, **things):
        self.seen += [(name, weakref.ref(thing)) for name, thing in things.items()]

    def step(self):
        x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
        law = torch.distributions.Normal(self.net(x), 1.0)
        action = law.rsample().detach()
        loss = F.cross_entropy(self.net(x), y) - law.log_prob(action).mean()
        self.optimizer.zero_grad()
        scaled = self.scaler.scale(loss)
        ghost = loss.grad_fn.metadata["ghost"] = Ghost()  # nodes themselves cannot be watched
        self.see(x=x, loss=loss, node=ghost, action=action, scaled=scaled)
        del ghost
        scaled.backward(retain_graph=True)
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.see(norm=norm, gradient=self.net.head.weight.grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        out = self.net(x)
        (first, *_) = torch.autograd.grad(out.sum(), list(self.net.parameters()), allow_unused=True)
        self.net.head.weight.data.mul_(0.99)
        with contextlib.suppress(RuntimeError):
            out.sum().backward()
        self.see(out=out, returned=first)
        self.optimizer.zero_grad()

    def alive(self):
        return [name for name, ref in self.seen if ref() is not None]


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_loop_alone_leaves_nothing(no_collector):
    loop = Loop()
    loop.step()
    assert loop.alive() == []


@pytest.mark.parametrize("mode", MODES)
def test_nothing_outlives_its_step(mode, no_collector):
    loop = Loop()
    with Doctor({"net": loop.net}, {"adam": loop.optimizer}, mode=mode, every=2) as doctor:
        for _ in range(6):
            loop.step()
            doctor.step()
            assert loop.alive() == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_the_model_goes_when_the_user_lets_it_go(mode, given):
    loop = Loop()
    everything = {"net": loop.net}, {"adam": loop.optimizer}, loop.scaler
    with Doctor(*(everything if given else ()), mode=mode) as doctor:
        for _ in range(4):
            loop.step()
            doctor.step()
    del everything
    refs = [*map(weakref.ref, loop.net.parameters())]
    refs += map(weakref.ref, (loop.net, loop.optimizer, loop.scaler))
    del loop
    gc.collect()
    assert not [ref for ref in refs if ref() is not None]
    assert doctor.report()


def test_names_stay_while_the_user_keeps_the_model():
    loop = Loop()
    with Doctor({"net": loop.net}, {"adam": loop.optimizer}) as doctor:
        loop.step()
    registry = doctor.session.registry
    assert registry.name(loop.net.head.weight) == "net.head.weight"
    assert list(registry.optimizers) == ["adam"]


def test_a_failed_step_leaves_nothing():
    loop = Loop()
    failed = False
    with Doctor({"net": loop.net}, {"adam": loop.optimizer}) as doctor:
        try:
            x = torch.randn(5, 4)
            loop.see(x=x, out=(out := loop.net(x).sum()))
            out.backward()
            out.backward()
        except RuntimeError:
            failed = True  # not pytest.raises: what it keeps of the error keeps the tensors
        assert failed
        del x, out
        doctor.step()
        gc.collect()
        assert loop.alive() == []
