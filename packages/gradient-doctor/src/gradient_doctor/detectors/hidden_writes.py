"""Class 13, the silent half: a value is changed through `.data` before the backward that needs it.

`x.data` shares the numbers of `x` and not its version counter. So torch, which would refuse the
backward after any other write, cannot notice this one: the gradient is computed with the new value.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.findings import Severity, Site, listed
from gradient_doctor.graph import next_number, node_of, nodes_of, origin_of
from gradient_doctor.session import Backward, Detector, OpCall, Session
from gradient_doctor.sites import called_by_user

_KEPT = 512
_SAVED = "_raw_saved_"
# kept by the node, but not part of the derivative in training
_STATISTICS = ("_raw_saved_running",)


@dataclass(eq=False)
class Write:
    """A change that torch has not counted."""

    op: str
    site: Site | None
    storage: int
    sequence: int  # nodes with a smaller number are older than it
    bits: int  # what the changed value depends on


class HiddenWrites(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._aliases = WeakIdKeyDictionary()  # `x.data`, and views of it
        self._pending: list[tuple[Tensor, Tensor]] = []  # during one call: target, copy of it
        self._writes: deque[Write] = deque(maxlen=_KEPT)

    # writes

    def write_starts(self, call: OpCall) -> None:
        self._pending.clear()
        if call.name == "torch.Tensor.data.__set__":
            targets = [call.args[0]]
        else:
            targets = [t for t in call.targets if t in self._aliases] if self._aliases else []
        # what libraries do between forward and backward (sharding, offloading) they put back
        if targets and called_by_user():
            self._pending = [(t, t.detach().clone()) for t in targets]

    def op_failed(self, call: OpCall, error: BaseException) -> None:
        self._pending.clear()

    def op(self, call: OpCall) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            bits = 0 if call.taint is None else call.taint.depends
            for target, before in pending:
                if not _same(target, before):
                    now = next_number()
                    site, storage = call.site, _storage(target)
                    self._writes.append(Write(_word(call), site, storage, now, bits))
        if call.short == "data":
            for output in call.outputs:
                self._aliases[output] = True
        elif call.inputs and self._aliases and call.inputs[0] in self._aliases:
            storage = _storage(call.inputs[0])
            for output in call.outputs:
                if _storage(output) == storage:
                    self._aliases[output] = True

    # uses

    def backward_starts(self, backward: Backward) -> None:
        if backward.graph is None or not self._writes:
            return
        by_storage: dict[int, list[Write]] = {}
        for write in self._writes:
            by_storage.setdefault(write.storage, []).append(write)
        newest = self._writes[-1].sequence
        hits: dict[Write, Any] = {}
        for root in backward.roots:
            for node in nodes_of(node_of(root)):
                age = node._sequence_nr()
                if age >= newest:
                    continue
                for value in _saved(node):
                    for write in by_storage.get(_storage(value), ()):
                        if age < write.sequence:
                            hits.setdefault(write, node)
        lines: dict[Any, dict[Write, Any]] = {}
        for write, node in hits.items():
            lines.setdefault((write.op, write.site), {})[write] = node
        for same in lines.values():
            self._say(same, backward)

    def _say(self, writes: dict[Write, Any], backward: Backward) -> None:
        registry = self.session.registry
        storages = {write.storage for write in writes}
        changed = registry.bits(
            p for p in registry.parameters().values() if _storage(p) in storages
        )
        depends = 0
        for write in writes:
            depends |= write.bits
        write, node = next(iter(writes.items()))
        origin = origin_of(node)
        used = None if origin is None else origin.site
        names = registry.names(changed)
        what = f"{listed(names, 3)} {'is' if len(names) == 1 else 'are'}" if names else "A value is"
        self.report(
            13,
            Severity.WARNING,
            f"{what} changed by `{write.op}` between the forward that used it and its backward, "
            "and torch cannot notice.",
            why=f"{node.name()}{'' if used is None else f', made at {used},'} has kept it for the "
            f"backward at {backward.site}. A write through `.data` is not counted, so no error "
            "comes: the gradient of everything before that point is computed with the new value, "
            "and is the gradient of no loss.",
            fix="Change it after the backward (weights: after the optimizer's step), under "
            "torch.no_grad() and without `.data`: then torch checks it.",
            site=write.site,
            parameters=changed or depends & registry.registered,
            related=(used, backward.site),
        )


def _word(call: OpCall) -> str:
    return ".data =" if call.short == "__set__" else call.short


def _storage(tensor: Tensor) -> int:
    """The address of the memory behind a tensor; 0 where it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0  # sparse, meta, a wrapper around others


def _same(tensor: Tensor, before: Tensor) -> bool:
    """A mask on weights that are masked already, a clamp of what is inside changes nothing."""
    if tensor.shape != before.shape or tensor.dtype != before.dtype or not _storage(tensor):
        return not _storage(tensor)
    return bool(((tensor == before) | ((tensor != tensor) & (before != before))).all())


def _saved(node: Any) -> list[Tensor]:
    """The tensors that a node has kept, as they are: hooks of checkpoints are not run."""
    saved = []
    for name in _names(type(node)):
        try:
            value = getattr(getattr(node, name), "data", None)
        except RuntimeError:
            continue  # freed
        if isinstance(value, Tensor) and _storage(value):
            saved.append(value)
    return saved


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(n for n in dir(kind) if n.startswith(_SAVED) and not n.startswith(_STATISTICS))
