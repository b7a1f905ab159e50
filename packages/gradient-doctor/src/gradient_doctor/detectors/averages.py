"""Classes 21 and 32: networks that follow another by an average of weights, the wrong way round.

A target network or teacher is `slow = d * slow + (1 - d) * trained`, with d close to 1. With the
two factors exchanged it is all but the trained network itself (32). With the two networks exchanged
the average is written into the one that is trained: each step is undone, and the slow one never
moves (21). Both are read from the weights: which combination of the two is what came out?

An average into a tensor that shares the memory of the weights (`p.data` without a copy) averages
them with themselves (21).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import values_of
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session

_STEPS = 64  # of an optimizer that are looked at
_SOME = 256  # numbers of one parameter
_ENOUGH = 3  # updates
_FEW = 0.1  # a share of the old weights that forgets them at once
_NONE = 1e-4  # a copy, up to rounding
_CLOSE = 0.02
_PAIRS = 64
_MODULES = 2000  # larger models are not searched for networks inside of them


@dataclass
class Pair:
    """A network that some optimizer trains, and one of the same shapes that none does."""

    trained: weakref.ref[nn.Module]
    slow: weakref.ref[nn.Module]
    before: tuple[Tensor, Tensor] | None = None  # numbers of both, after the optimizer's step
    kept: list[float] = field(default_factory=list)  # shares of itself that the slow one keeps
    pulled: int = 0  # times that the trained one was moved towards the slow one
    moved: bool = False  # the slow one has changed


class Averages(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._pairs: dict[int, list[Pair]] = {}  # by the optimizer's id
        self._steps: dict[int, int] = {}
        self._used = 0  # parameters that some loss depends on, through cuts as well
        self._written: dict[int, Site | None] = {}  # address of a parameter -> its last writing
        self._assigned = WeakIdKeyDictionary()  # `p.data = ...` moves p to another address
        self._shares = WeakIdKeyDictionary()  # a tensor on a parameter's memory -> its line
        self._scaled: dict[int, float] = {}  # address -> the factor that it was just multiplied by
        self._onto_itself: dict[Site | None, int] = {}

    # writings

    def op(self, call: OpCall) -> None:
        if call.short in ("data", "detach") and isinstance(call.inputs[0], nn.Parameter):
            self._shares[call.outputs[0]] = call.site
        for target in call.targets or (call.args[:1] if call.short == "__set__" else ()):
            if call.short == "__set__" and isinstance(target, nn.Parameter):
                self._assigned[target] = call.site
            address = _address(target)
            if address is not None:
                self._written[address] = call.site
                self._same_memory(call, target, address)

    def _same_memory(self, call: OpCall, target: Tensor, address: int) -> None:
        """`shadow.mul_(d).add_(p, alpha=1 - d)` where shadow is p."""
        others = [t for t in call.inputs if t is not target]
        if call.short == "mul_" and not others:
            number = call.args[1] if len(call.args) > 1 else None
            self._scaled[address] = float(number) if isinstance(number, float) else 0.0
            return
        before = self._scaled.pop(address, 0.0)
        alpha = call.kwargs.get("alpha", 0.0)
        added = call.short == "add_" and isinstance(alpha, float) and abs(before + alpha - 1) < 1e-6
        same = len(others) == 1 and _address(others[0]) == address
        if not same or not (added or call.short == "lerp_"):
            return
        owner = next(
            (p for p in self.session.registry.everything() if _address(p) == address), None
        )
        if owner is None or not self.session.registry.bit(owner) & self.session.registry.owned:
            return
        made = self._shares.get(target)
        self._onto_itself[made] = self._onto_itself.get(made, 0) | self.session.registry.bit(owner)
        self.report(
            21,
            Severity.WARNING,
            "Weights are averaged with themselves.",
            why=f"What is averaged at {call.site} shares the memory of the weights: `.data`, "
            "`detach()` and state_dict() copy nothing. The average is the weights, always.",
            fix="Keep a copy: p.detach().clone(), or copy.deepcopy(model).",
            site=made or call.site,
            parameters=self._onto_itself[made],
            related=(call.site,),
        )

    def event(self, event: Event) -> None:
        if event.kind == "step_starts":
            self._compare(event.data["optimizer"])
        elif event.kind == "step":
            self._keep(event.data["optimizer"])
        elif event.kind == "load_module":
            module = event.data["module"]()
            for parameter in module.parameters() if module is not None else ():
                self._written[_address(parameter) or 0] = event.site

    def backward_starts(self, backward: Backward) -> None:
        if backward.taint is not None:
            self._used |= backward.taint.depends

    # weights

    def _keep(self, optimizer: Any) -> None:
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps > _STEPS:
            self._pairs.pop(id(optimizer), None)
            return
        if steps <= _ENOUGH:  # what is called first in a later step is no module of ours before
            self._search(optimizer)
        for pair in self._pairs.get(id(optimizer), ()):
            pair.before = _numbers(pair)

    def _search(self, optimizer: Any) -> None:
        registry = self.session.registry
        own = registry.bits(owned_by(optimizer))
        owned = registry.owned
        trained: list[nn.Module] = []
        slow: list[nn.Module] = []
        for root in list(registry.roots.values()):
            parts = list(root.modules())
            for part in parts if len(parts) <= _MODULES else [root]:
                bits = registry.bits(part.parameters())
                if bits and not bits & ~own:
                    trained.append(part)
                elif bits and not bits & owned:
                    slow.append(part)
        pairs = self._pairs.setdefault(id(optimizer), [])
        known = {(id(p.trained()), id(p.slow())) for p in pairs}
        taken: set[int] = set()
        forms: dict[tuple[Any, ...], list[nn.Module]] = {}
        for module in _outermost(trained):
            forms.setdefault(_form(module), []).append(module)
        for module in slow:
            mine = [] if id(module) in taken else forms.get(_form(module), [])
            taken |= {id(part) for part in module.modules()} if mine else set()
            for other in mine:
                if (id(other), id(module)) not in known and len(pairs) < _PAIRS:
                    pairs.append(Pair(weakref.ref(other), weakref.ref(module)))

    def _compare(self, optimizer: Any) -> None:
        for pair in list(self._pairs.get(id(optimizer), ())):
            now, before, pair.before = _numbers(pair), pair.before, None
            if now is None or before is None:
                continue
            if not torch.equal(now[1], before[1]):
                pair.moved = True
                share = _share(now[1], before[1], before[0])
                if share is not None:
                    pair.kept.append(share)
            elif not torch.equal(now[0], before[0]):
                pair.pulled += _share(now[0], before[0], before[1]) is not None
            self._judge(pair)

    def _judge(self, pair: Pair) -> None:
        trained, slow = pair.trained(), pair.slow()
        if trained is None or slow is None:
            return
        registry = self.session.registry
        name, other = registry.module_name(slow), registry.module_name(trained)
        last = pair.kept[-_ENOUGH:]
        least, most = min(last, default=0.0), max(last, default=1.0)
        if len(last) == _ENOUGH and least > _NONE and most < _FEW and most - least < _CLOSE:
            self.report(
                32,
                Severity.WARNING,
                f"{name} keeps {last[-1]:.1%} of itself in each average with {other}.",
                why=f"The slow network should keep nearly all of its weights, and takes "
                f"{1 - last[-1]:.1%} from the trained one in every update: it is a copy of it, "
                "one step late. The two factors are exchanged.",
                fix="slow = decay * slow + (1 - decay) * trained, with decay close to 1 "
                "(tau = 1 - decay is the factor of the trained weights).",
                site=self._site(slow),
                parameters=registry.bits(slow.parameters()),
            )
        bits = registry.bits(slow.parameters())
        if pair.pulled == _ENOUGH - 1 and not pair.moved and bits & self._used:
            self.report(
                21,
                Severity.WARNING,
                f"{other} is set back to {name}, and {name} never changes.",
                why=f"After its optimizer's step the weights of {other} are moved towards those of "
                f"{name}, which nothing trains: what is learnt is undone. The two networks are "
                "exchanged in this update.",
                fix=f"Write into {name}, and read from {other}.",
                site=self._site(trained),
                parameters=registry.bits(trained.parameters()),
                related=(birth_site(registry, slow),),
            )

    def _site(self, module: nn.Module) -> Site | None:
        sites = [
            self._assigned.get(p) or self._written.get(_address(p) or 0)
            for p in module.parameters()
        ]
        return next((site for site in sites if site is not None), None)


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Without those that are parts of another of them."""
    kept: list[nn.Module] = []
    inside: set[int] = set()
    for module in modules:
        if id(module) not in inside:
            kept.append(module)
        inside |= {id(part) for part in module.modules()}
    return kept


