"""Terms of a loss that change its number but not the update (class 23)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from gradient_doctor.explain import CutFact, Ledger, how_to_mend, what_cuts
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.sites import is_user_file
from gradient_doctor.taint import GRAD, Taint
from gradient_doctor.terms import COPIES, LINEAR, Term

# optimizers whose step does not grow with the gradient
_SCALE_FREE = ("adam", "adafactor", "adagrad", "adadelta", "rmsprop", "rprop", "lion", "lamb")
_COMPARISONS = {"kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "cosine_similarity"}
_COMPARISONS |= {"cross_entropy", "nll_loss", "binary_cross_entropy"}
_SCALE_FREE += ("muon", "sophia", "shampoo", "novograd")


@dataclass
class Idle:
    """A term without influence, as one line of the program has it."""

    kind: str  # "addend" or "factor"
    taint: Taint | None
    loss: int  # parameters that the loss around it is alive in
    wanted: int = 0  # those that a scalar term should train, and depends on
    beside: set[Site | None] = field(default_factory=set)  # regions that other terms use as well
    amounts: list[float] = field(default_factory=list)
    steps: set[int] = field(default_factory=set)


class Cosmetic(Detector):
    """Follows each loss down its additions and constant factors."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._found: dict[tuple[str, Site], Idle] = {}
        self._scaling: set[Site | None] = set()  # lines that call GradScaler.scale
        self._clipped: list[bool] = []
        self._sampled = False
        self._moved = 0  # by the backward that is looked at
        self._calls: dict[tuple[int, Site | None], int] = {}  # backwards per step and line

    @property
    def ledger(self) -> Ledger:
        return self.session.ledger

    # facts

    def event(self, event: Event) -> None:
        if event.kind == "scale":
            self._scaling.add(event.site)
        elif event.kind == "clip":
            norm = event.data.get("total_norm")
            limit = event.data.get("max_norm")
            if norm is not None and limit is not None:
                self._clipped.append(float(norm) > float(limit))

    def op(self, call: OpCall) -> None:
        if call.taint is not None and not self._sampled:
            self._sampled = any(
                cut.kind == "sample" or (cut.region is not None and cut.region.kind == "sample")
                for cut in call.taint.cuts
            )

    def backward_starts(self, backward: Backward) -> None:
        if backward.taint is None:
            return
        key = (backward.step, backward.site)
        self._calls[key] = self._calls.get(key, 0) + 1
        self._moved = self._moved_by(backward)
        for root in backward.roots:
            term = self.ledger.terms.of(root)
            if term.live:
                self._walk(term, backward)

    def _moved_by(self, backward: Backward) -> int:
        """Inputs that this gradient is for: of an attack, a style, a latent code."""
        registry = self.session.registry
        owned, live = registry.owned, backward.taint.live if backward.taint is not None else 0
        if backward.kind == "grad":
            if backward.retain_graph:
                return 0  # a part of some other loss, most likely
            wanted = [t for t in backward.inputs or () if t.is_leaf]
        elif not live & self.ledger.should_train() and backward.graph is not None:
            wanted = backward.graph.leaves
        else:
            return 0
        inputs = [t for t in wanted if t.requires_grad and not isinstance(t, nn.Parameter)]
        return registry.bits(inputs) & ~owned

    def _walk(self, root: Term, backward: Backward) -> None:
        """Down the sums; `whole` while everything alive in the loss is below."""
        stack, seen = [(root, 1.0, True)], set()
        while stack:
            term, weight, whole = stack.pop()
            if id(term) in seen:
                continue
            seen.add(id(term))
            if term.kind == "scale" and term.factor is not None:
                if whole:
                    self._factor(term, term.factor, root)
                stack.append((term.parts[0][0], math.nan, whole))
            elif term.kind == "sum":
                alive = [part for part, _ in term.parts if part.live]
                for part, factor in term.parts:
                    if part.live:
                        stack.append((part, weight * factor, whole and len(alive) == 1))
                    elif alive:
                        self._addend(term, part, factor, alive, root)

    # candidates

    def _addend(
        self, total: Term, part: Term, factor: float, alive: list[Term], root: Term
    ) -> None:
        # x - x.detach(), y.detach() + x - x.detach(): a value is replaced, its gradient kept
        below = {id(inner) for inner in part.inside()}
        if any(id(inner) in below for term in alive for inner in _linear(term)):
            return
        if factor < 0 and not total.scalar and _is_peak(part):
            return  # scores less their largest, before exp: it falls out of every log-probability
        trained = part.depends & (self.ledger.should_train() | self._moved)
        if total.scalar:
            compared = next((t for t in part.inside() if t.op in _COMPARISONS), None)
            cuts = part.taint.cuts if part.taint is not None else ()
            only_read = not trained & root.live  # a teacher, and not the network of this loss
            if compared is not None and only_read and all(cut.kind == "region" for cut in cuts):
                # neither side of the comparison learns: the fault is what it was given
                self._note("addend", compared.site, part, root)
                return
            wanted = trained or (not part.depends and part.data and part.amount)
        else:
            # per element only what was a graph; out of regions without gradients only what has a
            # weight: differences of two evaluations (log-probabilities, estimates of a KL) are
            # meant
            cuts = part.taint.cuts if part.taint is not None else ()
            kinds = {cut.kind for cut in cuts if cut.graph & trained}
            wanted = kinds & {"explicit", "zero"} or (kinds and _weighted(part))
        if wanted:
            # a value per element may be cut off for something else, too: then the sum is the fault
            idle = self._note("addend", total.site, part, root, trained if total.scalar else 0)
            taints = [other.taint for other in alive if other.taint is not None]
            if idle is not None:
                cuts = [cut for taint in taints for cut in taint.cuts]
                idle.beside.update(cut.site for cut in cuts if cut.region is not None)

    def _factor(self, product: Term, factor: Term, root: Term) -> None:
        amount = factor.amount
        if not factor.scalar or product.site in self._scaling or amount is None:
            return
        if factor.ratio or float(amount).is_integer():
            return  # a normaliser, a count or a switch
        if all(p.numel() == 1 for p in self.session.registry.tensors(root.live)):
            return  # a multiplier, a temperature: the factor's sign says which way it moves
        if factor.data or factor.depends:
            self._note("factor", product.site, factor, root)

    def _note(
        self, kind: str, site: Site | None, term: Term, root: Term, wanted: int = 0
    ) -> Idle | None:
        if site is None or not is_user_file(site.file):
            return None  # libraries know what they add
        idle = self._found.setdefault((kind, site), Idle(kind, term.taint, 0))
        idle.loss |= root.live
        idle.taint = term.taint
        idle.wanted |= wanted
        idle.steps.add(self.session.step)
        if term.amount is not None:
            idle.amounts.append(term.amount)
        return idle

    # verdicts

    def step_ended(self, record: StepRecord) -> None:
        if record.traced and self.session.age + 1 >= self.session.trace_steps:
            self._verdicts()

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._verdicts()

    def _verdicts(self) -> None:
        pending, self._found = self._found, {}
        for (_, site), idle in pending.items():
            if idle.kind == "addend":
                self._say_addend(site, idle)
            else:
                self._say_factor(site, idle)

    def _say_addend(self, site: Site, idle: Idle) -> None:
        ledger = self.ledger
        facts = ledger.facts(idle.taint) if idle.taint is not None else []
        reported = {(f.number, f.site.place) for f in self.session.findings if f.site is not None}
        cuts = [fact.site.place for fact in facts if fact.site is not None]
        if any((number, place) in reported for place in cuts for number in (1, 2, 3, 10, 11)):
            return  # the cut has taken some parameter's only gradient: that is the finding
        hidden = 0
        for fact in facts:
            hidden |= fact.mask
        hidden &= ledger.should_train()
        if hidden & ~ledger.received:
            return
        value = f" (last value {idle.amounts[-1]:.4g})" if idle.amounts else ""
        why, at = "It is computed from data alone", site
        fix = (
            "Give the term a gradient (remove the cut; for a reward, a score-function or"
            " pathwise estimate), or drop it from the loss and log it on its own."
        )
        if facts:
            best = max(facts, key=lambda fact: (fact.graph.bit_count(), fact.step, fact.order))
            copied = best.op in COPIES or best.op.endswith("Tensor")
            if copied and best.kind == "explicit" and best.site is not None:
                self._say_copied(best, site, hidden)
                return
            on = self.session.registry.many(hidden) if hidden else "the input that it should move"
            why = f"It depends on {on}, but {what_cuts(best)}"
            if all(fact.op == GRAD for fact in facts):
                at, fix = best.site or site, how_to_mend(best)
            else:
                at = _where_to_change(facts, idle.wanted)
                # a rollout without gradients, of which another term is right to use values
                at = site if at is None or at in idle.beside else at
        self.report(
            23,
            Severity.WARNING,
            f"A term of the loss{value} has no gradient: it changes the number, not the update.",
            why=f"{why}; it enters the loss by addition at {site}.",
            fix=fix,
            site=at,
            parameters=hidden,
            related=(site, *(fact.site for fact in facts)),
        )

    def _say_copied(self, cut: CutFact, site: Site, hidden: int) -> None:
        """Class 3: `torch.tensor(losses)` can only be meant for values that have no gradient."""
        self.report(
            3,
            Severity.WARNING,
            f"`{cut.op}` copies the numbers of tensors that have a gradient, and drops it.",
            why=f"A list of losses or scores becomes a new tensor here, and a term of the loss at "
            f"{site}: it changes the number of the loss, and trains nothing.",
            fix="torch.stack(values) keeps their gradients.",
            site=cut.site,
            parameters=hidden,
            related=(site,),
        )

    def _say_factor(self, site: Site, idle: Idle) -> None:
        ledger = self.ledger
        low, high = min(idle.amounts), max(idle.amounts)
        facts = ledger.facts(idle.taint) if idle.taint is not None else []
        source = what_cuts(facts[-1]) if facts else "it is computed from data alone"
        names, effect = self._scale_free(idle.loss)
        parts = any(count > 1 for count in self._calls.values())
        # where batches share one step, or actions are rewarded, a weight per batch has its sense
        harmless = not effect or parts or self._sampled
        self.report(
            23,
            Severity.NOTE if harmless else Severity.WARNING,
            f"A factor between {low:.3g} and {high:.3g} without gradient rescales the whole loss.",
            why=f"No gradient flows through the factor ({source})"
            + (f", and {effect}." if effect else ": it only changes the length of the step."),
            fix="Weigh single terms or samples instead of the whole loss, or drop the factor.",
            site=site,
            parameters=ledger.should_train() & idle.loss if names else (),
            related=tuple(fact.site for fact in facts),
        )

    def _scale_free(self, mask: int) -> tuple[list[str], str]:
        """Why the size of the gradient does not matter to the optimizers of these parameters."""
        registry = self.session.registry
        owners = {name for tensor in registry.tensors(mask) for name in registry.owners(tensor)}
        kinds = {n: type(registry.optimizers[n]).__name__ for n in owners}
        free = [n for n, kind in kinds.items() if kind.lower().startswith(_SCALE_FREE)]
        if owners and len(free) == len(owners):
            shown = ", ".join(sorted(set(kinds.values())))
            return sorted(owners), f"{shown} divides the gradient by its own size"
        if self._clipped and all(self._clipped):
            return sorted(owners), "clip_grad_norm_ cuts every gradient to one length"
        return sorted(owners), ""


def _where_to_change(facts: list[CutFact], wanted: int) -> Site | None:
    """The one line that takes the term out of the graph; None where several lines do."""
    facts = [fact for fact in facts if fact.mask & wanted]
    lines = {fact.site for fact in facts if fact.graph & wanted} or {fact.site for fact in facts}
    if len(lines) != 1 or any(fact.kind in ("sample", "checkpoint") for fact in facts):
        return None
    site = lines.pop()
    return site if site is not None and is_user_file(site.file) else None


def _linear(term: Term) -> Iterator[Term]:
    """A term and what it is the sum of."""
    stack = [term]
    while stack:
        current = stack.pop()
        yield current
        if current.kind == "sum":
            stack.extend(part for part, _ in current.parts)


def _is_peak(term: Term) -> bool:
    """Whether the values are maxima: nothing but rearranged, or cut off, since they were taken."""
    while len(term.parts) == 1 and (term.kind in ("cut", "sum") or term.op in LINEAR):
        term = term.parts[0][0]
    return term.op in ("max", "amax")


def _weighted(part: Term) -> bool:
    """Whether the term was multiplied by a number of the program before it was added."""
    return part.op in ("mul", "multiply")
