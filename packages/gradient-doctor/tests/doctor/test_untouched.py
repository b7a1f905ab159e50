"""The doctor changes nothing: weights, random numbers, torch itself, the user's own modes."""

import random
from contextlib import contextmanager, nullcontext

import numpy
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from doctor.recipes import actor_critic, amp_scaler, mlp_loop
from doctor.stub import LOOP
from gradient_doctor import Doctor, modes
from gradient_doctor.script import examine

STEPS = 20


@pytest.fixture
def no_default_device():
    """Afterwards there is none: torch 2.6 keeps an empty one, at which transformers 5.0 fails."""
    yield
    torch.set_default_device(None)
    if getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", ...) is None:
        del torch._GLOBAL_DEVICE_CONTEXT.device_context


def weights(*modules):
    return [p.detach().clone() for module in modules for p in module.parameters()]


def random_states():
    """Draws, so that they can be compared; after the last step it does not matter."""
    return torch.rand(4), torch.tensor(numpy.random.rand(4)), torch.tensor(random.random())


def plain(options):
    model, optimizer, scheduler = mlp_loop.build()
    generator = torch.Generator().manual_seed(1)
    with _doctor(options, {"model": model}, {"optimizer": optimizer}) as doctor:
        for _ in range(STEPS):
            batch = mlp_loop.make_batch(generator)
            optimizer.zero_grad()
            mlp_loop.loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            mlp_loop.accuracy(model, batch)
            doctor.step()
    return weights(model), [torch.rand(4, generator=generator)]


def two_optimizers(options):
    agent = actor_critic.Agent()
    generator = torch.Generator().manual_seed(1)
    modules = {"encoder": agent.encoder, "actor": agent.actor, "critic": agent.critic}
    optimizers = {"actor": agent.actor_optimizer, "critic": agent.critic_optimizer}
    with _doctor(options, modules, optimizers) as doctor:
        for _ in range(STEPS // 2):
            batch = agent.collect(generator)
            for _ in range(2):
                agent.update(batch)
                doctor.step()
    return weights(*modules.values()), [torch.rand(4, generator=generator)]


def mixed_precision(options):
    model, optimizer, scaler = amp_scaler.build()
    generator = torch.Generator().manual_seed(1)
    with _doctor(options, {"model": model}, {"optimizer": optimizer}, scaler) as doctor:
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            for _ in range(amp_scaler.MICRO):
                loss = amp_scaler.loss_of(model, *amp_scaler.make_batch(generator))
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            doctor.step()
    return weights(model), [torch.rand(4, generator=generator), torch.tensor(scaler.get_scale())]


LOOPS = {"mlp": plain, "actor_critic": two_optimizers, "amp": mixed_precision}
OPTIONS = {
    "trace": {"mode": "trace"},
    "auto": {"mode": "auto", "every": 7},
    "light": {"mode": "light", "every": 3},
    "found": {"find_steps": True, "discover": True},
}


@contextmanager
def _found(options):
    """Steps are found: the loop's own calls of `step` go nowhere."""
    with Doctor(**options):
        yield Doctor(mode="off")


def _doctor(options, modules, optimizers, scaler=None):
    if options is None:
        return nullcontext(Doctor(mode="off"))
    if options.get("discover"):
        return _found(options)
    return Doctor(modules, optimizers, scaler, **options)


def outcome(loop, options):
    random.seed(2)
    numpy.random.seed(2)
    found, own = LOOPS[loop](options)
    return [*found, *own, *random_states()]


@pytest.fixture(scope="module")
def untouched():
    return {loop: outcome(loop, None) for loop in LOOPS}


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("loop", LOOPS)
def test_bit_for_bit(untouched, loop, mode):
    found = outcome(loop, OPTIONS[mode])
    assert len(found) == len(untouched[loop])
    for ours, theirs in zip(found, untouched[loop]):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_bit_for_bit_has_teeth(untouched):
    """One random number drawn on the way, or one bit of a weight, is seen."""
    loop = "mlp"
    torch.manual_seed(0)
    found = outcome(loop, None)
    assert all(map(torch.equal, found, untouched[loop]))
    original = mlp_loop.accuracy
    try:
        mlp_loop.accuracy = lambda *_: torch.rand(())
        drawn = outcome(loop, None)
    finally:
        mlp_loop.accuracy = original
    assert not all(map(torch.equal, drawn, untouched[loop]))


# what is replaced is put back


def state_of_torch():
    """Everything that a doctor could leave behind, as plain values."""
    hooks = nn.modules.module
    owners = (
        torch, torch.Tensor, torch.autograd, torch.autograd.Function, torch.inference_mode,
        torch.optim.Optimizer, nn.Module, torch.nn.utils.clip_grad, torch.amp.GradScaler,
        torch.distributions.Distribution, torch.distributions.Normal,
    )  # fmt: skip
    names = {
        f"{owner.__name__}.{name}": id(value)
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value) or isinstance(value, (staticmethod, classmethod, property))
    }
    counts = {
        name: len(value)
        for name, value in vars(hooks).items()
        if name.startswith("_global_") and hasattr(value, "__len__")
    }
    counts["pre"] = len(_global_optimizer_pre_hooks)
    counts["post"] = len(_global_optimizer_post_hooks)
    stack = [id(mode) for mode in _get_current_function_mode_stack()]
    return names, counts, stack, torch.is_grad_enabled()


