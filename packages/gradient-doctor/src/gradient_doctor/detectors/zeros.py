"""Class 20: connected, but the gradient is exactly zero."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in, shape
from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.functions import backward_line, function_of
from gradient_doctor.graph import is_opaque, nodes_of
from gradient_doctor.readable import values_of
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import filled_at

_SOFTMAX = {"softmax", "log_softmax", "softmin", "gumbel_softmax"}
_RELU = {"relu", "relu_", "relu6", "threshold"}
_SQUASH = {"tanh", "tanh_", "sigmoid", "sigmoid_", "hardtanh", "hardsigmoid"}
_CLAMP = {"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max"}
_PRODUCT = {"mul", "mul_", "multiply", "div", "div_"}
_MATRIX = {"linear", "matmul", "mm", "bmm", "addmm"}
_KEEPS_ZERO = {
    *("mul", "div", "neg", "float", "to", "detach", "__getitem__", "view", "reshape", "unsqueeze"),
    *("squeeze", "expand", "clone", "clamp", "repeat_interleave", "stack", "cat", "sum", "mean"),
}


_LATER = 2  # zero steps of what a later phase has brought


@dataclass(frozen=True)
class Cause:
    """Why a call passes no gradient on; `structural` if no training can ever change that."""

    site: Site | None
    what: str
    why: str
    fix: str
    structural: bool = False
    deliberate: bool = False
    made: Site | None = None
    also: Site | None = None
    constant: bool = False  # the output does not depend on the input, whatever rounding makes of it


class Zeros(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._causes: dict[tuple[Site | None, str], Cause] = {}
        self._zeros = WeakIdKeyDictionary()  # all-zero tensor -> line where it became zero
        self._silent = WeakIdKeyDictionary()  # output of a dead layer -> why it is dead
        self._from_zeros = WeakIdKeyDictionary()  # output of weights of zeros -> their line
        self._biases = WeakIdKeyDictionary()  # output of a layer -> its bias
        self._zero_steps: dict[int, set[int]] = {}
        self._alive = 0
        self._blame: dict[int, Cause] = {}
        self._steps: set[int] = set()
        self._judged = 0  # those whose first steps have been looked at
        self._data_of = WeakIdKeyDictionary()  # `weight.data` -> the weight
        # outputs that are constant by their shape: in which steps, and what is behind them
        self._constant: dict[Cause, tuple[set[int], int]] = {}

    # what may stop a gradient

    def op(self, call: OpCall) -> None:
        if not call.outputs:
            return
        result = call.outputs[0]
        if call.short == "data" and isinstance(call.inputs[0], nn.Parameter):
            self._data_of[result] = weakref.ref(call.inputs[0])
        for target in call.targets:
            self._written(target, call.site)
        if not result.requires_grad:
            self._follow_zero(call, result)
            return
        weights = [t for t in call.inputs if isinstance(t, nn.Parameter) and t.dim() > 1]
        if weights and not any(map(_any, weights)):
            self._from_zeros[result] = self._zeroed_at(weights[0])
        elif self._from_zeros and call.short not in _RELU and not _any(result):
            # a message that is added up, a bias of zeros, another shape
            before = next((t for t in call.inputs if t in self._from_zeros), None)
            if before is not None:
                self._from_zeros[result] = self._from_zeros[before]
        bias = next((t for t in call.inputs if isinstance(t, nn.Parameter) and t.dim() == 1), None)
        if bias is not None:
            self._biases[result] = weakref.ref(bias)
        cause = self._cause(call, result)
        if cause is not None:
            key = (call.site, call.name)
            if key not in self._causes or (cause.structural and not self._causes[key].structural):
                self._causes[key] = cause
            if cause.constant:
                self._note_constant(cause, call)
            if call.short in _RELU:
                self._silent[result] = cause
        elif not _any(result):
            source = next((t for t in call.inputs if t in self._silent), None)
            if source is not None:
                self._silent[result] = self._silent[source]

    def _written(self, target: Tensor, site: Site | None) -> None:
        """A weight that somebody writes zeros into, itself or through `.data`."""
        ref = self._data_of.get(target)
        weight = target if isinstance(target, nn.Parameter) else None if ref is None else ref()
        if weight is not None and weight.dim() > 1 and not _any(target):
            self.session.registry.zeroed_at[weight] = site

    def _note_constant(self, cause: Cause, call: OpCall) -> None:
        """What is constant by its shape leaves nothing but rounding in the gradient."""
        live = live_in(self.session, call.inputs[:1])
        steps, mask = self._constant.get(cause, (set(), 0))
        self._constant[cause] = ({*steps, self.session.step}, mask | live)

    def _zeroed_at(self, weight: Tensor) -> Site | None:
        """The line that made a weight zero; of its birth, if it was born so."""
        registry = self.session.registry
        return registry.zeroed_at.get(weight) or birth_site(registry, weight)

    def _begun_at(self, value: Tensor) -> Site | None:
        """The line that gave a parameter its first values."""
        if not isinstance(value, nn.Parameter):
            return None
        registry = self.session.registry
        made = registry.zeroed_at.get(value) or registry.initialised_at.get(value)
        return made or birth_site(registry, value)

    def _pressed_down(self, source: Tensor, value: Tensor) -> Site | None:
        """The line that set a bias, if it is the bias alone that keeps these values below 0."""
        bias = self._biases.get(source)
        bias = None if bias is None else bias()
        held = None if bias is None else values_of(bias)
        if bias is None or held is None or not bool((held < 0).all()):
            return None
        return self._begun_at(bias) if float(value.max()) > float(held.max()) else None

    def _layer_site(self, call: OpCall, kind: type[nn.Module]) -> Site | None:
        """The line that made the layer of this call: there its size is written."""
        registry, stack = self.session.registry, self.session.module_stack
        if not stack or not isinstance(stack[-1], kind):
            return None
        for parameter in stack[-1].parameters(recurse=False):
            first = registry.prototypes.get(parameter)
            if first is not None:
                return first
        return birth_site(registry, stack[-1])

    def _follow_zero(self, call: OpCall, result: Tensor) -> None:
        if not (result.is_floating_point() and result.numel()) or _any(result):
            return
        source = next((t for t in call.inputs if t in self._zeros), None)
        if source is not None and (
            call.short in _KEEPS_ZERO or all(t in self._zeros for t in call.inputs)
        ):
            self._zeros[result] = self._zeros[source]
        else:
            listed = filled_at(call.site) if call.short == "tensor" and call.site else None
            self._zeros[result] = listed or call.site

    def _cause(self, call: OpCall, result: Tensor) -> Cause | None:
        short, site = call.short, call.site
        source = call.inputs[0] if call.inputs else result
        value, out = values_of(source), values_of(result)
        if value is None or out is None or not out.numel():
            return None
        if short in _SOFTMAX and source.dim():
            dim = argument(call, 1, "dim", -1)
            if isinstance(dim, int) and source.shape[dim] == 1:
                return Cause(
                    site,
                    f"{short} over an axis of size 1 passes no gradient on.",
                    f"Its input is {shape(source)} and dim={dim}: the result is "
                    f"{'1' if 'log' not in short else '0'} whatever the input.",
                    "Take the softmax over the axis that is to be weighted.",
                    structural=True,
                )
        if short == "layer_norm" and _normalised(call) == 1:
            return Cause(
                site,
                "layer_norm over a single value passes no gradient on.",
                "One value minus its own mean is 0 whatever the value.",
                "Normalise over the feature axis, or give the layer more than one feature.",
                structural=True,
                made=self._layer_site(call, nn.LayerNorm),
                constant=True,
            )
        if short == "group_norm" and _per_group(call, source) == 1:
            return Cause(
                site,
                "group_norm over single values passes no gradient on.",
                f"Each group of {shape(source)} has one value, and that minus its own mean is 0.",
                "Use fewer groups, so that each has several values.",
                structural=True,
                made=self._layer_site(call, nn.GroupNorm),
                constant=True,
            )
        if short in _RELU and not bool(value.any()):
            made = self._from_zeros.get(source)
            return Cause(
                site,
                f"Every input of this {short} is exactly 0.",
                "The weights of the layer before it are all 0"
                + (f", since {made}" if made is not None else "")
                + ": its output does not depend on its input, and the slope at 0 is 0.",
                "Start the weights with random values; zeros are for biases.",
                made=made,
            )
        if short in _RELU and not bool(out.any()):
            return Cause(
                site,
                f"Every unit behind this {short} is dead.",
                f"All {out.numel()} inputs are negative (greatest {float(value.max()):.3g}).",
                "Lower the learning rate or the bias, or use a leaky activation.",
                made=self._pressed_down(source, value),
            )
        if short in _SQUASH and not bool(_slope(short, out).any()):
            return Cause(
                site,
                f"{short} is saturated everywhere.",
                f"Its inputs have sizes of at least {float(value.abs().min()):.3g}: in {out.dtype} "
                "its slope is exactly 0 there.",
                "Scale the inputs down, or normalise them first.",
                made=self._begun_at(source),
            )
        if short in _CLAMP and not bool((out == value).any()):
            return Cause(
                site,
                f"{short} cuts off every value.",
                f"Inputs lie between {float(value.min()):.3g} and {float(value.max()):.3g}, all "
                "outside of the bounds; outside the slope is 0.",
                "Widen the bounds, or clamp a copy that is only reported.",
            )
        if short in _PRODUCT:
            return self._product(call)
        if short in _MATRIX:
            return self._matrix(call)
        if short == "einsum":
            return self._contraction(call)
        return None

    def _product(self, call: OpCall) -> Cause | None:
        for factor in call.inputs:
            if not factor.requires_grad and factor.numel() and not _any(factor):
                return Cause(
                    call.site,
                    "The loss is multiplied by a tensor of zeros.",
                    f"The factor {shape(factor)} is 0 everywhere"
                    + (f", since {self._zeros[factor]}" if factor in self._zeros else "")
                    + ": equal rewards give zero advantages, an empty weight no loss.",
                    "Make the factor differ between samples, or skip such batches.",
                    made=self._zeros.get(factor),
                )
        numbers = [a for a in call.args if isinstance(a, (int, float))]
        if call.short != "div" and any(n == 0 for n in numbers):
            return Cause(
                call.site,
                "A term of the loss has the weight 0.",
                "It is multiplied by the number 0.",
                "Remove the term, or give it a weight.",
                deliberate=True,
            )
        return None

    def _contraction(self, call: OpCall) -> Cause | None:
        """einsum of two or more weights, of which at least two are zeros."""
        zero = [t for t in call.inputs if isinstance(t, nn.Parameter) and not _any(t)]
        if len(zero) < 2:
            return None
        return Cause(
            call.site,
            "Several factors of a product are zero, so none of them ever gets a gradient.",
            f"{' and '.join(shape(t) for t in zero)} are 0 everywhere: the gradient of each is a "
            "multiple of the others.",
            "Start all but one with random values.",
            structural=True,
            made=self._zeroed_at(zero[0]),
            also=self._zeroed_at(zero[1]),
        )

    def _matrix(self, call: OpCall) -> Cause | None:
        if len(call.inputs) < 2 or call.short == "addmm":
            return None
        for factor in call.inputs[:2]:
            if factor in self._silent:
                return self._silent[factor]  # the weights after a dead layer get nothing either
        left, right = call.inputs[:2]
        if _any(left):
            if isinstance(right, nn.Parameter) and not _any(right):
                return Cause(
                    call.site,
                    "What comes before a weight of zeros gets no gradient until it has moved.",
                    f"The weight {shape(right)} is 0 everywhere, as LoRA starts its B.",
                    "Nothing to do, if that weight itself has a gradient and an optimizer.",
                    deliberate=True,
                )
            return None
        if _any(right):
            return None
        # the first of the two is the one that should be random: B(A(x)), x @ A @ B
        first, second = (
            self._from_zeros.get(factor)
            or (self._zeroed_at(factor) if isinstance(factor, nn.Parameter) else None)
            for factor in (left, right)
        )
        return Cause(
            call.site,
            "Both factors of a product are zero, so neither ever gets a gradient.",
            f"{call.short} of {shape(left)} and {shape(right)}, both 0 everywhere: the gradient of "
            "each is a multiple of the other.",
            "Start one of the two (LoRA: A) with random values.",
            structural=True,
            made=first or second,
            also=second,
        )

    # which parameters it hits

    def backward_ended(self, backward: Backward) -> None:
        zero = 0
        for bit, fact in backward.gradients.items():
            if fact.zero:
                zero |= bit
                self._zero_steps.setdefault(bit, set()).add(backward.step)
            else:
                self._alive |= bit
        self._steps.add(backward.step)
        zero &= ~self._alive
        if not zero or backward.graph is None:
            return
        stops = sorted(
            # a node that stops everything explains more than one that stops a part
            [*backward.vanished, *backward.partial],
            key=lambda stop: self._cause_of(stop) is None,
        )
        for stop in stops:
            hit = self.session.registry.bits(_leaves(stop)) & zero
            zero &= ~hit
            for bit in _single(hit):
                cause = self._cause_of(stop)
                if cause is None and not self._cancels(bit):
                    cause = _unknown(stop)
                if cause is not None:
                    self._blame[bit] = cause
        for bit in _single(zero):  # a gradient came as far as the parameter itself
            cause = next(map(_hooked, self.session.registry.tensors(bit)), None)
            if cause is not None:
                self._blame.setdefault(bit, cause)

    def _cancels(self, bit: int) -> bool:
        """A bias without gradient, of a weight that has one: it falls out of a difference."""
        registry = self.session.registry
        moved = set(registry.names(self._alive))
        return any(
            name.endswith("bias") and name.removesuffix("bias") + "weight" in moved
            for name in registry.names(bit)
        )

    def _cause_of(self, stop: Any) -> Cause | None:
        if stop.origin is None:
            return None
        return self._causes.get((stop.origin.site, stop.origin.op))

    # verdicts

    def step_ended(self, record: StepRecord) -> None:
        if not record.traced or self.session.age + 1 < self.session.trace_steps:
            return
        first = self.session.age + 1 == self.session.trace_steps
        self._report(1 if first else _LATER)

    def finish(self, error: BaseException | None) -> None:
        self._report(1 if self.session.age < self.session.trace_steps else _LATER)

    def _report(self, least: int) -> None:
        """Of what has had zeros for `least` steps: layers of a later phase are new ones."""
        registry = self.session.registry
        ours = (registry.registered | registry.owned) & ~self._judged
        ripe = sum(bit for bit, when in self._zero_steps.items() if len(when) >= least)
        for when, bits in self._constant.values():
            ripe |= bits if len(when) > 1 else 0
        ours &= ripe
        ledger = getattr(self.session, "ledger", None)
        if ledger is not None:
            ours &= ~(ledger.explained | ledger.zeroed())  # round and the like: another class
        groups: dict[Cause | None, int] = {}
        steps: dict[Cause | None, int] = {}
        # a function without slope (round, sign) is class 3's, and said by then
        ours &= ~self.session.ledger.explained
        for bit, when in self._zero_steps.items():
            if bit & self._alive or not bit & ours:
                continue
            cause = self._blame.get(bit)
            groups[cause] = groups.get(cause, 0) | bit
            steps[cause] = min(steps.get(cause, len(when)), len(when))
        for cause, (when, bits) in self._constant.items():
            if len(when) > 1:
                groups[cause] = groups.get(cause, 0) | bits & ours
                steps[cause] = len(when)
        for cause, bits in groups.items():
            if bits:
                self._say(cause, bits, steps[cause])
        self._judged |= ripe

    def _say(self, cause: Cause | None, bits: int, steps: int) -> None:
        often = f"in all {steps} examined steps" if steps > 1 else "in the only examined step"
        if cause is None:
            self.report(
                20,
                Severity.NOTE,
                f"The gradient of {self.session.registry.many(bits)} is exactly zero {often}.",
                why="They are connected to the loss, but no single operation was seen to stop the "
                "gradient.",
                fix="Check whether their part of the model was used by the data of these steps.",
                parameters=bits,
            )
            return
        grave = cause.structural or (steps > 1 and not cause.deliberate)
        self.report(
            20,
            Severity.ERROR if grave else Severity.NOTE,
            cause.what,
            why=f"{cause.why} The parameters behind it have a gradient of "
            + (f"0, up to rounding, {often}." if cause.constant else f"exactly 0 {often}."),
            fix=cause.fix,
            site=cause.made or cause.site,
            parameters=bits,
            related=(cause.also, cause.site),
        )


def _hooked(parameter: Tensor) -> Cause | None:
    """A hook of the user's on the parameter, which may turn its gradient to zeros."""
    for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
        code = getattr(hook, "__code__", None)
        if code is not None and is_user_file(code.co_filename):
            site = Site(code.co_filename, code.co_firstlineno, code.co_name)
            wanted = (
                "zero" in "".join(code.co_names) or 0 in code.co_consts or 0.0 in code.co_consts
            )
            return Cause(
                site,
                "A hook on the parameter turns its whole gradient to zeros.",
                "What the hook returns takes the place of the gradient; no other operation was "
                "seen to stop it.",
                "Look at the mask in the hook; to freeze the parameter, use requires_grad_(False).",
                deliberate=wanted,
            )
    return None


