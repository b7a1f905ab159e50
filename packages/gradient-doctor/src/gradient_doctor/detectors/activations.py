"""Class 29: probabilities where a loss expects raw scores, so that softmax or sigmoid acts twice.

cross_entropy, log_softmax and Categorical(logits=...) apply a softmax of their own, and
binary_cross_entropy_with_logits a sigmoid. Probabilities lie between 0 and 1: a second softmax of
them is nearly uniform, so the loss is bounded far from 0 and its gradient is small.

A ReLU before such a loss takes the negative scores away: those classes get no gradient (20).

An activation is known by the call that made it, through changes of shape; one that is written
out, by its parts. The values must agree: a softmax over the axis of the classes sums to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session
from gradient_doctor.sites import within
from gradient_doctor.written_out import WrittenOut

_SOFTMAX = {"softmax"}
_SIGMOID = {"sigmoid", "sigmoid_", "expit"}
# the same values in another shape or precision
_SAME = {
    *("view", "reshape", "squeeze", "unsqueeze", "flatten", "transpose", "permute", "contiguous"),
    *("float", "double", "to", "type_as", "clone", "__getitem__", "T", "mT", "stack", "cat"),
    *("clamp", "clip", "clamp_", "clamp_min", "masked_select", "gather", "index_select"),
    # a loop over the samples takes them apart
    *("unbind", "split", "chunk", "movedim"),
}
_OF_SCORES = {"cross_entropy", "log_softmax", "softmax", "gumbel_softmax", "logsumexp"}
_OF_LOGITS = {"binary_cross_entropy_with_logits", "multilabel_soft_margin_loss"}
_OF_LOGITS |= {"soft_margin_loss"}
# the losses of two classes, written by hand: log(sigmoid(x)), of either sign
_BY_HAND = {"softplus", "logsigmoid"}
_MODULES = (nn.Softmax, nn.Softmax2d, nn.Sigmoid, nn.ReLU, nn.ReLU6)
_RELU = {"relu", "relu_", "relu6"}
_DEAD = 0.1  # of the scores
_CLOSE = 1e-3


@dataclass(frozen=True)
class Activation:
    name: str  # "softmax" or "sigmoid"
    site: Site | None  # of the layer's own line, if it is a module
    call: Site | None


class Activations(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._made = WeakIdKeyDictionary()
        self._cut_off = WeakIdKeyDictionary()  # output of a ReLU -> its line
        self._dead: dict[Site | None, set[int]] = {}
        self._votes: dict[Site | None, set[int]] = {}
        self._written_out = WrittenOut()

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        if call.short in _OF_SCORES | _OF_LOGITS | _SIGMOID | _BY_HAND:
            self._check(call)
            self._check_relu(call)
        if call.short in _RELU:
            self._cut_off[call.outputs[0]] = self._layer() or call.site
        elif call.short in _SAME and call.inputs[0] in self._cut_off:
            self._cut_off[call.outputs[0]] = self._cut_off[call.inputs[0]]
        written = self._written_out.op(call)
        if written is not None:
            self._made[call.outputs[0]] = Activation(written, call.site, call.site)
        elif call.short in _SOFTMAX | _SIGMOID:
            name = "softmax" if call.short in _SOFTMAX else "sigmoid"
            made = Activation(name, self._layer() or call.site, call.site)
            self._made[call.outputs[0]] = made
        elif call.short in _SAME or call.short == "neg":
            sources = [self._made.get(tensor) for tensor in call.inputs]
            if sources[0] is not None and None not in sources:
                for output in call.outputs:
                    self._made[output] = sources[0]

    def _layer(self) -> Site | None:
        """The line of the layer, if the activation is a module of its own."""
        stack = self.session.module_stack
        if stack and isinstance(stack[-1], _MODULES):
            return birth_site(self.session.registry, stack[-1])
        return None

    def _check_relu(self, call: OpCall) -> None:
        scores = argument(call, 0, "input")
        if not isinstance(scores, Tensor) or scores not in self._cut_off:
            return
        if call.short not in ("cross_entropy", "log_softmax", *_OF_LOGITS):
            return  # inside of a model a softmax may weigh anything
        live, values = live_in(self.session, [scores]), self.session.values(scores)
        if not live or values is None or not values.numel():
            return
        share = 1 - int(torch.count_nonzero(values)) / values.numel()
        site = self._cut_off[scores]
        steps = self._dead.setdefault(site, set())
        steps.add(self.session.step)
        if share < _DEAD or len(steps) < 2:
            return
        self.report(
            20,
            Severity.WARNING,
            f"A ReLU cuts off {share:.0%} of the scores before {call.short}.",
            why=f"{call.short} at {call.site} takes raw scores of either sign. Where the ReLU "
            "gives 0 its slope is 0: these scores get no gradient, however wrong they are, and "
            "none can fall below 0.",
            fix="Pass the output of the last layer as it is.",
            site=site,
            parameters=live,
            related=(call.site,),
        )

    def _check(self, call: OpCall) -> None:
        scores = argument(call, 0, "input")
        if not isinstance(scores, Tensor):
            return
        made = self._made.get(scores)
        if made is None:
            self._check_values(call, scores)
            return
        live = live_in(self.session, [scores])
        if not live:
            return
        if call.short == "logsumexp" and not within("distributions"):
            return  # only where torch takes the values for logits
        axis = _axis(call, scores)
        values = self.session.values(scores)
        if values is None or axis is None or not values.numel():
            return
        if call.short in _SIGMOID | _BY_HAND:
            values = values.abs() if call.short in _BY_HAND else values
            twice = made.name == "sigmoid"  # right after the other, with nothing learnt in between
        elif made.name == "softmax" and call.short in _OF_SCORES:
            twice = bool(((values.sum(axis) - 1).abs() < _CLOSE).all()) and values.shape[axis] > 1
        else:
            # a sigmoid squeezes the scores of a loss as well; inside of a model it may be a gate
            twice = call.short in _OF_LOGITS | {"cross_entropy", "log_softmax"}
        if twice and bool((values >= 0).all()):
            self._say(call, made, values, live)

    def _check_values(self, call: OpCall, scores: Tensor) -> None:
        """Rows that sum to 1 are probabilities, whatever made them: averaged votes, say."""
        if call.short not in ("cross_entropy", "log_softmax") or scores.dim() < 2:
            return
        axis, values = _axis(call, scores), self.session.values(scores)
        if axis is None or values is None or scores.shape[axis] < 2 or len(values) < 2:
            return
        if not values.is_floating_point() or not bool((values >= 0).all()):
            return
        live = live_in(self.session, [scores])
        if not live or not bool(((values.sum(axis) - 1).abs() < _CLOSE).all()):
            return
        steps = self._votes.setdefault(call.site, set())
        steps.add(self.session.step)
        if len(steps) < 2:
            return
        self.report(
            29,
            Severity.WARNING,
            f"{call.short} takes probabilities for raw scores.",
            why=f"All {values.numel() // scores.shape[axis]} rows of its input are positive and "
            "sum to 1. It applies a softmax itself: with a second one no prediction can be sure, "
            "so the loss stays far from 0 and its gradient small.",
            fix="Use nll_loss on the logarithm of the probabilities, or pass the scores before.",
            site=call.site,
            parameters=live,
        )

    def _say(self, call: OpCall, made: Activation, values: Tensor, live: int) -> None:
        taker = "Categorical(logits=...)" if call.short == "logsumexp" else call.short
        squeezes = call.short in _OF_LOGITS | _SIGMOID | _BY_HAND
        own = "sigmoid" if squeezes else "softmax"
        self.report(
            29,
            Severity.WARNING,
            f"The output of {made.name} goes into {taker}, which applies {own} itself.",
            why=f"{taker} at {call.site} takes its input for raw scores, and gets values between "
            f"{float(values.min()):.3g} and {float(values.max()):.3g}: with a second {own} no "
            "prediction can be sure, so the loss stays far from 0 and its gradient small.",
            fix=f"Remove the {made.name} before the loss, and apply it to predictions only.",
            site=made.site,
            parameters=live,
            related=(call.site, made.call),
        )


def _axis(call: OpCall, scores: Tensor) -> int | None:
    """The axis of the classes, as the call takes it."""
    if call.short == "cross_entropy":
        return 1 if scores.dim() > 1 else 0
    if call.short in _OF_LOGITS | _SIGMOID | _BY_HAND:
        return -1 if scores.dim() else None
    position = {"gumbel_softmax": 4}.get(call.short, 1)
    axis = argument(call, position, "dim", -1)
    if isinstance(axis, (tuple, list)) and len(axis) == 1:
        axis = axis[0]
    return axis if isinstance(axis, int) and scores.dim() else None
