"""Class 21: a network that should follow another one, and whose update nobody calls.

A target network, a teacher or an average of the weights stands still from the first step to the
last, and the program has a function that would move it, which nothing refers to. Both are needed: a
reference model stands still on purpose, and a program may have functions that it does not use.
"""

from __future__ import annotations

import weakref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.places import birth_site, count
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import checksum
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.updaters import Updater, copies_now_and_then, uncalled_updaters

_STEPS = 6
_COPIES = {"clone", "deepcopy", "__deepcopy__"}
_ALIASES = {"detach", "data", "cpu", "to", "float"}
_MOST = 200  # copies that are followed


class Standing(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._sums: dict[int, float] = {}  # of copies of parameters, at the first backward
        self._used = self._received = 0
        self._steps = 0
        self._aliases = WeakIdKeyDictionary()  # `p.detach()` -> True
        self._data_of = WeakIdKeyDictionary()  # `p.data` -> weakref of p
        self._written = WeakIdKeyDictionary()  # parameters -> the line that wrote them last
        self._clones: list[tuple[weakref.ref[Tensor], Site | None, int]] = []  # and their version
        self._unmoved: dict[Site, int] = {}  # lines of clones that lived on, unchanged: how many

    def op(self, call: OpCall) -> None:
        for target in call.targets or (call.args[:1] if call.short == "__set__" else ()):
            parameter = self._parameter(target)
            if parameter is not None:
                self._written[parameter] = call.site
        if call.short in ("data", "detach") and isinstance(call.inputs[0], nn.Parameter):
            for output in call.outputs:
                self._data_of[output] = weakref.ref(call.inputs[0])
        if self.session.age or not call.inputs or not call.outputs:
            return
        source = call.inputs[0]
        if not (isinstance(source, nn.Parameter) or source in self._aliases):
            return
        if call.short in _ALIASES:
            self._aliases[call.outputs[0]] = True
        elif call.short in _COPIES and len(self._clones) < _MOST:
            copy = call.outputs[0]
            self._clones.append((weakref.ref(copy), call.site, copy._version))

    def _parameter(self, target: object) -> Tensor | None:
        if isinstance(target, nn.Parameter):
            return target
        ref = self._data_of.get(target) if isinstance(target, Tensor) else None
        return None if ref is None else ref()

    def start(self) -> None:
        registry = self.session.registry
        for parameter in registry.parameters().values():
            if parameter in registry.copy_of:
                self._sums[registry.bit(parameter)] = checksum(parameter)

    def backward_ended(self, backward: Backward) -> None:
        self._received |= backward.received | backward.arrived
        if backward.taint is not None:
            self._used |= backward.taint.depends

    def event(self, event: Event) -> None:
        self._steps += event.kind == "step"

    def step_ended(self, record: StepRecord) -> None:
        """Whoever keeps an average may be gone at the end: its copies are looked at before."""
        if record.checked and self._steps >= _STEPS and self._clones:
            self._look_at_clones()

    def _look_at_clones(self) -> None:
        lines: dict[Site, int] = {}
        for ref, site, version in self._clones:
            copy = ref()
            if copy is not None and site is not None and copy._version == version:
                lines[site] = lines.get(site, 0) + 1
        self._unmoved = lines

    def finish(self, error: BaseException | None) -> None:
        if error is not None or self._steps < _STEPS:
            return
        registry = self.session.registry
        if any(ref() is not None for ref, _, _ in self._clones):
            self._look_at_clones()
        still = self._still()
        if not still and not self._unmoved:
            return
        still &= ~self._left_behind(still)
        things = [*registry.optimizers.values(), *registry.tensors(still)]
        sites = [birth_site(registry, thing) for thing in things]
        files = [s.file for s in [*sites, *self._unmoved] if s is not None]
        updaters = uncalled_updaters(files)
        for updater in updaters:
            clones = sum(n for site, n in self._unmoved.items() if _within(site, updater))
            if updater.is_method and clones > 1:
                self._say(updater, f"{clones} copies of weights that it keeps", 0)
            elif still and not copies_now_and_then(files):
                self._say(
                    updater,
                    f"{count(still.bit_count(), 'parameter')} copied from trained weights",
                    still,
                )
                still = 0

    def _left_behind(self, still: int) -> int:
        """Copies that stand still beside others, in one model, that follow their originals."""
        registry = self.session.registry
        moved: dict[str, Site] = {}
        for bit, first in self._sums.items():
            for parameter in registry.tensors(bit & ~self._received):
                written = self._written.get(parameter)
                if written is not None and checksum(parameter) != first:
                    moved.setdefault(registry.name(parameter).split(".")[0], written)
        groups: dict[str, int] = {}
        for parameter in registry.tensors(still):
            root = registry.name(parameter).split(".")[0]
            groups[root] = groups.get(root, 0) | registry.bit(parameter)
        behind = 0
        for root in groups.keys() & moved.keys():
            behind |= groups[root]
            names = registry.names(groups[root])
            self.report(
                21,
                Severity.WARNING,
                f"{count(len(names), 'parameter')} of a copy do not follow the trained network, "
                "and others do.",
                why=f"This line moves copies of {root}'s trained weights after them. {names[0]} "
                f"and the like are such copies as well, are used for the loss, and did not change "
                f"in {self._steps} steps.",
                fix="Go over all parts that are copied, not over one of them.",
                site=moved[root],
                parameters=groups[root],
            )
        return behind

    def _still(self) -> int:
        """Copies of weights that have moved, used for a loss, which have not."""
        registry = self.session.registry
        still = 0
        for bit, first in self._sums.items():
            for parameter in registry.tensors(bit & self._used & ~self._received):
                ref = registry.copy_of.get(parameter)
                original = None if ref is None else ref()
                if original is None or checksum(parameter) != first:
                    continue
                if registry.bit(original) & self._received and checksum(original) != first:
                    still |= bit
        return still

    def _say(self, updater: Updater, what: str, mask: int) -> None:
        self.report(
            21,
            Severity.WARNING,
            f"`{updater.name}` is never called: what should follow the trained weights stands "
            "still.",
            why=f"This function writes an average or a copy of weights, and nothing in the program "
            f"refers to it. In {self._steps} steps {what} did not change, while the weights did.",
            fix="Call it after each step of the optimizer (or every so many steps).",
            site=Site(updater.file, updater.line, updater.name),
            parameters=mask,
        )


def _within(site: Site, updater: Updater) -> bool:
    return site.file == updater.file and updater.first <= site.line <= updater.last
