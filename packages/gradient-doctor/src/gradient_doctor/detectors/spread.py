"""A loss that is one number already is multiplied by weights, or a mask, of single samples.

`torch.sum(kl) * mask` and `F.mse_loss(y, target) * weight` raise no error: the one number is
spread over all samples. The weights do not weigh one sample against another, the mask takes none
out; and of a sum, which is spread and summed again, each sample counts as many times as there are.

A scalar may scale data on purpose (a learnt temperature), so all of this must be seen: the values
before the reduction have the shape of the weights, or begin with it; the weights are data, and
differ; and the product is reduced again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
_MEANS = {
    *("mean", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss"),
}
_SAME = {"neg", "add", "sub", "__rsub__", "__radd__", "float", "view", "reshape", "squeeze", "exp"}
_SUMS = {"add", "sub", "__radd__", "__rsub__"}
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
    weights: tuple[int, ...]
    mask: bool
    site: Site | None
    added: bool = False  # not multiplied: each sample gets the sum over all of them


class Spreads(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._reduced = WeakIdKeyDictionary()
        self._spread = WeakIdKeyDictionary()
        # by the lines of the reduction and of the product
        self._steps: dict[tuple[Site | None, Site | None], tuple[Spread, set[int], int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs or not call.outputs[0].requires_grad:
            return
        result, source = call.outputs[0], call.inputs[0]
        if result.dim() == 0 and source.dim() and (call.short == "sum" or call.short in _MEANS):
            spread = self._spread.get(source)
            if spread is not None:
                self._note(spread, call)
            elif source.numel() > 1 and source.requires_grad:
                self._reduced[result] = Reduced(
                    call.short == "sum" or call.kwargs.get("reduction") == "sum",
                    tuple(source.shape),
                    self._line(call),
                )
        elif call.short in _PRODUCTS and len(call.inputs) == 2:
            self._multiply(call)
        elif call.short in _SUMS and len(call.inputs) == 2 and result.dim():
            self._add(call)
        elif call.short in _SAME or (call.short in ("mul", "div") and len(call.inputs) == 1):
            for known in (self._reduced, self._spread):
                if source in known:
                    known[result] = known[source]

    def _line(self, call: OpCall) -> Site | None:
        """Of a loss's module, the line with its options."""
        stack = self.session.module_stack
        if stack and isinstance(stack[-1], nn.modules.loss._Loss):
            return self.session.registry.construction(stack[-1]) or call.site
        return call.site

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
            mask = bool(((values == 0) | (values == 1)).all())
            self._spread[call.outputs[0]] = Spread(reduced, whole, mask, call.site)

    def _add(self, call: OpCall) -> None:
        """The sum over all samples, added to a value of each of them: a log determinant."""
        result, batch = call.outputs[0], tuple(call.outputs[0].shape)
        for term, other in (call.inputs, call.inputs[::-1]):
            if term in self._spread and other.shape in (result.shape, ()):
                self._spread[result] = self._spread[term]
            reduced = self._reduced.get(term)
            if reduced is None or not reduced.total or not other.requires_grad:
                continue
            # one number for each sample, on both sides
            if reduced.shape == batch == tuple(other.shape) and result.dim() == 1 < batch[0]:
                self._spread[result] = Spread(reduced, batch, False, call.site, added=True)

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

    def _say_added(self, spread: Spread, live: int) -> None:
        count = spread.weights[0]
        self.report(
            22,
            Severity.WARNING,
            "The sum over all samples is added to the value of each single one.",
            why=f"{count} values, one for each sample, are summed to one number here, and at "
            f"{spread.site} it is added to {count} others, again one for each sample. In the mean "
            f"over them this term counts {count} times: it grows with the batch.",
            fix="Add the values sample by sample: reduce over the inner axes only (dim=-1), and "
            "over the batch at the end.",
            site=spread.of.site,
            parameters=live,
            related=(spread.site,),
        )

    def _say(self, spread: Spread, live: int) -> None:
        if spread.added:
            self._say_added(spread, live)
            return
        reduced, what = spread.of, "a mask" if spread.mask else "weights"
        count = 1
        for size in spread.weights:
            count *= size
        number = 22 if reduced.total else 19 if spread.mask else 23
        self.report(
            number,
            Severity.WARNING,
            f"A loss that is one number already is multiplied by {what} of single samples.",
            why=f"Values of shape {list(reduced.shape)} are "
            + ("summed" if reduced.total else "averaged")
            + f" to one number here. At {spread.site} it is spread over the shape "
            f"{list(spread.weights)} of the {what.removeprefix('a ')}"
            + (
                f", and the sum of that counts it up to {count} times."
                if reduced.total
                else ": all samples count alike."
            ),
            fix="Reduce over the inner axes only (dim=-1, or reduction='none'), multiply, and then "
            "take the mean over the samples that count.",
            site=reduced.site,
            parameters=live,
            related=(spread.site,),
        )
