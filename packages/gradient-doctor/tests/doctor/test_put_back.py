"""What the doctor replaces is found by walking torch and the standard library, before and after."""

import os
import random
import signal
import sys
import threading
import types
import warnings
from unittest import mock

import numpy
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode_stack

from doctor.stub import LOOP
from gradient_doctor import Doctor
from gradient_doctor.script import examine

ABSENT = object()
# memory of torch and Python: what was compiled or inspected, the number of the next hook
CACHES = ("_cache", "cache_", "_lru_", "linecache", "RemovableHandle.next_id")


def walked():
    """Every attribute of every module of torch and the standard library, and of their classes."""
    seen = {}
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        if not isinstance(module, types.ModuleType) or not (
            root in ("torch", "numpy", "yaml") or root in sys.stdlib_module_names
        ):
            continue
        for key, value in list(vars(module).items()):
            seen[f"{name}:{key}"] = value
            # not isinstance: deprecated stand-ins warn when they are asked for their class
            if issubclass(type(value), type) and value.__module__.partition(".")[0] == root:
                for attribute, inner in list(vars(value).items()):
                    seen[f"{value.__module__}:{value.__qualname__}.{attribute}"] = inner
    return seen


def process():
    """What belongs to the whole process and is no attribute."""
    return {
        "argv": list(sys.argv),
        "path": list(sys.path),
        "environment": dict(os.environ),
        "hooks": (sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook),
        "traces": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "signals": {number: signal.getsignal(number) for number in (2, 14, 15)},
        "filters": list(warnings.filters),
        "threads": set(threading.enumerate()),
        "folder": os.getcwd(),
        "hooks of modules": {
            name: list(value.items())
            for name, value in vars(nn.modules.module).items()
            if name.startswith("_global_") and isinstance(value, dict)
        },
        "hooks of optimizers": [
            list(hooks.items())
            for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
        ],
        "modes": _get_current_function_mode_stack(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "random of numpy": str(numpy.random.get_state()),
    }


def changes(before, after):
    """Names of attributes that are other objects, or not there any more, or new."""
    names = before.keys() | after.keys()
    return {
        name
        for name in names
        if before.get(name, ABSENT) is not after.get(name, ABSENT)
        and not any(part in name for part in CACHES)
        and (name in before or name.partition(":")[0] in {n.partition(":")[0] for n in before})
    }


def owner_name(owner):
    if isinstance(owner, type):
        return f"{owner.__module__}:{owner.__qualname__}."
    return f"{owner.__name__}:"


def small():
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, optimizer, doctor=None, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        noise = torch.distributions.Normal(model(torch.ones(3, 2)), 1.0).rsample()
        noise.square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if doctor is not None:
            doctor.step()


ENDINGS = {
    "well": None,
    "exception": ValueError("mine"),
    "Ctrl-C": KeyboardInterrupt(),
    "sys.exit": SystemExit(3),
}


@pytest.mark.parametrize("mode", ["auto", "trace", "light"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_every_patch_is_taken_off(ending, mode):
    """Has teeth: inside, the walk sees each attribute that the doctor has replaced."""
    model, optimizer = small()
    train(model, optimizer)  # torch's own lazy parts are loaded
    with Doctor({"m": model}, {"o": optimizer}, mode=mode) as first:
        train(model, optimizer, first)
    state = torch.get_rng_state()
    before, process_before = walked(), process()
    error, ended = ENDINGS[ending], None
    undo, inside = [], set()
    doctor = Doctor({"m": model}, {"o": optimizer}, mode=mode)
    try:
        with doctor:
            undo = [(owner, name) for owner, name, *_ in doctor._watch._patches._undo]
            inside = changes(before, walked())
            train(model, optimizer, doctor, 4)
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt, SystemExit) as raised:
        ended = raised
    assert ended is error
    torch.set_rng_state(state)  # the loop's own draws
    assert len(undo) > 30
    for owner, name in undo:
        assert owner_name(owner) + name in inside, f"the walk does not see {owner}.{name}"
    assert not changes(before, walked())
    assert process() == process_before


@pytest.mark.parametrize("where", [*range(12), *range(12, 400, 37)])
def test_ctrl_c_at_any_line_of_entering_and_leaving(where):
    """The interruption comes at the n-th line that the doctor itself runs at its two ends."""
    model, optimizer = small()
    with Doctor({"m": model}, {"o": optimizer}, mode="trace") as first:
        train(model, optimizer, first)
    before = walked()
    lines = iter(range(10**9))

    def interrupt(frame, event, argument):
        if "gradient_doctor" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(lines) == where:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    doctor = Doctor({"m": model}, {"o": optimizer}, mode="trace")
    for end in ("enter", "leave"):
        lines = iter(range(10**9))
        try:
            if end == "enter":
                sys.settrace(interrupt)
            with doctor:
                sys.settrace(None)
                train(model, optimizer, doctor)
                if end == "leave":
                    sys.settrace(interrupt)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        left, modes = changes(before, walked()), _get_current_function_mode_stack()
        doctor.remove()
        # a `with` calls __exit__ at its first line: what comes before that is Python's own gap
        assert (end, where) == ("leave", 0) or not (left or modes), f"line {where} of {end}"
        doctor = Doctor({"m": model}, {"o": optimizer}, mode="trace")


@pytest.mark.parametrize("ending", ["", "raise ValueError", "raise KeyboardInterrupt", "exit(3)"])
def test_a_script_leaves_nothing(tmp_path, ending):
    path = tmp_path / "train.py"
    path.write_text(LOOP)
    examine(path)
    path.write_text(f"{LOOP}\n{ending}\n")
    before = walked()
    try:
        examine(path)
    except KeyboardInterrupt:
        assert "Keyboard" in ending
    left = {name for name in changes(before, walked()) if not name.startswith("__m")}
    assert not left


# patches of others


def test_a_patch_of_the_users_that_stays_is_left_in_place():
    """It calls what it found, which is ours: that must have become a mere passage."""
    model, optimizer = small()
    original = torch.Tensor.backward
    calls = []
    try:
        with Doctor({"m": model}, {"o": optimizer}) as doctor:
            watched = torch.Tensor.backward

            def theirs(self, *args, **kwargs):
                calls.append(1)
                return watched(self, *args, **kwargs)

            torch.Tensor.backward = theirs
            train(model, optimizer, doctor)
        assert torch.Tensor.backward is theirs
        seen = len(doctor.session.history)
        train(model, optimizer)
        assert len(calls) == 4
        assert len(doctor.session.history) == seen
        with Doctor({"m": model}, {"o": optimizer}) as again:
            train(model, optimizer, again)
        assert torch.Tensor.backward is theirs
        assert again.session.step == 2
    finally:
        torch.Tensor.backward = original


def test_a_patch_of_the_users_that_is_taken_off_inside_does_not_come_back():
    model, optimizer = small()
    original = torch.optim.Optimizer.zero_grad
    patch = mock.patch.object(torch.optim.Optimizer, "zero_grad", lambda self: original(self))
    patch.start()
    with Doctor({"m": model}, {"o": optimizer}) as doctor:
        train(model, optimizer, doctor)
        patch.stop()
        train(model, optimizer, doctor)
    assert torch.optim.Optimizer.zero_grad is original


def test_doctors_that_end_in_the_order_they_began():
    model, optimizer = small()
    before = walked()
    first = Doctor({"m": model}, {"o": optimizer})
    second = Doctor({"m": model}, {"o": optimizer})
    first.__enter__()
    second.__enter__()
    train(model, optimizer)
    first.__exit__(None, None, None)
    train(model, optimizer, second)
    second.__exit__(None, None, None)
    assert not changes(before, walked())
    assert second.session.step == 2
