"""Class 22, from values: numbers of a size that nothing before or after them is made for.

Inputs that were divided twice by the largest value of a pixel are all but zero; a layer that takes
them sees its bias and little else. Scores that begin a hundred times too large, because a matrix of
unit variance was tied to, or initialised as, an output layer, make a loss far above that of a
guess. A loss that has grown by a factor of ten thousand is no longer about the data.

The line is that of the cause: the division, the initialisation, the tie.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import address_of, values_of
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
_LAYERS = {"linear", "conv1d", "conv2d", "conv3d", "lstm", "gru"}
_DIVIDES = {"div", "div_", "true_divide", "divide", "mul", "mul_", "multiply"}
_SAME = {
    *("view", "reshape", "flatten", "__getitem__", "to", "float", "clone", "stack", "cat"),
    *("unsqueeze", "squeeze", "permute", "transpose", "contiguous", "expand", "sub", "add"),
    *("index_select", "unbind", "split", "chunk", "detach", "repeat", "pin_memory"),
}
_RANDOM = {"randn", "rand", "normal"}
_FACTOR = 16.0  # a division that changes the size of data for good
_SMALL = 0.01  # the largest of the inputs
_UNLIKELY = 3.0  # a first loss over that of an even guess
_GAIN = 4.0  # of a layer's output over its input; ordinary layers give about 1
_GREW = 1e4  # a loss over its first values
_WINDOW = 5
_LARGE = 30.0  # the root mean square of inputs
_LEAP = 50.0


@dataclass
class Curve:
    """The values of one loss: its first few and its last few."""

    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    count: int = 0
    greatest: float = 0.0

    def add(self, loss: float) -> None:
        self.count += 1
        self.greatest = max(self.greatest, abs(loss) if math.isfinite(loss) else math.inf)
        if len(self.first) < _WINDOW:
            self.first.append(loss)
        else:
            self.last.append(loss)

    @property
    def in_trouble(self) -> bool:
        """It leapt up, or is no smaller in the end than it was in the beginning."""
        start = abs(self.first[0]) if self.first else 0.0
        if len(self.last) < _WINDOW or not math.isfinite(self.greatest):
            return not math.isfinite(self.greatest)
        return self.greatest > _LEAP * start or (
            sum(self.last) / len(self.last) >= 0.95 * sum(self.first) / len(self.first)
        )


@dataclass
class Large:
    """Inputs of one layer that are far above the size of its weights' making."""

    size: float
    call: Site | None
    live: int
    steps: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Divided:
    """Data that were divided, and by how much in all."""

    factor: float
    site: Site | None


