"""Which parameters exist, what they are called, who owns them.

A parameter is a bit: sets of parameters are integers, so that the union for every operation of a
forward costs one `|`. Bits are given on first sight; names are looked up when something is said.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.findings import Site, count
from gradient_doctor.readable import checksum, shape_of
from gradient_doctor.sites import user_frame
from gradient_doctor.slips import is_method

_OFTEN = 4  # times that a parameter is frozen at one line


@dataclass
class Birth:
    """Where and when a parameter, or an optimizer, was made; `order` counts through all of them."""

    site: Site | None
    step: int
    order: int = 0


@dataclass
class Leaf:
    """A tensor that gradients can end in."""

    bit: int
    ref: weakref.ref[Tensor]
    shape: tuple[int, ...] | None  # None while it has none: a lazy parameter
    is_parameter: bool


@dataclass
class Registry:
    """Modules, optimizers and the bits of their parameters; open to what turns up later."""

    roots: MutableMapping[str, nn.Module] = field(default_factory=dict)
    optimizers: MutableMapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    discover: bool = False
    leaves: list[Leaf] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bits = WeakIdKeyDictionary()
        self._by_id: dict[int, Leaf] = {}  # the same at a thirtieth of the cost; ids are used again
        self._free: list[int] = []  # places of leaves that have died
        self._swept = self._ever_owned = 0
        self.thrown_away: dict[Site | None, Leaf] = {}  # by birth line: what it makes is one leaf
        self._births = WeakIdKeyDictionary()
        self._order = itertools.count()
        self.frozen_at: WeakIdKeyDictionary = (
            WeakIdKeyDictionary()
        )  # parameter -> where requires_grad went off
        # the same parameters -> that line, and those of its callers
        self.freezers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._refrozen = WeakIdKeyDictionary()  # parameter -> how often in a row, at which line
        self.converted_at: WeakIdKeyDictionary = (
            WeakIdKeyDictionary()
        )  # parameter -> where its dtype was changed
        self.first_rates: WeakIdKeyDictionary = (
            WeakIdKeyDictionary()
        )  # optimizer -> learning rates it was made with
        self.scheduled_at: WeakIdKeyDictionary = (
            WeakIdKeyDictionary()
        )  # optimizer -> where its lr scheduler was made
        # tensors on an array of numpy's, of another dtype than the usual -> the line
        self.arrays_at: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # weights of constants -> the line that made them so
        self.zeroed_at: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.copy_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # copies -> weakref of original
        # copies of parameters -> the line that made the first of them
        self.prototypes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # weights -> the line that wrote their first values, and that gave them to a second layer
        self.initialised_at: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.tied_at: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._random: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter -> its first checksum
        self._names: dict[int, str] = {}
        self._modules: dict[int, str] = {}
        self._stale = True
        self._found: dict[str, Tensor] = {}
        self._aliases: dict[str, Tensor] = {}  # every name: tied parameters have several
        self._labels: dict[str, list[weakref.ref[Tensor]]] = {}  # of tensors in no module
        self._ways = WeakIdKeyDictionary()  # parameter -> the callers of its module's constructor
        self._homes = WeakIdKeyDictionary()  # parameter -> the module that it was given to
        # modules -> where they were constructed, and the lines of all callers on the way there
        self._constructed: weakref.WeakKeyDictionary[nn.Module, Birth] = weakref.WeakKeyDictionary()
        self._callers: weakref.WeakKeyDictionary[nn.Module, tuple[Site, ...]] = (
            weakref.WeakKeyDictionary()
        )
        self._parents: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self.unnamed: list[Any] = []  # optimizers whose variable does not exist yet

    # growth

    def add_root(self, module: nn.Module, name: str | None = None) -> None:
        if any(module is name_inside for name_inside in self.roots.values()):
            return
        # a wrapper takes the place of the module it wraps: the outermost name is the one users see
        inner: str | None = None
        inside = {id(m) for m in module.modules()}
        for name_inside in [n for n, m in self.roots.items() if id(m) in inside]:
            inner = inner or name_inside
            del self.roots[name_inside]
        if any(module is m for root in self.roots.values() for m in root.modules()):
            return
        name = name or variable_name(module) or inner or type(module).__name__
        self.roots[_free(name, self.roots)] = module
        self._stale = True

    def add_optimizer(self, optimizer: torch.optim.Optimizer, name: str | None = None) -> None:
        if any(optimizer is registered for registered in self.optimizers.values()):
            return
        name = name or variable_name(optimizer) or type(optimizer).__name__
        self.optimizers[_free(name, self.optimizers)] = optimizer
        self._stale = True

    def born(self, module: nn.Module, parameter: Tensor, site: Site | None, step: int) -> None:
        self.made(parameter, site, step)
        home = self._homes.get(parameter)
        if home is not None and home() not in (None, module):
            self.tied_at[parameter] = site
        self._homes[parameter] = weakref.ref(module)
        if module in self._callers:
            self._ways[parameter] = self._callers[module]
        self._stale = True

    def made(self, thing: Any, site: Site | None, step: int) -> None:
        """A parameter or an optimizer has come into being; the first word counts."""
        if thing not in self._births:
            self._births[thing] = Birth(site, step, next(self._order))

    def switched(
        self,
        parameter: Tensor,
        here: Callable[[], Site | None],
        lines: Callable[[], tuple[Site, ...]],
    ) -> None:
        """requires_grad was set, to what it is now.

        What goes off at one line again and again, as a judge's in every step of its maker, is
        believed to go on so: to look for the line costs more than the switch.
        """
        if parameter.requires_grad:
            self.frozen_at.pop(parameter, None)
            return
        before: tuple[int, Site | None] = self._refrozen.get(parameter) or (0, None)
        times, site = before
        if times < _OFTEN:
            now = here()
            self._refrozen[parameter] = (times + 1 if now == site else 1, now)
            site = now
            self.freezers[parameter] = lines()
        self.frozen_at[parameter] = site

    def copied(self, parameter: Tensor, original: Tensor) -> None:
        """A deep copy; layers are often made once and copied (nn.TransformerEncoder)."""
        self.copy_of[parameter] = weakref.ref(original)
        birth = self.birth(original)
        site = self.prototypes.get(original) or (None if birth is None else birth.site)
        if site is not None:
            self.prototypes[parameter] = site
        if original in self.zeroed_at:
            self.zeroed_at[parameter] = self.zeroed_at[original]

    def adopted(self, parent: nn.Module, child: nn.Module) -> None:
        self._parents[child] = weakref.ref(parent)

    def flush(self) -> None:
        """Optimizers get their names, and the modules whose parameters they hold become roots."""
        if self.discover:
            for optimizer in self.unnamed:
                self.add_optimizer(optimizer)
            self.unnamed.clear()
            for optimizer in self.optimizers.values():
                for parameter in owned_by(optimizer):
                    if not self.is_registered(parameter):
                        self._add_home(parameter)
        self.refresh()

    def _add_home(self, parameter: Tensor) -> None:
        ref = self._homes.get(parameter)
        module = None if ref is None else ref()
        while module is not None:
            parent = self._parents.get(module)
            above = None if parent is None else parent()
            if above is None:
                self.add_root(module)
                return
            module = above

    def parent(self, module: nn.Module) -> nn.Module | None:
        """The module that it was given to last."""
        ref = self._parents.get(module)
        return None if ref is None else ref()

    def top_of(self, module: nn.Module) -> nn.Module:
        """The outermost module that holds this one: its parts may be called one by one."""
        while True:
            ref = self._parents.get(module)
            parent = None if ref is None else ref()
            if parent is None or all(child is not module for child in parent.children()):
                return module
            module = parent

    def everything(self) -> Iterator[Tensor]:
        """Parameters of the roots and of the optimizers; some may come twice."""
        yield from self.parameters().values()
        for optimizer in self.optimizers.values():
            yield from owned_by(optimizer)

    def birth(self, thing: Any) -> Birth | None:
        """Of a parameter or an optimizer; None for one that is older than the examination."""
        return self._births.get(thing)

    def entered(self, parameter: Tensor, optimizer: Any) -> Site | None:
        """The line that put a parameter into its model, if that was after the optimizer was made.

        A layer may be made first and put in its place later: the outermost part that is newer than
        the optimizer counts.
        """
        own, made = self.birth(parameter), self.birth(optimizer)
        site = None if own is None else own.site
        ref = self._homes.get(parameter)
        module = None if ref is None else ref()
        while module is not None and made is not None:
            added = self.birth(module)  # given to a parent
            birth = added or self._constructed.get(module)
            if birth is None or birth.order < made.order or birth.site is None:
                break
            # what a function makes or converts comes in where that is called, beside the optimizer;
            # a method of the model knows itself what it adds
            here = made.site is not None and birth.site.function == made.site.function
            own = added is not None and (here or is_method(birth.site))
            site = birth.site if own else self._beside(made.site, module) or birth.site
            parent = self._parents.get(module)
            module = None if parent is None else parent()
        return site

    def constructed(self, chain: Iterable[tuple[nn.Module, tuple[Site, ...]]], step: int) -> None:
        """Modules whose constructors are running, and the lines of the callers of each."""
        for module, callers in chain:
            if module not in self._constructed and callers:
                self._constructed[module] = Birth(callers[0], step, next(self._order))
                self._callers[module] = callers

    def construction(self, module: nn.Module) -> Site | None:
        """The line that called a module's constructor."""
        birth = self._constructed.get(module)
        return None if birth is None else birth.site

    def called_apart(self, parameter: Tensor, other: Tensor) -> Site | None:
        """Two parameters of one line in a function: where the ways of their callers part."""
        mine, theirs = self._ways.get(parameter), self._ways.get(other)
        if not mine or not theirs or mine[0] != theirs[0]:
            return None
        return next((a for a, b in zip(mine, theirs) if a != b), None)

    def constructed_before(self, module: nn.Module, step: int) -> bool:
        birth = self._constructed.get(module)
        return birth is not None and birth.step < step

    def _beside(self, other: Site | None, module: nn.Module) -> Site | None:
        """The line that led to a module, in the function that another line stands in."""
        for caller in self._callers.get(module, ()):
            if other is not None and (caller.file, caller.function) == (other.file, other.function):
                return caller
        return None

    def initialised(self, parameter: Tensor, site: Site | None = None) -> None:
        """Random numbers were written into a parameter."""
        if site is not None:
            self.initialised_at[parameter] = site
        if not is_lazy(parameter) and parameter.dim() > 1:
            self._random[parameter] = checksum(parameter)

    def is_random(self, parameter: Tensor) -> bool:
        """Whether it still has the random numbers it began with: neither loaded nor trained."""
        return self._random.get(parameter) == checksum(parameter)

    def home(self, parameter: Tensor) -> nn.Module | None:
        """The module that a parameter was given to."""
        ref = self._homes.get(parameter)
        return None if ref is None else ref()

    def refresh(self) -> None:
        """Modules grow parameters while they run: look again before names are used."""
        self._stale = True

    def let_go(self) -> None:
        """Names stay known for as long as the user keeps the modules."""
        self.roots = weakref.WeakValueDictionary(self.roots)
        self.optimizers = weakref.WeakValueDictionary(self.optimizers)
        self.unnamed.clear()
        self._names, self._modules, self._found, self._aliases = {}, {}, {}, {}
        self._stale = True

    # bits

    def bit(self, tensor: Tensor) -> int:
        """The bit of a leaf, given on first sight."""
        seen = self._by_id.get(id(tensor))
        if seen is not None and seen.ref() is tensor:
            if seen.shape is None and not is_lazy(tensor):
                seen.shape = tuple(tensor.shape)
            return seen.bit
        leaf = self._bits.get(tensor)
        if leaf is None:
            leaf = self._bits[tensor] = self._thrown(tensor) or self._new_leaf(tensor)
        self._by_id[id(tensor)] = leaf
        return leaf.bit

    def _new_leaf(self, tensor: Tensor) -> Leaf:
        is_parameter = isinstance(tensor, nn.Parameter)
        shape = None if is_lazy(tensor) else tuple(tensor.shape)
        # bits of inputs go to inputs: what is known of a parameter is never another's
        place = len(self.leaves) if is_parameter or not self._free else self._free.pop()
        leaf = Leaf(1 << place, weakref.ref(tensor), shape, is_parameter)
        self.leaves[place : place + 1] = [leaf]
        return leaf

    def _thrown(self, tensor: Tensor) -> Leaf | None:
        birth = self.birth(tensor) if self.thrown_away else None
        return None if birth is None else self.thrown_away.get(birth.site)

    def sweep(self) -> None:
        """Between two steps: inputs that asked for a gradient and have died give their bits back.

        Every step has such inputs, or parameters that it makes anew (class 6, which are one leaf
        once that is said): without this a long trace would have ever longer sets.
        """
        if len(self.leaves) == self._swept and self._free:
            return
        self._swept = len(self.leaves)
        taken = set(self._free)
        for place, leaf in enumerate(self.leaves):
            dead = leaf.ref() is None and not leaf.is_parameter
            if dead and place not in taken and not leaf.bit & self._ever_owned:
                self._free.append(place)
        self._by_id = {k: leaf for k, leaf in self._by_id.items() if leaf.ref() is not None}

    def known_bit(self, tensor: Tensor) -> int:
        leaf = self._bits.get(tensor)
        return 0 if leaf is None else leaf.bit

    def bits(self, tensors: Iterable[Tensor]) -> int:
        mask = 0
        for tensor in tensors:
            mask |= self.bit(tensor)
        return mask

    def tensors(self, mask: int) -> Iterator[Tensor]:
        """The living tensors of a set."""
        for leaf in self._of(mask):
            tensor = leaf.ref()
            if tensor is not None:
                yield tensor

    def _of(self, mask: int) -> Iterator[Leaf]:
        while mask:
            low = mask & -mask
            yield self.leaves[low.bit_length() - 1]
            mask ^= low

    # names

    def name(self, tensor: Tensor) -> str:
        self._rename()
        name = self._names.get(id(tensor))
        if name is not None:
            return name
        birth = self.birth(tensor)
        origin = f" made at {birth.site}" if birth is not None and birth.site is not None else ""
        label = f"unregistered {list(shape_of(tensor))}{origin}"
        number = self._number(label, tensor)
        return f"<{label}>" if number == 1 else f"<{label}, number {number}>"

    def _number(self, label: str, tensor: Tensor) -> int:
        """Which of the living tensors with this label it is: two of them are two parameters."""
        places = self._labels.setdefault(label, [])
        living = [ref() for ref in places]
        place = next((k for k, other in enumerate(living) if other is tensor), None)
        if place is None:
            free = (k for k, other in enumerate(living) if other is None)
            place = next(free, len(places))
            places[place : place + 1] = [weakref.ref(tensor)]
        return place + 1

    def names(self, mask: int) -> tuple[str, ...]:
        """Names of a set, in the order of the modules; leaves that have died are left out."""
        return self.in_order(self.name(tensor) for tensor in self.tensors(mask))

    def many(self, mask: int) -> str:
        """`3 parameters`: as many of a set as `names` lists, whatever their sizes."""
        return count(sum(1 for _ in self.tensors(mask)), "parameter")

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        self._rename()
        order = {name: k for k, name in enumerate(self._names.values())}
        return tuple(sorted(names, key=lambda n: order.get(n, len(order))))

    def is_registered(self, tensor: Tensor) -> bool:
        self._rename()
        return id(tensor) in self._names

    def module_name(self, module: nn.Module) -> str:
        """The path of a module, `policy.trunk.0`; its class name where it is in no root."""
        self._rename()
        return self._modules.get(id(module)) or f"<{type(module).__name__}>"

    def parameters(self) -> dict[str, Tensor]:
        """All parameters of the roots, each once: one that is tied has its first name."""
        self._rename()
        return dict(self._found)

    def aliases(self) -> dict[str, Tensor]:
        """The same with every name that a parameter has."""
        self._rename()
        return dict(self._aliases)

    def _rename(self) -> None:
        if not self._stale:
            return
        self._stale = False
        self._names, self._modules, self._found, self._aliases = {}, {}, {}, {}
        for root, module in self.roots.items():
            for name, child in module.named_modules():
                self._modules.setdefault(id(child), f"{root}.{name}" if name else root)
            for name, parameter in module.named_parameters(remove_duplicate=False):
                full = f"{root}.{name}"
                self._aliases.setdefault(full, parameter)
                if self._names.setdefault(id(parameter), full) == full:
                    self._found[full] = parameter

    # sets

    @property
    def registered(self) -> int:
        return self.bits(self.parameters().values())

    @property
    def trainable(self) -> int:
        return self.bits(p for p in self.parameters().values() if p.requires_grad)

    @property
    def owned(self) -> int:
        """Parameters that some optimizer holds."""
        owned = self.bits(p for o in self.optimizers.values() for p in owned_by(o))
        self._ever_owned |= owned
        return owned

    def owners(self, tensor: Tensor) -> list[str]:
        """Names of the optimizers that hold this parameter."""
        return [
            name
            for name, optimizer in self.optimizers.items()
            if any(p is tensor for p in owned_by(optimizer))
        ]

    def optimizer_name(self, optimizer: Any) -> str:
        for name, registered in self.optimizers.items():
            if registered is optimizer:
                return name
        return type(optimizer).__name__

    def matching(self, patterns: Iterable[str]) -> int:
        """Parameters one of whose names, or a dotted end of it, fits one of the glob patterns."""
        wanted = tuple(patterns)
        return self.bits(
            p for name, p in self.aliases().items() if any(fits(name, w) for w in wanted)
        )


def owned_by(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def fits(name: str, pattern: str) -> bool:
    """Whether a glob fits the full name or what remains after some of its first parts."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[k:]), pattern) for k in range(len(parts)))


def variable_name(thing: object) -> str | None:
    """What the user's code calls this object: a local, a global, or an attribute of `self`."""
    frame = user_frame()
    while frame is not None:
        for scope in (frame.f_locals, frame.f_globals):
            for name, value in list(scope.items()):
                if value is thing and not name.startswith("_") and name != "self":
                    return name
        owner = frame.f_locals.get("self")
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if value is thing:
                return name.lstrip("_")
        frame = frame.f_back
    return None


def _free(name: str, taken: Mapping[str, Any]) -> str:
    if name not in taken:
        return name
    number = 2
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"
