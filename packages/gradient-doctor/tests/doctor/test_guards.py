"""Our own mistakes: the user's call is made exactly once, with its own result or its own error."""

import contextlib
import functools
import os
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gradient_doctor import Doctor
from gradient_doctor.guards import guarded, observed
from gradient_doctor.session import STRICT


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch):
    monkeypatch.delenv(STRICT, raising=False)


class Bench:
    """A model, and everything that the doctor stands in front of."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.ones(2, 3)
        self.calls = 0

    def loss(self):
        return self.model(self.x).square().mean()

    def backward(self):
        self.loss().backward()
        return self.model.weight.grad

    def grad(self):
        return torch.autograd.grad(self.loss(), [self.model.weight])[0]

    def step(self):
        self.loss().backward()
        self.sgd.step()
        return self.model.weight

    def closure(self):
        def once():
            self.calls += 1
            self.sgd.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.sgd.step(once)
        return self.model.weight

    def zero_grad(self):
        self.loss().backward()
        self.sgd.zero_grad()
        self.calls += self.model.weight.grad is None
        return self.model.weight

    def clip_norm(self):
        self.loss().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        return self.model.weight.grad

    def clip_value(self):
        self.loss().backward()
        nn.utils.clip_grad_value_(self.model.parameters(), 0.01)  # a generator
        return self.model.weight.grad

    def scaler(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(self.loss()).backward()
        scaler.unscale_(self.sgd)
        scaler.step(self.sgd)
        scaler.update()
        return self.model.weight

    def function(self):
        bench = self

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                bench.calls += 1
                return 2 * x

            @staticmethod
            def backward(ctx, gradient):
                return 2 * gradient

        return Twice.apply(self.loss())

    def from_numpy(self):
        return torch.from_numpy(np.ones(3, dtype=np.float32))

    def number(self):
        loss = self.loss()
        twice = 2.0 * loss.item()
        return loss.detach() + twice

    def train(self):
        self.calls += self.model.eval().training is False
        return self.model.train().weight

    def inference(self):
        with torch.inference_mode():
            return self.model(self.x).clone()

    def law(self):
        law = torch.distributions.Normal(self.loss(), 1.0)
        torch.manual_seed(1)
        return law.log_prob(law.sample()) + law.rsample()

    def makes(self):
        torch.manual_seed(2)
        made = nn.Linear(3, 1)
        adam = torch.optim.Adam(made.parameters(), lr=0.5)
        torch.optim.lr_scheduler.StepLR(adam, 1)
        adam.load_state_dict(torch.optim.Adam(made.parameters(), lr=0.25).state_dict())
        self.calls += adam.param_groups[0]["lr"] == 0.25
        return made.weight

    def grad_mode(self):
        self.model.weight.requires_grad_(False)
        with torch.no_grad():
            out = self.model(self.x)
        self.model.weight.grad = torch.ones_like(self.model.weight)
        return out


ACTIONS = [name for name in vars(Bench) if not name.startswith("_") and name != "loss"]


def sabotage(session):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("our own mistake")

    for name in ("here", "add_event", "taint_of", "before_backward", "values"):
        setattr(session, name, broken)
    session.registry.made = session.registry.add_optimizer = broken
    session.numbers.behind = broken


@pytest.mark.parametrize("action", ACTIONS)
def test_our_mistakes_do_not_reach_the_user(action):
    plain, watched = Bench(), Bench()
    expected = getattr(plain, action)()
    with Doctor({"model": watched.model}, {"sgd": watched.sgd}, mode="trace") as doctor:
        sabotage(doctor.session)
        got = getattr(watched, action)()
    assert torch.equal(got, expected)
    assert watched.calls == plain.calls
    assert doctor.session.paused == 0
    failed = [f for f in doctor.findings if "switched off" in f.what]
    assert failed  # has teeth: every action does pass by us
    assert "ZeroDivisionError" in failed[0].why


@pytest.mark.parametrize("action", ACTIONS)
def test_without_sabotage_nothing_fails(action):
    watched = Bench()
    with Doctor({"model": watched.model}, {"sgd": watched.sgd}, mode="trace") as doctor:
        getattr(watched, action)()
    assert not [f for f in doctor.findings if "switched off" in f.what]


def test_errors_of_the_user_come_out_as_they_are():
    model = nn.Linear(3, 1)
    unfit = pytest.raises(RuntimeError, match="grad can be implicitly created")
    with Doctor({"model": model}, {}), unfit as caught:
        model(torch.ones(2, 3)).backward()
    assert caught.value.__context__ is None
    frames = []
    traceback = caught.value.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "_run" not in frames  # of the observer: the call itself was made outside of it


class Part:
    def __init__(self):
        self.session = Doctor().session

    @guarded
    def hook(self, error):
        raise error


def test_the_end_of_an_iterator_passes_through_a_closure():
    """A generator cannot let StopIteration through: Python makes a RuntimeError of it."""
    bench = Bench()
    batches = iter([bench.x])

    def closure():
        next(batches)
        bench.sgd.zero_grad()
        loss = bench.loss() * float("nan")
        loss.backward()
        return loss

    with Doctor({"model": bench.model}, {"sgd": bench.sgd}) as doctor:
        bench.sgd.step(closure)
        with pytest.raises(StopIteration) as caught:
            bench.sgd.step(closure)
        doctor.step()
        assert doctor.session.paused == 0
    assert [f.number for f in doctor.findings] == [27]  # and nothing was switched off
    assert caught.value.__cause__ is None


def test_an_error_of_ours_on_the_way_of_a_stop_is_told():
    """Has teeth: only the very error that Python makes of theirs is let pass."""
    broken = []
    session: Any = SimpleNamespace(
        over=False, strangers=(), broke=lambda _, error: broken.append(error)
    )

    def observe():
        try:
            yield
        except StopIteration as error:
            raise RuntimeError("ours") from ValueError(error)

    def theirs():
        raise StopIteration

    with pytest.raises(StopIteration):
        observed(session, None, observe)(theirs)()
    assert [str(error) for error in broken] == ["ours"]


def test_a_hook_ends_with_itself():
    assert Part().hook(ValueError("ours")) is None
    with pytest.raises(KeyboardInterrupt):  # not an error of ours
        Part().hook(KeyboardInterrupt())


def test_an_observer_that_yields_twice_is_told():
    part = Part()

    def observe():
        yield
        yield

    assert observed(part.session, part, observe)(lambda: 5)() == 5
    assert "yielded twice" in part.session.findings[0].why


# optimizer steps that raise


class Moody(torch.optim.SGD):
    bad = 0

    @torch.no_grad()
    def step(self, closure=None):
        if self.bad:
            self.bad -= 1
            raise OSError("transient")
        return super().step(closure)


def test_a_step_that_raises_does_not_end_the_trace():
    model, x = nn.Linear(3, 1), torch.ones(2, 3)
    head = nn.Linear(1, 1)
    optimizer = Moody([*model.parameters(), *head.parameters()], lr=0.1)
    optimizer.bad = 1
    with Doctor({"model": model, "head": head}, {"moody": optimizer}, mode="trace") as doctor:
        for _ in range(3):
            optimizer.zero_grad()
            head(x[:, :1]).mean().backward()
            with contextlib.suppress(OSError):
                optimizer.step()
            assert doctor.session.paused == 0
            # the rest of the step, with a cut that only a trace can see
            optimizer.zero_grad()
            (model(x).detach().mean() + head(x[:, :1]).mean()).backward()
            optimizer.step()
            doctor.step()
    cut = [f for f in doctor.findings if f.number == 3]
    assert cut
    assert cut[0].parameters == ("model.weight", "model.bias")


def test_a_step_inside_of_a_step_that_raises():
    model = nn.Linear(3, 1)
    inner = Moody(model.parameters(), lr=0.1)

    class Outer(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            try:
                inner.step()
            except OSError:
                seen.append(doctor.session.paused)
            return super().step(closure)

    outer = Outer(model.parameters(), lr=0.1)
    inner.bad, seen = 1, []
    with Doctor({"model": model}, {"outer": outer, "inner": inner}, mode="trace") as doctor:
        model(torch.ones(2, 3)).mean().backward()
        outer.step()
        assert seen == [1]  # the outer step was still running
        assert doctor.session.paused == 0


# forked children


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, k):
        watched = hasattr(torch.Tensor.backward, "__wrapped__")
        modes = len(torch.overrides._get_current_function_mode_stack())
        row = torch.full((3,), float(k))
        return row, torch.tensor([watched, modes, type(row.sum().item()) is not float])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_workers_of_a_loader_are_not_watched(caplog):
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Rows(), 4, num_workers=2, multiprocessing_context="fork")
    with Doctor({"model": model}, {"sgd": sgd}, mode="trace") as doctor:
        assert hasattr(torch.Tensor.backward, "__wrapped__")
        for rows, traces in loader:
            assert not traces.any()
            model(rows).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
            doctor.step()
        assert hasattr(torch.Tensor.backward, "__wrapped__")  # the parent's own is untouched
        assert doctor.mode == "trace"
    assert doctor.findings == []
    assert not caplog.records


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_can_leave_the_block():
    read, write = os.pipe()
    doctor = Doctor({"model": nn.Linear(3, 1)}, {}, mode="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python: threads may be running
        with doctor:
            child = os.fork()
        if child == 0:
            os.write(write, f"{doctor.mode} {len(doctor.findings)}".encode())
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"off 0"
    assert doctor.mode == "trace"


# threads


def test_only_one_thread_is_examined():
    models = [nn.Linear(3, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    turn = threading.Barrier(2, timeout=20)

    def work(k):
        for _ in range(10):
            turn.wait()
            optimizers[k].zero_grad()
            models[k](torch.ones(2, 3)).square().mean().backward()
            optimizers[k].step()

    modules: dict[str, nn.Module] = {f"model_{k}": model for k, model in enumerate(models)}
    with Doctor(modules, {f"sgd_{k}": o for k, o in enumerate(optimizers)}, mode="trace") as doctor:
        for _ in range(3):
            threads = [threading.Thread(target=functools.partial(work, k)) for k in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            doctor.step()
    notes = [f for f in doctor.findings if "More than one thread" in f.what]
    assert notes
    assert not [f for f in doctor.findings if f.number in (5, 7, 8, 21)]
