"""Why does a parameter get no gradient? One ledger for all detectors, so that nobody says it twice.

The ledger only keeps facts. The order of explanations: frozen, a constant loss, autograd.grad gave
None, a cut between the parameter and a loss, used without reaching a loss, never used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradient_doctor.dead_ends import DeadEnds
from gradient_doctor.findings import Site, joined
from gradient_doctor.graph import node_of
from gradient_doctor.readable import checksum
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.slips import is_never_read
from gradient_doctor.taint import GRAD, Cut, Taint
from gradient_doctor.terms import CUTS, Term, Terms

# moved or converted, which is no use of it
_MOVES = {"to", "cpu", "cuda", "float", "half", "bfloat16", "double", "type", "pin_memory", "copy_"}
_NO_USE = CUTS | _MOVES
_NUMBERS = {"item", "__int__", "tolist"}
_COMPARISONS = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cosine_similarity"}
_FLOORS = {"clamp", "clamp_min", "clip", "maximum", "relu"}
# a parameter that one of these takes is applied to something, outside of modules, too
_LAYERS = {"linear", "matmul", "mm", "bmm", "addmm", "embedding", "einsum", "conv1d", "conv2d"}
_UNREDUCED = "Expected to have finished reduction in the prior iteration"
_ENOUGH = 2  # steps of its optimizer without a gradient before we speak of a parameter


@dataclass(eq=False)
class CutFact:
    """A cut that losses depend on, over all steps."""

    kind: str  # of the cut; "sample" also for a region that torch.distributions entered
    op: str
    site: Site | None
    region: str  # "no_grad", "inference_mode"; "" outside any
    mask: int = 0  # parameters that it hides
    graph: int = 0  # those of them that had a graph up to here
    own: int = 0  # those whose optimizer stepped right after a loss with this cut
    step: int = -1
    order: int = -1
    ops: int = 0
    size: int = 1
    target: bool = False  # what a live value is compared with: meant to be without gradient

    @property
    def key(self) -> tuple[Any, ...]:
        """The same cut in another step."""
        return self.kind, self.op, self.site

    @property
    def number(self) -> int:
        """The class of the fault, if this is its cause."""
        return {"region": 2, "checkpoint": 11}.get(self.kind, 3)

    def rank(self, bit: int) -> tuple[bool, bool, bool, bool, int, int]:
        """The likeliest culprit is greatest.

        A cut in the loss that the parameter's own optimizer steps on says more than one in another
        loss (a GAN's detached fakes); a cut through an existing graph more than a second use of the
        parameter without gradients (a rollout, a target); the nearer to the loss, the more.
        """
        graph = bool(self.graph & bit)
        meant = self.kind == "sample", self.target
        return bool(self.own & bit), graph, not meant[0], not meant[1], self.step, self.order


class Ledger(Detector):
    """Facts about who received what; no findings of its own."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        session.ledger = self
        self.terms = Terms(session)
        self.ends = DeadEnds(session)
        self.received = 0  # ever, in checked steps
        self.nonzero = 0  # ever something else than zeros
        self.lost = 0  # some loss depends on them, and its gradient does not reach them
        self.reached = 0  # alive in a loss
        self.attempted = 0  # alive in a loss whose backward failed
        self.explained = 0  # somebody has said why
        self.seen = 0  # some operation's result depended on them
        self.applied = 0  # taken by a layer, with gradients: more than a weight that is looked at
        self.uses: dict[int, Site | None] = {}  # by bit: the first operation that took it
        # by bit and step: the batch size of each operation that took it
        self.loads: dict[int, dict[int, list[int]]] = {}
        self.cuts: dict[Any, CutFact] = {}
        self.orphans: dict[Site | None, int] = {}  # scalars that no backward started from
        self.by_site: dict[Site | None, int] = {}  # what backwards of this line gave gradients to
        self.empty: list[tuple[int, str, Site | None]] = []  # (step, operation, line)
        # lines of this step that took a number, or cut whole numbers off at some value
        self.targets: set[Site | None] = set()  # lines that detach what is compared with
        self.counted: dict[tuple[Site | None, bool], None] = {}
        self.numpy: dict[Site | None, int] = {}  # left for numpy before an array came back
        self.sometimes = 0  # received in one checked step, and not in another
        self.unchecked = self.traced = False
        self.backwards = 0
        # of the backwards since the last optimizer step: what the loss depends on, and its line
        self._losses: list[tuple[int, Site | None]] = []
        # by optimizer: the line of a loss that it steps on, and that none of its parameters is in
        self.aside: weakref.WeakKeyDictionary[Any, Site | None] = weakref.WeakKeyDictionary()
        self._recent: list[CutFact] = []  # of the backwards since the last optimizer step
        self._stepped = False
        self._root_cuts: set[Site | None] = set()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.busy = 0  # checked steps with a backward
        self._since: dict[int, int] = {}  # by bit: steps of its optimizer before we knew it
        self._before = 0  # what the last of them gave gradients to
        self.by_hand = 0  # no backward gave them a gradient, and yet they had one at a step
        self._arrived = self._handed = 0  # by a backward; by autograd.grad alone
        self._still: dict[int, float] = {}  # the latter: had no `.grad` at a step, and this sum
        # all lines that made values alive in parameters, in the order of their last calls
        self.lines: dict[Site | None, int] = {}
        self.claims: list[Any] = []  # detectors.late.Claim: what a later gradient would refute

    # facts

    def op(self, call: OpCall) -> None:
        if call.taint is not None:
            self.seen |= call.taint.depends
            if call.taint.live and call.outputs:
                # the line that came last goes to the end
                self.lines[call.site] = self.lines.pop(call.site, 0) | call.taint.live
        for tensor in call.inputs:
            # what makes nothing new of it (a question, an exchange of its data) is no use either
            made = any(output is not tensor for output in call.outputs)
            if made and isinstance(tensor, nn.Parameter) and call.short not in _NO_USE:
                bit = self.session.registry.bit(tensor)
                self.uses.setdefault(bit, call.site)
                if self.session.module_stack or call.short in _LAYERS:
                    self.applied |= bit if torch.is_grad_enabled() else 0
                if call.outputs and node_of(call.outputs[0]) is not None:
                    loads = self.loads.setdefault(bit, {})
                    loads.setdefault(self.session.step, []).append(_rows(call))
        if call.short in _COMPARISONS and len(call.inputs) > 1:
            self._note_target(*call.inputs[:2])
        self.terms.made(call)
        self.ends.made(call)
        if call.short in _NUMBERS:
            self.counted[call.site, True] = None
        elif call.short in _FLOORS and not (call.outputs and call.outputs[0].is_floating_point()):
            self.counted[call.site, False] = None
        if (
            call.outputs
            and call.outputs[0].numel() == 0
            and any(tensor.numel() for tensor in call.inputs)
        ):
            self.empty.append((self.session.step, call.short, call.site))

    def _note_target(self, left: Tensor, right: Tensor) -> None:
        """`mse_loss(a, b.detach())`: b is read only, on purpose."""
        if left.requires_grad != right.requires_grad:
            taint = self.session.taint_of(right if left.requires_grad else left)
            if taint is not None and taint.op.endswith((".detach", ".data")):
                self.targets.add(taint.site)

    def backward_starts(self, backward: Backward) -> None:
        self.backwards += 1
        for root in backward.roots:
            if backward.taint is not None:
                self.terms.of(root).used = True
                self.ends.used(root)
        if self._stepped:
            self._recent.clear()
            self._losses.clear()
            self._stepped = False
        if backward.kind == "backward" and backward.taint is not None:
            self._losses.append((backward.taint.depends, backward.taint.site))
        if backward.taint is not None:
            self._root_cuts.update(cut.site for cut in backward.taint.cuts)
            self.lost |= backward.taint.depends & ~backward.taint.live
            for fact in self.facts(backward.taint):
                earlier = self.cuts.setdefault(fact.key, fact)
                earlier.mask |= fact.mask
                earlier.graph |= fact.graph
                earlier.target |= fact.target
                earlier.step, earlier.order = fact.step, fact.order
                earlier.ops = max(earlier.ops, fact.ops)
                self._recent.append(earlier)

    def backward_ended(self, backward: Backward) -> None:
        self.received |= backward.received | backward.arrived
        if backward.kind == "grad":
            self._handed |= backward.received & ~self._arrived
        else:
            self._arrived |= backward.received | backward.arrived
            self._handed &= ~self._arrived
        self.by_site[backward.site] = self.by_site.get(backward.site, 0) | backward.received
        for bit, fact in backward.gradients.items():
            if not fact.zero:
                self.nonzero |= bit
        if backward.taint is not None:
            self.reached |= self._within(backward)

    def _within(self, backward: Backward) -> int:
        """What the loss is alive in, of what it was asked for; autograd.grad leaves no gradient."""
        assert backward.taint is not None
        if backward.inputs is None:
            return backward.taint.live
        if backward.kind == "grad":
            return 0
        return backward.taint.live & self.session.registry.bits(
            t for t in backward.inputs if t.is_leaf
        )

    def backward_failed(self, backward: Backward, error: BaseException) -> None:
        if backward.taint is not None:
            self.attempted |= backward.taint.live

    def event(self, event: Event) -> None:
        if event.kind == "step_starts":
            written = self._written(event.data["optimizer"])
            self.by_hand |= written
            self.received |= written
            self.nonzero |= written
        elif event.kind == "step" and self.session.record.checked:
            optimizer = event.data["optimizer"]
            self._stepped = True
            self._note_still(event.data.get("update"))
            theirs = self.session.registry.bits(owned_by(optimizer))
            if any(depends & theirs for depends, _ in self._losses):
                self.aside[optimizer] = None
            elif self._losses:
                self.aside.setdefault(optimizer, self._losses[-1][1])
            for fact in self._recent:
                fact.own |= fact.mask & theirs
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def _note_still(self, update: Any) -> None:
        """What autograd.grad has handed out may be used by hand, or to no effect."""
        registry = self.session.registry
        for parameter in update.without_gradient if update is not None and self._handed else ():
            bit = registry.bit(parameter)
            if bit & self._handed:
                self._still.setdefault(bit, checksum(parameter))
                self._since.setdefault(bit, 0)

    def _unmoved(self) -> int:
        """Handed out by autograd.grad, never given to the optimizer, and nobody has moved them."""
        registry = self.session.registry
        unmoved = 0
        for bit, value in self._still.items():
            if bit & self._handed & ~self.by_hand:
                unmoved |= bit if all(checksum(p) == value for p in registry.tensors(bit)) else 0
        return unmoved

    def _written(self, optimizer: Any) -> int:
        """Gradients that the program has put there itself: evolution strategies, Reptile."""
        session = self.session
        unknown = session.awaited | (~self.received if session.record.checked else 0)
        written = 0
        for parameter in owned_by(optimizer) if unknown & ~self.received else ():
            bit = session.registry.bit(parameter)
            if parameter.grad is not None and bit & unknown & ~self.received:
                values = session.values(parameter.grad)
                written |= bit if values is None or bool(values.any()) else 0
        return written

    def step_ended(self, record: StepRecord) -> None:
        self.unchecked |= bool(not record.checked and record.backwards)
        self.traced |= bool(record.traced and record.backwards)
        if record.checked and record.backwards:
            now = 0
            for backward in record.backwards:
                now |= backward.received
            self.sometimes |= (self._before ^ now) & self.received if self.busy else 0
            self._before = now
            self.busy += 1
        for term in self.terms.scalars:
            if not term.used and not term.read & self._root_cuts:
                mask = self.orphans.get(term.site, 0)
                self.orphans[term.site] = mask | term.live
        self.terms.step_ended()
        self.ends.step_ended()
        self._root_cuts.clear()
        del self.empty[:-3]
        self.counted.clear()

    # questions

    def facts(self, taint: Taint) -> list[CutFact]:
        """The cuts behind a value, with what they hide of it."""
        order = {id(cut): k for k, cut in enumerate(self.session.cuts.cuts.values())}
        hidden = taint.depends & ~taint.live
        facts: dict[Any, CutFact] = {}
        for cut in sorted(taint.cuts, key=lambda c: order.get(id(c), -1)):
            mask = cut.depends & hidden
            if mask:
                fresh = fact_of(cut)
                fact = facts.setdefault(fresh.key, fresh)
                fact.mask |= mask
                fact.graph |= cut.graph & mask
                fact.step, fact.order = cut.step, order.get(id(cut), -1)
                fact.target = fact.site in self.targets
                fact.ops = max(fact.ops, fresh.ops)
        return list(facts.values())

    def should_train(self) -> int:
        """Parameters that need gradient and that an optimizer, or the contract, wants to move."""
        registry = self.session.registry
        wanted = registry.matching(self.session.contract.get("trainable", ()))
        wanted |= registry.owned
        return registry.bits(
            p for p in registry.tensors(wanted) if p.requires_grad and has_elements(p)
        )

    def missing(self, at_end: bool, error: BaseException | None = None) -> int:
        """Those of them that have received nothing for long enough, and nobody has said why."""
        registry = self.session.registry
        received = self.received & ~(self._unmoved() if at_end else 0)
        silent = self.should_train() & ~received & ~self.explained & ~self.attempted
        self.session.awaited |= silent
        if error is not None and _UNREDUCED in str(error):
            error = None  # DistributedDataParallel waits for the gradients of what is not used
        needed = 1 if at_end and error is None else _ENOUGH
        if at_end and error is None and not self.unchecked and not any(self._steps.values()):
            needed = 0 if self.backwards else 1  # no optimizer has stepped at all
        owners: dict[int, int] = {}
        for optimizer in registry.optimizers.values():
            steps = self._steps.get(optimizer, 0)
            for parameter in owned_by(optimizer):
                bit = registry.bit(parameter)
                owners[bit] = max(owners.get(bit, 0), steps)
        missing_mask = 0
        looked = self.session.record.checked and self.session.record.backwards
        for bit in bits_of(silent):
            if self.unchecked and not looked and bit not in self._since:
                continue  # thawed or added after the last look: nobody knows
            steps = owners.get(bit, self.busy)
            # what was added or unfrozen late has missed only the steps since
            if steps - self._since.setdefault(bit, max(0, steps - 1)) >= needed:
                missing_mask |= bit
        return missing_mask

    def zeroed(self) -> int:
        """Received nothing but zeros, and a function without slope stands in the way."""
        flat = 0
        for fact in self.cuts.values():
            if fact.kind == "zero" or fact.op == "normal":
                flat |= fact.mask
        flat &= self.should_train() & self.received
        return flat & ~self.nonzero & ~self.reached & ~self.explained

    def culprits(self, mask: int, facts: Iterable[CutFact]) -> list[tuple[CutFact, int]]:
        """Each parameter goes to the cut that is most likely its cause."""
        chosen: dict[int, tuple[CutFact, int]] = {}
        facts = [fact for fact in facts if fact.mask & mask]
        for bit in bits_of(mask):
            able = [fact for fact in facts if fact.mask & bit]
            if able:
                best = max(able, key=lambda fact: fact.rank(bit))
                chosen[id(best)] = (best, chosen.get(id(best), (best, 0))[1] | bit)
        return _by_line(chosen.values())

    def dead_end(self, mask: int) -> Site | None:
        """The last line that these parameters come to, if it fills a name that nobody reads."""
        last = next((site for site, live in reversed(self.lines.items()) if live & mask), None)
        return last if last is not None and is_never_read(last) else None

    def orphan(self, bit: int) -> Site | None:
        """The line of a loss that this parameter is alive in and that no backward started from."""
        if not bit & self.applied:
            return None  # the size of a weight, say, that is only printed
        return next((site for site, mask in self.orphans.items() if mask & bit), None)

    def made_at(self, root: Tensor) -> Term:
        """Where a constant began: its first part that is not made of others."""
        term = self.terms.behind(root)
        while term.parts and term.kind != "cut" and term.parts[0][0].site is not None:
            term = term.parts[0][0]
        return term


def has_elements(parameter: Tensor) -> bool:
    """Without elements there is nothing to train; a lazy parameter has not got its own yet."""
    return is_lazy(parameter) or parameter.numel() > 0


def _rows(call: OpCall) -> int:
    """The length of the first axis of what a parameter is applied to."""
    data = next((t for t in call.inputs if not isinstance(t, nn.Parameter) and t.dim()), None)
    return 1 if data is None else data.shape[0]


def fact_of(cut: Cut) -> CutFact:
    """The cut as the ledger knows it, before it is said what it hides."""
    region = cut.region.kind if cut.region is not None else ""
    kind = "sample" if region == "sample" else cut.kind
    size = 1
    for length in cut.shape:
        size *= length
    ops = cut.region.ops if cut.region is not None else cut.count
    op = "" if cut.region is not None else cut.op
    return CutFact(kind, op, cut.site, region, ops=ops, size=size)


def _by_line(culprits: Iterable[tuple[CutFact, int]]) -> list[tuple[CutFact, int]]:
    """A line that cuts in several modules is one culprit; what it did there is added up."""
    lines: dict[Any, list[tuple[CutFact, int]]] = {}
    for fact, mask in culprits:
        place = None if fact.site is None else fact.site.place
        lines.setdefault((fact.kind, fact.op, fact.region, place), []).append((fact, mask))
    merged = []
    for parts in lines.values():
        fact, mask = parts[0]
        sites = [part.site for part, _ in parts if part.site is not None]
        if len(parts) > 1 and sites:
            fact = replace(fact, site=joined(sites), ops=sum(part.ops for part, _ in parts))
            for part, bits in parts[1:]:
                fact.mask |= part.mask
                fact.graph |= part.graph
                mask |= bits
        merged.append((fact, mask))
    return merged


def bits_of(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


# in words


def what_cuts(fact: CutFact) -> str:
    """What the cut does, to follow `because`."""
    at = fact.site if fact.site is not None else "a line outside the trace"
    if fact.kind == "region":
        count = f"{fact.ops} operation{'s' if fact.ops != 1 else ''}"
        return f"{count} on the way ran without gradients, in the {fact.region} entered at {at}"
    if fact.kind == "checkpoint":
        return (
            f"the reentrant checkpoint at {at} has no input that needs gradient, "
            "so autograd records nothing inside it"
        )
    if fact.kind == "sample" and fact.op in ("detach", "data"):
        return f"`{fact.op}` at {at} makes the random draw a sample without gradient"
    if fact.kind == "sample":
        return f"a random draw at {at} has no gradient with respect to its distribution"
    if fact.kind == "integer":
        return f"`{fact.op}` at {at} makes whole numbers or booleans, which have no gradient"
    if fact.kind == "zero":
        return f"`{fact.op}` at {at} is flat between its jumps: its derivative is zero"
    if fact.kind == "scalar":
        return f"`{fact.op}` at {at} turns the value into a Python number"
    if fact.op == GRAD:
        return f"{GRAD} at {at}, without create_graph=True, gives numbers that have no graph"
    if fact.kind == "function":
        return f"the custom Function {fact.op} at {at} returns a value without gradient"
    return f"`{fact.op}` at {at} takes the value out of the graph"


def how_to_mend(fact: CutFact) -> str:
    if fact.kind == "region":
        return (
            f"Remove the {fact.region} there, or move it to the code that really needs no gradient."
        )
    if fact.kind == "checkpoint":
        return (
            "Use checkpoint(..., use_reentrant=False), or make an input need gradient "
            "(enable_input_require_grads() for transformers models)."
        )
    if fact.kind == "sample" and fact.op in ("detach", "data"):
        return f"Remove `{fact.op}`, or add a score-function term with log_prob of the sample."
    if fact.kind == "sample":
        return "Use rsample(), or add a score-function term with log_prob of the sample."
    if fact.kind in ("integer", "zero"):
        return "Use a differentiable stand-in (softmax, a straight-through or score estimator)."
    if fact.kind == "scalar":
        return f"Keep the tensor; use `{fact.op}` for what is printed only."
    if fact.op == GRAD:
        return "Pass create_graph=True there: then the gradient can be differentiated itself."
    if fact.kind == "function":
        return f"Let {fact.op}.forward return a differentiable output, with a backward for it."
    return f"Remove `{fact.op}` there, or take the parameters out of the optimizer if it is meant."
