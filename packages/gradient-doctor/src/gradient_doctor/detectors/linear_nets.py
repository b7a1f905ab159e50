"""Class 29: no activation at all. Layers that follow each other are one linear map.

Two linear layers without a function between them can do what one can, and no more: XOR, circles, a
sine stay out of reach. Linear layers in a row are often meant (a bottleneck, an adapter, a
projection before attention), so this is said of networks only that are linear as a whole, from the
data to the loss, whose inner layers are not narrower than their ends, and whose loss has stopped
falling at a height that is no small part of its first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import is_dead_view, node_of
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, OpCall, Session

_LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "matmul", "mm", "addmm", "__matmul__"}
_PASSES = {
    *("view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "T", "mT"),
    *("contiguous", "dropout", "clone", "to", "float", "__getitem__", "add", "add_", "mean", "sum"),
    *("avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_avg_pool1d", "dropout_"),
}
_ENOUGH = 60  # losses
_WINDOW = 5
_HIGH = 0.25  # of the first losses
_STILL = 0.97  # of what it was half a run before


class Layer(NamedTuple):
    """One linear map: its weight, its widths, and the line that would get the activation."""

    bit: int
    into: int
    out: int
    site: Site | None


@dataclass
class Losses:
    """The first, and one of every few: enough to see whether a curve still falls."""

    first: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    every: int = 1
    count: int = 0

    def add(self, loss: float) -> None:
        if len(self.first) < _WINDOW:
            self.first.append(loss)
        if self.count % self.every == 0:
            self.kept.append(loss)
            if len(self.kept) > 16 * _WINDOW:
                self.kept, self.every = self.kept[::2], 2 * self.every
        self.count += 1

    def is_stuck(self) -> bool:
        """No longer falling, and still high."""
        if self.count < _ENOUGH or not all(map(math.isfinite, self.kept)):
            return False
        width = max(_WINDOW, len(self.kept) // 5)
        start = sum(self.first) / len(self.first)
        last = sum(self.kept[-width:]) / width
        middle = len(self.kept) // 2
        half = sum(self.kept[middle - width // 2 :][:width]) / width
        return start > 0 and last > _HIGH * start and last > _STILL * half


class LinearNets(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._chains = WeakIdKeyDictionary()  # values that are linear in the data -> their layers
        self._longest: tuple[Layer, ...] = ()
        self._other = 0  # weights that something else uses
        self._losses: dict[Site | None, Losses] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.outputs[0].requires_grad:
            return
        chain = self._chain(call)
        if chain:
            self._chains[call.outputs[0]] = chain
            if len(chain) > len(self._longest):
                self._longest = chain
        else:
            weights = [t for t in call.inputs if _is_weight(t) and t.dim() > 1]
            self._other |= self.session.registry.bits(weights)

    def _chain(self, call: OpCall) -> tuple[Layer, ...]:
        """The layers between the data and the result, if there is nothing else."""
        weights = [t for t in call.inputs if _is_weight(t) and t.dim() > 1]
        others = [t for t in call.inputs if not _is_weight(t)]
        before = [self._chains.get(t) for t in others if t.requires_grad]
        if None in before or not (before or weights):
            return ()
        known = max((chain for chain in before if chain), key=len, default=())
        if not weights:
            return known if call.short in _PASSES else ()
        if call.short not in _LAYERS or len(weights) != 1 or len(others) != 1:
            return ()
        [weight] = weights
        widths = (weight.shape[1], weight.shape[0])
        if call.short not in ("linear", "conv1d", "conv2d", "conv3d"):
            widths = (weight.shape[0], weight.shape[1])
        return (*known, Layer(self.session.registry.bit(weight), *widths, self._line(call, weight)))

    def _line(self, call: OpCall, weight: Tensor) -> Site | None:
        """In a list of layers, that of the layer; in a forward of the user's, that of the call."""
        stack = self.session.module_stack
        listed = len(stack) > 1 and isinstance(stack[-2], nn.Sequential)
        made = birth_site(self.session.registry, weight) if listed else None
        return made or call.site

    def backward_starts(self, backward: Backward) -> None:
        root = backward.roots[0] if backward.kind == "backward" and backward.roots else None
        if len(self._longest) < 2 or root is None or root.numel() != 1:
            return
        if root.device.type == "cpu":
            values = self.session.values(root)
            if values is not None and not values.is_complex():
                self._losses.setdefault(backward.site, Losses()).add(float(values))

    def finish(self, error: BaseException | None) -> None:
        registry, chain = self.session.registry, self._longest
        if error is not None or len(chain) < 2 or len(self._losses) != 1:
            return
        bits = 0
        for layer in chain:
            bits |= layer.bit
        owned = [p for o in registry.optimizers.values() for p in owned_by(o) if p.dim() > 1]
        narrow = min(layer.out for layer in chain[:-1]) < min(chain[0].into, chain[-1].out)
        if bits & self._other or registry.bits(owned) != bits or narrow or self.session.draws:
            return
        [losses] = self._losses.values()
        serious = [f for f in self.session.findings if f.severity >= Severity.WARNING]
        if serious or not losses.is_stuck():
            return  # what others have seen may be why it does not fall
        self.report(
            29,
            Severity.WARNING,
            f"The network is linear: nothing stands between its {len(chain)} layers.",
            why=f"Layers of widths {', '.join(str(n) for n in _widths(chain))} follow each other "
            "without an activation, so all of them together are one linear map. The loss no longer "
            f"falls, at {losses.kept[-1]:.3g} (the first: {losses.first[0]:.3g}).",
            fix="Put an activation between the layers (nn.ReLU(), torch.tanh), but not after the "
            "last; or keep one layer, if a linear map is meant.",
            site=chain[1].site,
            parameters=bits,
            related=tuple(layer.site for layer in chain[2:5]),
        )


def _is_weight(tensor: Tensor) -> bool:
    return tensor.requires_grad and node_of(tensor) is None and not is_dead_view(tensor)


def _widths(chain: tuple[Layer, ...]) -> list[int]:
    return [chain[0].into, *(layer.out for layer in chain)]
