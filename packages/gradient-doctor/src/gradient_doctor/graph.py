"""The graph that autograd kept: its leaves, its opaque nodes, the marks that we leave on nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr

from gradient_doctor.findings import Site

MARK = "gradient_doctor"


class NodeOrigin(NamedTuple):
    """Which call made a node of the graph."""

    op: str
    site: Site | None
    step: int


class Used(NamedTuple):
    """Which backward has walked a node, and whether its saved tensors are gone."""

    backward: int
    freed: bool
    site: Site | None


def node_of(tensor: Tensor) -> Any:
    """`grad_fn`, or None for a leaf and for a view that autograd forbids to ask."""
    if not tensor.requires_grad:
        return None
    try:
        return tensor.grad_fn
    except RuntimeError:
        # a view taken without gradients whose base was written to with them: using it is an
        # error, and the user's to make, not ours by looking
        return None


def is_dead_view(tensor: Tensor) -> bool:
    """A view taken without gradients: torch says that it needs gradient, but it leads nowhere."""
    return (
        tensor.requires_grad
        and tensor._base is not None
        and node_of(tensor) is None
        and not isinstance(tensor, torch.nn.Parameter)
    )


def next_number() -> int:
    """What the next node of this thread will have as `_sequence_nr`: smaller ones are older."""
    return _get_sequence_nr()


def mark_origin(tensor: Tensor, origin: NodeOrigin) -> None:
    """Write on the node who made it."""
    node = node_of(tensor)
    if node is not None:
        cast(dict[str, Any], node.metadata).setdefault(MARK, origin)


def origin_of(node: Any) -> NodeOrigin | None:
    return node.metadata.get(MARK)


def used_by(node: Any) -> Used | None:
    return node.metadata.get(MARK + ".used")


def is_opaque(node: Any) -> bool:
    """Whether the node is Python's: a custom Function, which may hide leaves of its own."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def nodes_of(root: Any) -> Iterator[Any]:
    """All nodes below, each once, the root first."""
    if root is None:
        return
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


@dataclass
class Graph:
    """What one walk found."""

    leaves: list[Tensor] = field(default_factory=list)
    opaque: list[Any] = field(default_factory=list)
    nodes: int = 0


def walk(tensor: Tensor) -> Graph:
    """Leaves and opaque nodes behind a tensor."""
    graph = Graph()
    if tensor.grad_fn is None:
        if tensor.requires_grad:
            graph.leaves.append(tensor)
        return graph
    for node in nodes_of(tensor.grad_fn):
        graph.nodes += 1
        # a custom Function's node may have any attribute that its author gave it
        leaf = None if is_opaque(node) else getattr(node, "variable", None)
        if leaf is not None:
            graph.leaves.append(leaf)
        elif is_opaque(node):
            graph.opaque.append(node)
    return graph
