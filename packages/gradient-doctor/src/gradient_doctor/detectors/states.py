"""Class 3: the state of a recurrent cell is detached at every time step of one loss.

Then each step's loss reaches the cell through its own step alone: the weights learn no dependence
that is longer than one step. A detach between losses, or once in a window of several steps, is
truncated backpropagation, and meant; so is one of a prediction that is fed back (it is compared
with a target itself), and one beside another state that keeps its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import node_of
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord

_CELLS = {"gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell"}
_WHOLE = {"gru", "lstm", "rnn_tanh", "rnn_relu"}  # over the steps that they are given
_PRODUCTS = {"linear", "addmm", "matmul", "mm", "bmm", "__matmul__", "__rmatmul__", "einsum"}
_LAYERS = _CELLS | _WHOLE | _PRODUCTS | {"conv1d", "conv2d"}
_DETACHES = {"detach", "detach_", "data"}
_LINKS = 2  # detached states in a row, each made of the one before


@dataclass(eq=False)
class Cut:
    """One detach of a state."""

    site: Site | None
    age: int  # in detaches, since the first
    fresh: frozenset[int]  # the layers' results that the state is made of
    weights: int = 0  # applied to the state before it, once
    before: tuple[Cut, ...] = ()


@dataclass(slots=True)
class Path:
    """What is behind a tensor, as far as a gradient can tell."""

    cuts: frozenset[Cut]  # whose results it is made of
    once: int = 0  # weights applied since
    again: bool = False  # one of them more than once: a window of several steps
    fresh: frozenset[int] = frozenset()  # results of layers, with no layer in between


@dataclass
class Loop:
    """The detaches of one line."""

    weights: int = 0
    most: int = 0
    steps: set[int] = field(default_factory=set)
    clean: bool = True


class States(Detector):
    """Follows states from one detach to the next, and into the loss."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._paths = WeakIdKeyDictionary()
        self._results = 0
        self._loops: dict[Site | None, Loop] = {}

    def op(self, call: OpCall) -> None:
        paths = [p for p in map(self._paths.get, call.inputs) if p is not None]
        layer = call.short in _LAYERS and any(isinstance(t, nn.Parameter) for t in call.inputs)
        if call.short in _DETACHES and call.inputs and call.outputs:
            if node_of(call.inputs[0]) is not None and paths:
                self._cut(call, paths[0])
            return
        if not paths and not layer:
            return
        cuts = frozenset().union(*(p.cuts for p in paths))
        once, again = 0, any(p.again for p in paths)
        for path in paths:
            once |= path.once
        fresh = frozenset().union(*(p.fresh for p in paths))
        if layer:
            applied = self.session.registry.bits(
                t for t in call.inputs if isinstance(t, nn.Parameter)
            )
            if any(p.cuts for p in paths):
                again |= bool(once & applied) or _takes_many(call)
                once |= applied
            self._results += 1
            fresh = frozenset((self._results,))
        for output in call.outputs:
            self._paths[output] = Path(cuts, once, again, fresh)

    def _cut(self, call: OpCall, path: Path) -> None:
        ages = {cut.age for cut in path.cuts}
        # an older state that still has its gradient is another way back in time
        single = len(ages) == 1 and not path.again and path.once
        output = call.outputs[0]
        # a memory of many places, [batch, places, features], is no single state
        small = output.dim() == 2 or output.dim() == 4 or (output.dim() == 3 and path.once)
        cut = Cut(call.site, max(ages, default=-1) + 1, path.fresh)
        if single and small:
            cut.weights = path.once
            cut.before = tuple(path.cuts)
        self._paths[output] = Path(frozenset((cut,)))

    def backward_starts(self, backward: Backward) -> None:
        if backward.taint is None:
            return
        for root in backward.roots:
            path = self._paths.get(root)
            if path is not None and len(path.cuts) >= _LINKS:
                self._judge(root, path)

    def _judge(self, root: Tensor, path: Path) -> None:
        compared = path.fresh
        lines: dict[Site | None, list[Cut]] = {}
        for cut in path.cuts:
            lines.setdefault(cut.site, []).append(cut)
        for site, cuts in lines.items():
            linked = [c for c in cuts if any(b.site == site and b in path.cuts for b in c.before)]
            oldest = min(cut.age for cut in cuts)
            # what was made of no detached state is the first of them
            chained = all(cut in linked or cut.age == oldest for cut in cuts)
            long = len({cut.age for cut in linked}) >= _LINKS
            loop = self._loops.setdefault(site, Loop())
            weights = -1
            for cut in linked:
                weights &= cut.weights
            loop.clean &= chained and long and bool(weights)
            loop.clean &= not any(cut.fresh & compared for cut in cuts)
            loop.weights |= weights if linked else 0
            loop.most = max(loop.most, len({cut.age for cut in cuts}))
            loop.steps.add(self.session.step)

    def step_ended(self, record: StepRecord) -> None:
        self._paths = WeakIdKeyDictionary()  # what is carried over begins anew
        if record.traced and self.session.age + 1 >= self.session.trace_steps:
            self._verdicts()

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._verdicts()

    def _verdicts(self) -> None:
        loops, self._loops = self._loops, {}
        said = {f.site.place for f in self.session.findings if f.number == 3 and f.site is not None}
        for site, loop in loops.items():
            wanted = loop.weights & self.session.ledger.should_train()
            if not loop.clean or not wanted or site is None or site.place in said:
                continue
            self.report(
                3,
                Severity.WARNING,
                f"The state of a recurrent cell is detached at each of {loop.most + 1} or more "
                "steps of one loss.",
                why="Each step's part of the loss reaches the cell through that one step alone: "
                "the weights learn no dependence that is longer than one step.",
                fix="Detach the state between the losses (between batches), not between the time "
                "steps of one.",
                site=site,
                parameters=wanted,
            )


def _takes_many(call: OpCall) -> bool:
    """Whether a recurrent layer runs over more than one step by itself."""
    if call.short not in _WHOLE:
        return False
    data: Any = call.args[0] if call.args else None
    if not isinstance(data, Tensor) or data.dim() != 3 or not isinstance(call.args[-1], bool):
        return True
    return data.shape[1 if call.args[-1] else 0] > 1