def _form(module: nn.Module) -> tuple[Any, ...]:
    return (type(module), *((n, tuple(p.shape)) for n, p in module.named_parameters()))


def _numbers(pair: Pair) -> tuple[Tensor, Tensor] | None:
    """Some numbers of the same parameter of both."""
    trained, slow = pair.trained(), pair.slow()
    if trained is None or slow is None:
        return None
    both = zip(trained.parameters(), slow.parameters())
    first, second = max(both, key=lambda two: min(two[0].numel(), _SOME), default=(None, None))
    left = None if first is None else values_of(first)
    right = None if second is None else values_of(second)
    if left is None or right is None or not left.is_floating_point():
        return None
    return _some(left), _some(right)


def _some(values: Tensor) -> Tensor:
    return values.detach().flatten()[:_SOME].to(torch.float64, copy=True)


def _share(now: Tensor, before: Tensor, other: Tensor) -> float | None:
    """The w of `now = w * before + (1 - w) * other`; None if it is no such average."""
    apart, left = before - other, now - other
    size = float(apart.norm())
    if size <= 1e-6 * float(other.norm()):
        return None  # the two are one still
    share = float(left @ apart) / size**2
    rest = float((left - share * apart).norm())
    return share if rest <= 0.02 * size and -_NONE <= share < 1.0 - _NONE else None


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None  # nothing behind it
