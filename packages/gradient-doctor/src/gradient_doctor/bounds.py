"""Values that are never negative, never positive, or limited from above, by how they were made.

An exponential of such a value cannot overflow, whatever the weights become.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.readable import values_of
from gradient_doctor.records import OpCall

_NEVER_NEGATIVE = {
    *("square", "abs", "norm", "exp", "relu", "softplus", "softmax", "sigmoid", "cdist", "var"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "cross_entropy", "std", "sqrt", "vector_norm"),
    *("binary_cross_entropy_with_logits", "binary_cross_entropy", "expm1", "pairwise_distance"),
}
_NEVER_POSITIVE = {"log_softmax", "logsigmoid"}
_LIMITED = {"tanh", "sigmoid", "softmax", "sin", "cos", "minimum", "min", "amin", "hardtanh"}
_LIMITED |= {"cosine_similarity", "relu6", "hardsigmoid", "softsign", "normalize", "erf", "atan"}
_GREATEST = {"max", "amax", "logsumexp", "logcumsumexp", "cummax"}
# of one value; what is true of it stays true
_SIGN_STAYS = {
    *("view", "reshape", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "expand"),
    *("sum", "mean", "contiguous", "__getitem__", "float", "double", "to", "clone", "T", "detach"),
}


class Bounds:
    """What is known of the values of this step, call by call."""

    def __init__(self) -> None:
        self._low = WeakIdKeyDictionary()  # never negative
        self._high = WeakIdKeyDictionary()  # limited from above
        self._negative = WeakIdKeyDictionary()  # never positive
        self._greatest = WeakIdKeyDictionary()  # the maximum of other values

    def above(self, value: Tensor) -> bool:
        """Whether something keeps it from growing without limit."""
        return value in self._high or value in self._negative

    def follow(self, call: OpCall) -> None:
        short, result, source = call.short, call.outputs[0], call.inputs[0]
        short = short if short.startswith("__") else short.rstrip("_")
        if short in _GREATEST:
            self._greatest[result] = True
        if short in _NEVER_NEGATIVE or (short == "pow" and _power(call) % 2 == 0):
            self._low[result] = True
        if short in _NEVER_POSITIVE:
            self._negative[result] = True
        if short in _LIMITED or (short in ("clamp", "clip", "clamp_max") and _upper(call)):
            self._high[result] = True
        if short == "sub" and len(call.inputs) > 1 and call.inputs[1] in self._greatest:
            self._high[result] = True
        if short in _SIGN_STAYS:
            for known in (self._low, self._high, self._negative, self._greatest):
                if source in known and (known is not self._high or short != "sum"):
                    known[result] = True
        elif short == "neg":
            self._turn(source, result)
        elif short in ("mul", "div", "add", "sub", "rsub", "__rsub__"):
            self._combine(short, call)

    def _turn(self, source: Tensor, result: Tensor) -> None:
        if source in self._low:
            self._negative[result] = True
        if source in self._negative:
            self._low[result] = True

    def _combine(self, short: str, call: OpCall) -> None:
        result = call.outputs[0]
        numbers = [a for a in call.args if isinstance(a, (int, float))]
        if len(call.inputs) == 1 and numbers and short in ("mul", "div"):
            if numbers[0] < 0:
                self._turn(call.inputs[0], result)
            else:
                for known in (self._low, self._high, self._negative):
                    if call.inputs[0] in known:
                        known[result] = True
        elif len(call.inputs) == 1 and numbers:
            limited = short in ("add", "sub") and self.above(call.inputs[0])
            if limited or (short in ("rsub", "__rsub__") and call.inputs[0] in self._low):
                self._high[result] = True
        elif len(call.inputs) == 2:
            left, right = call.inputs
            low = left in self._low and (right in self._low or is_number(right))
            if short != "sub" and low:
                self._low[result] = True
            if short in ("mul", "div") and left in self._negative:
                if right in self._low or is_number(right):
                    self._negative[result] = True
            elif self.above(left) and (
                right in (self._low if short == "sub" else self._high)
                or (short == "add" and right in self._negative)
            ):
                self._high[result] = True


def _power(call: OpCall) -> float:
    power = call.args[1] if len(call.args) > 1 else call.kwargs.get("exponent")
    return float(power) if isinstance(power, (int, float)) else 1.0


def _upper(call: OpCall) -> bool:
    """Whether this clamp has an upper end."""
    if call.short.startswith("clamp_max") or call.kwargs.get("max") is not None:
        return True
    return len(call.args) > 2 and call.args[2] is not None


def is_number(tensor: Tensor) -> bool:
    """Whether it is a single number above 0 that nothing learns."""
    if tensor.dim() or tensor.requires_grad:
        return False
    values = values_of(tensor)
    return values is not None and bool((values > 0).all())
