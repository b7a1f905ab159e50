"""Class 23: a term of the loss that reaches only parameters which do not step with it.

A generator's adversarial term is computed from the real sample: its gradient goes into the
discriminator alone, whose own step clears it. The number is in the loss, and trains nothing.
So is a term of the generated sample that was detached before it was scored. A term whose networks
all stand in another, useful term is left alone: the Wasserstein distance is often written whole,
`D(real) - D(fake)`, for the generator too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gradient_doctor.explain import CutFact, what_cuts
from gradient_doctor.findings import Severity, Site
from gradient_doctor.python_numbers import Values
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, Session, StepRecord
from gradient_doctor.sites import is_user_code, user_frame
from gradient_doctor.taint import tensors_in
from gradient_doctor.terms import Term

_ENOUGH = 2  # steps
_HEIGHT = 4  # callers that may have chosen an argument


@dataclass
class Part:
    """One term of a loss: the parameters of optimizers that it is made of, and can reach."""

    term: Term
    depends: int
    live: int


@dataclass
class Waiting:
    """Gradients of one backward, until steps have used them or somebody has erased them."""

    site: Site | None
    step: int
    parts: list[Part]
    waiting: int
    used: int = 0
    calls: dict[int, Site] = field(default_factory=dict)  # by the bits of a network: its last call


@dataclass
class Idle:
    """A term of one line of backward, as its steps show it."""

    mask: int
    live: int
    at: Site
    cut: CutFact | None  # what has taken the network that the loss trains out of the term
    steps: set[int] = field(default_factory=set)


class Misdirected(Detector):
    """Follows the gradients of each term to the step that uses them."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._all: list[Waiting] = []  # of this step
        self._calls: dict[int, Site] = {}  # since the last backward
        self._idle: dict[Any, Idle] = {}
        self._good: set[Any] = set()  # terms that have trained something
        self._used = 0

    # facts

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, site: Site | None) -> None:
        """A network that is given data alone: who chose them?"""
        if site is None or not torch.is_grad_enabled():
            return
        bits = self.session.registry.bits(module.parameters())
        given = tensors_in([args, kwargs])
        if not bits or not given or any(t.requires_grad for t in given):
            return
        self._calls[bits] = self._chosen_at(given[0], bits) or site

    def _chosen_at(self, given: Tensor, own: int) -> Site | None:
        """The outermost line that hands these data on where a result to score is at hand, too."""
        frame, at = user_frame(), None
        for _ in range(_HEIGHT):
            if frame is None or not is_user_code(frame.f_code):
                break
            values = Values(frame)
            if at is None or self._has_other(values, given, own):
                at = Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            if not any(values.named(name) is given for name in values.parameters):
                break
            frame = _caller(frame)
        return at

    def _has_other(self, values: Values, given: Tensor, own: int) -> bool:
        for value in values.everything():
            if isinstance(value, Tensor) and value.requires_grad and value.shape == given.shape:
                taint = self.session.taint_of(value)
                if taint is not None and taint.live & ~own:
                    return True
        return False

    def backward_starts(self, backward: Backward) -> None:
        calls, self._calls = self._calls, {}
        if backward.taint is None or backward.kind != "backward" or backward.inputs is not None:
            return
        owned = self.session.registry.owned
        parts = [
            Part(term, term.depends & owned, term.live & owned)
            for root in backward.roots
            for term in _addends(self.session.ledger.terms.of(root))
        ]
        live = backward.taint.live & owned
        self._all.append(Waiting(backward.site, backward.step, parts, live, calls=calls))

    def event(self, event: Event) -> None:
        if not self._all:
            return
        bits = self.session.registry.bits
        if event.kind == "step":
            owned = bits(owned_by(event.data["optimizer"]))
            for backward in self._all:
                backward.used |= backward.waiting & owned
                backward.waiting &= ~owned
                self._used |= backward.used
        elif event.kind == "zero_grad":
            erased = bits(event.data["parameters"])
            for backward in self._all:
                backward.waiting &= ~erased
        elif event.kind == "grad_set":
            for backward in self._all:
                backward.waiting &= ~self.session.registry.bit(event.data["parameter"])

    # verdicts

    def step_ended(self, record: StepRecord) -> None:
        if not record.traced:
            return
        terms = [(b.site, {part.term.site for part in b.parts}) for b in self._all]
        late = []
        for (site, own), backward in zip(terms, self._all):
            reach = 0
            for part in backward.parts:
                reach |= part.live
            if reach & backward.waiting:
                # the next step may clear them, or use them
                late.extend([backward] if backward.step == record.number else [])
                if backward.step != record.number:
                    self._good.update(_key(backward, part) for part in backward.parts)
                continue
            # the same loss at another line, for another part of the model: they take turns
            alternates = any(line != site and own <= theirs for line, theirs in terms)
            for part in backward.parts:
                self._judge(part, backward, alternates)
        self._all = late
        self._calls.clear()
        if self.session.age + 1 >= self.session.trace_steps:
            self._verdicts()

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._verdicts()

    def _judge(self, part: Part, backward: Waiting, alternates: bool) -> None:
        key = _key(backward, part)
        if part.live & backward.used:
            self._good.add(key)
        elif not alternates and self._trains_nothing(part, backward):
            cut = self._cut_of(part, backward)
            at = cut.site if cut is not None else None
            at = at or _last_call(part, backward.calls) or part.term.site
            if at is not None:
                idle = self._idle.setdefault(key, Idle(part.depends, part.live, at, cut))
                idle.steps.add(backward.step)

    def _trains_nothing(self, part: Part, backward: Waiting) -> bool:
        others = [p for p in backward.parts if p is not part]
        taint = part.term.taint
        useful = any(p.live & backward.used for p in others)
        if not part.depends or not part.live or not useful:
            return False
        if taint is None or not taint.cuts:
            return not any(not part.depends & ~p.depends for p in others)
        cut = self._cut_of(part, backward)
        if cut is None or cut.kind == "explicit":
            return cut is not None
        # a region without gradients may be meant, if another term asks the same judge
        return not any(p.depends & part.live for p in others)

    def _cut_of(self, part: Part, backward: Waiting) -> CutFact | None:
        """The one cut that hides from this term what the loss trains."""
        taint = part.term.taint
        hidden = part.depends & ~part.live & backward.used
        if taint is None or not hidden:
            return None
        facts = [
            fact
            for fact in self.session.ledger.facts(taint)
            if (fact.mask if fact.kind == "region" else fact.graph) & hidden
        ]
        lines = {fact.site for fact in facts}
        return facts[0] if len(lines) == 1 and facts[0].kind in ("explicit", "region") else None

    def _verdicts(self) -> None:
        pending, self._idle = self._idle, {}
        for key, idle in pending.items():
            if key in self._good or len(idle.steps) < _ENOUGH or idle.mask & ~self._used:
                continue  # what never steps at all is another fault
            if idle.cut is not None:
                self._say_cut(idle, idle.cut, key)
                continue
            self.report(
                23,
                Severity.WARNING,
                "A term of the loss trains nothing: it reaches only parameters that do not step "
                "with this loss.",
                why=f"It can move {self.session.registry.many(idle.live)} alone, and their "
                f"gradients of the backward at {key[0]} are cleared before their own optimizer "
                "steps. What this loss should train takes no part in the term.",
                fix="Compute the term from what should learn by it: score the generated sample, "
                "not the real one.",
                site=idle.at,
                parameters=idle.mask,
                related=(key[1], key[0]),
            )

    def _say_cut(self, idle: Idle, cut: CutFact, key: tuple[Any, ...]) -> None:
        """The generator's sample is detached before it is judged, in the generator's own loss."""
        rest = self.session.registry.many(idle.mask & ~cut.mask)
        self.report(
            cut.number,
            Severity.WARNING,
            "A term of the loss trains nothing: what this loss should train is cut out of it.",
            why=f"Here {what_cuts(cut)}. The term still reaches {rest}, whose "
            f"gradients of the backward at {key[0]} are cleared before their own optimizer steps.",
            fix="Leave out the cut where this term is computed; it belongs into the other loss, "
            "that of the network which judges.",
            site=idle.at,
            parameters=idle.mask & cut.mask,
            related=(key[1], key[0]),
        )


def _key(backward: Waiting, part: Part) -> tuple[Site | None, Site | None, int, int]:
    """The same term in another step; one line may make those of several networks."""
    return backward.site, part.term.site, part.depends, part.live


def _addends(root: Term) -> Iterator[Term]:
    """What a loss is the sum of."""
    stack, seen = [root], set()
    while stack:
        term = stack.pop()
        if id(term) in seen:
            continue
        seen.add(id(term))
        if term.kind in ("sum", "scale") and term.parts:
            stack.extend(part for part, _ in term.parts)
        else:
            yield term


def _last_call(part: Part, calls: dict[int, Site]) -> Site | None:
    sites = [site for bits, site in calls.items() if not part.depends & ~bits]
    return sites[-1] if sites else None


def _caller(frame: FrameType) -> FrameType | None:
    """The next frame of the user's: a module's forward is called through torch's own."""
    outer = frame.f_back
    while outer is not None and not is_user_code(outer.f_code):
        outer = outer.f_back
    return outer
