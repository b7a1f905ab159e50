"""Class 27: gradients that are not finite, and the line that made the first bad number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.functions import function_of, singular_line
from gradient_doctor.graph import MARK, node_of, nodes_of
from gradient_doctor.mask_lines import MaskLines
from gradient_doctor.readable import gradient_of, is_finite, values_of
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.singular import Exposed, Singular
from gradient_doctor.taint import tensors_in

# infinities that are written on purpose: they mask
_ON_PURPOSE = {"masked_fill", "masked_fill_", "full", "full_like", "tensor", "where", "fill_"}
_SOFTMAX = {"softmax", "log_softmax"}
_ATTENTION = {"multi_head_attention_forward", "scaled_dot_product_attention"}
# calls that NaN of data come from: written there on purpose, for what is missing
_WRITTEN = _ON_PURPOSE | {"__setitem__", "from_numpy", "as_tensor", "full"}
_GROWTH = 100.0  # of a loss, before it overflows
_HINTS = {
    "div": "a division by zero",
    "log": "the logarithm of zero",
    "sqrt": "the square root of zero, whose slope is infinite",
    "std": "the standard deviation of a single value",
    "var": "the variance of a single value",
    "exp": "an overflow of exp",
    "norm": "the norm of a zero vector",
    "pow": "a power whose slope is infinite at zero",
    "__pow__": "a power whose slope is infinite at zero",
    "mean": "the mean of nothing",
    "acos": "acos at 1 or -1, where its slope is infinite",
    "asin": "asin at 1 or -1, where its slope is infinite",
    "rsqrt": "the root of zero",
    "mul": "zero times infinity",
    "sub": "infinity minus infinity",
    "softmax": "a softmax over nothing but -inf",
    "log_softmax": "a softmax over nothing but -inf",
    "ctc_loss": "labels that need more frames than there are",
    "multi_head_attention_forward": "a row whose keys are all masked",
    "scaled_dot_product_attention": "a row whose keys are all masked",
}
_FIXES = {
    "ctc_loss": "Let the layers before shorten the sequence less, leave such labels out, or pass "
    "zero_infinity=True.",
    "div": "Add a small number to the denominator, or clamp it from below.",
    "log": "Clamp from below first, or use log_softmax / logsigmoid.",
    "sqrt": "Add a small number inside of the root.",
    "mean": "Divide the sum by the number of values, clamped from below to 1; or leave the term "
    "out where nothing is selected.",
    "std": "Take it over more than one value (or unbiased=False), and add a small number.",
    "norm": "Add a small number inside of the root; mask zero rows before, not after.",
    "exp": "Subtract the maximum first, or clamp from above.",
    "softmax": "Leave at least one place of each row unmasked, or mask with a finite number.",
    "multi_head_attention_forward": "Leave at least one key for each row: its own place.",
    "scaled_dot_product_attention": "Leave at least one key for each row: its own place.",
}


@dataclass(frozen=True)
class Birth:
    """The call that made the first non-finite numbers of a tensor's ancestry."""

    op: str
    site: Site | None
    kind: str
    inputs: str = ""  # the range of what went in
    data: bool = False  # numbers that depend on no parameter: missing values, say
    likely: bool = False  # the step was not traced: this is the likeliest of the traced calls
    felt: Site | None = None  # the call itself, where another line is to be changed


@dataclass(frozen=True)
class Bad:
    """Gradients of one step that are not finite."""

    bits: int
    birth: Birth
    backward: Site | None
    by_scale: bool  # the scaler's factor may have made them: with a smaller one they might be fine