class BoomError(Exception):
    pass


def small():
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, doctor=None, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
        if doctor is not None:
            doctor.step()


@pytest.mark.parametrize("mode", ["trace", "auto", "light"])
@pytest.mark.parametrize("where", ["nowhere", "outside", "forward", "backward", "step", "nested"])
def test_everything_is_put_back(mode, where):
    model, optimizer = small()
    train(model, optimizer)  # torch's own lazy parts are loaded
    before = state_of_torch()

    def fail(*_):
        raise BoomError

    doctor = Doctor({"model": model}, {"o": optimizer}, mode=mode)
    with pytest.raises(BoomError) if where != "nowhere" else nullcontext(), doctor:
        inside = state_of_torch()
        train(model, optimizer, doctor)
        if where == "outside":
            fail()
        if where == "forward":
            model.register_forward_hook(fail)
        if where == "backward":
            model.weight.register_hook(fail)
        if where == "step":
            optimizer.register_step_pre_hook(fail)
        if where == "nested":
            try:
                raise ValueError("first")
            except ValueError:
                with torch.no_grad():
                    model.register_forward_hook(fail)
                    model(torch.ones(3, 2))
        train(model, optimizer, doctor)
    assert inside[0] != before[0]
    assert state_of_torch() == before
    assert not doctor.session.paused or where != "nowhere"


def test_a_second_doctor_starts_afresh_after_a_crash():
    model, optimizer = small()
    handle = optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(BoomError))
    with pytest.raises(BoomError), Doctor({"m": model}, {"o": optimizer}, mode="trace") as doctor:
        train(model, optimizer, doctor)
    handle.remove()
    with Doctor({"m": model}, {"o": optimizer}, mode="trace") as doctor:
        train(model, optimizer, doctor)
    assert doctor.session.step == 2
    assert len(doctor.session.history[0].backwards) == 1


def test_a_doctor_within_a_doctor():
    model, optimizer = small()
    before = state_of_torch()
    with Doctor({"m": model}, {"o": optimizer}, mode="trace") as outer:
        with Doctor({"m": model}, {"o": optimizer}, mode="trace") as inner:
            train(model, optimizer, inner)
        train(model, optimizer, outer)
    assert state_of_torch() == before
    assert inner.session.step == outer.session.step == 2


def test_a_crash_while_entering_leaves_nothing(monkeypatch):
    model, optimizer = small()
    before = state_of_torch()
    doctor = Doctor({"model": model}, {"o": optimizer}, mode="trace")

    def fail():
        raise BoomError

    monkeypatch.setattr(doctor, "_begin", fail)
    with pytest.raises(BoomError), doctor:
        pass
    assert state_of_torch() == before


