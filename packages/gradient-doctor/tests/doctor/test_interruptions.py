"""What a signal handler raises reaches the program, wherever the doctor is at that moment."""

import functools
import signal

import pytest
import torch
from torch import nn

from gradient_doctor import Doctor, session
from gradient_doctor.interruptions import is_the_programs
from gradient_doctor.session import STRICT, Detector


class MyTimeoutError(Exception):
    pass


class Alarm:
    def __call__(self, number, frame):
        raise MyTimeoutError


def handler(number, frame):
    raise MyTimeoutError


def builtin(number, frame):
    raise ValueError("mine")


HANDLERS = {
    "function": (handler, MyTimeoutError),
    "object": (Alarm(), MyTimeoutError),
    "partial": (functools.partial(handler), MyTimeoutError),
    "builtin error": (builtin, ValueError),
}
FACTS = ("op", "backward_starts", "backward_ended", "event", "step_ended")


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch):
    monkeypatch.delenv(STRICT, raising=False)
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def train(doctor, model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).square().mean().backward()
        optimizer.step()
        doctor.step()


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("kind", HANDLERS)
def test_a_handlers_error_is_not_ours(kind, fact):
    """The signal comes while a detector is being told something."""
    handle, error = HANDLERS[kind]
    signal.signal(signal.SIGUSR1, handle)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Doctor({"m": model}, {"o": optimizer}, mode="trace") as doctor:
        train(doctor, model, optimizer)

        class Interrupted(Detector):
            pass

        setattr(Interrupted, fact, lambda self, *facts: signal.raise_signal(signal.SIGUSR1))
        detector = Interrupted(doctor.session)
        handlers = doctor.session._handlers
        handlers.setdefault(fact, []).append(getattr(detector, fact))
        with pytest.raises(error):
            train(doctor, model, optimizer)
        handlers[fact].pop()
        train(doctor, model, optimizer)
    assert not [f for f in doctor.findings if f.number == 0], doctor.report()


def raised_in(file, error):
    """The error, as if a line of this file had raised it."""
    space = {"error": error}
    exec(compile("def run():\n    raise error", file, "exec"), space)
    with pytest.raises(type(error)) as caught:
        space["run"]()
    return caught.value


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("y"), torch.OutOfMemoryError()])
def test_our_own_mistakes_stay_ours(error):
    assert not is_the_programs(raised_in(session.__file__, error))
    assert not is_the_programs(raised_in(__file__, error))


def test_an_error_that_another_thread_puts_into_our_code():
    """As libraries for timeouts do; where the program's own code raises it, we have called that."""
    assert is_the_programs(raised_in(session.__file__, MyTimeoutError()))
    assert not is_the_programs(raised_in(__file__, MyTimeoutError()))