class NonFinite(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._births = WeakIdKeyDictionary()
        # missing values -> where a mask took them out of a loss, after they had been used
        self._hidden_at: dict[Birth, Site | None] = {}
        self._bad: dict[int, Bad] = {}  # step -> what was seen first
        self._loss_is_finite = True  # before it was scaled
        self._steps: set[int] = set()
        self._good = False  # some backward was finite: a scaler has found its scale
        self._losses: dict[int, tuple[Birth, Site | None, int]] = {}  # step -> a loss that is none
        self._diverged: tuple[int, Site | None] | None = None  # a step without a trace
        self._singular = Singular()
        self._masks = MaskLines()
        self._recovered = False  # a later loss was a number again: the weights had stayed whole
        self._suspects: list[Exposed] = []  # what that step may have brought to its singular point
        # the first NaN without a graph: of gradients that the program itself changes
        self._beside: Birth | None = None
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._poisoned = False  # a step was taken with such gradients: all that follows is too

    def op(self, call: OpCall) -> None:
        if self._poisoned:
            return
        self._singular.op(call)
        if call.outputs:
            self._masks.op(call)
        inherited = next((b for b in map(self._births.get, call.inputs) if b is not None), None)
        for output in call.outputs:
            if not (output.is_floating_point() and output.numel()):
                continue
            birth = self._birth(call, output, inherited)
            if birth is None:
                continue
            self._births[output] = birth
            node = node_of(output)
            if node is not None and birth.kind == "nan":
                cast(dict[str, Any], node.metadata).setdefault(MARK + ".birth", birth)
        if inherited is not None and inherited.data:
            live = [o for o in call.outputs if o.requires_grad]
            if live and all(is_finite(v) for v in map(self.session.values, live) if v is not None):
                self._hidden_at.setdefault(inherited, call.site)
        if inherited is not None:
            # the gradient can turn bad here even where the numbers do not: 0 * nan in backward
            for output in call.outputs:
                node = node_of(output)
                if node is not None:
                    cast(dict[str, Any], node.metadata).setdefault(MARK + ".birth", inherited)

    def _birth(self, call: OpCall, output: Tensor, inherited: Birth | None) -> Birth | None:
        values = self.session.values(output)
        if values is None or is_finite(values):
            return None
        kind = "nan" if bool(values.isnan().any()) else "inf"
        if inherited is not None:
            return inherited  # also NaN, of infinities that nobody has written
        if kind == "inf" and (call.short in _ON_PURPOSE or _infinite(call) or _is_mask(call)):
            self._masks.note_infinite(call, output)
            return None
        if self._beside is not None and self._is_poisoned(call):
            return self._beside  # a step has brought it into the weights
        data = not output.requires_grad and call.short in _WRITTEN
        cause = self._line_to_change(call)
        felt = call.site if cause is not None else None
        site = cause or call.site
        birth = Birth(call.short, site, kind, self._range(call), data, felt=felt)
        of_gradients = self._steps and not output.requires_grad and not data
        if of_gradients and kind == "nan" and call.inputs and "empty" not in call.short:
            self._beside = self._beside or birth
        return birth

    def _is_poisoned(self, call: OpCall) -> bool:
        """Whether a weight is no number, though no gradient was seen to be none."""
        weights = [t for t in call.inputs if isinstance(t, nn.Parameter)]
        contents = [v for v in map(self.session.values, weights) if v is not None]
        return not all(map(is_finite, contents))

    def _line_to_change(self, call: OpCall) -> Site | None:
        """Where that is not the line of the call itself."""
        if call.short in _SOFTMAX:
            return self._masks.filled_at(call.inputs[0])
        if call.short in _ATTENTION:
            masks = [t for t in call.inputs if not t.requires_grad]
            return next((s for s in map(self._masks.made_at, masks) if s is not None), None)
        stack = self.session.module_stack
        if call.short == "ctc_loss" and stack and isinstance(stack[-1], nn.CTCLoss):
            return self.session.registry.construction(stack[-1])  # its options are written there
        return None

    def _range(self, call: OpCall) -> str:
        contents = [self.session.values(t) for t in call.inputs[:1] if t.is_floating_point()]
        finite = [v[v.isfinite()] for v in contents if v is not None]
        known = [v for v in finite if v.numel()]
        if not known:
            return ""
        return f" of values between {float(known[0].min()):.3g} and {float(known[0].max()):.3g}"

    # steps without a trace

    def backward_starts(self, backward: Backward) -> None:
        """A loss on the CPU is read in every step: that costs nothing there."""
        for root in backward.roots:
            if root.device.type != "cpu" or root.numel() != 1 or self._recovered:
                continue
            values = self.session.values(root)
            if values is None or values.is_complex():
                continue
            loss = abs(float(values))
            if self._diverged is not None:
                self._recovered = math.isfinite(loss)
            elif math.isfinite(loss):
                self._first_loss = loss if self._first_loss is None else self._first_loss
                self._last_loss = loss
            elif not self.session.record.checked and self._losses:
                first = self._losses[min(self._losses)]
                if first[1] == backward.site:  # the same loss, in a step that nobody looks at
                    self._losses.setdefault(backward.step, first)
            elif not self.session.record.checked and not self._bad:
                self._diverged = (backward.step, backward.site)
                self._suspects = (
                    self._singular.exponentials()
                    if self._grew() and self.session.summed is None
                    else []
                    if self._grew()
                    else self._singular.suspects(slope=self._weights_are_bad())
                )

    def _weights_are_bad(self) -> bool:
        """The step before has written what is no number: its loss was one, its slope was not."""
        registry = self.session.registry
        contents = map(self.session.values, registry.tensors(registry.owned))
        return any(v is not None and v.is_floating_point() and not is_finite(v) for v in contents)

    def _say_diverged(self) -> None:
        if self._diverged is None or self._scaled() or self._is_said():
            return
        if any(f.number == 27 for f in self.session.findings):
            return
        step, site = self._diverged
        first, last = self._first_loss or 0.0, self._last_loss or 0.0
        grew = self._grew()
        if grew and self.session.summed is not None:
            self._say_summed(step, *self.session.summed)
            return
        if self._suspects:
            self._say_suspect(step, last, site)
            return
        if grew:
            self._say_growth(step, site)
            return
        self.report(
            27,
            Severity.ERROR,
            f"The loss is not finite from step {step} on.",
            why=f"Its last value before was {last:.3g} (the first: {first:.3g})"
            + ". That step was not traced, so the operation is not known.",
            fix="Run with --mode trace to see the operation.",
            site=site,
            parameters=self.session.registry.owned,
        )

    def _say_growth(self, step: int, backward: Site | None) -> None:
        """The loss had grown step after step before: its rate is where the optimizer is made."""
        registry = self.session.registry
        births = [birth_site(registry, optimizer) for optimizer in registry.optimizers.values()]
        self.report(
            27,
            Severity.ERROR,
            f"The loss is not finite from step {step} on.",
            why=f"Its last value before was {self._last_loss or 0.0:.3g} (the first: "
            f"{self._first_loss or 0.0:.3g}): the steps grow until they overflow, as they do when "
            "the learning rate is too large for this loss.",
            fix="Lower the learning rate, scale the inputs, or clip the gradient.",
            site=(births[0] if births else None) or backward,
            parameters=registry.owned,
            related=(backward,),
        )

    def _say_suspect(self, step: int, last: float, backward: Site | None) -> None:
        """The step was not traced; the operation is one of those that were, without a guard."""
        whole = self._singular.selections() if self._recovered else []
        first, *others = [*whole, *(e for e in self._suspects if e not in whole)]
        cause = _HINTS.get(first.op)
        self.report(
            27,
            Severity.ERROR,
            f"The loss is not finite in step {step}."
            if self._recovered
            else f"The loss is not finite from step {step} on.",
            why=f"Its last value before was {last:.3g}. That step was not traced; in those that "
            f"were, nothing keeps the input of {first.op} at this line off its singular point"
            + (f" ({cause})." if cause else "."),
            fix=_FIXES.get(first.op, "Keep the inputs of this line away from its singular points.")
            + " To be sure, run with --mode trace.",
            site=first.site,
            parameters=self.session.registry.owned,
            related=(*(e.site for e in others[:3]), backward),
        )

    def _grew(self) -> bool:
        return (self._last_loss or 0.0) > _GROWTH * max(self._first_loss or 0.0, 1e-12)

    def _say_summed(self, step: int, count: int, site: Site | None) -> None:
        first, last = self._first_loss or 0.0, self._last_loss or 0.0
        self.report(
            22,
            Severity.ERROR,
            f"The loss is a sum over {count} values, and the steps along it overflow.",
            why=f"Its value went from {first:.3g} to {last:.3g} and is not finite from step {step} "
            f"on. Nothing divides the sum, so the steps are {count} times those of a mean: the "
            "learning rate is too large for it.",
            fix="Use the mean over the batch, or a learning rate that is that much smaller.",
            site=site,
            parameters=self.session.registry.owned,
            related=(self._diverged[1] if self._diverged is not None else None,),
        )

    # gradients

    def backward_ended(self, backward: Backward) -> None:
        if not self.session.record.checked:
            return
        self._steps.add(backward.step)
        bits = 0
        for bit, fact in backward.gradients.items():
            bits |= 0 if fact.finite else bit
        self._good |= not bits
        if not bits and backward.received:
            self._look_at_loss(backward)
        earlier = self._bad.get(backward.step)
        if not bits or self._poisoned or (earlier is not None and not earlier.by_scale):
            return
        birth, by_scale = self._culprit(backward)
        bad = Bad(bits, birth, backward.site, by_scale and self._scaled())
        if earlier is None or not bad.by_scale:
            self._bad[backward.step] = bad
        if not self._scaled():
            self._say(bad, Severity.WARNING)

    def _look_at_loss(self, backward: Backward) -> None:
        """log of a negative number is NaN, and its slope is a number."""
        for root in backward.roots:
            values = self.session.values(root)
            if values is None or not values.numel() or bool(values.isfinite().all()):
                continue
            kind = "nan" if bool(values.isnan().any()) else "inf"
            birth = self._births.get(root) or self._likely(kind, backward)
            self._losses[backward.step] = (birth, backward.site, backward.received)
            if len(self._losses) > 1 and not self._scaled():
                self._say_loss()

    def _is_said(self) -> bool:
        """An empty mask explains what is no number."""
        findings = self.session.findings
        return any(f.number == 19 and f.severity is Severity.ERROR for f in findings)

    def _say_loss(self) -> None:
        if self._is_said():
            return
        birth, site, received = self._losses[max(self._losses)]
        cause = _HINTS.get(birth.op.rstrip("_"))
        numbers = "NaN" if birth.kind == "nan" else "infinite"
        steps = len(self._losses)
        self.report(
            27,
            Severity.ERROR,
            f"The loss is {numbers} in {steps} of {len(self._steps)} examined steps, although its "
            "gradient is finite.",
            why=(
                f"The likeliest source is {birth.op}, which nothing keeps off its singular point"
                if birth.likely
                else f"The first {numbers} values come from {birth.op}{birth.inputs}"
            )
            + (f" ({cause}, or of less)" if cause else "")
            + ". Its slope is a number there, so the weights move, by a rule that is not the "
            "derivative of any loss.",
            fix=_FIXES.get(birth.op.rstrip("_"), "Keep its inputs where it is defined."),
            site=birth.site,
            parameters=received,
            related=(site,),
        )

    def _scaled(self) -> bool:
        """A scaler that looks for its scale makes infinities, and skips those steps."""
        scaler = self.session.scaler
        return scaler is not None and bool(scaler.is_enabled())

    def _culprit(self, backward: Backward) -> tuple[Birth, bool]:
        """Where it began, and whether the factor of a scaler may be what made it."""
        for root in backward.roots:
            birth = self._births.get(root)
            if birth is not None:
                return birth, self._loss_is_finite
        for blown in backward.blown:
            birth = blown.node.metadata.get(MARK + ".birth")
            if birth is not None:
                return birth, False
        # an operation made of several nodes is marked on the last of them only
        for root in backward.roots:
            for node in nodes_of(node_of(root)):
                birth = node.metadata.get(MARK + ".birth")
                if birth is not None and birth.kind == "nan":
                    return birth, False
        for blown in backward.blown:
            line = singular_line(function_of(blown.node))
            if line is not None:  # its backward is the program's own formula
                return Birth("a formula of a backward", line, blown.kind), False
            if blown.origin is not None:
                short = blown.origin.op.rsplit(".", 1)[-1]
                return Birth(short, blown.origin.site, blown.kind), not blown.singular
        for root in backward.roots if not backward.blown else ():
            for node in nodes_of(node_of(root)):
                line = singular_line(function_of(node))
                if line is not None and self._loss_is_finite:
                    return Birth("a formula of a backward", line, "nan", likely=True), False
        birth = self._likely("nan", backward)
        return birth, not birth.likely

    def _likely(self, kind: str, backward: Backward) -> Birth:
        """Of a step that was not traced: one of the operations of those that were."""
        suspects = self._suspects
        if not suspects and not self.session.record.traced and not self._grew():
            suspects = self._singular.suspects(slope=False)
        if not suspects:
            return Birth("backward", backward.site, kind)
        return Birth(suspects[0].op, suspects[0].site, kind, likely=True)

    def event(self, event: Event) -> None:
        if event.kind == "scale" and self.session.record.checked:
            losses = map(self.session.values, tensors_in(event.data["args"]))
            self._loss_is_finite = all(v is None or bool(v.isfinite().all()) for v in losses)
        if event.kind != "step" or self._poisoned:
            return
        bad = self._bad.get(event.step)
        if bad is not None and not self._scaled():
            owned = self.session.registry.bits(
                p for group in event.data["optimizer"].param_groups for p in group["params"]
            )
            if bad.bits & owned and self._stepped_on(bad.bits & owned):
                self._poisoned = True
                self._say(bad, Severity.ERROR)

    def _stepped_on(self, bits: int) -> bool:
        """Whether the bad gradients are still there: not cleaned, not skipped."""
        gradients = map(gradient_of, self.session.registry.tensors(bits))
        held = [gradient for gradient in gradients if gradient is not None]
        contents = map(self.session.values, held)
        return any(values is not None and not bool(values.isfinite().all()) for values in contents)

    def step_ended(self, record: StepRecord) -> None:
        if self._scaled() and len(self._steps) >= self.session.trace_steps:
            self._always()

    def finish(self, error: BaseException | None) -> None:
        if self._scaled():
            self._always()
        elif len(self._losses) > 1 and not self._bad:
            self._say_loss()
        self._say_diverged()

    def _always(self) -> None:
        """No backward was finite. If a smaller scale may help, the steps that are skipped are the
        finding (class 21), and this is its explanation."""
        if not self._bad or self._good:
            return
        singular = [bad for bad in self._bad.values() if not bad.by_scale]
        if singular:
            self._say(singular[-1], Severity.ERROR)
        else:
            self._say(self._bad[max(self._bad)], Severity.NOTE)

    def _say(self, bad: Bad, severity: Severity) -> None:
        bits, birth = bad.bits, bad.birth
        if self._is_said():
            return
        if birth.op == "backward" and self.session.summed is not None and self._grew():
            self._say_summed(self.session.step, *self.session.summed)
            return
        if birth.op == "backward" and self._grew():
            self._say_growth(self.session.step, bad.backward)
            return
        numbers = "NaN" if birth.kind == "nan" else "infinite"
        stepped = ""
        if severity is Severity.ERROR:
            stepped = "; the optimizer stepped on it"
            if self._scaled():
                stepped = " in any examined step; the scaler skips them all"
        cause = _HINTS.get(birth.op.rstrip("_"))
        self.report(
            27,
            severity,
            f"The gradient of {self.session.registry.many(bits)} is not finite{stepped}.",
            why=(
                f"The step that made it so was not traced; in those that were, nothing limits what "
                f"goes into {birth.op}"
                if birth.likely
                else f"The first {numbers} values come from {birth.op}{birth.inputs}"
            )
            + (f": {cause}." if cause else ".")
            + (
                " A gradient that was scaled less might have passed."
                if bad.by_scale
                else " They stay in the gradient even where a mask hides them in the loss."
            ),
            fix=_FIXES.get(
                birth.op.rstrip("_"), "Keep the inputs of this line away from its singular points."
            ),
            site=self._hidden_at.get(birth) or birth.site,
            parameters=bits,
            related=(birth.site, birth.felt, bad.backward),
        )


def _is_mask(call: OpCall) -> bool:
    """The logarithm of what hides places: 0 there, and no gradient."""
    return call.short == "log" and not call.outputs[0].requires_grad


def _infinite(call: OpCall) -> bool:
    """Whether an input was infinite already, from data or on purpose."""
    contents = [values_of(t) for t in call.inputs if t.is_floating_point()]
    return any(values is not None and bool(values.isinf().any()) for values in contents)