def _per_group(call: OpCall, source: Tensor) -> int:
    groups = argument(call, 1, "num_groups", 1)
    return source[0].numel() // groups if source.dim() and len(source) else 0


def _normalised(call: OpCall) -> int:
    sizes = argument(call, 1, "normalized_shape", ())
    count = 1
    for size in sizes if isinstance(sizes, (tuple, list)) else (sizes,):
        count *= size
    return count


def _slope(short: str, out: Tensor) -> Tensor:
    if short.startswith("tanh"):
        return 1 - out * out
    if short.startswith("sigmoid"):
        return out * (1 - out)
    low, high = (0.0, 1.0) if short == "hardsigmoid" else (-1.0, 1.0)
    return (out > low) & (out < high)


def _any(tensor: Tensor) -> bool:
    """Whether something is not zero; what cannot be read is taken to be."""
    values = values_of(tensor)
    return values is None or bool(values.any())


def _leaves(stop: Any) -> Iterator[Tensor]:
    """Leaves behind the inputs of a node that got nothing."""
    edges = stop.edges if stop.partial else range(len(stop.node.next_functions))
    for edge in edges:
        if edge >= len(stop.node.next_functions):
            continue
        for node in nodes_of(stop.node.next_functions[edge][0]):
            leaf = None if is_opaque(node) else getattr(node, "variable", None)
            if isinstance(leaf, torch.Tensor):
                yield leaf


def _single(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


def _unknown(stop: Any) -> Cause | None:
    if is_opaque(stop.node):
        kind = function_of(stop.node)
        site = backward_line(kind)
        return Cause(
            site,
            f"{kind.__name__}.backward gives nothing but zeros.",
            "A gradient arrives at this Function, and only zeros leave it.",
            "Look at what it multiplies the gradient by: torch.autograd.gradcheck compares it with "
            "the forward.",
            deliberate=site is None,
        )
    if stop.partial or stop.origin is None or stop.origin.site is None:
        return None
    return Cause(
        stop.origin.site,
        f"{stop.origin.op.rsplit('.', 1)[-1]} passes only zeros back.",
        f"A gradient arrives at {stop.name}, and nothing but zeros leaves it.",
        "Look at the values that go into this line: all masked, saturated, or multiplied by 0?",
    )