def test_a_script_leaves_nothing(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(LOOP)
    examine(path)
    before = state_of_torch()
    for ending in ("", "raise ValueError", "import sys; sys.exit(3)"):
        path.write_text(f"{LOOP}\n{ending}\n")
        examine(path)
        assert state_of_torch() == before


# modes of the user's own


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def stack():
    return _get_current_function_mode_stack()


@pytest.mark.parametrize("mode", ["trace", "auto", "light"])
def test_modes_of_the_user(mode):
    """Around the doctor, inside it, and across its step boundaries, where ours comes and goes."""
    model, optimizer = small()
    with Counting() as around:
        with Doctor({"m": model}, {"o": optimizer}, mode=mode, trace_steps=2) as doctor:
            train(model, optimizer, doctor, 1)
            with Counting() as inside:
                train(model, optimizer, doctor, 3)
                doctor._look_closer = True
                train(model, optimizer, doctor, 2)
                assert stack()[-1] is inside
            assert stack()[0] is around
            assert inside not in stack()
            counted = inside.calls
            train(model, optimizer, doctor, 2)
            assert inside.calls == counted > 0
        assert stack() == [around]
        assert around.calls > counted
    assert stack() == []


def test_a_mode_that_outlives_the_doctor():
    model, optimizer = small()
    theirs = Counting()
    with Doctor({"m": model}, {"o": optimizer}, mode="trace") as doctor:
        theirs.__enter__()
        train(model, optimizer, doctor)
    assert stack() == [theirs]
    theirs.__exit__(None, None, None)
    assert stack() == []


@pytest.mark.usefixtures("no_default_device")
def test_ours_goes_back_to_its_place():
    below, above, ours = Counting(), Counting(), Counting()
    with below:
        depth = modes.depth()
        with above:
            modes.insert(ours, depth)
            assert stack() == [below, ours, above]
            modes.remove(ours)
            assert stack() == [below, above]
            with torch.device("cpu"):
                modes.insert(ours, depth)
                assert stack()[:3] == [below, ours, above]
            assert stack() == [below, ours, above]
            modes.remove(ours)
            torch.set_default_device("cpu")
            modes.insert(ours, depth)
            assert stack()[1:] == [below, ours, above]
            torch.set_default_device(None)
            assert stack() == [below, ours, above]
            modes.remove(ours)
    assert stack() == []


@pytest.mark.parametrize("mode", ["trace", "auto"])
def test_device_contexts(mode):
    model, optimizer = small()
    examining = Doctor({"m": model}, {"o": optimizer}, mode=mode, trace_steps=1)
    with torch.device("cpu"), examining as doctor:
        train(model, optimizer, doctor, 1)
        with torch.device("meta"):
            assert torch.ones(2).is_meta
            train_on = nn.Linear(2, 1)
            doctor._look_closer = True
            doctor.step()
            assert torch.ones(2).is_meta
        assert train_on.weight.is_meta
        assert not torch.ones(2).is_meta
        train(model, optimizer, doctor, 2)
    assert stack() == []


@pytest.mark.usefixtures("no_default_device")
def test_set_default_device_inside():
    model, optimizer = small()
    try:
        with Doctor({"m": model}, {"o": optimizer}, mode="trace") as doctor:
            torch.set_default_device("meta")
            assert torch.ones(2).is_meta
            torch.set_default_device("cpu")
            train(model, optimizer, doctor)
            assert not torch.ones(2).is_meta
    finally:
        torch.set_default_device(None)
    assert stack() == []


def test_an_optimizer_that_steps_inside_backward():
    """Steps are found there while torch has the trace in hand."""
    model, optimizer = small()
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with Doctor(discover=True, find_steps=True, trace_steps=2) as doctor:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).mean().backward()
    assert doctor.session.step == 6
    assert stack() == []