class Scales(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._divided = WeakIdKeyDictionary()  # data -> Divided
        self._small: dict[Site, tuple[set[int], float, float, int]] = {}
        self._large: dict[Site | None, Large] = {}
        self._ordinary: set[Site] = set()  # divisions whose results are not always small
        self._gains: dict[int, tuple[float, Tensor, Site | None]] = {}  # of the first step
        self._random: set[int] = set()  # addresses of what random numbers were written to
        self._unlikely: tuple[float, float, Site | None, int] | None = None
        self._curves: dict[Site | None, Curve] = {}

    # data

    def op(self, call: OpCall) -> None:
        if not call.outputs:
            return
        result = call.outputs[0]
        if not self.session.age:
            self._follow_random(call)
        if not call.inputs:
            return
        if call.short in _LAYERS:
            self._input(call)
            if not self.session.age:
                self._gain(call)
        elif not result.requires_grad:
            self._data(call)
        elif call.short == "cross_entropy" and not self.session.age:
            self._guess(call)
        if call.short == "matmul" and not self.session.age:
            self._gain(call)

    def _follow_random(self, call: OpCall) -> None:
        """Memory of random numbers: a parameter that is made of them begins with these."""
        address = address_of(call.outputs[0])
        if call.short in _RANDOM or (
            call.short in _DIVIDES and call.inputs and address_of(call.inputs[0]) in self._random
        ):
            self._random.add(address)
        elif call.targets:
            self._random -= {address_of(target) for target in call.targets}

    def _data(self, call: OpCall) -> None:
        if call.short in _DIVIDES and len(call.inputs) == 1:
            number = next((a for a in call.args if type(a) in (int, float)), None)
            factor = abs(float(number)) if number else 1.0
            factor = 1.0 / factor if call.short.startswith("mul") else factor
            if factor >= _FACTOR:
                earlier = self._divided.get(call.inputs[0])
                total = factor * (earlier.factor if earlier is not None else 1.0)
                self._divided[call.outputs[0]] = Divided(total, call.site)
                return
        if self._divided and call.short in _SAME | _DIVIDES:
            known = next((self._divided[t] for t in call.inputs if t in self._divided), None)
            if known is not None:
                for output in call.outputs:
                    self._divided[output] = known

    def _input(self, call: OpCall) -> None:
        source = call.inputs[0]
        self._large_input(call, source)
        known = self._divided.get(source) if self._divided else None
        if known is None or known.site is None or source.requires_grad:
            return
        values = self.session.values(source)
        if values is None or not values.numel():
            return
        greatest = float(values.abs().max())
        if greatest >= _SMALL:
            self._ordinary.add(known.site)
        elif greatest > 0.0:
            live = live_in(self.session, call.inputs)
            steps, _, _, before = self._small.get(known.site, (set(), 0.0, 0.0, 0))
            steps.add(self.session.step)
            self._small[known.site] = (steps, greatest, known.factor, before | live)

    def _large_input(self, call: OpCall, source: Tensor) -> None:
        """Data as they came, in a layer that learns: raw pixels, prices, coordinates."""
        if source.requires_grad:
            return
        size, live = _size(source), live_in(self.session, call.inputs)
        if size > _LARGE and math.isfinite(size) and live:
            stack = self.session.module_stack
            outermost = self.session.called.get(stack[0]) if stack else None
            large = self._large.setdefault(call.site, Large(size, outermost or call.site, live))
            large.steps.add(self.session.step)

    def _judge_large(self) -> None:
        """Large inputs are a choice; beside a loss that does not fall they are its cause."""
        if not self._large or self._is_explained() or len(self._curves) != 1:
            return
        if self.session.draws:
            return  # the loss of a policy need not fall
        [curve] = self._curves.values()
        large = max(self._large.values(), key=lambda one: one.size)
        if len(large.steps) < _ENOUGH or not curve.in_trouble:
            return
        self.report(
            22,
            Severity.WARNING,
            f"The model's inputs are of size {large.size:.3g}, and the loss does not fall.",
            why="Layers are initialised for inputs of size 1. These go into the first one as they "
            f"are: outputs and gradients are {large.size:.0f} times as large, units saturate or "
            "die in the first steps.",
            fix="Normalise the inputs: subtract their mean and divide by their standard deviation.",
            site=large.call,
            parameters=large.live,
        )

    # the first forward

    def _gain(self, call: OpCall) -> None:
        """How much larger a layer's output is than its input, while its weights are untrained."""
        tensors = [t for t in call.inputs if isinstance(t, nn.Parameter) and t.dim() > 1]
        source = next((t for t in call.inputs if not isinstance(t, nn.Parameter)), None)
        if not tensors or source is None or not call.outputs[0].requires_grad:
            return
        before, after = _size(source), _size(call.outputs[0])
        if before > 0.0 and math.isfinite(after):
            bit = self.session.registry.bit(tensors[0])
            self._gains.setdefault(bit, (after / before, tensors[0], call.site))

    def _guess(self, call: OpCall) -> None:
        scores, target = argument(call, 0, "input"), argument(call, 1, "target")
        if not (isinstance(scores, Tensor) and isinstance(target, Tensor)) or scores.dim() < 2:
            return
        if call.outputs[0].numel() != 1 or target.is_floating_point() or scores.shape[1] < 2:
            return
        loss = values_of(call.outputs[0])
        guess = math.log(scores.shape[1])
        size = _size(scores)
        value = math.nan if loss is None else float(loss)
        if self._unlikely is None and value > _UNLIKELY * guess and size > _UNLIKELY:
            live = live_in(self.session, [scores])
            self._unlikely = (value, guess, call.site, live)

    def _judge_guess(self) -> None:
        if self._unlikely is None:
            return
        (loss, guess, site, live), self._unlikely = self._unlikely, None
        registry = self.session.registry
        loud = [
            (gain, weight, at)
            for bit, (gain, weight, at) in self._gains.items()
            if gain > _GAIN and bit & live and bit & registry.owned and self._is_fresh(weight)
        ]
        if not loud:
            return  # loaded weights, or inputs that are large themselves
        gain, weight, at = max(loud, key=lambda one: one[0])
        tied = registry.tied_at.get(weight)
        made = registry.initialised_at.get(weight) or birth_site(registry, weight)
        self.report(
            22,
            Severity.WARNING,
            f"The first loss is {loss:.3g}, where an even guess has {guess:.3g}.",
            why=f"The scores begin too large: {registry.name(weight)} makes its input "
            f"{gain:.1f} times as large (an ordinary layer about once), at {at}."
            + (
                f" It is one matrix with another layer, since {tied}: what is a fair size for an "
                "embedding is too large for an output layer."
                if tied is not None
                else ""
            ),
            fix="Start these weights smaller: about 1 / sqrt(inputs), or 0.02 for a matrix that is "
            "shared with an embedding.",
            site=tied or made or site,
            parameters=registry.bit(weight),
            related=(made, at, site),
        )

    def _is_fresh(self, weight: Tensor) -> bool:
        """Random numbers that this program wrote, and nothing has been loaded into since."""
        return self.session.registry.is_random(weight) or address_of(weight) in self._random

    # the whole curve

    def backward_starts(self, backward: Backward) -> None:
        if not self.session.age and self._gains and backward.kind == "backward":
            self._judge_guess()
            self._gains.clear()
        root = backward.roots[0] if backward.kind == "backward" and backward.roots else None
        if root is None or root.numel() != 1 or root.device.type != "cpu":
            return
        values = self.session.values(root)
        if values is None or values.is_complex():
            return
        self._curves.setdefault(backward.site, Curve()).add(float(values))

    def step_ended(self, record: StepRecord) -> None:
        if record.traced and self.session.age + 1 >= self.session.trace_steps:
            self._judge_inputs(_ENOUGH)

    def finish(self, error: BaseException | None) -> None:
        self._judge_inputs(_ENOUGH)
        self._judge_large()
        self._judge_curve()

    def _judge_inputs(self, enough: int) -> None:
        for site, (steps, greatest, factor, live) in list(self._small.items()):
            if len(steps) < enough or site in self._ordinary:
                continue
            del self._small[site]
            self.report(
                22,
                Severity.WARNING,
                f"The model's inputs are all but zero: the largest is {greatest:.2g}.",
                why=f"They were divided by {factor:g} in all, the last time here. A layer with "
                "ordinary weights makes next to nothing of them beside its bias, so all samples "
                "look alike, and the gradient of its weights is as small.",
                fix="Divide once: look at the range that the data have already.",
                site=site,
                parameters=live,
            )

    def _judge_curve(self) -> None:
        """A loss that has left its first values behind, without ever becoming infinite."""
        registry = self.session.registry
        if len(self._curves) != 1 or len(registry.optimizers) != 1 or self._is_explained():
            return
        [(site, curve)] = self._curves.items()
        if len(curve.last) < _WINDOW or not all(map(math.isfinite, curve.last)):
            return
        first, last = max(map(abs, curve.first)), min(curve.last)
        # values of a policy grow with its rewards, from next to nothing
        if first <= 0.0 or last <= _GREW * max(first, 1.0):
            return
        optimizer = next(iter(registry.optimizers.values()))
        rates = [group.get("lr") for group in optimizer.param_groups]
        self.report(
            22,
            Severity.WARNING,
            f"The loss has grown from {first:.3g} to {last:.3g}.",
            why=f"In {curve.count} steps against its gradient it became {last / first:.0e} times "
            f"as large: the steps (learning rate {rates[0]}) overshoot.",
            fix="Lower the learning rate, scale inputs and targets to about 1, or clip the "
            "gradient.",
            site=birth_site(registry, optimizer) or site,
            parameters=registry.owned,
            related=(site,),
        )

    def _is_explained(self) -> bool:
        known = (17, 22, 27, 28, 32)
        return any(f.number in known and f.severity >= 2 for f in self.session.findings)


@torch.no_grad()
def _size(tensor: Tensor) -> float:
    """The root mean square; 0 for what has none."""
    values = values_of(tensor)
    if values is None or not values.numel() or not values.is_floating_point():
        return 0.0
    return float(torch.linalg.vector_norm(values.float())) / math.sqrt(values.numel())
