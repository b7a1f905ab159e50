"""Class 18: the target's dtype or shape is not what the loss takes it for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in, shape
from gradient_doctor.detectors.places import birth_site
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session
from gradient_doctor.sites import is_user_file

_FUNCTIONAL = "torch.nn.functional."
_ELEMENTWISE = {
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "gaussian_nll_loss"),
    *("poisson_nll_loss", "soft_margin_loss"),
}
_CLASSES = {"cross_entropy", "nll_loss"}
_ERRORS = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
# where their target stands; soft_margin_loss has one for each prediction
_SIGNS = {
    **dict.fromkeys(("soft_margin_loss", "hinge_embedding_loss"), 1),
    **dict.fromkeys(("margin_ranking_loss", "cosine_embedding_loss"), 2),
}
_UNNORMALISED = 0.1  # of a log-sum of probabilities
_BINARY = {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
_ARITHMETIC = {
    *("add", "sub", "mul", "div", "__rsub__", "__rtruediv__", "minimum", "maximum", "min", "max"),
    *("subtract", "multiply", "divide", "true_divide", "add_", "sub_", "mul_", "div_"),
}
# these put an axis where the user wants one: what then broadcasts was meant to
_PLACED = {"unsqueeze", "__getitem__", "expand", "expand_as", "broadcast_to", "outer"}
_CONSTRUCTORS = {"zeros", "ones", "full", "tensor", "zeros_like", "ones_like", "full_like"}
_RESHAPES = {
    *("view", "reshape", "squeeze", "unsqueeze", "flatten", "expand", "repeat", "to", "clone"),
    *("cat", "stack", "__getitem__", "fill_", "cpu", "cuda", "detach"),
}
_FULL = {"sum", "mean", "nansum", "nanmean"}
_TURNS = {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "T", "mT", "view", "reshape"}


class Targets(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._pairs = WeakIdKeyDictionary()  # all pairs of a batch: (site, shapes)
        self._made = WeakIdKeyDictionary()  # data from a constructor without dtype -> its line
        self._classes_last = WeakIdKeyDictionary()
        self._single_targets: dict[Site | None, set[float]] = {}  # values of targets of one element

    def op(self, call: OpCall) -> None:
        self._follow_births(call)
        if call.name.startswith(_FUNCTIONAL) and call.short in _ELEMENTWISE | _CLASSES:
            self._loss(call)
            if call.short in _SIGNS:
                self._signs(call)
            return
        if call.short in _SIGNS and call.name.startswith(_FUNCTIONAL):
            self._signs(call)
        elif call.short == "ctc_loss":
            self._log_probs(call)
            self._blanks(call)
        self._follow_pairs(call)
        self._follow_classes(call)

    # losses

    def _loss(self, call: OpCall) -> None:
        prediction, target = argument(call, 0, "input"), argument(call, 1, "target")
        if not (isinstance(prediction, Tensor) and isinstance(target, Tensor)):
            return
        live = live_in(self.session, call.inputs)
        if not live:
            return
        if call.short in _ELEMENTWISE:
            self._broadcast(call, prediction, target, live)
            self._values(call, prediction, target, live)
        else:
            self._classes(call, prediction, target, live)

    def _broadcast(self, call: OpCall, prediction: Tensor, target: Tensor, live: int) -> None:
        if prediction.shape == target.shape:
            return
        if min(prediction.numel(), target.numel()) <= 1:
            self._single(call, prediction, target, live)
            return
        size = torch.broadcast_shapes(prediction.shape, target.shape)
        grown = [t for t in (prediction, target) if tuple(t.shape) != tuple(size)]
        earlier = self._pairs.get(target)
        if earlier is not None and all(t is prediction for t in grown):
            self._report_pairs(earlier, live)  # the target's own line has made all pairs
            return
        if grown[0] is target and self._are_ids(call, prediction, target):
            self._say(
                call,
                live,
                f"{call.short} compares all {prediction.shape[-1]} outputs of a row with its "
                "class id.",
                f"The target {shape(target)} has whole numbers from 0 to "
                f"{prediction.shape[-1] - 1}, and is repeated along the outputs.",
                "Use cross_entropy(logits, ids.long()), or one_hot the ids.",
            )
            return
        both = len(grown) == 2
        coincidence = _lines_up_by_chance(prediction, target)
        if not both and not coincidence and grown[0] is target:
            severity = Severity.NOTE
        else:
            severity = Severity.ERROR if both else Severity.WARNING
        if both:
            why = "Every prediction is compared with every target, not with its own."
        elif coincidence:
            why = (
                f"The target's only axis ({target.shape[-1]}) is matched with the last axis of the "
                "prediction; it fits because two sizes happen to be equal."
            )
        else:
            smaller = "target" if grown[0] is target else "prediction"
            why = f"The {smaller} is repeated to fit the other."
        self.report(
            18,
            severity,
            f"{call.short} broadcasts the prediction {shape(prediction)} and the target "
            f"{shape(target)} to {list(size)}.",
            why=why,
            fix="Give both the same shape: squeeze(-1) the prediction, or unsqueeze(-1) the "
            "target; then assert that the shapes are equal.",
            site=call.site,
            parameters=live,
        )

    def _are_ids(self, call: OpCall, prediction: Tensor, target: Tensor) -> bool:
        """One whole number for each row, and as many outputs as there are numbers."""
        classes = prediction.shape[-1]
        if call.short not in _ERRORS or classes < 3 or tuple(target.shape[-1:]) != (1,):
            return False
        values = self.session.values(target)
        if (
            values is None
            or target.requires_grad
            or tuple(target.shape[:-1]) != tuple(prediction.shape[:-1])
        ):
            return False
        if bool((values != values.round()).any()) or bool((values < 0).any()):
            return False
        return int(values.max()) == classes - 1 and len(values.unique()) > 2

    def _single(self, call: OpCall, prediction: Tensor, target: Tensor, live: int) -> None:
        """One element for all of a batch. A label that is always the same (a GAN's 1) is meant."""
        if max(prediction.numel(), target.numel()) <= 1 or not target.numel():
            return
        if target.numel() == 1:
            seen = self._single_targets.setdefault(call.site, set())
            seen.add(float(target.detach().reshape(())))
            if len(seen) < 2:
                return
            what, fix = "target", "Pass one target for each prediction: the whole batch of them."
        elif prediction.numel() == 1 and not isinstance(prediction, nn.Parameter):
            what, fix = "prediction", "Compare each sample's prediction; reduce after the loss."
        else:
            return
        self.report(
            18,
            Severity.WARNING,
            f"{call.short} compares a prediction {shape(prediction)} with a target "
            f"{shape(target)}: the {what} has one element, which is repeated.",
            why="All others are compared with that one value"
            + (
                ", which changes from step to step: it is data of one sample, or a mean."
                if what == "target"
                else ": the model has one answer for the whole batch."
            ),
            fix=fix,
            site=call.site,
            parameters=live,
        )

    def _values(self, call: OpCall, prediction: Tensor, target: Tensor, live: int) -> None:
        if not target.numel():
            return
        values = target.detach()
        if call.short == "kl_div" and not argument(call, 5, "log_target", False):
            if not values.is_floating_point() or bool((values > 1 + 1e-3).any()):
                self._say(
                    call,
                    live,
                    f"kl_div takes its target for probabilities, but it has values up to "
                    f"{float(values.max()):g} ({values.dtype}).",
                    "Class ids are not a distribution; their sizes act as weights.",
                    "Use cross_entropy(logits, ids.long()), or one_hot the ids.",
                )
            elif bool((values < 0).any()):
                self._say(
                    call,
                    live,
                    f"kl_div's target has negative values (least {float(values.min()):g}): "
                    "log-probabilities?",
                    "Without log_target=True the target is taken for probabilities.",
                    "Pass log_target=True, or exponentiate the target.",
                )
        elif call.short in _BINARY and bool(((values < 0) | (values > 1)).any()):
            self._say(
                call,
                live,
                f"{call.short} has targets from {float(values.min()):g} to "
                f"{float(values.max()):g}; they must lie between 0 and 1.",
                "Outside of that the loss has no lower bound, and pushes logits to infinity.",
                "Map the labels to 0 and 1; for class ids use cross_entropy.",
            )
        if call.short == "kl_div" and prediction.numel() and bool((prediction > 1e-3).any()):
            self._say(
                call,
                live,
                f"kl_div's input has positive values (up to {float(prediction.detach().max()):g}): "
                "not log-probabilities.",
                "The first argument must be logarithms of probabilities.",
                "Pass log_softmax(logits), not logits or probabilities.",
            )

    def _classes(self, call: OpCall, prediction: Tensor, target: Tensor, live: int) -> None:
        if target.is_floating_point() and call.short == "cross_entropy" and target.numel():
            values = target.detach()
            worst = float(values.max())
            if worst > 1 + 1e-3 or float(values.min()) < 0:
                self._say(
                    call,
                    live,
                    f"cross_entropy takes the {target.dtype} target {shape(target)} for class "
                    f"probabilities, but it has values up to {worst:g}.",
                    "A target of floats in the shape of the logits is a distribution, not ids.",
                    "Pass class ids as integers: target.long(), one per row.",
                )
        elif (
            target.dim() == prediction.dim() - 1 > 1
            and prediction.shape[1] == prediction.shape[-1]
            and prediction in self._classes_last
        ):
            self._say(
                call,
                live,
                f"{call.short} takes axis 1 of {shape(prediction)} for the classes, but they "
                "are on the last axis.",
                f"It does not fail because both axes have size {prediction.shape[1]} here.",
                "Transpose to [batch, classes, ...], or flatten to [rows, classes].",
            )
        if call.short == "nll_loss" and bool((prediction.detach() > 1e-3).any()):
            self._say(
                call,
                live,
                f"nll_loss got values up to {float(prediction.detach().max()):g}: "
                "not log-probabilities.",
                "Its input must be logarithms of probabilities, which are never positive.",
                "Pass log_softmax(logits), or use cross_entropy on the logits.",
            )

    def _signs(self, call: OpCall) -> None:
        """Losses of which one label means `alike` and the other `different`: 1 and -1."""
        target = argument(call, _SIGNS[call.short], "target")
        live = live_in(self.session, call.inputs)
        values = self.session.values(target) if isinstance(target, Tensor) else None
        if values is None or not live or not bool((values == 0).any()):
            return
        if bool(((values == 0) | (values == 1)).all()) and bool((values == 1).any()):
            self._say(
                call,
                live,
                f"{call.short} has targets 0 and 1; they must be -1 and 1.",
                "A target of 0 is neither: it takes the prediction out of the loss.",
                "Pass 2 * target - 1.",
            )

    def _log_probs(self, call: OpCall) -> None:
        scores = argument(call, 0, "log_probs")
        values = self.session.values(scores) if isinstance(scores, Tensor) else None
        live = live_in(self.session, call.inputs)
        if values is None or not live or not values.numel():
            return
        sums = values.float().logsumexp(-1)
        if bool((sums[sums.isfinite()].abs() > _UNNORMALISED).any()):
            self._say(
                call,
                live,
                "ctc_loss got scores whose probabilities do not sum to 1.",
                f"Along the last axis they sum to values up to {float(sums.exp().max()):.3g}; its "
                "input must be logarithms of probabilities.",
                "Pass log_softmax(logits, dim=-1).",
            )

    def _blanks(self, call: OpCall) -> None:
        """The blank stands between symbols; a target that asks for it asks for nothing."""
        target, lengths = argument(call, 1, "targets"), argument(call, 3, "target_lengths")
        blank = argument(call, 4, "blank", 0)
        live = live_in(self.session, call.inputs)
        values = self.session.values(target) if isinstance(target, Tensor) else None
        if values is None or not live or type(blank) is not int or not values.numel():
            return
        if values.dim() == 2:  # behind its length a row holds anything
            ends = torch.as_tensor(lengths, device=values.device).reshape(-1, 1)
            values = values[torch.arange(values.shape[1], device=values.device) < ends]
        count = int((values == blank).sum())
        if not count:
            return
        stack = self.session.module_stack
        own = stack and type(stack[-1]).__module__.startswith("torch.nn")
        made = birth_site(self.session.registry, stack[-1]) if own else None
        self.report(
            18,
            Severity.WARNING,
            f"{count} of {values.numel()} labels of ctc_loss are {blank}, which it takes for the "
            "blank.",
            why="The blank is what the network says between symbols. A label with its number is "
            "never learnt as a symbol of its own, and cannot be told from silence.",
            fix="Keep one number free for the blank, and pass it: CTCLoss(blank=...).",
            site=made or call.site,
            parameters=live,
            related=(call.site,),
        )

    def _say(self, call: OpCall, live: int, what: str, why: str, fix: str) -> None:
        self.report(18, Severity.ERROR, what, why=why, fix=fix, site=call.site, parameters=live)

    # arithmetic between [N, 1] and [N]

    def _follow_pairs(self, call: OpCall) -> None:
        if not call.outputs or call.site is None:
            return
        if call.short in _FULL and call.inputs and call.outputs[0].dim() == 0:
            earlier = self._pairs.get(call.inputs[0])
            if earlier is not None:
                self._report_pairs(earlier, live_in(self.session, call.inputs))
            return
        result = call.outputs[0]
        operands = [t for t in call.inputs if t.numel() > 1]
        if call.short in _ARITHMETIC and len(call.inputs) == 2 and len(operands) == 2:
            a, b = operands
            # a column and a row of the same values: all pairs are meant
            crosses = _crosses(a, b, result) and a.data_ptr() != b.data_ptr()
            if crosses and is_user_file(call.site.file):
                pair = (call.site, call.short, a.shape, b.shape)
                live = live_in(self.session, operands)
                if live and not self._was_placed(a, b):
                    self._report_pairs(pair, live)
                else:
                    # an axis put there by hand may mean all pairs: only their plain average is odd
                    self._pairs[result] = pair
                return
        for tensor in call.inputs:
            earlier = self._pairs.get(tensor)
            if earlier is not None and result.shape == tensor.shape:
                self._pairs[result] = earlier
                return

    def _was_placed(self, a: Tensor, b: Tensor) -> bool:
        wide = a if a.dim() > b.dim() else b
        taint = self.session.taints.get(wide)
        return taint is None or taint.op.rsplit(".", 1)[-1] in _PLACED

    def _report_pairs(self, pair: tuple[Site, str, Any, Any], live: int) -> None:
        if not live:
            return
        site, op, left, right = pair
        size = list(torch.broadcast_shapes(left, right))
        self.report(
            18,
            Severity.ERROR,
            f"{op} broadcasts {list(left)} and {list(right)} to {size}.",
            why=f"A column meets a row of the same {max(size)} values: every one is combined with "
            "every other, instead of with its own.",
            fix="Give both the same shape: squeeze(-1) the column, or unsqueeze(-1) the row.",
            site=site,
            parameters=live,
        )

    # where data were made

    def _follow_births(self, call: OpCall) -> None:
        if not call.outputs or call.outputs[0].requires_grad or call.targets:
            return
        if call.short in _CONSTRUCTORS and "dtype" not in call.kwargs and call.site is not None:
            self._made[call.outputs[0]] = call.site
            return
        source = call.inputs[0] if call.inputs and call.short in _RESHAPES else None
        made = self._made.get(source) if source is not None else None
        if made is not None and source is not None and call.outputs[0].dtype == source.dtype:
            self._made[call.outputs[0]] = made

    # which axis holds the classes

    def _follow_classes(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        result, source = call.outputs[0], call.inputs[0]
        kept = source in self._classes_last and call.short not in _TURNS
        if call.short == "linear" or (
            kept and result.dim() == source.dim() > 2 and result.shape[-1] == source.shape[-1]
        ):
            self._classes_last[result] = True

    # crashes

    def op_failed(self, call: OpCall, error: BaseException) -> None:
        explained = explain_crash(call)
        if explained is None:
            return
        what, fix = explained
        target = argument(call, 1, "target")
        made = self._made.get(target) if isinstance(target, Tensor) else None
        # a constructor whose dtype nobody has named: there the type was decided
        site = made if made is not None and "torch." in what else None
        self.report(
            18,
            Severity.ERROR,
            what,
            why=f"{call.short}: {str(error).splitlines()[0]}",
            fix=fix,
            site=site or call.site,
            related=(call.site,),
            parameters=live_in(self.session, call.inputs),
        )


def explain_crash(call: OpCall) -> tuple[str, str] | None:
    """What is wrong with the target of a loss that failed, and what mends it."""
    if not (call.name.startswith(_FUNCTIONAL) and call.short in _ELEMENTWISE | _CLASSES):
        return None
    prediction, target = argument(call, 0, "input"), argument(call, 1, "target")
    if not (isinstance(prediction, Tensor) and isinstance(target, Tensor)):
        return None
    return _explain(call.short, prediction, target)


def _explain(loss: str, prediction: Tensor, target: Tensor) -> tuple[str, str] | None:
    if loss in _CLASSES:
        if target.is_floating_point() and target.shape != prediction.shape:
            return (
                f"{loss} got class ids as {target.dtype}; they must be integers.",
                "Pass target.long().",
            )
        if target.dim() == prediction.dim() and target.shape[-1:] == (1,):
            return (
                f"{loss} got class ids of shape {shape(target)} for logits {shape(prediction)}.",
                "Squeeze the last axis of the target: one id per row.",
            )
        classes = prediction.shape[1] if prediction.dim() > 1 else prediction.shape[0]
        if prediction.dim() > 2 and tuple(target.shape) == tuple(prediction.shape[:-1]):
            return (
                f"{loss} takes axis 1 of {shape(prediction)} for the classes, but the target "
                f"{shape(target)} shows that they are on the last axis.",
                "Transpose to [batch, classes, ...], or flatten to [rows, classes].",
            )
        if not target.is_floating_point() and target.numel():
            worst = int(target.max())
            if worst >= classes:
                return (
                    f"{loss} got class id {worst}, but there are {classes} classes.",
                    "Map the ids to 0..classes-1, or make the last layer wider.",
                )
        return None
    if _squeezed(prediction) == _squeezed(target) and prediction.shape != target.shape:
        return (
            f"{loss} got a prediction {shape(prediction)} and a target {shape(target)}.",
            "Give both the same shape: squeeze(-1) the prediction or unsqueeze(-1) the target.",
        )
    if loss == "kl_div" and not target.is_floating_point():
        return (
            f"kl_div got class ids ({target.dtype}, {shape(target)}) for a target.",
            "Use cross_entropy(logits, ids), or one_hot the ids.",
        )
    if prediction.dim() != target.dim() and min(prediction.dim(), target.dim()):
        return (
            f"{loss} got a prediction {shape(prediction)} and a target {shape(target)}.",
            "Give the target one value for each value of the prediction.",
        )
    if loss == "binary_cross_entropy" and prediction.numel() and target.shape == prediction.shape:
        low, high = float(prediction.detach().min()), float(prediction.detach().max())
        if low < 0 or high > 1:
            return (
                f"{loss} got predictions from {low:.3g} to {high:.3g}: raw scores, not "
                "probabilities.",
                "Use binary_cross_entropy_with_logits (BCEWithLogitsLoss), or apply sigmoid first.",
            )
    if loss in _BINARY and not target.is_floating_point():
        return (f"{loss} got a target of {target.dtype}.", "Pass target.float().")
    return None


def _squeezed(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _crosses(a: Tensor, b: Tensor, result: Tensor) -> bool:
    """[N, 1] meets [N]: the same values' shape, another number of axes, and N x N comes out."""
    return (
        a.dim() != b.dim()
        and _squeezed(a) == _squeezed(b)
        and result.numel() > max(a.numel(), b.numel())
        and result.dim() == max(a.dim(), b.dim())
    )


def _lines_up_by_chance(prediction: Tensor, target: Tensor) -> bool:
    """A target per row meets a square prediction: it is taken for a target per column."""
    return (
        target.dim() == 1
        and prediction.dim() >= 2
        and prediction.shape[0] == target.shape[0] == prediction.shape[-1]
    )
