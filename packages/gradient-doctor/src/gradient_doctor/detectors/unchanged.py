"""Class 21: the gradient is there, but the weights do not change."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from gradient_doctor.detectors.places import birth_site, called, count, dtype_site, most_common
from gradient_doctor.findings import Finding, Severity, Site
from gradient_doctor.readable import checksum
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, Session, StepRecord
from gradient_doctor.slips import assigned_item, bare_attribute, calls_of, loaded_state
from gradient_doctor.steps import StepFacts

_LITTLE = 0.5  # share of elements that must move for a parameter to count as trained
_NOTHING = 0.01
_PATIENCE = 10  # skipped steps; a scaler that looks for its scale needs fewer
_SHOWN = 6
_LOOP = 6  # gradients that were cleared before the only step
_RESETS = 4  # in a row, each after one step
_LOW = (torch.float16, torch.bfloat16)


@dataclass
class Moves:
    """One parameter over all checked steps that had a gradient for it."""

    size: int
    dtype: torch.dtype
    steps: int = 0
    at_zero_rate: int = 0
    woken: bool = False  # its rate was 0 in the first steps, and is not any more
    changed: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return sum(self.changed) / len(self.changed)


@dataclass
class History:
    """One optimizer."""

    name: str
    steps: int = 0  # that really happened
    checked: int = 0
    asked: int = 0  # of the scaler
    scales: list[float] = field(default_factory=list)  # at those times, of checked steps
    cleared: int = 0  # gradients that were there, before the first step
    scheduled: Site | None = None  # its scheduler's last step
    backwards: int = 0  # that gave its parameters gradients
    site: Site | None = None
    loaded: tuple[float, ...] = ()  # checksums after the model was loaded last
    loaded_after: int = 0  # steps
    resets: int = 0  # in a row, to the same values
    sums: dict[int, float] = field(default_factory=dict)  # of a few, at the first backward
    moves: dict[int, Moves] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Resting:
    """What was said of parameters with a rate of 0: any step at another rate takes it back."""

    finding: Finding
    optimizer: int  # its id
    idle: dict[int, Moves]


class Unchanged(Detector):
    """Reads what each step did to a sample of the elements."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._histories: dict[int, History] = {}
        self._backward_at: Counter[Site | None] = Counter()
        self._stepped_at: set[Site | None] = set()
        self._said: set[int] = set()
        self._resting: list[Resting] = []

    def _history(self, optimizer: Any) -> History:
        name = self.session.registry.optimizer_name(optimizer)
        return self._histories.setdefault(id(optimizer), History(name))

    def backward_ended(self, backward: Backward) -> None:
        if backward.kind != "backward" or not self.session.record.checked:
            return
        self._backward_at[backward.site] += 1
        registry = self.session.registry
        for optimizer in registry.optimizers.values():
            received = backward.received & registry.bits(owned_by(optimizer))
            if received:
                history = self._history(optimizer)
                history.backwards += 1
                if not history.sums:
                    some = itertools.islice(registry.tensors(received), 4)
                    history.sums = {registry.bit(p): checksum(p) for p in some}

    def event(self, event: Event) -> None:
        if event.kind == "zero_grad" and not self.session.age and event.data["parameters"]:
            cleared = set(map(id, event.data["parameters"]))
            for optimizer in self.session.registry.optimizers.values():
                if any(id(p) in cleared for p in owned_by(optimizer)):
                    self._history(optimizer).cleared += 1
        elif event.kind == "schedule" and not self.session.age:
            self._history(event.data["optimizer"]).scheduled = event.site
        elif event.kind == "load_module":
            self._reloaded(event)
        if event.kind == "scaler_step" and event.data["args"]:
            history = self._history(event.data["args"][0])
            history.asked += event.data["scaler"].is_enabled()
            history.site = event.site
            if self.session.record.checked and len(history.scales) < _SHOWN:
                history.scales.append(float(event.data["scaler"].get_scale()))
        elif event.kind == "step":
            history = self._history(event.data["optimizer"])
            history.steps += 1
            history.site = event.site
            self._stepped_at.add(event.site)
            self._wake(event.data["optimizer"])
            facts = event.data.get("update")
            if facts is not None:
                history.checked += 1
                self._moved(history, facts)

    def _reloaded(self, event: Event) -> None:
        """Weights that are set back to the same values after every single step."""
        module = event.data["module"]()
        registry = self.session.registry
        if module is not None and event.data["own"]:
            self._copied_onto_itself(event, module)
        if module is None:
            return
        for optimizer in registry.optimizers.values():
            history = self._history(optimizer)
            own = {id(p) for p in module.parameters()}
            some = [p for p in itertools.islice(owned_by(optimizer), 4) if id(p) in own]
            if not some or not history.steps:
                continue
            values = tuple(checksum(p) for p in some)
            again = values == history.loaded and history.steps - history.loaded_after == 1
            history.resets = history.resets + 1 if again else 0
            history.loaded, history.loaded_after = values, history.steps
            if history.resets != _RESETS:
                continue
            self.report(
                21,
                Severity.ERROR,
                f"Every step of the {called(history.name)} is undone: the weights are loaded anew.",
                why=f"After each of the last {_RESETS + 1} steps this line has set the weights "
                "back to the same values.",
                fix="Load them once, before the loop.",
                site=event.site,
                parameters=registry.bits(owned_by(optimizer)),
                related=(history.site,),
            )

    def _copied_onto_itself(self, event: Event, module: Any) -> None:
        self.report(
            21,
            Severity.WARNING,
            "A network's weights are copied onto themselves.",
            why="The state that is loaded here consists of the very tensors that it is loaded "
            "into: nothing changes. state_dict() copies no numbers: a state that was kept moves "
            "with the weights. Or the state of another network was meant.",
            fix="Keep copy.deepcopy(model.state_dict()); or pass the state_dict() of the network "
            "that learns. If both names mean one network, make the second with copy.deepcopy.",
            site=(loaded_state(event.site) if event.site is not None else None) or event.site,
            parameters=self.session.registry.bits(module.parameters()),
            related=(event.site,),
        )

    def _moved(self, history: History, facts: StepFacts) -> None:
        registry = self.session.registry
        rates = {
            id(p): rate
            for group, rate in zip(facts.optimizer.param_groups, facts.rates)
            for p in group["params"]
        }
        for update in facts.updates:
            if math.isnan(update.changed) or not 0 < update.gradient_norm < math.inf:
                continue
            counted = Moves(update.parameter.numel(), update.dtype)
            moves = history.moves.setdefault(registry.bit(update.parameter), counted)
            moves.steps += 1
            moves.at_zero_rate += rates.get(id(update.parameter)) == 0.0
            moves.changed.append(update.changed)

    def _wake(self, optimizer: Any) -> None:
        """Groups that begin at rate 0 are warmed up later; also between two looks."""
        mine = [r for r in self._resting if r.optimizer == id(optimizer)]
        if not mine:
            return
        registry = self.session.registry
        moving = 0
        for group in optimizer.param_groups:
            if group.get("lr") != 0:
                moving |= registry.bits(group["params"])
        for key in {r.finding.key for r in mine if any(bit & moving for bit in r.idle)}:
            self._take_back([r for r in self._resting if r.finding.key == key], moving)

    def _take_back(self, reported: list[Resting], moving: int) -> None:
        """The whole finding goes; those that still rest are judged again."""
        session = self.session
        finding = session.found(reported[0].finding.key)
        idle = {bit: moves for resting in reported for bit, moves in resting.idle.items()}
        if finding is None or {*finding.parameters} - {*session.registry.names(sum(idle))}:
            return  # others have said the same of parameters that they know better
        session.withdraw(finding)
        self._resting = [r for r in self._resting if r not in reported]
        self._said -= {resting.optimizer for resting in reported}
        woken = [bit for bit in idle if bit & moving]
        for bit in woken:
            idle[bit].woken = True
        self.report(
            21,
            Severity.NOTE,
            f"{count(len(woken), 'parameter')} had a learning rate of 0 before step "
            f"{session.step}, and not since.",
            why=f"Reported before: {finding.what}",
            fix="Nothing to do, if a warm-up is meant.",
            parameters=sum(woken),
            related=(finding.site,),
        )

    def step_ended(self, record: StepRecord) -> None:
        if record.checked and self.session.age + 1 >= self.session.trace_steps:
            self._judge(least=3)
            self._all_skipped(_PATIENCE)

    def finish(self, error: BaseException | None) -> None:
        self._judge(least=2)
        self._all_skipped(2)
        if error is None:
            self._never()
            self._once()

    def _judge(self, least: int) -> None:
        for optimizer in self.session.registry.optimizers.values():
            history = self._histories.get(id(optimizer))
            if history is None or history.checked < least or id(optimizer) in self._said:
                continue
            moves = {bit: m for bit, m in history.moves.items() if m.steps >= least}
            idle = {bit: m for bit, m in moves.items() if m.at_zero_rate == m.steps and not m.woken}
            if idle:
                self._rate_zero(optimizer, history, idle, len(moves))
                continue
            # never with one step at rate zero: a warmup begins like that
            able = {bit: m for bit, m in moves.items() if not m.at_zero_rate}
            low = {bit: m for bit, m in able.items() if m.dtype in _LOW}
            if low and _share(low) < _LITTLE:
                self._rounded(optimizer, history, low)
            elif able and len(able) == len(moves) and not any(m.share for m in able.values()):
                self._rounded(optimizer, history, able)

    def _rate_zero(
        self, optimizer: Any, history: History, idle: dict[int, Moves], total: int
    ) -> None:
        registry = self.session.registry
        self._said.add(id(optimizer))
        from_start = 0.0 in (registry.first_rates.get(optimizer) or ())
        birth = birth_site(registry, optimizer)
        files = [s.file for s in (history.site, birth) if s is not None]
        scheduled = registry.scheduled_at.get(optimizer)
        site = birth if from_start else scheduled or assigned_item(files, "lr")
        steps = min(m.steps for m in idle.values())
        finding = self.report(
            21,
            Severity.ERROR if len(idle) == total else Severity.WARNING,
            f"The learning rate of the {called(history.name)} is 0 for "
            f"{count(len(idle), 'parameter')}.",
            why=f"In {steps} of {steps} checked steps they had a gradient and a learning rate of "
            "exactly 0; no number changed.",
            fix="Set the learning rate, or the factor of the scheduler, above 0; or freeze the "
            "parameters if that is meant.",
            site=site or history.site,
            parameters=sum(idle),
            related=(history.site, birth),
        )
        self._resting.append(Resting(finding=finding, optimizer=id(optimizer), idle=idle))

    def _rounded(self, optimizer: Any, history: History, moves: dict[int, Moves]) -> None:
        registry = self.session.registry
        self._said.add(id(optimizer))
        stuck = {bit: m for bit, m in moves.items() if m.share < _LITTLE}
        share = _share(stuck)
        dtype = next(iter(stuck.values())).dtype
        low = dtype in _LOW
        birth = birth_site(registry, optimizer)
        dtype_place = most_common(dtype_site(registry, p) for p in registry.tensors(sum(stuck)))
        given_rates = (group.get("lr") for group in optimizer.param_groups)
        rates = {float(rate) for rate in given_rates if rate is not None}
        self.report(
            21,
            Severity.ERROR if share < _NOTHING else Severity.WARNING,
            f"{1 - share:.0%} of the numbers in {count(len(stuck), 'parameter')} do not change "
            f"in a step of the {called(history.name)}.",
            why=f"They have a gradient in all {history.checked} checked steps, but at a learning "
            f"rate of {', '.join(f'{rate:g}' for rate in sorted(rates))} the update is less than "
            f"half the distance between two neighbouring {str(dtype).removeprefix('torch.')} "
            "values, and is rounded away.",
            fix=(
                "Keep the weights (or a master copy of them) in float32 and run the forward under "
                "autocast; or take larger steps."
                if low
                else "Take larger steps: the learning rate is too small for these weights."
            ),
            site=(dtype_place if low else birth) or history.site,
            parameters=sum(stuck),
            related=(birth, history.site),
        )

    def _unmoved(self, optimizer: Any, history: History) -> int:
        """Its parameters, if it has never stepped and nobody else moves them."""
        registry = self.session.registry
        parameters = registry.bits(owned_by(optimizer))
        for other in registry.optimizers.values():
            if other is not optimizer and self._history(other).steps:
                parameters &= ~registry.bits(owned_by(other))
        sums = history.sums.items()
        if any(checksum(p) != s for bit, s in sums for p in registry.tensors(bit)):
            return 0  # a wrapper around another optimizer, or an update by hand
        return parameters

    def _all_skipped(self, least: int) -> None:
        """Every step that was asked of the scaler was skipped."""
        for optimizer in self.session.registry.optimizers.values():
            history = self._histories.get(id(optimizer))
            if history is None or history.steps or history.asked < least:
                continue
            parameters = self._unmoved(optimizer, history)
            reported = [f for f in self.session.findings if f.number in (17, 27)]
            if not parameters or any(f.severity is Severity.ERROR for f in reported):
                continue  # why the scaler skips is said there
            if id(optimizer) in self._said:
                continue
            self._said.add(id(optimizer))
            scales = ", ".join(f"{scale:g}" for scale in history.scales)
            self.report(
                21,
                Severity.WARNING,
                f"The scaler skipped {history.asked} of {history.asked} steps of the "
                f"{called(history.name)}.",
                why="The weights have not changed: each time it found gradients that are not "
                "finite. "
                + (f"Scales seen: {scales}. " if scales else "")
                + "The scale is too large at first and is halved after each such step, or the "
                "gradients overflow by themselves.",
                fix="Begin with a smaller init_scale; if it goes on, look for the overflow.",
                site=history.site,
                parameters=parameters,
                related=tuple(f.site for f in reported if f.number == 27),
            )

    def _once(self) -> None:
        """A single step, after a loop that went back and cleared its gradients again and again."""
        registry = self.session.registry
        for optimizer in registry.optimizers.values():
            history = self._histories.get(id(optimizer))
            if history is None or history.steps != 1 or history.cleared < _LOOP:
                continue
            self.report(
                21,
                Severity.ERROR,
                f"The {called(history.name)} stepped once, with the last of many gradients.",
                why=f"Gradients were cleared {history.cleared} times before the only step: all "
                "but the last have changed no weight. The call stands outside of the loop.",
                fix="Move it into the loop, right after backward.",
                site=history.site,
                parameters=registry.bits(owned_by(optimizer)),
            )

    def _never(self) -> None:
        """Optimizers that never stepped although their parameters had gradients."""
        registry = self.session.registry
        for optimizer in registry.optimizers.values():
            history = self._histories.get(id(optimizer))
            if history is None or history.steps or history.asked or history.backwards < 2:
                continue
            parameters = self._unmoved(optimizer, history)
            backward = most_common(self._backward_at)
            bare = None if backward is None else bare_attribute([backward.file], "step")
            files = [] if backward is None else [backward.file]
            lines = calls_of(files, history.name.split(".")[-1], "step")
            # a name that means another optimizer there, as an argument of a function does
            stepped = {(s.file, s.line) for s in self._stepped_at if s is not None}
            unreached = [s for s in lines if (s.file, s.line) not in stepped]
            if parameters:
                self.report(
                    21,
                    Severity.ERROR,
                    f"The {called(history.name)} never steps.",
                    why=f"{history.backwards} backwards gave its parameters gradients, "
                    "and step() was never called"
                    + ("." if not unreached else ": the program does not come to this line.")
                    + (" `step` without parentheses calls nothing." if bare is not None else ""),
                    fix="Call its step() after backward."
                    if not unreached
                    else "Look at the condition that it stands under: is it ever true?",
                    site=bare
                    or (unreached[0] if unreached else None)
                    or history.scheduled
                    or birth_site(registry, optimizer)
                    or backward,
                    parameters=parameters,
                    related=(birth_site(registry, optimizer), backward),
                )


def _share(moves: dict[int, Moves]) -> float:
    """Of all elements together: a tiny tensor that stands still is nothing."""
    size = sum(m.size for m in moves.values())
    return sum(m.share * m.size for m in moves.values()) / size if size else 1.0
