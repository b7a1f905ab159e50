"""What one examination knows, and the detectors that read it.

The trace and the watch write facts here; detectors turn facts into findings. No detector touches
torch's hooks itself, so each can be read, and tested, alone.
"""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.constructors import Returned
from gradient_doctor.findings import Culprit, Finding, Severity, Site, add_note
from gradient_doctor.graph import node_of, walk
from gradient_doctor.interruptions import is_the_programs
from gradient_doctor.python_numbers import Numbers
from gradient_doctor.readable import address_of, alone, unreadable, values_of
from gradient_doctor.records import Backward, Event, OpCall, StepRecord
from gradient_doctor.registry import Registry
from gradient_doctor.sites import here
from gradient_doctor.taint import NO_CUTS, CutBook, Region, Taint, merged

STRICT = "GRADIENT_DOCTOR_STRICT"  # set in our own tests: a detector's error is an error there
_KEPT = 32  # step records


def _nothing() -> None:
    pass


class Detector:
    """Override what you need; call `self.report`. Methods left alone cost nothing."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def start(self) -> None:
        """Once modules and optimizers are known: on entry; in scripts, at the first backward."""

    def op(self, call: OpCall) -> None:
        """After a torch call of a traced step."""

    def write_starts(self, call: OpCall) -> None:
        """Before a torch call of a traced step that changes a tensor, or its `.data`."""

    def op_failed(self, call: OpCall, error: BaseException) -> None:
        """A torch call of a traced step raised."""

    def backward_starts(self, backward: Backward) -> None: ...

    def backward_ended(self, backward: Backward) -> None: ...

    def backward_failed(self, backward: Backward, error: BaseException) -> None: ...

    def event(self, event: Event) -> None: ...

    def event_ended(self, event: Event) -> None:
        """A watched call (of the scaler) returned; for now `event.data["result"]` is its result."""

    def event_failed(self, event: Event, error: BaseException) -> None:
        """A watched call (of the scaler) raised."""

    def step_ended(self, record: StepRecord) -> None: ...

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, site: Site | None) -> None:
        """The forward of an outermost module begins, in a traced step."""

    def module_ends(self, module: nn.Module, result: Any) -> None:
        """The forward of an outermost module has returned, in a traced step."""

    def peeked(self, call: OpCall) -> None:
        """A torch call of an evaluation between two looks: its name, inputs and outputs only."""

    def sampled(self, distribution: Any, value: Any, pathwise: bool, site: Site | None) -> None:
        """A distribution of torch.distributions was drawn from, by rsample if `pathwise`."""

    def density(self, distribution: Any, value: Any, result: Any, site: Site | None) -> None:
        """A distribution of torch.distributions was evaluated: a log-probability."""

    def entropy(self, distribution: Any, result: Any) -> None:
        """A distribution of torch.distributions was asked for its entropy."""

    def finish(self, error: BaseException | None) -> None:
        """At the end of the examination; `error` is what ended it, if something did."""

    def report(
        self,
        number: int,
        severity: Severity,
        what: str,
        *,
        why: str,
        fix: str,
        site: Site | None = None,
        parameters: int | tuple[str, ...] = (),
        related: tuple[Site | None, ...] = (),
    ) -> Finding:
        names = (
            self.session.registry.names(parameters) if isinstance(parameters, int) else parameters
        )
        finding = Finding(
            number,
            severity,
            what,
            why,
            fix,
            site,
            names,
            self.session.step,
            tuple(s for s in related if s is not None and s != site),
        )
        return self.session.report(finding)


class Pause:
    """Entered a dozen times in every step: a class, which costs a third of a generator."""

    __slots__ = ("session",)

    def __init__(self, session: Session) -> None:
        self.session: Session = session

    def __enter__(self) -> None:
        self.session.paused += 1

    def __exit__(self, *error: object) -> None:
        # a step that ended inside (an optimizer in a hook of backward) has begun at 0 again
        self.session.paused = max(0, self.session.paused - 1)


@dataclass
class Session:
    """The shared state. `contract` is the user's word on what must train."""

    registry: Registry
    scaler: Any = None
    contract: dict[str, Any] = field(default_factory=dict)
    trace_steps: int = 3
    findings: list[Finding] = field(default_factory=list)
    step: int = 0  # of the training, also of the parts before a resume
    first: int = 0  # the step that this examination began with
    record: StepRecord = field(default_factory=lambda: StepRecord(0, False, False))
    history: list[StepRecord] = field(default_factory=list)
    module_stack: list[nn.Module] = field(default_factory=list)
    region: Region | None = None
    grad_off_at: Site | None = None  # where set_grad_enabled(False) was called last
    grad_off_by: str = ""  # "no_grad" if a region has called it
    inference_at: Site | None = None  # where inference_mode was entered last, or made
    entering: Site | None = None  # the line that made the region which is just being entered
    opaque_depth: int = 0
    paused: int = 0
    started: bool = False
    # parameters whose `.grad` the user's own code has looked at (traced steps only)
    gradients_read: int = 0
    read_since_backward: int = 0
    cuts: CutBook = field(default_factory=CutBook)
    # calls by name in each region without gradients, of this step
    heard: dict[tuple[Site | None, str], int] = field(default_factory=dict)
    summed: tuple[int, Site | None] | None = None  # a loss that is a sum: of how many, and where
    draws: int = 0  # from distributions of torch
    ledger: Any = None  # explain.Ledger: what each parameter received, and why it did not
    awaited: int = 0  # parameters whose first gradient matters, also in steps that are not checked
    look_again: bool = False  # a detector asks for a closer look at the next step
    new_phase: bool = False  # a detector has seen a phase begin that has no optimizer
    compiled: set[Site | None] = field(default_factory=set)  # calls that torch.compile made opaque
    compiling: bool = False  # inside of such a call
    # why values could not be read, and where that was first seen; see readable.py
    unread: dict[str, Site | None] = field(default_factory=dict)
    over: bool = False  # nothing is watched any more
    asleep: bool = False  # in a loop that samples; see rounds.py
    drowsy: bool = False  # the same, between two rounds of it
    noting: bool = False  # rounds of such a loop are followed
    alive: int = 0  # calls with a gradient
    learns: Callable[[], None] = _nothing  # told of what is no part of such a loop
    strangers: set[int] = field(default_factory=set)  # threads that train beside the examined one

    def __post_init__(self) -> None:
        self.taints: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.kinds: set[type] = set()  # of modules that were called in a traced step
        # modules -> the line of their first call in a traced step
        self.called: weakref.WeakKeyDictionary[nn.Module, Site | None] = weakref.WeakKeyDictionary()
        self.arrays: dict[int | None, Taint] = {}  # numpy arrays by address
        # by address, of this step: what `.data` and detach gave, and whether that memory is still
        # theirs; `Variable(x.data)` is made unseen
        self.severed: dict[int, tuple[StorageWeakRef, Taint]] = {}
        self.numbers: Numbers = Numbers()  # plain floats that left torch
        self.returned: Returned = Returned()  # the same by value, to be known inside of tensors
        self._culprits: dict[Any, tuple[int, Culprit]] = {}  # and their place in `findings`
        self._reported: dict[Any, Finding] = {}  # since the last error
        self._noted: dict[Any, Finding] = {}  # as they stand on an error
        self._order = itertools.count()
        self._handlers: dict[str, list[Callable[..., None]]] = {}
        self._broken: set[str] = set()

    @property
    def age(self) -> int:
        """Whole steps of this examination: what it knows is no older."""
        return self.step - self.first

    # detectors

    def listen(self, detectors: list[Detector]) -> None:
        for name in (
            *("start", "op", "write_starts", "op_failed", "backward_starts", "backward_ended"),
            *("backward_failed", "event", "event_ended", "event_failed", "step_ended", "finish"),
            *("module_starts", "module_ends", "sampled", "density", "entropy", "peeked"),
        ):
            default = getattr(Detector, name)
            self._handlers[name] = [
                getattr(d, name) for d in detectors if getattr(type(d), name) is not default
            ]

    def wants(self, name: str) -> bool:
        return bool(self._handlers.get(name))

    def tell(self, name: str, *facts: Any, blind: bool = False) -> None:
        """Pass facts on; the trace is paused, so that detectors may use torch freely.

        A detector that fails on facts of tensors that cannot be read is `blind`, not broken.
        """
        handlers = self._handlers.get(name)
        if handlers:
            with self.pause(), alone():
                for handle in tuple(handlers):
                    try:
                        handle(*facts)
                    except Exception as error:
                        if not blind:
                            self.broke(getattr(handle, "__self__", None), error)

    def values(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor; None where they cannot be read, which is then reported."""
        values = values_of(tensor)
        if values is None:
            self.blind(unreadable(tensor))
        return values

    def blind(self, kind: str | None) -> None:
        if kind is not None and kind not in self.unread:
            self.unread[kind] = self.here()

    def broke(self, part: Any, error: Exception) -> None:
        """Our own mistake must not end the user's training; nor may it pass for good health.

        A detector that fails is alone in that. Without the trace nobody can be sure of anything.
        What a signal handler of the program's has raised in the meantime is no mistake of ours.
        """
        if is_the_programs(error):
            raise error
        if os.environ.get(STRICT):
            raise error
        if isinstance(part, Detector):
            for name, handlers in self._handlers.items():
                self._handlers[name] = [
                    h for h in handlers if getattr(h, "__self__", None) is not part
                ]
        else:
            self._handlers.clear()
        name = type(part).__name__
        if name in self._broken:
            return
        self._broken.add(name)
        logging.getLogger("gradient_doctor").warning("%s failed", name, exc_info=error)
        self.report(
            Finding(
                0,
                Severity.NOTE,
                f"A part of the doctor failed and was switched off: {name}.",
                f"{type(error).__name__}: {error}",
                "Training is not affected, but what this part looks for was not looked for. "
                "Please report it, with the traceback in the log.",
                step=self.step,
            )
        )

    def fail(self, name: str, error: BaseException, *facts: Any) -> None:
        """Pass an error on; what is found because of it is noted on the error itself."""
        try:
            # the error may come before the first backward: names are needed
            self.registry.flush()
        except Exception as own:
            self.broke(self, own)
        self._reported = {}  # also what was said before, and is confirmed by the error
        self.tell(name, *facts, error)
        for finding in self._reported.values():
            if finding.severity >= Severity.WARNING:
                add_note(error, finding, self._noted.get(finding.key))
                self._noted[finding.key] = finding

    def start(self) -> None:
        """Once, when the modules and optimizers are known."""
        if not self.started:
            self.started = True
            self.tell("start")

    def before_backward(self) -> None:
        """Everything that a script has made by now is known now."""
        self.registry.flush()
        self.start()

    def remember(self, record: StepRecord) -> None:
        """Keep the last few records; events hold what they speak of, and end with their step."""
        record.events.clear()
        self.severed.clear()
        self.history.append(record)
        del self.history[:-_KEPT]

    def let_go(self) -> None:
        """The examination is over: nothing of the user's is kept alive from here on."""
        self.registry.let_go()
        self.record.events.clear()
        self._handlers.clear()
        self.scaler = self.ledger = self.region = None
        self.module_stack.clear()
        self.cuts.clear()
        self.arrays.clear()
        self.severed.clear()
        self.numbers.clear()
        self.returned.clear()

    def report(self, finding: Finding) -> Finding:
        """Keep what is found at one line as one finding, with all parameters that it hits."""
        at, culprit = self._culprits.setdefault(finding.key, (len(self.findings), Culprit(finding)))
        culprit.add(finding, self.registry.in_order)
        self.findings[at : at + 1] = [culprit.whole]
        self._reported[finding.key] = culprit.whole
        return culprit.whole

    def found(self, key: Any) -> Finding | None:
        """What stands in the report under this key."""
        culprit = self._culprits.get(key)
        return None if culprit is None else self.findings[culprit[0]]

    def withdraw(self, finding: Finding) -> None:
        """What was true once, and is no longer: it leaves the report."""
        at, _ = self._culprits.pop(finding.key)
        del self.findings[at]
        self._reported.pop(finding.key, None)
        for key, (place, culprit) in self._culprits.items():
            if place > at:
                self._culprits[key] = (place - 1, culprit)

    # over a resume

    def memory(self) -> list[dict[str, Any]]:
        """All findings with what they are made of, as JSON; `recall` reads it."""
        culprits = dict(self._culprits.values())
        return [
            {"whole": f.to_dict(), "parts": [part.to_dict() for part in culprits[at].parts]}
            for at, f in enumerate(self.findings)
        ]

    def recall(self, memory: list[dict[str, Any]], *, step: int) -> None:
        """Before the first step: findings of the part of a training that `step` steps made."""
        culprits = [
            Culprit(Finding.from_dict(entry["whole"]), [*map(Finding.from_dict, entry["parts"])])
            for entry in memory
        ]
        for culprit in culprits:
            whole = culprit.whole
            self._culprits[whole.key] = (len(self.findings), culprit)
            self.findings.append(whole)
        self.step = self.first = step

    # where we are

    def pause(self) -> Pause:
        """The trace neither sees nor records what happens inside."""
        return Pause(self)

    @property
    def module_path(self) -> str:
        return self.registry.module_name(self.module_stack[-1]) if self.module_stack else ""

    def here(self) -> Site | None:
        return here(self.module_path)

    def add_event(self, kind: str, **data: Any) -> Event:
        if kind != "mode":  # policies that act are switched to eval() and back
            self.learns()
        event = Event(kind, self.step, self.here(), next(self._order), data)
        self.record.events.append(event)
        self.tell("event", event)
        return event

    # taint

    def taint_of(self, tensor: Tensor) -> Taint | None:
        """What a tensor depends on; for one made out of sight, what autograd kept of it."""
        stored = self.taints.get(tensor)
        if stored is not None:
            return stored
        if self.severed and not isinstance(tensor, nn.Parameter) and tensor.is_leaf:
            memory, before = self.severed.get(address_of(tensor)) or (None, None)
            if memory is not None and before is not None and not memory.expired():
                bit = self.registry.bit(tensor) if tensor.requires_grad else 0
                taint = replace(before, depends=before.depends | bit, live=bit)
                self.taints[tensor] = taint
                return taint
        if not tensor.requires_grad or node_of(tensor) is None:
            if type(tensor) is Tensor and not tensor.requires_grad:
                return self._returned(tensor) if self.returned else None
            if not (isinstance(tensor, nn.Parameter) or tensor.requires_grad):
                return None
            bit = self.registry.bit(tensor)
            live = bit if tensor.requires_grad else 0
            # not kept: requires_grad may be switched between two uses
            return Taint(bit, live, NO_CUTS, None, "leaf", self.step)
        graph = walk(tensor)
        bits = self.registry.bits(graph.leaves)
        opaque = frozenset(type(node).__name__ for node in graph.opaque)
        taint = Taint(bits, bits, NO_CUTS, None, "unseen", self.step, opaque)
        self.taints[tensor] = taint
        return taint

    def held_by(self, tensor: Tensor) -> list[Taint]:
        """The taints of numbers that left torch in this step, if a tensor is made of such."""
        with self.pause():
            values = values_of(tensor) if tensor.is_floating_point() else None
            return [] if values is None else self.returned.inside(values)

    def _returned(self, tensor: Tensor) -> Taint | None:
        """For a tensor that nobody saw made: what the numbers in it depend on."""
        taints = self.held_by(tensor)
        if not taints:
            return None
        depends, live, cuts, opaque = merged(taints)
        first = taints[0]
        taint = Taint(depends, live, cuts, first.site, first.op, self.step, opaque)
        self.taints[tensor] = taint
        return taint
