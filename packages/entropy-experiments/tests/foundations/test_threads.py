"""How many threads a pass gets: as many as are quickest, and afterwards as before."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from entropy_experiments import threads
from entropy_experiments.threads import (
    AGAIN,
    ENOUGH_PASSES,
    MUCH_SLOWER,
    SHARE,
    Threads,
    choose_threads,
    chosen_threads,
    fixed_threads,
    same_threads,
    timed_pass,
)

pytestmark = pytest.mark.naive

CPU = torch.device("cpu")


class Machine:
    """A clock, and passes that take what a table says for the number of threads."""

    def __init__(self, seconds: dict[int, float]):
        self.now, self.seconds, self.used = 0.0, seconds, list[int]()

    def clock(self) -> float:
        return self.now

    def work(self) -> None:
        self.used.append(torch.get_num_threads())
        self.now += self.seconds[torch.get_num_threads()]


@pytest.fixture(autouse=True)
def four_threads(monkeypatch):
    monkeypatch.delenv(threads.VARIABLE)
    monkeypatch.setattr(threads, "_last", None)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({4: 1.0, 2: 1.9, 1: 3.6}, 4),  # large products on a quiet machine
        ({4: 60.0, 2: 1.2, 1: 1.0}, 1),  # a small model beside a busy neighbour
        ({4: 8.0, 2: 2.0, 1: 3.0}, 2),
        ({4: 1.0, 2: 1.04, 1: 1.2}, 2),  # a tie goes to fewer
        ({4: 1.0, 2: 1.04, 1: 1.045}, 1),
    ],
)
def test_the_quickest_number_is_chosen(seconds, best):
    machine = Machine(seconds)
    assert Threads(4, clock=machine.clock).choose(machine.work) == best
    assert torch.get_num_threads() == best


def test_passes_much_slower_than_before_are_timed_again():
    machine = Machine({4: 1.0, 2: 2.0, 1: 4.0})
    ours = Threads(4, clock=machine.clock)
    assert ours.due
    ours.choose(machine.work)

    def passes(count: int, *, kind: str = "score") -> None:
        for _ in range(count):
            with ours.timing(kind, 10):
                machine.work()

    ours._next = math.inf  # of time alone there is another test
    passes(ENOUGH_PASSES)
    machine.seconds = {4: 1.1 * MUCH_SLOWER, 2: 2.0, 1: 1.5}
    passes(3, kind="decode")  # of another kind: nothing is known of it yet
    assert not ours.due
    passes(1)
    assert not ours.due  # one hiccup
    passes(1)
    assert ours.due
    assert ours.choose(machine.work) == 1
    ours._next = math.inf
    passes(ENOUGH_PASSES)
    assert not ours.due


def test_now_and_then_passes_are_timed_again():
    """A machine that was busy, or quiet, by chance while they were timed; two percent at most."""
    machine = Machine({4: 0.1, 2: 0.2, 1: 0.4})
    ours = Threads(4, clock=machine.clock)
    ours.choose(machine.work)
    took = machine.now
    assert took * SHARE > AGAIN
    machine.now = took + 0.99 * SHARE * took
    assert not ours.due
    machine.now = took + 1.01 * SHARE * took
    assert ours.due
    quick = Machine({4: 1e-4, 2: 2e-4, 1: 4e-4})
    ours = Threads(4, clock=quick.clock)
    ours.choose(quick.work)
    quick.now += 0.99 * AGAIN
    assert not ours.due
    quick.now += 0.02 * AGAIN
    assert ours.due


def test_a_slow_pass_does_not_become_the_usual_one():
    """Teeth: with hiccups among what is usual, the next ones would not be noticed."""
    machine = Machine({4: 1.0, 2: 2.0, 1: 4.0})
    ours = Threads(4, clock=machine.clock)
    ours.choose(machine.work)
    ours._next = math.inf
    for slow in [1.0] * ENOUGH_PASSES + [9.0, 1.0] * ENOUGH_PASSES:
        machine.seconds = {4: slow}
        with ours.timing("score", 10):
            machine.work()
    assert not ours.due  # never two in a row
    assert max(ours._seconds["score"]) == pytest.approx(0.1)


def test_nothing_is_chosen_unless_asked():
    choose_threads(CPU, lambda: pytest.fail("a trial"))
    with timed_pass("score", 1, CPU, lambda: pytest.fail("a trial")):
        assert torch.get_num_threads() == 4


def test_inside_it_is_chosen_once_and_afterwards_as_before(monkeypatch):
    machine = Machine({4: 60.0, 2: 1.2, 1: 1.0})
    monkeypatch.setattr(threads, "Threads", partial(Threads, clock=machine.clock))
    with chosen_threads():
        with timed_pass("score", 1, CPU, machine.work):
            assert torch.get_num_threads() == 1
        trials = len(machine.used)
        with timed_pass("score", 1, CPU, machine.work), chosen_threads():
            assert torch.get_num_threads() == 1  # inside another: the outer one's choice
        assert len(machine.used) == trials
    assert torch.get_num_threads() == 4
    with chosen_threads():  # the next step of a training: what was found out is still known
        assert torch.get_num_threads() == 1
        with timed_pass("score", 1, CPU, machine.work):
            assert len(machine.used) == trials
        choose_threads(CPU, machine.work, anew=True)  # another model
        assert len(machine.used) > trials
    assert torch.get_num_threads() == 4


def test_a_choice_made_inside_another_context_stays_until_that_one_ends():
    """As of a probe inside `entropy-probe train`: a neighbour that it notices is there after it."""
    quiet, busy = {4: 1.0, 2: 1.9, 1: 3.6}, {4: 60.0, 2: 1.2, 1: 1.0}
    machine = Machine(quiet)
    with chosen_threads():
        assert threads._current is not None
        threads._current._clock = machine.clock
        choose_threads(CPU, machine.work, anew=True)
        assert torch.get_num_threads() == 4
        machine.seconds = busy
        with chosen_threads():
            choose_threads(CPU, machine.work, anew=True)
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4


def test_a_number_that_is_given_is_kept(monkeypatch):
    def trial():
        pytest.fail("a trial")

    with fixed_threads(3), chosen_threads(), timed_pass("score", 1, CPU, trial):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 4
    monkeypatch.setenv(threads.VARIABLE, "4")
    with fixed_threads(None), chosen_threads(), timed_pass("score", 1, CPU, trial):
        assert torch.get_num_threads() == 4


def test_no_trial_inside_a_derivative_nor_on_a_device():
    def trial():
        pytest.fail("a trial")

    def f(x):
        with timed_pass("score", 1, CPU, trial):
            return x * x

    with chosen_threads():
        torch.func.jvp(f, (torch.ones(2),), (torch.ones(2),))
        choose_threads(torch.device("cuda"), trial)


def test_nothing_is_tried_in_passes_that_ranks_make_together(four_threads):
    tried = []
    with chosen_threads():
        with same_threads():
            choose_threads(CPU, lambda: tried.append("together"), anew=True)
        assert tried == []
        choose_threads(CPU, lambda: tried.append("alone"), anew=True)
    assert set(tried) == {"alone"}


def test_a_failing_command_gives_the_threads_back():
    with pytest.raises(RuntimeError, match="broken"), fixed_threads(2), chosen_threads():
        raise RuntimeError("broken")
    assert torch.get_num_threads() == 4
