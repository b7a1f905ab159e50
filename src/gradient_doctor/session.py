"""What one examination knows, and the detectors that read it.

The trace and the watch write facts here; detectors turn facts into findings. No detector touches
torch's hooks itself, so each can be read, and tested, alone.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.findings import Culprit, Finding, Severity, Site
from gradient_doctor.graph import Graph, node_of, walk
from gradient_doctor.registry import Registry
from gradient_doctor.sites import here
from gradient_doctor.taint import NO_CUTS, CutBook, Region, Taint, TracedFloat, tensors_in

STRICT = "GRADIENT_DOCTOR_STRICT"  # set in our own tests: a detector's error is an error there
_KEPT = 32  # step records


@dataclass(slots=True)
class OpCall:
    """One call of a torch function while the full trace is on. Do not keep it: it holds tensors.

    `taint` is that of the first output. For a failed call there are no outputs.
    """

    name: str  # "torch.nn.functional.linear", "torch.Tensor.add_"
    site: Site | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    floats: list[TracedFloat]
    outputs: list[Tensor]
    taint: Taint | None
    result: Any = None

    @property
    def short(self) -> str:
        return self.name.rsplit(".", 1)[-1]

    @property
    def targets(self) -> list[Tensor]:
        """The tensors that the call writes to."""
        if "out" in self.kwargs:
            return tensors_in(self.kwargs["out"])
        short = self.short
        if short == "__setitem__" or (short.endswith("_") and not short.endswith("__")):
            return tensors_in(self.args[0]) if self.args else []
        if self.kwargs.get("inplace") is True:
            return self.inputs[:1]
        return []


@dataclass
class GradientFact:
    """What one parameter's `.grad` looked like after a backward (checked steps only)."""

    norm: float
    zero: bool
    finite: bool
    dtype: Any


@dataclass
class Backward:
    """One call of backward, or of autograd.grad (`kind`)."""

    number: int
    step: int
    kind: str  # "backward" or "grad"
    site: Site | None
    roots: list[Tensor]
    taint: Taint | None  # of the roots together; None without a trace
    graph: Graph | None  # of the roots, walked before the call; None without a trace
    retain_graph: bool
    inputs: list[Tensor] | None  # of autograd.grad, or backward(inputs=...)
    allow_unused: bool = False
    received: int = 0  # bits of parameters whose gradient was accumulated, or returned not None
    gradients: dict[int, GradientFact] = field(default_factory=dict)  # by bit, checked steps only
    results: Any = None  # of autograd.grad
    vanished: list[Any] = field(default_factory=list)  # sentinels.Vanished, in order of backward
    partial: list[Any] = field(default_factory=list)  # sentinels.Vanished: only some inputs
    blown: list[Any] = field(default_factory=list)  # sentinels.Blown
    leaks: list[Any] = field(default_factory=list)  # sentinels.Leak
    outdated: bool = False  # hangs on a graph of weights that have been stepped since (class 14)

    def release(self) -> None:
        """Tensors and nodes must not live longer than the user's own references to them."""
        self.roots, self.inputs, self.results = [], None, None
        for nodes in (self.vanished, self.partial, self.blown):
            nodes.clear()
        if self.graph is not None:
            self.graph.opaque.clear()
            self.graph.leaves.clear()


@dataclass
class Event:
    """A call that matters for the order of things: see `kind`.

    zero_grad (owner, parameters), grad_set (a `.grad` assigned by hand: parameter, empty),
    load_state (optimizer, state), scale, unscale,
    clip (parameters, max_norm), scaler_step (optimizer), scaler_update, step_starts,
    step (optimizer, update facts), closure (optimizer: it takes the gradients now), backward,
    checkpoint, mode (module, training).
    """

    kind: str
    step: int
    site: Site | None
    order: int
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class StepRecord:
    """Everything that happened between two step boundaries."""

    number: int
    traced: bool
    checked: bool
    events: list[Event] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)


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

    def sampled(self, law: Any, value: Any, pathwise: bool, site: Site | None) -> None:
        """A law of torch.distributions was drawn from, by rsample if `pathwise`."""

    def density(self, law: Any, value: Any, result: Any, site: Site | None) -> None:
        """A law of torch.distributions was asked for a log-probability."""

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


