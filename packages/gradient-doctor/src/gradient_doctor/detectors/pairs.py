"""Classes 18, 19 and 33: what is compared with what, in losses over pairs and over noise.

A sample is most similar to itself: where the similarities of a batch with itself are the logits of
cross_entropy, and the diagonal is not masked, every row asks for another column than its largest
(19). A denoiser learns the noise that is in its input; compared with noise that was drawn again, it
learns that noise has mean 0 (18). Vectors that were normalised along another axis than the one of
their product have no cosine (33). A temperature belongs to both sides of a distillation (18).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.axes import moved
from gradient_doctor.detectors.common import argument, live_in, shape
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import address_of
from gradient_doctor.session import Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
_MATRIX = {"matmul", "mm", "bmm", "__matmul__"}
_TURNS = {"t", "T", "mT", "transpose", "permute", "swapaxes", "unsqueeze", "squeeze"}
_SCALES = {"div", "mul", "true_divide", "div_", "mul_", "multiply", "divide"}
_SAME = {"float", "to", "contiguous", "clone", "add", "sub", "masked_fill", "where", "detach"}
_ERRORS = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
_DRAWS = {"randn", "randn_like", "normal_"}
_DIAGONAL = -50.0  # lower than this it is masked


class Unit(NamedTuple):
    """Vectors of length 1 along an axis, from the end."""

    axis: int
    site: Site | None


class Pairs(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._own = WeakIdKeyDictionary()  # similarities of a batch with itself -> the line
        self._units = WeakIdKeyDictionary()
        self._norms = WeakIdKeyDictionary()  # norms -> (id of the vectors, axis)
        self._scaled = WeakIdKeyDictionary()  # scores divided by a number -> the number
        self._tables = WeakIdKeyDictionary()  # softmax of scores -> (temperature, line)
        self._draws = WeakIdKeyDictionary()  # plain noise -> its line
        self._used: dict[int, bool] = {}  # of this step: draws that are in some input
        self._noised: list[tuple[tuple[int, ...], int]] = []  # of this step: shape, draw
        self._kept: list[Tensor] = []  # draws of this step, so that ids stay theirs
        self._steps: dict[tuple[str, Site | None], set[int]] = {}

    def step_ended(self, record: StepRecord) -> None:
        self._used.clear()
        self._noised.clear()
        self._kept.clear()

    def op(self, call: OpCall) -> None:
        if not call.outputs:
            return
        short, result = call.short, call.outputs[0]
        if short in _DRAWS and result.dim() > 1 and not result.requires_grad:
            self._draws[result] = call.site
            self._kept.append(result)
            return
        if not call.inputs:
            return
        source = call.inputs[0]
        if short in _MATRIX and len(call.inputs) == 2:
            self._product(call)
        elif short == "cosine_similarity":
            first, second = call.inputs[0], call.inputs[-1]
            same = first.numel() == second.numel() and 0 != address_of(first) == address_of(second)
            if same and result.dim() == 2:
                self._own[result] = call.site
        elif short == "normalize":
            dim = argument(call, 2, "dim", 1)
            if type(dim) is int and result.requires_grad and source.dim():
                self._units[result] = Unit(dim % source.dim() - source.dim(), call.site)
        elif short in ("norm", "vector_norm"):
            self._norm(call)
        elif short in ("softmax", "log_softmax"):
            self._tables[result] = (self._scaled.get(source) or 1.0, call.site)
        elif short in ("kl_div", "cross_entropy"):
            self._distil(call)
            if short == "cross_entropy":
                self._contrast(call)
        elif short in _TURNS and source in self._units:
            self._turn(call, self._units[source])
        elif short in _SCALES:
            self._scale(call)
        elif short in _SAME and source in self._own and result.shape == source.shape:
            self._own[result] = self._own[source]
        if self._draws:
            self._noise(call)

    # a batch and itself

    def _product(self, call: OpCall) -> None:
        left, right = call.inputs
        result = call.outputs[0]
        same = left.numel() == right.numel() and 0 != address_of(left) == address_of(right)
        if same and result.dim() == 2 and result.shape[0] == result.shape[1] > 3:
            self._own[result] = call.site
        ours, theirs = self._units.get(left), self._units.get(right)
        if ours is None or theirs is None or right.dim() < 2 or left.dim() < 2:
            return
        if same and result.dim() > 2:
            return  # products of features over places: their lengths are those of a place
        for unit, summed, operand in ((ours, -1, left), (theirs, -2, right)):
            if unit.axis != summed and operand.shape[unit.axis] > 1:
                self._say_unit(unit, summed, operand, call)

    def _contrast(self, call: OpCall) -> None:
        logits, target = argument(call, 0, "input"), argument(call, 1, "target")
        if not isinstance(logits, Tensor) or not isinstance(target, Tensor):
            return
        site = self._own.get(logits)
        values = self.session.values(logits)
        if site is None or values is None or target.is_floating_point():
            return
        rows = torch.arange(len(target), device=target.device)
        if target.shape != logits.shape[:1] or bool((target == rows).any()):
            return
        diagonal = values.detach().diagonal()
        largest = (diagonal >= values.detach().amax(1)).float().mean()
        if float(diagonal.min()) < _DIAGONAL or float(largest) < 0.9:
            return
        if self._again("own", site):
            self.report(
                19,
                Severity.WARNING,
                "Every sample is compared with itself: the diagonal of the similarities counts.",
                why=f"The logits {shape(logits)} are the products of a batch with itself. Each "
                "row's largest is that of the sample with itself, which no target asks for: it "
                "takes most of the softmax, and the loss cannot fall.",
                fix="similarity.fill_diagonal_(float('-inf')) before the loss.",
                site=site,
                parameters=live_in(self.session, [logits]),
                related=(call.site,),
            )

    # directions

    def _norm(self, call: OpCall) -> None:
        source, result = call.inputs[0], call.outputs[0]
        dim = call.kwargs.get("dim", argument(call, 2, "dim"))
        dims = dim if isinstance(dim, (tuple, list)) else [dim]
        if len(dims) == 1 and type(dims[0]) is int and 0 < result.dim() == source.dim():
            self._norms[result] = (id(source), dims[0] % source.dim() - source.dim())

    def _turn(self, call: OpCall, unit: Unit) -> None:
        source, result = call.inputs[0], call.outputs[0]
        if call.short in ("mT",):
            places: list[int] | None = [*range(source.dim())]
            places[-2:] = places[:-3:-1]
        else:
            places = moved(call, source, result)
        axis = unit.axis % source.dim()
        if places is not None and axis in places:
            self._units[result] = unit._replace(axis=places.index(axis) - result.dim())

    def _say_unit(self, unit: Unit, summed: int, operand: Tensor, call: OpCall) -> None:
        if not self._again("unit", unit.site):
            return
        self.report(
            33,
            Severity.WARNING,
            f"Vectors are normalised along axis {unit.axis}, and multiplied along axis {summed}.",
            why=f"At {call.site} {shape(operand)} meets other vectors of length 1; its own do not "
            "have length 1 along the axis that the product sums over. The products are no cosines, "
            "and samples or places share a length.",
            fix="F.normalize(x, dim=-1) of [..., features].",
            site=unit.site,
            parameters=live_in(self.session, call.inputs),
            related=(call.site,),
        )

    # temperatures

    def _scale(self, call: OpCall) -> None:
        source, result = call.inputs[0], call.outputs[0]
        norm = self._norms.get(call.inputs[1]) if len(call.inputs) == 2 else None
        if norm is not None and norm[0] == id(source) and result.requires_grad:
            self._units[result] = Unit(norm[1], call.site)
        number = next((a for a in call.args if type(a) in (int, float)), None)
        if number and len(call.inputs) == 1:
            divided = call.short.startswith(("div", "true"))
            own = self._scaled.get(source) or 1.0
            self._scaled[result] = own * number if divided else own / number
        if source in self._own and result.shape == source.shape:
            self._own[result] = self._own[source]

    def _distil(self, call: OpCall) -> None:
        prediction, target = argument(call, 0, "input"), argument(call, 1, "target")
        if not (isinstance(prediction, Tensor) and isinstance(target, Tensor)):
            return
        if not target.is_floating_point() or target not in self._tables:
            return
        taint = self.session.taint_of(target)
        if taint is None or not taint.depends:
            return  # no teacher: labels that are spread over their neighbours
        if call.short == "kl_div":
            if prediction not in self._tables:
                return
            ours, at = self._tables[prediction]
        else:
            ours, at = self._scaled.get(prediction) or 1.0, call.site
        theirs, there = self._tables[target]
        # a teacher that is made sharper on purpose has a temperature below 1
        if not (ours == 1 < theirs or theirs == 1 < ours):
            return
        live = live_in(self.session, [prediction])
        site = there if theirs == 1 else at
        if live and self._again("temperature", site):
            self.report(
                18,
                Severity.WARNING,
                f"Only one side of a distillation has the temperature {max(ours, theirs):g}.",
                why=f"The {'student' if ours > 1 else 'teacher'}'s scores are divided by it, the "
                "others are not: the two distributions differ even where the scores are equal, "
                "and the student is taught another scale.",
                fix="Divide both by the same temperature before the softmax.",
                site=site,
                parameters=live,
                related=(at, there, call.site),
            )

    # noise

    def _noise(self, call: OpCall) -> None:
        short = call.short
        if short in _ERRORS or short in ("sub", "__rsub__"):
            self._denoise(call)
        draws = [t for t in call.inputs if t in self._draws]
        others = [t for t in call.inputs if t not in self._draws]
        result = call.outputs[0]
        for draw in draws:
            self._used[id(draw)] = True
        # by a schedule: a fixed amount of noise belongs to data that are made up, too
        scheduled = short in _SCALES and len(draws) == len(others) == 1
        scheduled = scheduled and others[0].numel() < result.numel() == draws[0].numel()
        if scheduled and not result.requires_grad:
            self._noised.append((tuple(result.shape), id(draws[0])))

    def _denoise(self, call: OpCall) -> None:
        if len(call.inputs) < 2:
            return
        left, right = call.inputs[:2]
        noise = next((t for t in (left, right) if t in self._draws), None)
        other = right if noise is left else left
        if noise is None or id(noise) in self._used:
            return
        lengths = tuple(noise.shape)
        live = live_in(self.session, [other]) if other.requires_grad else 0
        if not live or tuple(other.shape) != lengths:
            return
        if not any(one == lengths and draw != id(noise) for one, draw in self._noised):
            return
        site = self._draws[noise]
        if self._again("noise", site):
            self.report(
                18,
                Severity.WARNING,
                "The prediction is compared with noise that is in none of its inputs.",
                why=f"Noise of {list(lengths)} was added to the input, and this is another draw "
                "of the same shape that nothing has used before: nothing can predict it, and the "
                "best answer is 0.",
                fix="Keep the noise that was added, and compare with that.",
                site=site,
                parameters=live,
                related=(call.site,),
            )

    def _again(self, kind: str, site: Site | None) -> bool:
        steps = self._steps.setdefault((kind, site), set())
        steps.add(self.session.step)
        return len(steps) == _ENOUGH
