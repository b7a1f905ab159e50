"""Classes 12 and 14: a graph, or a part of one, that has been used before."""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.places import count
from gradient_doctor.explain import CutFact, fact_of, how_to_mend, what_cuts
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import Used, next_number, node_of, nodes_of, origin_of, used_by
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.slips import carried_through, kept_at, statement_at
from gradient_doctor.taint import GRAD, tensors_in

_COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
_SECOND_TIME = "backward through the graph a second time"


@dataclass
class Shared:
    """The part of a graph that an earlier backward has walked, or that an earlier step made."""

    nodes: int = 0
    entry: Any = None  # the first such node, seen from the loss
    user: Any = None  # the call above it: what the old tensor was used for
    used: Used | None = None
    leaves: int = 0
    state: bool = False  # carried on from step to step


class GraphReuse(Detector):
    """Reads the marks that the trace and earlier backwards have left on the nodes."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._step_of: dict[int, int] = {}  # by number of the backward
        # nodes of an earlier step that a model was called with, and where that was
        self._given: list[tuple[Any, Site]] = []
        self._old: Shared | None = None  # during a backward
        self._leaks: set[Site | None] = set()
        self._kept = WeakIdKeyDictionary()  # tensor -> earlier steps whose graphs hang on it
        # optimizer -> number of the first node that is younger than its last step
        self._stepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def event(self, event: Event) -> None:
        if event.kind == "step":
            self._stepped[event.data["optimizer"]] = next_number()

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, site: Site | None) -> None:
        for tensor in tensors_in([args, kwargs], depth=4):
            node = node_of(tensor)
            if site is not None and _made_before(node, self.session.step):
                self._given.append((node, site))

    def step_ended(self, record: StepRecord) -> None:
        self._given.clear()

    def backward_starts(self, backward: Backward) -> None:
        self._step_of[backward.number] = backward.step
        self._old = None
        for root in backward.roots if backward.graph is not None else ():
            # looked for now: the marks change when the backward ends
            old = self._shared(
                node_of(root), lambda node: _made_before(node, backward.step), self._is_outdated
            )
            if old.entry is not None:
                old.state = _is_state(root, old)
                self._old, backward.outdated = old, True

    def backward_ended(self, backward: Backward) -> None:
        if self._old is not None:
            self._stale(backward, self._old, failed=False)
            self._old = None

    def backward_failed(self, backward: Backward, error: BaseException) -> None:
        old, self._old = self._old, None
        if "modified by an inplace operation" in str(error) and old is not None:
            self._stale(backward, old, failed=True)
        if _SECOND_TIME not in str(error):
            return
        for root in backward.roots:
            shared = self._shared(node_of(root), _freed)
            if shared.entry is None:
                continue
            shared.state = _is_state(root, shared)
            # the freed part may begin inside of an operation: what was kept of it is marked
            kept = shared if old is None or origin_of(shared.entry) is not None else old
            if self._is_carried(backward, root, kept):
                # what was kept may be a step after what was freed
                self._stale(backward, old or shared, failed=True)
            else:
                self._second(backward, shared)
            return
        reported = [f.site.place for f in self.session.findings if f.number in (12, 14) and f.site]
        if backward.site is not None and backward.site.place in reported:
            return
        self.report(
            12,
            Severity.ERROR,
            "A second backward through a graph whose buffers are gone.",
            why="An earlier backward has freed them. That step was not traced: the shared part is "
            "not known.",
            fix=_SECOND_FIX,
            site=backward.site,
        )

    def _is_carried(self, backward: Backward, root: Tensor, shared: Shared) -> bool:
        """Whether a tensor of an earlier step is meant to last: a state, a cache.

        What the training function itself computed once, before a loop of several backwards, is no
        state: these backwards share it.
        """
        origin = origin_of(shared.entry)
        if origin is None or not _made_before(shared.entry, backward.step):
            return False
        born, at = origin.site, backward.site
        if born is None or at is None or born.module:
            return True
        if (born.file, born.function) != (at.file, at.function):
            return True
        return _is_made_again(root, born)

    def op(self, call: OpCall) -> None:
        """A value that gathers the graphs of many steps, though no backward will ever use it."""
        if call.taint is None or not call.taint.live:
            return
        kept: set[int] = set().union(*map(self._graphs_on, call.inputs))
        if not kept:
            return
        for output in call.outputs:
            if output.requires_grad:
                self._kept[output] = kept
        if len(kept) < 2 or call.site in self._leaks:
            return
        self._leaks.add(call.site)
        self.report(
            14,
            Severity.WARNING,
            f"The graphs of {len(kept)} steps are kept alive by the value made here.",
            why=f"`{call.short}` adds a tensor that still has its graph to one of an earlier step. "
            "Their backwards are over; the chain grows with every step, and with it the memory.",
            fix="Use loss.item() or loss.detach() for running values.",
            site=call.site,
        )

    def _graphs_on(self, tensor: Tensor) -> set[int]:
        """Earlier steps whose backward is over and whose graph this tensor keeps."""
        graphs = self._kept.get(tensor)
        if graphs is not None:
            return graphs
        node = node_of(tensor)
        if not _made_before(node, self.session.step):
            return set()
        marks = map(used_by, _inner(node))
        steps = {self._step_of.get(used.backward) for used in marks if used and used.freed}
        kept = self._kept[tensor] = {step for step in steps if step is not None}
        return kept

    # the shared part

    def _is_outdated(self, entry: Any) -> bool:
        """Whether weights behind it have changed since they were used, or its graph is freed.

        The number of the step alone says little: in scripts steps are guessed, and where two
        optimizers take turns the guess may fall between a forward and its backward.
        """
        nodes = list(_inner(entry))
        if any(map(_freed, nodes)):
            return True
        owners = {
            id(p): optimizer
            for optimizer in self.session.registry.optimizers.values()
            for p in owned_by(optimizer)
        }
        for node in nodes:
            for child, _ in node.next_functions:
                if child is None or not _is_leaf(child):
                    continue
                owner = owners.get(id(child.variable))
                # weights without an optimizer are changed by hand, out of sight
                if owner is None and isinstance(child.variable, nn.Parameter):
                    return True
                if owner is not None and self._stepped.get(owner, 0) > node._sequence_nr():
                    return True
        return False

    def _shared(self, root: Any, is_old: Any, counts: Any = bool) -> Shared:
        """Nodes that are old, and where the rest of the graph meets them."""
        shared = Shared()
        if root is None:
            return shared
        stack: list[tuple[Any, Any]] = [(root, None)]
        seen = {root}
        entries: list[tuple[Any, Any]] = []
        while stack:
            node, above = stack.pop(0)
            if _is_leaf(node):
                continue
            if is_old(node):
                entries.append((node, above))
                continue
            # operations made of several nodes are marked on the last of them only
            user = node if origin_of(node) is not None else above
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append((child, user))
        entries = [entry for entry in entries if counts(entry[0])]
        if not entries:
            return shared
        # the entry that most parameters are behind: a scalar may be shared as well
        for node, above in entries:
            leaves = self._leaves(node)
            if shared.entry is None or leaves.bit_count() > shared.leaves.bit_count():
                shared.entry, shared.user, shared.leaves = node, above, leaves
        everything = set()
        for node, _ in entries:
            everything.update(_inner(node))
            shared.leaves |= self._leaves(node)
        shared.nodes = len(everything)
        shared.used = next((u for u in map(used_by, _inner(shared.entry)) if u is not None), None)
        return shared

    def _leaves(self, node: Any) -> int:
        registry = self.session.registry
        return registry.bits(n.variable for n in nodes_of(node) if _is_leaf(n))

    # findings

    def _second(self, backward: Backward, shared: Shared) -> None:
        taint = backward.taint
        for cut in () if taint is None else taint.cuts:
            # the derivative is a part of this very loss: it was meant to have a graph, too
            if cut.op == GRAD and shared.used is not None and cut.site == shared.used.site:
                self._without_graph(backward, fact_of(cut))
                return
        origin = origin_of(shared.entry)
        born = None if origin is None else origin.site
        first = None if shared.used is None else shared.used.site
        self.report(
            12,
            Severity.ERROR,
            f"This backward shares {count(shared.nodes, 'node')} with an earlier one that has "
            "freed them.",
            why=f"The shared part begins with {shared.entry.name()}{_made_at(born)}; "
            f"{'an earlier backward' if first is None else f'the backward at {first}'} has used it "
            "and freed what it had saved.",
            fix=_SECOND_FIX,
            # two backwards of one step share a forward; what is older was made once, for all
            site=(born if _made_before(shared.entry, backward.step) else None) or backward.site,
            parameters=shared.leaves,
            related=(born, first, backward.site),
        )

    def _without_graph(self, backward: Backward, fact: CutFact) -> None:
        """Class 3: autograd.grad has freed the graph, and its results have none."""
        self.report(
            3,
            Severity.ERROR,
            "A derivative that is a part of the loss has no graph of its own.",
            why=f"In this loss {what_cuts(fact)}; it has also freed the graph that the rest of the "
            f"loss needs, so the backward at {backward.site} ends with an error.",
            fix=how_to_mend(fact),
            site=fact.site,
            parameters=backward.taint.live if backward.taint is not None else 0,
            related=(backward.site,),
        )

    def _stale(self, backward: Backward, old: Shared, failed: bool) -> None:
        origin, user = origin_of(old.entry), origin_of(old.user) if old.user is not None else None
        born = None if origin is None else origin.site
        since = "" if origin is None else f" of step {origin.step}"
        self.report(
            14,
            Severity.ERROR if failed else Severity.WARNING,
            f"A tensor{since} is used in step {backward.step} together with its graph.",
            why=f"{old.entry.name()}{_made_at(born)}, and {count(old.nodes - 1, 'node')} behind it "
            "belong to weights that have been changed since"
            + (
                ", or whose saved values an earlier backward has freed."
                if failed
                else "; the gradient that flows into them is that of an old forward."
            ),
            fix="Recompute it in every step, or keep it with detach() if no gradient is meant "
            f"to flow: {self.session.registry.many(old.leaves)} would then get none from it.",
            # a state is cut where it is carried on; what was kept once, where it is used
            site=(user.site if user is not None and _empties(user.op) else None)
            or _carried_further(self._carried_at(old.entry))
            or (None if born is None else kept_at(born) or carried_through(born))
            or (
                born if old.state or self._is_attribute(old.entry) or _is_kept(born, user) else None
            )
            or (user.site if user is not None else None)
            or backward.site,
            parameters=old.leaves,
            related=(born, None if user is None else user.site, backward.site),
        )

    def _is_attribute(self, entry: Any) -> bool:
        """Whether a module keeps the old tensor: it was made once, and not where it is used."""
        return any(
            isinstance(value, Tensor) and node_of(value) is entry
            for root in self.session.registry.roots.values()
            for module in root.modules()
            for value in vars(module).values()
        )

    def _carried_at(self, entry: Any) -> Site | None:
        """The call that was given the old tensor, or one that it is a part of."""
        for node, site in self._given:
            if node is entry or any(inner is entry for inner in _inner(node)):
                return site
        return None


_SECOND_FIX = (
    "Add the losses and call backward once, or run the forward again for the second loss. "
    "retain_graph=True in the first backward also works if no weights change in between; detach() "
    "on the shared part would silence the error, and these parameters would get nothing from it."
)


def _carried_further(site: Site | None) -> Site | None:
    """A helper that is handed the state and gives it back is not at fault: its caller keeps it."""
    return None if site is None else carried_through(site) or site


def _is_kept(born: Site | None, user: Any) -> bool:
    """`self.alpha = ...` in one function, read in another: made once, for all that read it."""
    if born is None or user is None or user.site is None or born.function == user.site.function:
        return False
    made = statement_at(born)
    return isinstance(made, ast.Assign) and any(isinstance(t, ast.Attribute) for t in made.targets)


def _empties(op: str) -> bool:
    """`state.zero_()`: other values, and the same history."""
    return op.rsplit(".", 1)[-1] in ("zero_", "fill_")


def _made_at(site: Site | None) -> str:
    return "" if site is None else f", made at {site}"


def _is_leaf(node: Any) -> bool:
    return getattr(node, "variable", None) is not None


def _inner(root: Any) -> Iterator[Any]:
    return (node for node in nodes_of(root) if not _is_leaf(node))


def _freed(node: Any) -> bool:
    used = used_by(node)
    return used is not None and used.freed


def _is_made_again(root: Tensor, site: Site | None) -> bool:
    """Whether this line also made a part of the graph that no backward has walked."""
    fresh = (origin_of(node) for node in _inner(node_of(root)) if used_by(node) is None)
    return site is not None and any(o is not None and o.site == site for o in fresh)


def _is_state(root: Tensor, shared: Shared) -> bool:
    """Whether it is a value that is carried around: what uses it had a part in making it, or the
    line that made it makes one in each step, in the function that uses it. One line of a helper
    makes many values, which says nothing.
    """
    user, born = origin_of(shared.user) if shared.user else None, origin_of(shared.entry)
    if user is None or user.site is None:
        return False
    made = (origin_of(node) for node in _inner(shared.entry))
    if any(o is not None and o.site == user.site for o in made):
        return True
    if born is None or born.site is None:
        return False
    within = (born.site.function, *_COMPREHENSIONS)
    beside = born.site.file == user.site.file and user.site.function in within
    return beside and _is_made_again(root, born.site)


def _made_before(node: Any, step: int) -> bool:
    origin = origin_of(node) if node is not None else None
    return origin is not None and origin.step < step
