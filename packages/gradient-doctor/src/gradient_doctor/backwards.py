"""Every backward, watched: what it starts from, who receives a gradient, what it looks like."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradient_doctor.findings import Site
from gradient_doctor.graph import MARK, Graph, Used, nodes_of, walk
from gradient_doctor.guards import observed
from gradient_doctor.patches import Patches
from gradient_doctor.readable import FUNCTORCH, THREADS, alone, in_functorch, unreadable
from gradient_doctor.records import Backward, GradientFact
from gradient_doctor.sentinels import Sentinels
from gradient_doctor.session import Session
from gradient_doctor.steps import Read, norm_of
from gradient_doctor.taint import GRAD, Cut, Taint, merged, tensors_in


class Backwards:
    """Wraps `Tensor.backward`, `autograd.backward` and `autograd.grad`."""

    def __init__(self, session: Session, ended: Callable[[], None]) -> None:
        self.session = session
        self._ended = ended  # called after each backward of the user's
        self._numbers = itertools.count(1)
        self._home: int | None = None
        self._inside = False  # Tensor.backward calls autograd.backward: one event, not two

    def install(self, patches: Patches) -> None:
        for owner, name, read in (
            (torch.Tensor, "backward", _tensor_backward),
            (torch.autograd, "backward", _autograd_backward),
            (torch.autograd, "grad", _autograd_grad),
        ):
            observe = functools.partial(self._watched, name, read)
            patches.replace(owner, name, observed(self.session, self, observe))

    def _watched(
        self, kind: str, read: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        if self._is_stranger():
            session = self.session
            session.blind(THREADS)
            for root in read(*args, **kwargs)["roots"]:
                leaves = session.registry.bits(walk(root).leaves)
                if session.ledger is not None:
                    session.ledger.explained |= leaves  # the rest of their story is not seen
            return
        if self._inside or self.session.paused:
            return
        if in_functorch():
            # torch.func calls it for its own ends, with tensors that have no numbers
            self.session.blind(FUNCTORCH)
            return
        arguments = read(*args, **kwargs)
        if self.session.compiling and any(map(unreadable, arguments["roots"])):
            return  # the compiler's, on its own tensors; a backward of the user's may be in there
        self._inside = True
        try:
            yield from self._run(kind, arguments)
        finally:
            self._inside = False
        self._ended()

    def _is_stranger(self) -> bool:
        """One thread is examined: that of the first backward, while it lives.

        What another thread trains must not be touched: torch's setters and getters of `.grad` in
        two threads can end the process.
        """
        me = threading.get_ident()
        if self._home == me:
            return False
        started = {t.ident for t in threading.enumerate() if type(t) is not threading._DummyThread}
        if me not in started:
            return False  # autograd's own: a checkpoint's backward inside of ours
        if self._home in started:
            self.session.strangers.add(me)
            return True
        self._home = me
        self.session.strangers.discard(me)
        return False

    def _run(self, kind: str, arguments: dict[str, Any]) -> Iterator[Any]:
        session = self.session
        site = session.here()
        session.before_backward()
        backward = Backward(
            next(self._numbers), session.step, kind, site, taint=None, graph=None, **arguments
        )
        session.record.backwards.append(backward)
        hooks: list[Any] = []
        guards: list[Sentinels] = []
        failed = False
        try:
            if session.record.traced:
                with session.pause():
                    self._look_ahead(backward, guards)
            session.add_event("backward", backward=backward)
            session.tell("backward_starts", backward)
            if kind == "backward":
                session.read_since_backward = 0
                self._receipts(backward, hooks)
            try:
                # hooks and recomputed forwards run inside: they are not the user's forward
                with session.pause():
                    result = yield
            except Exception as error:
                failed = True
                session.fail("backward_failed", error, backward)
                raise
        finally:
            for guard in guards:
                guard.settle()
                backward.vanished.extend(guard.vanished)
                backward.partial.extend(guard.partial)
                backward.blown.extend(guard.blown)
                backward.leaks.extend(guard.leaks)
                backward.cancelled.extend(guard.cancellations.seen)
                guard.remove()
            for hook in hooks:
                hook.remove()
            if failed:
                backward.release()
        with session.pause(), alone():
            self._close(backward, result, site)
        session.tell("backward_ended", backward)
        backward.release()

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
                fact = gradient_fact(gradient, self.session.values)
                if fact is not None:
                    backward.gradients[bit] = fact
        if self.session.record.traced:
            used = Used(backward.number, not backward.retain_graph, site)
            for root in backward.roots:
                for node in nodes_of(root.grad_fn):
                    node.metadata[MARK + ".used"] = used
            if backward.kind == "grad" and backward.taint is not None:
                self._cut_off(backward.taint, [g for g in result if g is not None], site)

    def _cut_off(self, taint: Taint, gradients: list[Tensor], site: Site | None) -> None:
        """Gradients without create_graph: they depend on the parameters, and have no graph."""
        session = self.session
        key = ("explicit", GRAD, site, session.step)
        for gradient in gradients if taint.live else ():
            if gradient.requires_grad or unreadable(gradient) is not None:
                continue
            shape = tuple(gradient.shape)
            cut = session.cuts.enter(
                key, lambda: Cut("explicit", GRAD, site, session.step, 0, shape=shape), taint.live
            )
            cut.graph |= taint.live
            session.taints[gradient] = Taint(
                *(taint.depends, 0, taint.cuts | {cut}, site, GRAD, session.step, taint.opaque)
            )

    def _look_ahead(self, backward: Backward, guards: list[Sentinels]) -> None:
        """The graph before it is walked, and guards on its nodes; what was put on must come off."""
        backward.taint = self._taint(backward.roots)
        backward.graph = _graph(backward.roots)
        for root in backward.roots:
            if root.grad_fn is not None:
                guards.append(Sentinels(self.session))
                guards[-1].watch(root)

    def _taint(self, roots: list[Tensor]) -> Taint | None:
        taints = [t for t in map(self.session.taint_of, roots) if t is not None]
        if not taints:
            return None
        first = taints[0]
        depends, live, cuts, opaque = merged(taints)
        return Taint(depends, live, cuts, first.site, first.op, first.step, opaque)

    def _receipts(self, backward: Backward, hooks: list[Any]) -> None:
        """Hooks that say which leaves were given a gradient."""
        registry = self.session.registry

        def arrived(parameter: Tensor) -> None:
            # it also runs for a None, which a custom Function's backward has passed on
            if parameter.grad is not None:
                backward.arrived |= registry.bit(parameter)

        if not self.session.record.checked:
            # of those that something was said of, the first gradient matters at any time
            for leaf in registry.tensors(self.session.awaited):
                if leaf.is_leaf and leaf.requires_grad:
                    hooks.append(leaf.register_post_accumulate_grad_hook(arrived))
            return

        def received(bit: int) -> Callable[[Tensor], None]:
            def hook(parameter: Tensor) -> None:
                stranger = threading.get_ident() in self.session.strangers
                if not stranger and parameter.grad is not None:
                    backward.received |= bit

            return hook

        leaves: dict[int, Tensor] = {id(p): p for p in registry.everything() if p.requires_grad}
        if backward.graph is not None:
            leaves.update((id(leaf), leaf) for leaf in backward.graph.leaves)
        for leaf in leaves.values():
            if leaf.is_leaf and leaf.requires_grad:
                hook = received(registry.bit(leaf))
                hooks.append(leaf.register_post_accumulate_grad_hook(hook))


@torch.no_grad()
def gradient_fact(gradient: Tensor, read: Read) -> GradientFact | None:
    """None for a gradient whose values cannot be read."""
    values = read(gradient)
    if values is None:
        return None
    norm = norm_of(values) if values.numel() else 0.0
    # one pass over the values; only squares that overflow or vanish need a second look
    finite = math.isfinite(norm) or bool(values.isfinite().all())
    # without elements there is none that could be something else than zero
    zero = norm == 0.0 and bool(gradient.numel()) and not bool(values.any())
    return GradientFact(norm, zero, finite, gradient.dtype)


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
