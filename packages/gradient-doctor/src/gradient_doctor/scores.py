"""Addends of a loss that are nothing but a network's own output: a score that is driven up or down.

A critic's mean, a discriminator's cross-entropy with all ones: between the last layer of the
network and the loss stands no data. Such a loss is meant for what comes *before* the network (a
policy, a generator): for the network itself it has no right answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradient_doctor.graph import nodes_of
from gradient_doctor.registry import Registry

# between the last layer and the loss
_SCORE = {
    *("Neg", "Mean", "Sum", "Mul", "Div", "Add", "Sub", "Rsub", "Squeeze", "Unsqueeze", "View"),
    *("UnsafeView", "Reshape", "Minimum", "Maximum", "Min", "Amin", "Select", "Slice", "Cat"),
    *("Stack", "Softplus", "LogSigmoid", "Sigmoid", "Log", "Clamp", "Expand", "Permute", "Unbind"),
    *("Transpose", "ToCopy", "Relu", "Alias", "Clone"),
}
_WITH_TARGET = {"MseLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"}
_ADDS = {"Add", "Sub", "Rsub"}
_SCALES = {"Neg", "Mul", "Div"}


@dataclass(frozen=True)
class Addend:
    """One part of a loss: what it reaches, and the last layers that it is a plain score of."""

    leaves: int
    scored: int


def addends(root: Any, registry: Registry) -> list[Addend]:
    """The parts of a loss, from the node that made it."""
    parts: list[Addend] = []
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        children = [child for child, _ in node.next_functions if child is not None]
        kind = _kind(node)
        if (kind in _ADDS and len(children) > 1) or (kind in _SCALES and len(children) == 1):
            for child in children:
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
            continue
        leaves = [_leaf(inner) for inner in nodes_of(node)]
        mask = registry.bits(leaf for leaf in leaves if leaf is not None)
        parts.append(Addend(mask, _scored(node, registry)))
    return parts


def _scored(root: Any, registry: Registry) -> int:
    """Weights of the layers whose output reaches this node by itself."""
    mask = 0
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        kind = _kind(node)
        children = [child for child, _ in node.next_functions if child is not None]
        # a product of two such values is a weighting of one by the other
        passes = kind in _SCORE and (kind not in ("Mul", "Div") or len(children) == 1)
        passes = passes or (kind in _WITH_TARGET and _has_constant_target(node))
        for child, _ in node.next_functions:
            if child is None or child in seen:
                continue
            seen.add(child)
            if passes:
                stack.append(child)
                continue
            # a layer: its weight hangs on it, plain or transposed
            inner = child if _kind(child) not in ("T", "Transpose") else _only_child(child)
            leaf = None if inner is None else _leaf(inner)
            mask |= 0 if leaf is None else registry.bit(leaf)
    return mask


def _has_constant_target(node: Any) -> bool:
    try:
        target = getattr(node, "_saved_target", None)
    except RuntimeError:
        return False  # an earlier backward has freed it
    if not isinstance(target, Tensor) or not target.numel():
        return False
    return bool((target == target.reshape(-1)[0]).all())


def _kind(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", node.name().rsplit("::", 1)[-1])


def _leaf(node: Any) -> Tensor | None:
    leaf = getattr(node, "variable", None)
    return leaf if isinstance(leaf, Tensor) else None


def _only_child(node: Any) -> Any:
    return node.next_functions[0][0] if node.next_functions else None
