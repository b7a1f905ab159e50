"""Class 26: batch norm in eval mode that normalises with the statistics it was made with.

A target network, or an average of the weights, often follows another network by a loop over
`parameters()`. The running mean and variance of batch norm are buffers: they do not come along, and
in eval mode the copy divides by 1 what the original divides by the spread of its data.

Said at the end, so that buffers which are copied later, or estimated anew, count.

And batch norm that was to be frozen by `momentum = 0`: its running statistics stay what they are,
but in train mode it normalises with those of the batch all the same.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site, count
from gradient_doctor.session import Detector, OpCall, Session
from gradient_doctor.slips import assigned_attribute

_ENOUGH = 2  # steps in which parameters were written
_SET = "torch.Tensor.data.__set__"
_ALIASES = {"data", "detach"}


@dataclass
class Followed:
    """A module's parameters are written from those of another: where, and in which steps."""

    site: Site | None = None
    leaders: int = 0  # the others' parameters
    steps: set[int] = field(default_factory=set)


class Statistics(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._writes = WeakIdKeyDictionary()  # parameters -> Followed
        self._aliases = WeakIdKeyDictionary()  # `p.data` -> p
        self._without_momentum: weakref.WeakKeyDictionary[nn.Module, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._used: weakref.WeakKeyDictionary[nn.Module, Site | None] = weakref.WeakKeyDictionary()

    def op(self, call: OpCall) -> None:
        """Writes to parameters from values that depend on other parameters."""
        if call.short == "batch_norm":
            self._normalises()
        if call.short in _ALIASES and isinstance(call.inputs[0], nn.Parameter):
            for output in call.outputs:
                self._aliases[output] = weakref.ref(call.inputs[0])
            return
        targets = [call.args[0]] if call.name == _SET else call.targets
        parameters = [p for p in map(self._parameter, targets) if p is not None]
        if not parameters:
            return
        sources = 0
        for tensor in call.inputs[1:]:
            taint = self.session.taint_of(tensor)
            sources |= 0 if taint is None else taint.depends
        for parameter in parameters:
            others = sources & ~self.session.registry.bit(parameter)
            if others:
                write = self._writes.get(parameter) or Followed()
                self._writes[parameter] = write
                write.site = call.site
                write.leaders |= others
                write.steps.add(self.session.step)

    def _normalises(self) -> None:
        stack = self.session.module_stack
        part = stack[-1] if stack else None
        if not isinstance(part, nn.modules.batchnorm._BatchNorm) or part in self._without_momentum:
            return
        if part.momentum != 0 or not part.training or not part.track_running_stats:
            return
        if not torch.is_grad_enabled():
            return
        self._without_momentum[part] = True
        registry = self.session.registry
        born = birth_site(registry, part)
        files = [site.file for site in (born, self.session.here()) if site is not None]
        self.report(
            26,
            Severity.WARNING,
            "Batch norm with momentum 0 is in train() mode.",
            why="Its running statistics never change, and in train mode it does not use them: it "
            "normalises each batch with that batch's own. What eval() uses later has nothing to do "
            "with it.",
            fix="To freeze batch norm, put these layers into eval() (after every model.train()); "
            "else give it a momentum.",
            site=assigned_attribute(files, {"momentum"}) or born,
            parameters=registry.bits(part.parameters()),
        )

    def _parameter(self, target: Tensor) -> Tensor | None:
        if isinstance(target, nn.Parameter):
            return target
        alias = self._aliases.get(target)
        return None if alias is None else alias()

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, site: Site | None) -> None:
        if not module.training and module not in self._used and self._writes:
            self._used[module] = site

    def finish(self, error: BaseException | None) -> None:
        trained = self._trained()
        for module, site in self._used.items():
            stale = [part for part in module.modules() if _is_as_made(part)]
            writes = [self._writes[p] for p in module.parameters() if p in self._writes]
            often = [write for write in writes if len(write.steps) >= _ENOUGH]
            others = trained & ~self.session.registry.bits(module.parameters())
            if stale and any(write.leaders & others for write in often):
                self._say(module, stale, often[0].site, site)

    def _trained(self) -> int:
        """Parameters of models whose batch norms have taken statistics in."""
        registry, mask = self.session.registry, 0
        for root in registry.roots.values():
            norms = [
                part for part in root.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)
            ]
            if any(int(n.num_batches_tracked or 0) > 0 for n in norms):
                mask |= registry.bits(root.parameters())
        return mask

    def _say(
        self, module: nn.Module, stale: list[nn.Module], write: Site | None, used: Site | None
    ) -> None:
        registry = self.session.registry
        self.report(
            26,
            Severity.WARNING,
            f"{registry.module_name(module)} follows the parameters of another network, but not "
            "the statistics of its batch norm.",
            why=f"{count(len(stale), 'batch norm')} in eval() mode still "
            f"{'has' if len(stale) == 1 else 'have'} a running mean of 0 and a variance of 1, as "
            "made. They are buffers, which parameters() does not contain; the network that is "
            "followed normalises with those of its data.",
            fix="Copy the buffers, too: zip(target.buffers(), net.buffers()), or go over "
            "state_dict().",
            site=write,
            parameters=registry.bits(p for part in stale for p in part.parameters()),
            related=(used,),
        )


def _is_as_made(part: nn.Module) -> bool:
    """A batch norm in eval mode that has never seen, nor been given, any statistics."""
    if not isinstance(part, nn.modules.batchnorm._BatchNorm) or part.training:
        return False
    mean, variance = part.running_mean, part.running_var
    if mean is None or variance is None or int(part.num_batches_tracked or 0):
        return False
    return not bool(mean.any()) and bool((variance == 1).all())
