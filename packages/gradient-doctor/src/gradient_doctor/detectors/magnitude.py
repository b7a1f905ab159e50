"""Class 22, while training: sums that grow with the batch, divisions by almost nothing, and means
of micro batches that are added up without a division by their number."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in, loss_line
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import as_real, values_of
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session

_ENOUGH = 32  # elements of a sum from which its size is worth a word
_CUT = 100.0  # a clip that shortens the gradient this much in every step rules the learning rate
_TINY = 1e-6
_HUGE = 1e4  # gradient norm over parameter norm: one SGD step of 1e-4 would double the weights
_DIVIDES = {"div", "div_", "true_divide", "divide", "__rtruediv__", "reciprocal", "rsqrt"}
_LINEAR = {"neg", "add", "sub", "__rsub__", "squeeze", "view", "reshape", "float", "__radd__"}


_SAME = {"squeeze", "view", "reshape", "float", "clone"}
_SCALE_FREE = {
    *("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Rprop", "Adafactor"),
}
_MEANS = {"mean", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss"}
_MEANS |= {"huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"}
_MICRO_BATCHES = 3  # of one step: twice the step is less than a learning rate is uncertain by
_MIXED = 64  # values of a sum over the batch that outweigh the mean beside it


@dataclass(frozen=True)
class Summed:
    """A sum over samples that nothing has divided yet."""

    count: int
    site: Site | None
    rows: int = 0  # the length of its first axis


@dataclass
class Round:
    """Backwards of one line since the gradients were cleared."""

    loss: Site | None
    backwards: int = 0
    mask: int = 0


@dataclass(frozen=True)
class Averaged:
    """A mean over samples."""

    rows: int
    site: Site | None


class Magnitude(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._sums = WeakIdKeyDictionary()
        self._means = WeakIdKeyDictionary()
        self._mixed: dict[Site | None, set[int]] = {}  # steps by the line that adds the two
        self._root: Summed | None = None
        self._cuts: list[float] = []
        self._smallest: tuple[float, Site | None] = (math.inf, None)
        self._root_live = 0
        self._rounds: dict[Site | None, Round] = {}  # means of several samples, not divided
        self._counts: dict[tuple[Site | None, int], list[int]] = {}  # backwards of each step

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs or not call.outputs[0].requires_grad:
            return
        result, source = call.outputs[0], call.inputs[0]
        plain = call.short == "sum" and result.dim() == 0
        if (plain or call.kwargs.get("reduction") == "sum") and source.numel() >= _ENOUGH:
            rows = source.shape[0] if source.dim() > 1 and not self._of_weights(call) else 0
            self._sums[result] = Summed(source.numel(), loss_line(self.session, call), rows)
        elif call.short in _MEANS and result.dim() == 0 and source.dim():
            self._means[result] = Averaged(source.shape[0], call.site)
        elif call.short == "add" and len(call.inputs) == 2 and self._mixes(call):
            return
        elif call.short in _SAME and source in self._means:
            self._means[result] = self._means[source]
        elif call.short in _LINEAR or call.short == "mul":
            sums = [self._sums[t] for t in call.inputs if t in self._sums]
            if sums and (call.short != "mul" or _plain_factor(call)):
                self._sums[result] = max(sums, key=lambda s: s.count)
        elif call.short in _DIVIDES:
            self._divisor(call)

    def _of_weights(self, call: OpCall) -> bool:
        """A penalty on weights: their rows are no samples, whatever the size of the batch."""
        live = call.taint.live if call.taint is not None else 0
        return any(p.shape == call.inputs[0].shape for p in self.session.registry.tensors(live))

    def _mixes(self, call: OpCall) -> bool:
        """A mean over the batch plus a sum over the same batch: the sum grows with its size."""
        summed = next((self._sums[t] for t in call.inputs if t in self._sums), None)
        mean = next((self._means[t] for t in call.inputs if t in self._means), None)
        if summed is None or mean is None or summed.count < _MIXED:
            return False
        if summed.rows != mean.rows or summed.rows < 2:
            return False
        steps = self._mixed.setdefault(call.site, set())
        steps.add(self.session.step)
        if len(steps) > 1:
            self.report(
                22,
                Severity.WARNING,
                f"A sum over {summed.count} values is added to a mean over the same batch.",
                why=f"The term at {summed.site} is summed over all {summed.rows} samples, the one "
                f"at {mean.site} is averaged over them: the sum weighs {summed.rows} times as much "
                "for each sample, and more with a larger batch.",
                fix="Average both over the batch (sum over features, then mean), and set their "
                "balance with a factor.",
                site=summed.site,
                parameters=live_in(self.session, call.inputs),
                related=(mean.site, call.site),
            )
        return True

    def _divisor(self, call: OpCall) -> None:
        below = call.inputs[-1] if call.short.startswith("div") else call.inputs[0]
        if not below.is_floating_point() or not below.numel():
            return
        sizes = below.detach().abs()
        sizes = sizes[sizes > 0]
        least = float(sizes.min()) if sizes.numel() else math.inf
        if least < min(_TINY, self._smallest[0]):
            self._smallest = (least, call.site)

    def _count(self, backward: Backward) -> None:
        """One more micro batch, if the loss is a mean over several samples as it stands."""
        means = [self._means[root] for root in backward.roots if root in self._means]
        if backward.kind == "backward" and means and means[0].rows > 1:
            one = self._rounds.setdefault(backward.site, Round(means[0].site))
            one.backwards += 1
            one.mask |= backward.received

    def _added_up(self, optimizer: Any, step: Site | None) -> None:
        registry = self.session.registry
        owned = registry.bits(owned_by(optimizer))
        rounds = {site: one for site, one in self._rounds.items() if one.mask & owned}
        self._rounds = {site: one for site, one in self._rounds.items() if site not in rounds}
        # Adam and its kin divide by the gradient's own size; the program may divide by itself
        if type(optimizer).__name__ in _SCALE_FREE or registry.bits(owned_by(optimizer)) & (
            self.session.read_since_backward
        ):
            return
        for site, one in rounds.items():
            if len(rounds) > 1:
                continue
            counts = self._counts.setdefault((site, id(optimizer)), [])
            counts.append(one.backwards)
            if len(counts) < 2 or counts[-1] < _MICRO_BATCHES or counts[-1] != counts[-2]:
                continue
            self.report(
                22,
                Severity.WARNING,
                f"The gradients of {one.backwards} micro batches are added up, and nothing "
                "divides them by their number.",
                why=f"The loss at {one.loss} is a mean over its micro batch, and this backward "
                f"runs {one.backwards} times for each step of {registry.optimizer_name(optimizer)}"
                f": the step is {one.backwards} times that of one batch of the same samples, as if "
                "the learning rate were that much larger.",
                fix=f"Go back from loss / {one.backwards}; or keep the sum, and choose the "
                "learning rate for it.",
                site=site,
                parameters=one.mask & owned,
                related=(one.loss, step),
            )

    def backward_ended(self, backward: Backward) -> None:
        self._count(backward)
        roots = [self._sums[root] for root in backward.roots if root in self._sums]
        self._root = roots[0] if roots else None
        if backward.taint is not None:
            self.session.summed = (roots[0].count, roots[0].site) if roots else None
        self._root_live = backward.received
        least, site = self._smallest
        self._smallest = (math.inf, None)
        if site is None or not backward.gradients:
            return
        gradient = math.sqrt(sum(fact.norm**2 for fact in backward.gradients.values()))
        weights = _norm(self.session.registry.tensors(backward.received))
        if math.isfinite(gradient) and gradient > _HUGE * max(weights, 1e-3) and not self._scaled():
            self.report(
                22,
                Severity.WARNING,
                f"The gradient is {gradient / max(weights, 1e-3):.1e} times as long as the "
                "parameters are.",
                why=f"A division by {least:.1e} stands on its way (gradient norm {gradient:.1e}, "
                f"parameter norm {weights:.1e}).",
                fix="Clamp the denominator from below by something of its usual size.",
                site=site,
                parameters=backward.received,
            )

    def _scaled(self) -> bool:
        scaler = self.session.scaler
        return scaler is not None and bool(scaler.is_enabled())

    def event(self, event: Event) -> None:
        if event.kind == "step":
            self._added_up(event.data["optimizer"], event.site)
        elif event.kind == "zero_grad":
            self._rounds.clear()
        if event.kind == "clip" and self._root is not None:
            total, most = _number(event.data["total_norm"]), _number(event.data["max_norm"])
            if most > 0 and math.isfinite(total):
                self._cuts.append(total / most)
                self._judge()

    def _judge(self) -> None:
        """A summed loss is a choice; one that clipping always undoes is a cost."""
        root = self._root
        if root is None or len(self._cuts) < self.session.trace_steps or self._scaled():
            return
        least = min(self._cuts)
        if least < _CUT:
            return
        self.report(
            22,
            Severity.WARNING,
            f"The loss is a sum over {root.count} values, and clipping undoes it in every step.",
            why=f"Nothing divides the sum, so the gradient grows with batch and length; clipping "
            f"shortens it at least {least:.0f} times in each of {len(self._cuts)} steps, so all "
            "steps have the same length whatever the data say.",
            fix="Divide by the number of samples or tokens (mean instead of sum).",
            site=root.site,
            parameters=self._root_live,
        )


def _plain_factor(call: OpCall) -> bool:
    """A number of ordinary size: 1/N written as a factor would be a normalisation."""
    numbers = [a for a in call.args if isinstance(a, (int, float))]
    return any(abs(n) >= 0.1 for n in numbers)


@torch.no_grad()
def _norm(tensors: Iterable[Tensor]) -> float:
    """Of all together; infinite, larger than any gradient, if one of them cannot be read."""
    contents = [values_of(tensor) for tensor in tensors]
    if any(values is None for values in contents):
        return math.inf
    real = [as_real(values).float() for values in contents if values is not None]
    return math.sqrt(sum(float(values.square().sum()) for values in real))


def _number(value: object) -> float:
    if isinstance(value, Tensor):
        return float(value.detach())
    return float(value) if isinstance(value, (int, float)) else math.nan