@dataclass
class Session:
    """The shared state. `contract` is the user's word on what must train."""

    registry: Registry
    scaler: Any = None
    contract: dict[str, Any] = field(default_factory=dict)
    trace_steps: int = 3
    findings: list[Finding] = field(default_factory=list)
    step: int = 0
    record: StepRecord = field(default_factory=lambda: StepRecord(0, False, False))
    history: list[StepRecord] = field(default_factory=list)
    module_stack: list[nn.Module] = field(default_factory=list)
    region: Region | None = None
    opaque_depth: int = 0
    paused: int = 0
    started: bool = False
    # parameters whose `.grad` the user's own code has looked at (traced steps only)
    gradients_read: int = 0
    read_since_backward: int = 0
    cuts: CutBook = field(default_factory=CutBook)
    ledger: Any = None  # explain.Ledger: what each parameter received, and why it did not
    compiled: set[Site | None] = field(default_factory=set)  # calls that torch.compile made opaque

    def __post_init__(self) -> None:
        self.taints = WeakIdKeyDictionary()
        self.arrays: dict[int | None, Taint] = {}  # numpy arrays by address
        self.numbers: dict[float, Taint] = {}  # plain floats that left torch, by value
        self._culprits: dict[Any, tuple[int, Culprit]] = {}  # and their place in `findings`
        self._reported: dict[Any, Finding] = {}  # since the last error
        self._order = itertools.count()
        self._handlers: dict[str, list[Callable[..., None]]] = {}
        self._broken: set[str] = set()

    # detectors

    def listen(self, detectors: list[Detector]) -> None:
        for name in (
            *("start", "op", "write_starts", "op_failed", "backward_starts", "backward_ended"),
            *("backward_failed", "event", "event_ended", "event_failed", "step_ended", "finish"),
            *("module_starts", "sampled", "density"),
        ):
            default = getattr(Detector, name)
            self._handlers[name] = [
                getattr(d, name) for d in detectors if getattr(type(d), name) is not default
            ]

    def wants(self, name: str) -> bool:
        return bool(self._handlers.get(name))

    def tell(self, name: str, *facts: Any) -> None:
        """Pass facts on; the trace is paused, so that detectors may use torch freely."""
        handlers = self._handlers.get(name)
        if handlers:
            with self.pause():
                for handle in tuple(handlers):
                    try:
                        handle(*facts)
                    except Exception as error:
                        self.broke(getattr(handle, "__self__", None), error)

    def broke(self, part: Any, error: Exception) -> None:
        """Our own mistake must not end the user's training; nor may it pass for good health.

        A detector that fails is alone in that. Without the trace nobody can be sure of anything.
        """
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
        self.registry.flush()  # the error may come before the first backward: names are needed
        self._reported = {}  # also what was said before, and is confirmed by the error
        self.tell(name, *facts, error)
        for finding in self._reported.values():
            note = f"gradient_doctor: {finding}"
            known = note in getattr(error, "__notes__", ())
            if finding.severity >= Severity.WARNING and not known:
                error.add_note(note)

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
        self.numbers.clear()

    def report(self, finding: Finding) -> Finding:
        """Keep what is found at one line as one finding, with all parameters that it hits."""
        at, culprit = self._culprits.setdefault(finding.key, (len(self.findings), Culprit(finding)))
        culprit.add(finding, self.registry.in_order)
        self.findings[at : at + 1] = [culprit.whole]
        self._reported[finding.key] = culprit.whole
        return culprit.whole

    # where we are

    @contextmanager
    def pause(self) -> Iterator[None]:
        """The trace neither sees nor records what happens inside."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @property
    def module_path(self) -> str:
        return self.registry.module_name(self.module_stack[-1]) if self.module_stack else ""

    def here(self) -> Site | None:
        return here(self.module_path)

    def add_event(self, kind: str, **data: Any) -> Event:
        event = Event(kind, self.step, self.here(), next(self._order), data)
        self.record.events.append(event)
        self.tell("event", event)
        return event

    # taint

    def taint_of(self, tensor: Tensor) -> Taint | None:
        """What a tensor depends on; for one made out of sight, what autograd kept of it."""
        known = self.taints.get(tensor)
        if known is not None:
            return known
        if not tensor.requires_grad or node_of(tensor) is None:
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
