"""A loss that is one number already meets values of single samples: weights, a mask, other losses.

`torch.sum(kl) * mask` and `F.mse_loss(y, target) * weight` raise no error: the one number is
spread over all samples. The weights do not weigh one sample against another, the mask takes none
out; and of a sum, which is spread and summed again, each sample counts as many times as there are.

A sum over all samples that is added to the loss of each counts as often as there are samples (also
Python's `sum(x)`, which adds the samples up).

A scalar may scale data on purpose (a learnt temperature), so all of this must be seen: the values
before the reduction have the shape of the weights, or begin with it; the weights are data, and
differ; and the product is reduced again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in, loss_line
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
_MEANS = {
    *("mean", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss"),
}
_SAME = {"neg", "add", "sub", "__rsub__", "__radd__", "float", "view", "reshape", "squeeze", "exp"}
_SUMS = {"add", "sub", "__rsub__", "__radd__"}
_SAMPLES = 4
_PLAIN = 0.1  # a smaller factor, or a divisor, may be for the number of samples
_PRODUCTS = {"mul", "multiply", "__rmul__"}


@dataclass(frozen=True)
class Reduced:
    """A scalar, and the values that it was made from."""

    total: bool  # a sum, not a mean
    shape: tuple[int, ...]
    site: Site | None


@dataclass(frozen=True)
class Spread:
    """A scalar that was multiplied by one number for each sample."""

    of: Reduced
    over: tuple[int, ...]
    by: str  # "a mask", "weights"; "" if it was added to one value for each sample
    site: Site | None


class Spreads(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._reduced = WeakIdKeyDictionary()
        self._spread = WeakIdKeyDictionary()
        self._learnt = WeakIdKeyDictionary()  # made of parameters alone
        # values of single samples -> how many of them were added up, and how many there are
        self._pieces = WeakIdKeyDictionary()
        # by the lines of the reduction and of the product
        self._steps: dict[tuple[Site | None, Site | None], tuple[Spread, set[int], int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs or not call.outputs[0].requires_grad:
            return
        result, source = call.outputs[0], call.inputs[0]
        if all(isinstance(t, nn.Parameter) or t in self._learnt for t in call.inputs):
            self._learnt[result] = True  # a penalty on weights has no samples
            return
        if result.dim() == 0 and source.dim() and (call.short == "sum" or call.short in _MEANS):
            spread = self._spread.get(source)
            if spread is not None:
                self._note(spread, call)
            elif source.numel() > 1 and source.requires_grad:
                self._reduced[result] = Reduced(
                    call.short == "sum" or call.kwargs.get("reduction") == "sum",
                    tuple(source.shape),
                    loss_line(self.session, call),
                )
        elif call.short == "unbind" and source.dim() == 1:
            for one in call.outputs:
                self._pieces[one] = (1, len(source))
        elif call.short in _PRODUCTS and len(call.inputs) == 2:
            self._multiply(call)
        elif len(call.inputs) == 2 and call.short in _SUMS:
            self._add(call)
        elif call.short in _SAME or (call.short in ("mul", "div") and len(call.inputs) == 1):
            self._pass_on(call, source)

    def _pass_on(self, call: OpCall, source: Tensor) -> None:
        result = call.outputs[0]
        if source in self._pieces and call.short in ("add", "__radd__"):  # sum() begins with 0
            self._pieces[result] = self._pieces[source]
        reduced = self._reduced.get(source)
        if reduced is not None:
            if reduced.total and call.short in ("mul", "div") and not _is_plain(call):
                return  # a division by the number of samples
            self._reduced[result] = reduced
        if source in self._spread:
            self._spread[result] = self._spread[source]

    def _add(self, call: OpCall) -> None:
        left, right = call.inputs
        result = call.outputs[0]
        if left in self._pieces and right in self._pieces and call.short == "add":
            count = self._pieces[left][0] + self._pieces[right][0]
            whole = self._pieces[right][1]
            self._pieces[result] = (count, whole)
            if count == whole > 1:  # Python's sum() over the samples
                self._reduced[result] = Reduced(True, (whole,), call.site)
            return
        for scalar, other in ((left, right), (right, left)):
            reduced = self._reduced.get(scalar)
            if reduced is None or not reduced.total or other.dim() != 1 or len(other) < _SAMPLES:
                continue
            if other.requires_grad and reduced.shape[0] == len(other) and result.dim() == 1:
                self._spread[result] = Spread(reduced, (len(other),), "", call.site)
                return
        for known in (self._spread, self._reduced):
            both = [known[t] for t in (left, right) if t in known]
            if both and (known is self._spread or result.dim() == 0):
                known[result] = both[0]

    def _multiply(self, call: OpCall) -> None:
        for scalar, weights in (call.inputs, call.inputs[::-1]):
            reduced = self._reduced.get(scalar)
            if reduced is None or weights.requires_grad or weights.numel() < 2:
                continue
            whole = tuple(weights.shape)
            if reduced.shape[: len(whole)] != whole:
                continue
            values = self.session.values(weights)
            if values is None or not bool((values != values.reshape(-1)[0]).any()):
                continue
            by = "a mask" if bool(((values == 0) | (values == 1)).all()) else "weights"
            self._spread[call.outputs[0]] = Spread(reduced, whole, by, call.site)

    def _note(self, spread: Spread, call: OpCall) -> None:
        key = (spread.of.site, spread.site)
        first, steps, live = self._steps.get(key, (spread, set(), 0))
        live |= live_in(self.session, call.outputs)
        self._steps[key] = (first, {*steps, self.session.step}, live)

    def step_ended(self, record: StepRecord) -> None:
        for key, (spread, steps, live) in list(self._steps.items()):
            if len(steps) >= _ENOUGH:
                self._say(spread, live)
                del self._steps[key]

    def _say(self, spread: Spread, live: int) -> None:
        reduced, by = spread.of, spread.by
        count = 1
        for size in spread.over:
            count *= size
        number = 22 if reduced.total else 19 if by == "a mask" else 23
        self.report(
            number,
            Severity.WARNING,
            f"A loss that is one number already is multiplied by {by} of single samples."
            if by
            else "A sum over all samples is added to the loss of each of them.",
            why=f"Values of shape {list(reduced.shape)} are "
            + ("summed" if reduced.total else "averaged")
            + f" to one number here. At {spread.site} it is spread over the shape "
            f"{list(spread.over)} of the {by.removeprefix('a ') or 'others'}"
            + (
                f", and what is made of that counts it up to {count} times."
                if reduced.total
                else ": all samples count alike."
            ),
            fix="Reduce over the inner axes only (dim=-1, or reduction='none'), multiply, and then "
            "take the mean over the samples that count.",
            site=reduced.site,
            parameters=live,
            related=(spread.site,),
        )


def _is_plain(call: OpCall) -> bool:
    numbers = [a for a in call.args if isinstance(a, (int, float))]
    if call.short == "div":
        return all(abs(number) <= 1 for number in numbers)
    return all(abs(number) >= _PLAIN for number in numbers)
