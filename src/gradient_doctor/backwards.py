"""Every backward, watched: what it starts from, who receives a gradient, what it looks like."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gradient_doctor.findings import Site
from gradient_doctor.graph import MARK, Graph, Used, nodes_of, walk
from gradient_doctor.patches import Patches
from gradient_doctor.sentinels import Sentinels
from gradient_doctor.session import Backward, GradientFact, Session
from gradient_doctor.steps import norm_of
from gradient_doctor.taint import Taint, merged, tensors_in


class Backwards:
    """Wraps `Tensor.backward`, `autograd.backward` and `autograd.grad`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._numbers = itertools.count(1)
        self._inside = False  # Tensor.backward calls autograd.backward: one event, not two

    def install(self, patches: Patches) -> None:
        patches.replace(torch.Tensor, "backward", self._wrap("backward", _tensor_backward))
        patches.replace(torch.autograd, "backward", self._wrap("backward", _autograd_backward))
        patches.replace(torch.autograd, "grad", self._wrap("grad", _autograd_grad))

    def _wrap(self, kind: str, read: Callable[..., dict[str, Any]]) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                if self._inside or self.session.paused:
                    return original(*args, **kwargs)
                self._inside = True
                try:
                    return self._run(kind, original, read(*args, **kwargs), args, kwargs)
                finally:
                    self._inside = False

            return call

        return make

    def _run(
        self, kind: str, original: Any, asked: dict[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        session = self.session
        site = session.here()
        session.before_backward()
        backward = Backward(
            next(self._numbers), session.step, kind, site, taint=None, graph=None, **asked
        )
        session.record.backwards.append(backward)
        guards: list[Sentinels] = []
        if session.record.traced:
            with session.pause():
                backward.taint = self._taint(backward.roots)
                backward.graph = _graph(backward.roots)
                guards = [
                    Sentinels(root, session.broke)
                    for root in backward.roots
                    if root.grad_fn is not None
                ]
        session.add_event("backward", backward=backward)
        session.tell("backward_starts", backward)
        if kind == "backward":
            session.read_since_backward = 0
        receipts = self._receipts(backward) if kind == "backward" else []
        failed = False
        try:
            # hooks and recomputed forwards run inside: they are not the user's forward
            with session.pause():
                result = original(*args, **kwargs)
        except Exception as error:
            failed = True
            session.fail("backward_failed", error, backward)
            raise
        finally:
            for guard in guards:
                backward.vanished.extend(guard.vanished)
                backward.partial.extend(guard.partial)
                backward.blown.extend(guard.blown)
                backward.leaks.extend(guard.leaks)
                guard.remove()
            for receipt in receipts:
                receipt.remove()
            if failed:
                backward.release()
        try:
            with session.pause():
                self._close(backward, result, site)
        except Exception as error:  # values that cannot be read: batched by vmap, on meta
            session.broke(self, error)
        session.tell("backward_ended", backward)
        backward.release()
        return result

    def _close(self, backward: Backward, result: Any, site: Site | None) -> None:
        registry = self.session.registry
        if backward.kind == "grad":
            backward.results = result
            inputs = backward.inputs or []
            pairs = [(t, g) for t, g in zip(inputs, result) if g is not None]
        else:
            pairs = [(t, t.grad) for t in registry.tensors(backward.received)]
        for tensor, gradient in pairs:
            bit = registry.bit(tensor)
            backward.received |= bit
            if self.session.record.checked and gradient is not None:
                backward.gradients[bit] = gradient_fact(gradient)
        if self.session.record.traced:
            used = Used(backward.number, not backward.retain_graph, site)
            for root in backward.roots:
                for node in nodes_of(root.grad_fn):
                    node.metadata[MARK + ".used"] = used

    def _taint(self, roots: list[Tensor]) -> Taint | None:
        taints = [t for t in map(self.session.taint_of, roots) if t is not None]
        if not taints:
            return None
        first = taints[0]
        depends, live, cuts, opaque = merged(taints)
        return Taint(depends, live, cuts, first.site, first.op, first.step, opaque)

    def _receipts(self, backward: Backward) -> list[Any]:
        if not self.session.record.checked:
            return []
        registry = self.session.registry

        def received(bit: int) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                backward.received |= bit

            return hook

        leaves: dict[int, Tensor] = {id(p): p for p in registry.everything() if p.requires_grad}
        if backward.graph is not None:
            leaves.update((id(leaf), leaf) for leaf in backward.graph.leaves)
        return [
            leaf.register_post_accumulate_grad_hook(received(registry.bit(leaf)))
            for leaf in leaves.values()
            if leaf.is_leaf and leaf.requires_grad
        ]


@torch.no_grad()
def gradient_fact(gradient: Tensor) -> GradientFact:
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    norm = norm_of(values) if values.numel() else 0.0
    # one pass over the values; only squares that overflow or vanish need a second look
    finite = math.isfinite(norm) or bool(values.isfinite().all())
    return GradientFact(norm, norm == 0.0 and not bool(values.any()), finite, gradient.dtype)


def _graph(roots: Iterable[Tensor]) -> Graph:
    whole = Graph()
    for root in roots:
        part = walk(root)
        whole.leaves.extend(part.leaves)
        whole.opaque.extend(part.opaque)
        whole.nodes += part.nodes
    return whole


# how each entry point names the same things


def _tensor_backward(
    root: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> dict[str, Any]:
    return {
        "roots": [root],
        "retain_graph": bool(create_graph if retain_graph is None else retain_graph),
        "inputs": None if inputs is None else tensors_in(inputs),
    }


def _autograd_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> dict[str, Any]:
    return {
        "roots": tensors_in(tensors),
        "retain_graph": bool(create_graph if retain_graph is None else retain_graph),
        "inputs": None if inputs is None else tensors_in(inputs),
    }


def _autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> dict[str, Any]:
    return {
        "roots": tensors_in(outputs),
        "retain_graph": bool(create_graph if retain_graph is None else retain_graph),
        "inputs": tensors_in(inputs),
        "allow_unused": bool(materialize_grads if allow_unused is None else allow_unused),
    }
