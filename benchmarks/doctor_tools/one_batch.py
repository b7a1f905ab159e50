"""Tools that are given a model, a loss function and one batch."""

from __future__ import annotations

import re
import runpy
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.doctor_tools.base import (
    EXPLODING,
    NO_GRADIENT,
    NOT_FINITE,
    UNCHANGED,
    ZERO_GRADIENT,
    Message,
    NotApplicableError,
    Subject,
    torch_kinds,
)


class Whole(nn.Module):
    """All modules of the script as one, from a batch to its loss."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        super().__init__()
        for name, module in space["modules"].items():
            self.add_module(name, module)
        self.loss_fn, self.batch = space["loss_fn"], space["batch"]

    def forward(self, *_: Any, **batch: Any) -> torch.Tensor:
        return self.loss_fn(batch or self.batch)


def one_batch(subject: Subject) -> tuple[Whole, torch.optim.Optimizer]:
    if subject.one_batch is None:
        raise NotApplicableError(subject.why_no_batch)
    space = runpy.run_path(str(subject.one_batch), run_name=subject.one_batch.stem)
    # One optimizer is what these tools take: the groups of all of them, each with its settings.
    first, *rest = space["optimizers"].values()
    if rest:
        first = type(first)([dict(g) for o in (first, *rest) for g in o.param_groups])
    return Whole(space), first


def torchtest2(subject: Subject) -> list[Message]:
    whole, optimizer = one_batch(subject)
    report = import_module("torchtest2").check_model(
        whole, whole.batch, loss_fn=lambda loss: loss, optimizer=optimizer
    )
    found = []
    for result in report:
        if result.status.value not in ("FAIL", "WARN"):
            continue
        details, text = result.details, result.message
        names, kinds = (), torch_kinds(text)
        if result.name == "loss" and "not connected" in text:
            kinds = (1, 2, 3, 4)
        elif result.name == "optimizer_coverage":
            names, kinds = details.get("missing", ()), (7, 8)
        elif result.name == "gradient_flow":
            names = details.get("no_grad") or details.get("zero_grad", ())
            kinds = NO_GRADIENT if details.get("no_grad") else ZERO_GRADIENT
        elif result.name == "gradient_magnitude":
            names = details.get("non_finite", ())
            kinds = NOT_FINITE if names else EXPLODING
        elif result.name in ("params_change", "frozen_params"):
            names, kinds = details.get("unchanged", ()), UNCHANGED
        elif result.name == "input_dependency":
            kinds = (19,)
        if "parameters are in half precision" in text:
            kinds = (*kinds, 15, 16)
        found.append(Message(result.name, text, kinds, tuple(names)))
    return found


def tinytorchtest(subject: Subject) -> list[Message]:
    whole, optimizer = one_batch(subject)
    tool = import_module("tinytorchtest.tinytorchtest")
    test = tool.TinyTorchTest(
        whole, lambda loss, _: loss, optimizer, torch.zeros(1), supervised=False
    )
    trainable = [(n, p) for n, p in whole.named_parameters() if p.requires_grad]
    ours = (tool.VariablesChangeException, tool.NaNTensorException, tool.InfTensorException)
    try:
        test.test(train_vars=trainable, test_nan_vals=True, test_inf_vals=True)
    except ours as error:
        names = tuple(n for n, _ in trainable if re.search(rf"\b{re.escape(n)}\b", str(error)))
        kinds = UNCHANGED if isinstance(error, ours[0]) else NOT_FINITE
        return [Message(type(error).__name__, str(error), kinds, names)]
    except Exception as error:  # of the script under test: the tool lets it through
        return [Message("raised", str(error), torch_kinds(str(error)))]
    return []


def preflight_ml(subject: Subject) -> list[Message]:
    whole, _ = one_batch(subject)
    loader = [(torch.zeros(2), torch.zeros(2))]
    check = import_module("preflight.checks.model").check_gradients
    result = check(loader, model=whole, loss_fn=lambda loss, _: loss)
    if result.passed:
        return []
    found = []
    for part in result.message.split("; "):
        names = tuple(re.findall(r"'([^']+)'", part))
        kinds = torch_kinds(part)
        if "no gradient" in part:
            kinds = NO_GRADIENT
        elif "zero gradient" in part:
            kinds = ZERO_GRADIENT
        elif "exploding" in part:
            kinds = EXPLODING
        found.append(Message("gradient_check", part, kinds, names))
    return found
