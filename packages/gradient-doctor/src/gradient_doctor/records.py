"""The facts that the trace and the watch write down: calls, backwards, events, steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradient_doctor.findings import Site
from gradient_doctor.graph import Graph
from gradient_doctor.python_numbers import Number
from gradient_doctor.taint import Taint, tensors_in


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
    numbers: list[Number]
    outputs: list[Tensor]
    taint: Taint | None
    result: Any = None
    short: str = field(init=False)  # "linear", "add_"

    def __post_init__(self) -> None:
        self.short = self.name.rsplit(".", 1)[-1]

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
    arrived: int = 0  # the same of `Session.awaited` alone, in steps that are not checked
    gradients: dict[int, GradientFact] = field(default_factory=dict)  # by bit, checked steps only
    results: Any = None  # of autograd.grad
    vanished: list[Any] = field(default_factory=list)  # sentinels.Vanished, in order of backward
    partial: list[Any] = field(default_factory=list)  # sentinels.Vanished: only some inputs
    blown: list[Any] = field(default_factory=list)  # sentinels.Blown
    cancelled: list[Any] = field(default_factory=list)  # cancelled.Cancelled
    leaks: list[Any] = field(default_factory=list)  # sentinels.Leak
    outdated: bool = False  # hangs on a graph of weights that have been stepped since (class 14)

    def release(self) -> None:
        """Tensors and nodes must not live longer than the user's own references to them."""
        self.roots, self.inputs, self.results = [], None, None
        for nodes in (self.vanished, self.partial, self.blown, self.cancelled):
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
    checkpoint, mode (module, training), schedule (scheduler, optimizer, by_user, metric),
    load_module (module: its weights have been loaded, from its `own` state?),
    no_grad_kept (tensor: no leaf, and its `.grad` is read),
    named (names: the user's code goes over a module's named parameters),
    new_part (parent: a trained model has a new parameter or module).
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
