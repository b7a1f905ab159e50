"""Class 31: learning rates that a schedule takes away, and schedulers out of step.

Three rules. Most updates were made at a thousandth of the optimizer's highest rate or less. A
scheduler is stepped several times for each step of its optimizer. A scheduler is stepped before
its optimizer in every round, so the first value of the schedule is never used.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from gradient_doctor.detectors.places import birth_site, called
from gradient_doctor.epochs import epochs_around, horizon
from gradient_doctor.findings import Severity, Site
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, Session
from gradient_doctor.slips import assigned_attribute, assigned_item

_NOTHING = 1.001e-3  # of the highest rate so far; three decays by ten are rounded to either side
_ENOUGH = 6  # updates before a share of them means something
_ROUNDS = 3
_RECENT = 32
_TIMES = 3  # lengths of a schedule


@dataclass
class Scheduler:
    """The steps of one scheduler, beside those of its optimizer."""

    site: Site | None = None  # of its last step
    plateau: bool = False
    by_user: bool = True  # all of its steps stand in the user's own code
    steps: int = 0
    since_update: int = 0  # steps since the last update of the optimizer
    several: int = 0  # updates with two or more steps of the scheduler before them
    first: bool = False  # its first step came before any update
    bursts: int = 0  # updates with any
    early: int = 0  # steps before the first update
    mode: str = ""  # of a plateau: "min" or "max"
    metrics: list[float] = field(default_factory=list)  # that it was given
    of_loss: bool = True  # each of them was the value of a loss
    horizon: int = 0  # steps after which it is over; 0: unknown


@dataclass
class Rates:
    """One optimizer. An update that a gradient scaler skips is an update here."""

    updates: int = 0
    highest: float = 0.0
    low: int = 0  # updates at next to nothing of the highest rate
    lowest: float = float("inf")  # of these
    made_with: float = 0.0  # the rate that the optimizer was made with
    below: int = 0  # updates at next to nothing of that
    first: float = 0.0
    last: float = 0.0
    site: Site | None = None
    schedulers: weakref.WeakKeyDictionary[Any, Scheduler] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    kept: list[Scheduler] = field(default_factory=list)  # also of schedulers that have died


class Schedule(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._rates: weakref.WeakKeyDictionary[Any, Rates] = weakref.WeakKeyDictionary()
        self._losses: list[float] = []  # the last of them

    def event(self, event: Event) -> None:
        if event.kind == "step":
            self._updated(event)
        elif event.kind == "schedule":
            self._scheduled(event)

    def _updated(self, event: Event) -> None:
        optimizer = event.data["optimizer"]
        rates = self._rates.setdefault(optimizer, Rates())
        groups = [group.get("lr") for group in optimizer.param_groups]
        known = [float(rate) for rate in groups if rate is not None]
        if known:
            rate = max(known)
            if not rates.updates:
                made_with = self.session.registry.first_rates.get(optimizer) or ()
                rates.made_with = max([float(r) for r in made_with if r is not None], default=0.0)
                rates.first = rate
            rates.last = rate
            rates.below += rate <= _NOTHING * rates.made_with
            if rates.highest > 0.0 and rate <= _NOTHING * rates.highest:
                rates.low += 1
                rates.lowest = min(rates.lowest, rate)
            rates.highest = max(rates.highest, rate)
        rates.updates += 1
        rates.site = event.site
        for scheduler in rates.kept:
            scheduler.several += scheduler.since_update > 1
            scheduler.bursts += scheduler.since_update > 0
            scheduler.since_update = 0

    def _scheduled(self, event: Event) -> None:
        scheduler, optimizer = event.data["scheduler"], _inner(event.data["optimizer"])
        rates = self._rates.setdefault(optimizer, Rates())
        known = rates.schedulers.get(scheduler)
        if known is None:
            known = rates.schedulers[scheduler] = Scheduler(first=rates.updates == 0)
            known.horizon = horizon(scheduler)
            known.plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            rates.kept.append(known)
        known.steps += 1
        known.since_update += 1
        known.early += rates.updates == 0
        known.by_user &= event.data["by_user"]
        known.site = event.site
        if known.plateau and event.data["metric"] is not None:
            known.mode = scheduler.mode
            known.metrics.append(event.data["metric"])
            known.of_loss &= bool(self._losses) and self._looks_like_loss(event.data["metric"])

    def backward_starts(self, backward: Backward) -> None:
        """Losses since the schedule moved last, as their range."""
        root = backward.roots[0] if backward.roots else None
        if root is None or root.numel() != 1 or root.device.type != "cpu":
            return
        values = self.session.values(root)
        if values is not None and not values.is_complex():
            self._losses = [*self._losses[-_RECENT:], float(values)]

    def _looks_like_loss(self, metric: float) -> bool:
        """One of the last losses, or a value among them."""
        return min(self._losses) * 0.5 <= metric <= max(self._losses) * 2.0

    def finish(self, error: BaseException | None) -> None:
        for optimizer, rates in list(self._rates.items()):
            self._attribute(optimizer, rates)
            if self._upside_down(optimizer, rates):
                continue
            if rates.updates >= _ENOUGH and 2 * rates.low > rates.updates:
                self._taken_away(optimizer, rates)
            # a warm-up that the run is too short for still rises
            elif rates.below == rates.updates >= _ENOUGH and 0 < rates.last <= rates.first:
                self._factor_for_rate(optimizer, rates)
            elif self._of_another(optimizer, rates) or self._counts_epochs(optimizer, rates):
                continue
            elif self.session.scaler is None:  # which may skip steps: that is torch's way
                for scheduler in rates.kept:
                    self._out_of_step(optimizer, rates, scheduler)

    def _attribute(self, optimizer: Any, rates: Rates) -> None:
        """`optimizer.lr = 1e-4` makes an attribute that nothing reads."""
        if not type(optimizer).__module__.startswith("torch.optim") or not rates.updates:
            return
        written = vars(optimizer).get("lr")
        if not isinstance(written, (int, float)) or written == rates.last:
            return
        name = self.session.registry.optimizer_name(optimizer)
        made = birth_site(self.session.registry, optimizer)
        files = [site.file for site in (rates.site, made) if site is not None]
        self.report(
            31,
            Severity.WARNING,
            f"{name}.lr = {written:g} changes nothing: the learning rate stays {rates.last:g}.",
            why="Optimizers of torch read the rate from their param_groups. An attribute of this "
            "name is one that the program has made, and nobody reads it.",
            fix=f"for group in {name}.param_groups: group['lr'] = ...",
            site=assigned_attribute(files, ["lr"]) or made or rates.site,
            parameters=self.session.registry.bits(owned_by(optimizer)),
            related=(made, rates.site),
        )

    def _of_another(self, optimizer: Any, rates: Rates) -> bool:
        """A scheduler of an optimizer that never steps, while another moves its parameters."""
        registry = self.session.registry
        stepped = [s for s in rates.kept if s.steps >= _ROUNDS]
        if rates.updates or not stepped:
            return False
        theirs = registry.bits(owned_by(optimizer))
        others = [
            other
            for other, its in self._rates.items()
            if its.updates and registry.bits(owned_by(other)) & theirs
        ]
        if not others:
            return False
        name = registry.optimizer_name(others[0])
        made = registry.scheduled_at.get(optimizer)
        self.report(
            31,
            Severity.WARNING,
            f"The scheduler belongs to another optimizer than the one that steps ({name}).",
            why=f"It was stepped {stepped[0].steps} times, and sets the learning rate of an "
            f"optimizer that never stepped. {name} holds the same parameters, was made elsewhere, "
            "and keeps its rate.",
            fix="Make the scheduler from the optimizer that is used, and after it.",
            site=birth_site(registry, others[0]) if self._is_newer(others[0], optimizer) else made,
            parameters=theirs,
            related=(made, birth_site(registry, others[0]), stepped[0].site),
        )
        return True

    def _counts_epochs(self, optimizer: Any, rates: Rates) -> bool:
        """A schedule as long as the loop over epochs, stepped with every batch."""
        registry = self.session.registry
        for scheduler in rates.kept:
            often = scheduler.bursts >= 0.8 * rates.updates and rates.updates >= _ENOUGH
            over = 0 < _TIMES * scheduler.horizon <= scheduler.steps
            if not often or not over or scheduler.site is None:
                continue
            epochs = epochs_around(scheduler.site)
            if not 1 < scheduler.horizon <= epochs:
                continue
            if scheduler.steps == epochs * scheduler.horizon:
                continue  # as long as an epoch has batches: it begins again with each
            made = registry.scheduled_at.get(optimizer)
            self.report(
                31,
                Severity.WARNING,
                f"A schedule of {scheduler.horizon} steps is stepped {scheduler.steps} times, "
                "after every batch.",
                why=f"The loop over epochs runs {epochs} times, and the schedule is made for as "
                "many steps or less: it counts epochs. Stepped here, within the loop over batches, "
                f"it is over (or begins again) after {scheduler.horizon} batches. Rates went from "
                f"{rates.highest:g} to {rates.last:g}.",
                fix="Step the scheduler once per epoch, after the loop over batches; or count its "
                "length in batches.",
                site=scheduler.site,
                parameters=registry.bits(owned_by(optimizer)),
                related=(made, rates.site),
            )
            return True
        return False

    def _is_newer(self, one: Any, other: Any) -> bool:
        first, second = self.session.registry.birth(other), self.session.registry.birth(one)
        return first is not None and second is not None and second.order > first.order

    def _upside_down(self, optimizer: Any, rates: Rates) -> bool:
        """ReduceLROnPlateau that waits for a falling loss to rise."""
        registry = self.session.registry
        for scheduler in rates.kept:
            values = scheduler.metrics
            falls = sum(later < earlier for earlier, later in itertools.pairwise(values))
            if scheduler.mode != "max" or len(values) < _ENOUGH or not scheduler.of_loss:
                continue
            if 2 * falls <= len(values) or rates.last >= rates.highest:
                continue
            made = registry.scheduled_at.get(optimizer)
            self.report(
                31,
                Severity.WARNING,
                "ReduceLROnPlateau with mode='max' is given a loss, which falls.",
                why=f"The value went from {values[0]:.3g} to {values[-1]:.3g}: training goes well, "
                f"and the rate was cut from {rates.highest:g} to {rates.last:g}, because nothing "
                "rose.",
                fix="mode='min' for a loss; 'max' is for an accuracy.",
                site=made or scheduler.site,
                parameters=registry.bits(owned_by(optimizer)),
                related=(scheduler.site,),
            )
            return True
        return False

    def _taken_away(self, optimizer: Any, rates: Rates) -> None:
        registry = self.session.registry
        name = registry.optimizer_name(optimizer)
        often = [s for s in rates.kept if 2 * s.steps > rates.updates]
        if rates.kept and not often and any(s.plateau for s in rates.kept):
            return  # the loss itself has asked for it
        made = registry.scheduled_at.get(optimizer)
        stepped = often[0].site if often else None
        how = (
            f"Its scheduler is stepped {often[0].steps} times in {rates.updates} updates, "
            "as often as the optimizer: a schedule that counts epochs is over after a few batches."
            if often
            else "Its schedule ends long before the training does."
            if rates.kept
            else "The rate was set in its param_groups."
        )
        self.report(
            31,
            Severity.ERROR if rates.lowest == 0.0 else Severity.WARNING,
            f"{rates.low} of {rates.updates} updates of the {called(name)} had a learning rate "
            f"of {'0' if rates.lowest == 0.0 else 'next to nothing'}.",
            why=f"The rate fell from {rates.highest:g} to {rates.lowest:g}, and the weights hardly "
            f"moved after that. {how}",
            fix="Step the scheduler in the unit that it counts (once per epoch), or count its "
            "step size and T_max in updates.",
            site=stepped or made or self._by_hand(optimizer, rates) or rates.site,
            parameters=registry.bits(owned_by(optimizer)),
            related=(made, rates.site, birth_site(registry, optimizer)),
        )

    def _by_hand(self, optimizer: Any, rates: Rates) -> Site | None:
        """Where the program sets the rate in param_groups itself."""
        made = birth_site(self.session.registry, optimizer)
        return assigned_item([s.file for s in (rates.site, made) if s is not None], "lr")

    def _factor_for_rate(self, optimizer: Any, rates: Rates) -> None:
        registry = self.session.registry
        name = registry.optimizer_name(optimizer)
        made = registry.scheduled_at.get(optimizer)
        self.report(
            31,
            Severity.WARNING,
            f"All {rates.updates} updates of the {called(name)} had next to nothing of its "
            "learning rate.",
            why=f"It was made with {rates.made_with:g}, and the schedule gave {rates.first:g} at "
            f"first and {rates.last:g} at last: a function of LambdaLR that returns a rate, where "
            "a factor is expected, multiplies the rate by itself.",
            fix="Return a factor: 1.0 keeps the optimizer's learning rate.",
            site=made or rates.site,
            parameters=registry.bits(owned_by(optimizer)),
            related=(rates.site, birth_site(registry, optimizer)),
        )

    def _out_of_step(self, optimizer: Any, rates: Rates, scheduler: Scheduler) -> None:
        registry = self.session.registry
        name = registry.optimizer_name(optimizer)
        made = registry.scheduled_at.get(optimizer)
        rounds = min(rates.updates, scheduler.steps)
        if rounds < _ROUNDS or not scheduler.by_user:
            return
        always = scheduler.several == scheduler.bursts >= _ROUNDS
        if 2 * scheduler.several > rates.updates or always:
            self.report(
                31,
                Severity.WARNING,
                f"The scheduler of the {called(name)} is stepped {scheduler.steps} times for "
                f"{rates.updates} updates.",
                why="Whenever the rate moves, it moves several times before the weights do once, "
                "as if every micro batch of an accumulation were an update: the schedule is over "
                "too soon.",
                fix="Step the scheduler right after the optimizer's own step, and only then.",
                site=scheduler.site,
                parameters=registry.bits(owned_by(optimizer)),
                related=(rates.site, made),
            )
        elif scheduler.first and scheduler.early == 1 and not scheduler.since_update:
            self.report(
                31,
                Severity.WARNING,
                f"The scheduler is stepped before the {called(name)} in every round.",
                why="The first value of the schedule is never used, and all others come one round "
                "too early; a warm-up loses its first step.",
                fix="Call optimizer.step() first, then scheduler.step().",
                site=scheduler.site,
                parameters=registry.bits(owned_by(optimizer)),
                related=(rates.site, made),
            )


def _inner(optimizer: Any) -> Any:
    """The optimizer that steps, behind wrappers (accelerate's) with the very same groups."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, torch.optim.Optimizer):
        if not any(a is b for a in optimizer.param_groups for b in inner.param_groups):
            break
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    return optimizer
