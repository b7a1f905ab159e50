"""Where the steps of a script end, told from the steps of its optimizers alone.

A step ends when every optimizer that is waited for has stepped, or when one repeats itself. Waited
for are all but those that have gone out of use:

- a new optimizer's first step begins a new phase: those that stepped before it was made, and not
  since, belong to the old one;
- a wrapper that never steps itself is not waited for once another has stepped on its parameters;
- who was waited for in vain three times in a row is not, until it steps again.
"""

from __future__ import annotations

from typing import Any

from gradient_doctor.registry import Registry, owned_by

_PATIENCE = 3


class Boundaries:
    """Told of every optimizer step; knows optimizers by their ids, as the registry keeps them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._since: set[int] = set()  # those that stepped since the last boundary
        self._ever: set[int] = set()
        self._missed: dict[int, int] = {}  # boundaries in a row that it was waited for in vain

    def stepped(self, optimizer: Any, step: int) -> bool:
        """Whether the current step, of this number, ends with this."""
        me = id(optimizer)
        birth = self._registry.birth(optimizer)
        if me not in self._ever and birth is not None and birth.step == step:
            self._missed.update(dict.fromkeys(self._ever - self._since, _PATIENCE))
        repeated = me in self._since
        self._since.add(me)
        self._ever.add(me)
        self._missed[me] = 0
        awaited = self._awaited()
        if awaited and not repeated:
            return False
        for late in awaited:
            self._missed[late] = self._missed.get(late, 0) + 1
        self._since.clear()
        return True

    def _awaited(self) -> set[int]:
        optimizers = {id(o): o for o in self._registry.optimizers.values()}
        waiting = {o for o in optimizers if self._missed.get(o, 0) < _PATIENCE} - self._since
        new = waiting - self._ever
        if new:
            stepped = {id(p) for o in self._since & {*optimizers} for p in owned_by(optimizers[o])}
            waiting -= {o for o in new if all(id(p) in stepped for p in owned_by(optimizers[o]))}
        return waiting
