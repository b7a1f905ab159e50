"""Class 19: masks that let padding through; masks that let nothing through are in masks.py."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.detectors.masks import ID_LOSSES, Masks
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import MARK, node_of
from gradient_doctor.pads import inferred_pad, known_pad, padded_places
from gradient_doctor.session import Backward, OpCall, Session, StepRecord


@dataclass
class Inputs:
    """A copy of the last ids that a model was given, and which places are padding."""

    ids: Tensor
    hidden: Tensor
    declared: bool  # by a mask that was given with them


class Padding(Masks):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._pad: int | None = None
        self._inputs: Inputs | None = None
        self._compared: set[int] = set()  # ids that the program looks for

    # the models' inputs

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, site: Site | None) -> None:
        pad, eos = known_pad(module)
        if pad is None:
            pad = self._declared_pad(args, kwargs)
        if pad is None:
            return
        self._pad = pad
        arguments = {**{str(k): v for k, v in enumerate(args)}, **kwargs}
        tensors = {k: v for k, v in arguments.items() if isinstance(v, Tensor) and v.dim() == 2}
        ids = next((t for k, t in tensors.items() if _are_ids(k, t)), None)
        if ids is None or not torch.is_grad_enabled():
            return
        pads = padded_places(ids, pad, eos)
        masks = {k: v for k, v in tensors.items() if "mask" in k.lower() and v.shape == ids.shape}
        # what the mask of the model itself calls padding is padding; else the ends of rows
        declared = [v == 0 for v in masks.values() if not bool((v != 0).all())]
        hidden = declared[0] if declared else pads
        certain = bool(pads[:, 0].any()) or int(pads.sum(1).max() if pads.numel() else 0) > 1
        if not certain and not declared:
            return
        self._inputs = Inputs(ids.detach().clone(), hidden.detach().clone(), bool(declared))
        if masks and not declared and certain:
            name, mask = next(iter(masks.items()))
            self._report_mask(module, name, self.masks.get(mask), site, pads)
        elif not masks and bool(pads[:, 0].any()) and _takes_a_mask(module):
            self._report_mask(module, None, None, site, pads)

    def _declared_pad(self, args: Any, kwargs: Any) -> int | None:
        """The id that fills the ends of rows, if the program itself has compared ids with it."""
        for tensor in (*args, *kwargs.values()) if self._compared else ():
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and _are_ids("", tensor):
                pad = inferred_pad(tensor)
                if pad is not None and pad in self._compared:
                    return pad
        return None

    def _report_mask(
        self,
        module: nn.Module,
        name: str | None,
        made: Site | None,
        site: Site | None,
        pads: Tensor,
    ) -> None:
        rows = int(pads.any(1).sum())
        what = f"{name} is 1 everywhere" if name else "The model is called without its mask"
        self.report(
            19,
            Severity.WARNING,
            f"{what}, although {rows} of {pads.shape[0]} rows contain padding.",
            why=f"{int(pads.sum())} of {pads.numel()} positions are token {self._pad}, the "
            "padding token, at an end of their row; the model attends to them as to text.",
            fix="Pass the tokenizer's attention_mask, or (ids != pad_token_id) where the padding "
            "token means nothing else.",
            site=made or site,
            parameters=self.session.registry.bits(
                p for p in module.parameters() if p.requires_grad
            ),
            related=(site,),
        )

    # operations

    def op(self, call: OpCall) -> None:
        super().op(call)
        if call.short in ("eq", "ne", "__eq__", "__ne__") and len(call.args) > 1:
            ids, other = call.args[0], call.args[1]
            if type(other) is int and isinstance(ids, Tensor) and not ids.is_floating_point():
                self._compared.add(other)
        if self._inputs is not None and call.outputs:
            if call.short in ID_LOSSES:
                self._loss_on_ids(call)
            elif call.short == "gather":
                self._watch_places(call, argument(call, 2, "index"))

    # padding that counts

    def _loss_on_ids(self, call: OpCall) -> None:
        target = argument(call, 1, "target")
        if not isinstance(target, Tensor) or target.is_floating_point():
            return
        ignored = argument(call, 4, "ignore_index", -100)
        weight = argument(call, 2, "weight")
        if ignored == self._pad or weight is not None:
            return
        if argument(call, 6, "reduction", "mean") == "none":
            self._watch_places(call, target, ignored)
            return
        pads = self._places(target, ignored)
        live = live_in(self.session, call.inputs)
        if pads is not None and pads.any() and live:
            self._report_leak(call.site, None, int(pads.sum()), pads.numel(), live)

    def _places(self, ids: Tensor, ignored: int = -100) -> Tensor | None:
        """Padding among these ids, if they are a stretch of the model's inputs."""
        inputs = self._inputs
        if inputs is None or ids.is_floating_point() or not ids.numel():
            return None
        rows, length = inputs.ids.shape
        if ids.numel() % rows or ids.numel() // rows > length:
            return self._places_of_some(inputs, ids.detach().reshape(-1), ignored)
        ids = ids.detach().reshape(rows, -1)
        width = ids.shape[1]
        free = ids == ignored
        for start in range(length - width, -1, -1):
            if bool(((inputs.ids[:, start : start + width] == ids) | free).all()):
                return inputs.hidden[:, start : start + width] & ~free
        return self._places_of_some(inputs, ids.reshape(-1), ignored)

    def _places_of_some(self, inputs: Inputs, ids: Tensor, ignored: int) -> Tensor | None:
        """The same for the first or the last rows of the batch: pairs that were put together."""
        rows, length = inputs.ids.shape
        for width in (length, length - 1):
            some = ids.numel() // width
            if not 0 < some < rows or some * width != ids.numel():
                continue
            targets = ids.reshape(some, width)
            free = targets == ignored
            for first, start in itertools.product((0, rows - some), range(length - width, -1, -1)):
                here = (slice(first, first + some), slice(start, start + width))
                if bool(((inputs.ids[here] == targets) | free).all()):
                    return inputs.hidden[here] & ~free
        return None

    def _watch_places(self, call: OpCall, ids: Any, ignored: int = -100) -> None:
        node = node_of(call.outputs[0])
        places = self._places(ids, ignored) if isinstance(ids, Tensor) else None
        if node is None or places is None or not places.any():
            return
        cast(dict[str, Any], node.metadata)[MARK + ".silent"] = places

    def _report_leak(
        self, site: Site | None, use: Site | None, leaking: int, of: int, live: int
    ) -> None:
        self.report(
            19,
            Severity.WARNING,
            f"Padding counts in the loss: {leaking} of {of} positions with token {self._pad} "
            "have a gradient."
            if use is not None
            else f"Padding counts in the loss: {leaking} of {of} targets are token {self._pad}.",
            why="They stand at the end of their row, where this model's inputs are padded; the "
            "model is taught to predict padding, and the mean is taken over too many positions.",
            fix="Mask these positions out of the loss (label -100, or a mask of real tokens), and "
            "divide by the number of the others.",
            site=site,
            parameters=live,
            related=(use,),
        )

    # backward

    def backward_ended(self, backward: Backward) -> None:
        super().backward_ended(backward)
        if backward.taint is None:
            return
        for leak in backward.leaks:
            # ids alone do not prove padding: a model may write that token too
            declared = self._inputs is not None and self._inputs.declared
            if not declared and leak.leaking < leak.places:
                continue
            origin, use = self.applied.get(leak.places_size, (None, None))
            site = leak.origin.site if leak.origin is not None else None
            live = backward.received & backward.taint.live
            self._report_leak(origin or use or site, site, leak.leaking, leak.places, live)

    def step_ended(self, record: StepRecord) -> None:
        super().step_ended(record)
        self._inputs = None


def _are_ids(name: str, tensor: Tensor) -> bool:
    if tensor.dtype not in (torch.long, torch.int) or not tensor.numel():
        return False
    if any(word in name for word in ("position", "type", "label", "mask")):
        return False
    return int(tensor.max()) > 1  # or it is a mask


def _takes_a_mask(module: nn.Module) -> bool:
    try:
        return "attention_mask" in inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False
