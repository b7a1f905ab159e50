"""The full trace: every torch call passes here, and hands its taint on to what it made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name

from gradient_doctor.callers import call_from_caller
from gradient_doctor.findings import Site
from gradient_doctor.graph import NodeOrigin, is_dead_view, mark_origin, node_of
from gradient_doctor.handed_in import chooser_of_dtype
from gradient_doctor.python_numbers import running_constructor
from gradient_doctor.readable import (
    LAZY,
    META,
    UNTOUCHABLE,
    address_of,
    is_recorded,
    shape_of,
    unreadable,
    values_of,
)
from gradient_doctor.records import OpCall
from gradient_doctor.replaced import Replaced
from gradient_doctor.session import Session
from gradient_doctor.sites import asked_by_user, here, user_lines, within
from gradient_doctor.taint import (
    Cut,
    Region,
    Taint,
    in_graphs,
    merged,
    tensors_in,
)

# calls that only look: no value comes out of them that a loss could be made from
_LOOKS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage"),
    *("storage_offset", "is_contiguous", "is_floating_point", "is_complex", "get_device"),
    *("untyped_storage", "data_ptr", "requires_grad_", "retain_grad", "register_hook"),
    *("is_same_size", "type", "__len__", "__repr__", "__format__", "__hash__", "__dir__"),
    *("is_tensor", "is_storage", "is_nonzero", "has_names", "_is_view", "__contains__"),
    *("register_post_accumulate_grad_hook", "typename", "result_type", "is_grad_enabled"),
    *("is_inference", "is_signed", "is_pinned", "is_shared", "is_set_to", "__index__"),
}
_GETTERS_THAT_COMPUTE = {"T", "mT", "H", "mH", "real", "imag", "data"}
# without its wrapper, which saves and restores the warnings' filters: then Python would show every
# warning of the program again
_resolve = getattr(resolve_name, "__wrapped__", resolve_name)
_SCALARS = {"item", "__float__", "tolist"}
_EXPLICIT = {"detach", "detach_", "data", "numpy", "__array__", "new_tensor", "tensor"}
_PLACES = {"indices", "_indices", "crow_indices", "col_indices"}  # of a sparse tensor's values
_SHARING = {"detach", "data"}  # the same memory
_ZERO_DERIVATIVE = {
    *("round", "floor", "ceil", "trunc", "sign", "sgn", "round_", "floor_", "ceil_", "heaviside"),
    *("trunc_", "sign_", "fix", "floor_divide", "__floordiv__"),
}


# only the shape of their argument matters
_SHAPE_ONLY = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("randint_like", "new_zeros", "new_ones", "new_empty", "new_full"),
}
_OVERWRITES = {"zero_", "fill_", "copy_"}
# each output is made from the input of the same place
_PAIRWISE = {"broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"}
_SAMPLERS = {"multinomial", "bernoulli", "normal", "poisson", "bernoulli_", "normal_"}
# what is done to a draw before it is an action
_OF_ACTIONS = {
    *("detach", "data", "tanh", "sigmoid", "clamp", "clip", "float", "to", "clone", "view"),
    *("reshape", "squeeze", "unsqueeze", "__getitem__", "flatten", "contiguous"),
}
_ARRAYS = {"numpy", "__array__"}
_OUTWARD = _SCALARS | _ARRAYS
# calls of one name in one region without gradients, in one step, that detectors hear of: a rollout
# does the same thing a thousand times
_HEARD = 48
_MANY = 16  # inputs of one call that detectors see without any taint
_COPIES = {"tensor", "new_tensor", "as_tensor", "asarray"}
_FROM_ARRAYS = {"tensor", "as_tensor", "from_numpy", "asarray"}


class Trace(TorchFunctionMode):
    """Propagates taint and reports calls to the session's detectors; changes no value."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.on = True
        self._names: dict[Any, tuple[str, bool]] = {}
        self._replaced = Replaced()
        self.rounds: Any = None  # rounds.Rounds, of the watch
        _resolve(torch.add)  # its table is made now, not in the middle of the program

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        session = self.session
        func = self._replaced.original(func)
        if not self.on or session.paused:
            return func(*args, **kwargs)
        if is_recorded():
            return call_from_caller(func, args, kwargs)
        if session.drowsy and (call := self.rounds.known(func, args)) is not None:
            return call(func, args, kwargs)
        if session.noting:
            self.rounds.note()
        name, looks = self._name(func)
        if looks:
            if name in _BEFORE:
                self._note(_BEFORE[name], args)
            result = call_from_caller(func, args, kwargs)
            if name in _AFTER:
                self._note(_AFTER[name], args)
            elif name in _CONSTANT:
                self._note(_zeroed, (kwargs.get("tensor"), *args))
            elif name in _RANDOM:  # torch passes these on by keyword
                self._note(_initialised, (kwargs.get("tensor"), *args))
            return result
        if name == "_set_grad_enabled":
            return self._grad_mode(func, args, kwargs)
        if name in ("torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad"):
            return func(*args, **kwargs)  # watched, see watch.py
        region = session.region
        if region is not None and self._is_repeated(region, name) and not torch.is_grad_enabled():
            return self._repeated(name, region, func, args, kwargs)
        return self._call(name, func, args, kwargs)

    def _name(self, func: Any) -> tuple[str, bool]:
        cached = self._names.get(func)
        if cached is None:
            name = self._replaced.names.get(func) or _resolve(func)
            name = name or getattr(func, "__name__", None) or str(func)
            parts = name.split(".")
            if parts[-1] in ("__get__", "__set__", "__delete__"):
                looks = parts[-1] != "__get__" or parts[-2] not in _GETTERS_THAT_COMPUTE
                if parts[-1] == "__set__" and parts[-2] == "data":
                    looks = False
                name = ".".join(parts[:-1]) if parts[-1] == "__get__" else name
            else:
                looks = parts[-1] in _LOOKS or name.startswith(("profiler.", "torch.nn.init."))
            cached = self._names[func] = (name, looks)
        return cached

    # regions

    def _grad_mode(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        before = torch.is_grad_enabled()
        result = func(*args, **kwargs)
        if torch.is_grad_enabled():
            self.session.region = None
        elif before:
            self._note(_grad_off, args)
        return result

    def _note(self, fact: Callable[[Session, Any], None], args: Any) -> None:
        try:
            fact(self.session, args)
        except Exception as error:
            self.session.broke(self, error)

    def _region(self) -> Region | None:
        """The region we are in, if gradients are off and not by a custom Function's own doing."""
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return None
        if self.session.region is None:
            self.session.region = Region("no_grad", None)  # entered before the trace began
        return self.session.region

    # calls

    def _call(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The call itself is made once and outside of all our own code, which may have mistakes."""
        session = self.session
        try:
            call, taints, was = self._before(name, args, kwargs)
        except Exception as error:
            session.broke(self, error)
            return func(*args, **kwargs)
        try:
            result = call_from_caller(func, args, kwargs, depth=2)
        except Exception as error:
            session.fail("op_failed", error, call)
            raise
        try:
            return self._after(call, taints, was, result)
        except Exception as error:
            session.broke(self, error)
            return result

    # rollouts

    def _is_repeated(self, region: Region, name: str) -> bool:
        key = (region.site, name)
        heard = self.session.heard[key] = self.session.heard.get(key, 0) + 1
        short = name.rsplit(".", 1)[-1]
        # what writes in place, or leaves torch, is followed to the end
        return heard > _HEARD and not short.endswith("_") and short not in _OUTWARD

    def _repeated(
        self, name: str, region: Region, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Only what the result depends on is noted, with the line of the region."""
        session = self.session
        try:
            result = call_from_caller(func, args, kwargs, depth=2)
        except Exception as error:
            site = here(session.module_path)
            inputs = tensors_in([args, kwargs], depth=4)
            session.fail("op_failed", error, OpCall(name, site, args, kwargs, inputs, [], [], None))
            raise
        try:
            inputs, numbers = session.numbers.among(args, kwargs)
            taints = [t for t in map(session.taint_of, inputs) if t is not None]
            taints.extend(number.taint for number in numbers)
            outputs = tensors_in(result) if taints else []
            short = name.rsplit(".", 1)[-1]
            if outputs and short not in _SHAPE_ONLY:
                self._spread(name, short, region.site, taints, outputs)
        except Exception as error:
            session.broke(self, error)
        return result

    def passed_over(self, module: str, taints: list[Taint], result: Any) -> None:
        """The forward of a module that was not traced; see rollouts.py."""
        outputs = tensors_in(result)
        if outputs and taints:
            self._spread(module, "forward", here(self.session.module_path), taints, outputs)

    def _before(
        self, name: str, args: Any, kwargs: dict[str, Any]
    ) -> tuple[OpCall, list[Taint], Any]:
        session = self.session
        site = here(session.module_path)
        inputs, numbers = session.numbers.among(args, kwargs)
        # taken before the call: an operation in place changes what its input is
        of_inputs = list(map(session.taint_of, inputs))
        taints = [t for t in of_inputs if t is not None]
        if len(inputs) > _MANY:  # rounds of a rollout are put together: data says nothing new
            inputs = [t for k, t in enumerate(inputs) if k < _MANY or of_inputs[k] is not None]
        short = name.rsplit(".", 1)[-1]
        if short in _SHAPE_ONLY:
            taints = []
        elif short in _OVERWRITES:
            taints = [t for t in map(session.taint_of, inputs[1:]) if t is not None]
        taints.extend(number.taint for number in numbers)
        if short in _FROM_ARRAYS and args:
            taints.extend(self._of_array(args[0]))
        was = args[0].dtype if short == "__set__" else None
        call = OpCall(name, site, args, kwargs, inputs, numbers, [], None)
        if (short == "__set__" or call.targets) and session.wants("write_starts"):
            touchable, blind = self._sight(inputs)
            if touchable:
                session.tell("write_starts", call, blind=blind)
        return call, taints, was

    def _after(self, call: OpCall, taints: list[Taint], was: Any, result: Any) -> Any:
        session = self.session
        name, short, site, args, inputs = call.name, call.short, call.site, call.args, call.inputs
        outputs = tensors_in(result)
        taint = None
        if short in _FROM_ARRAYS and not taints and session.returned and outputs:
            taints = session.held_by(outputs[0])
        if short in _PAIRWISE and len(outputs) == len(inputs):
            for own, output in zip(map(session.taint_of, inputs), outputs):
                taint = self._spread(name, short, site, [own] if own else [], [output])
        elif outputs:
            taint = self._spread(name, short, site, taints, outputs)
        if call.kwargs.get("requires_grad") and outputs and outputs[0].is_leaf:
            session.registry.made(outputs[0], site, session.step)
        if was is not None and args[0].dtype != was:
            # Module.to, half, bfloat16
            session.registry.converted_at[args[0]] = chooser_of_dtype(user_lines()) or site
        if short == "__setitem__" or short == "__set__":
            outputs = [args[0]]
            taint = self._spread(name, short, site, taints, outputs)
        if short in _SCALARS and taints:
            self._scalar(short, site, taints, result)
        elif short in _ARRAYS and taints:
            self._array(short, site, taints, inputs[0], result)
        if session.wants("op"):
            touchable, blind = self._sight([*inputs, *outputs])
            if touchable:
                call.outputs, call.taint, call.result = outputs, taint, result
                session.tell("op", call, blind=blind)
        return result

    def _sight(self, tensors: list[Tensor]) -> tuple[bool, bool]:
        """Whether detectors may look at a call with these tensors; if not all have values."""
        kinds = {kind for kind in map(unreadable, tensors) if kind is not None}
        for kind in kinds - {META, LAZY}:  # models are made on meta: no fault of sight
            self.session.blind(kind)
        return not kinds & UNTOUCHABLE, bool(kinds)

    def _spread(
        self, name: str, short: str, site: Site | None, taints: list[Taint], outputs: list[Tensor]
    ) -> Taint:
        session = self.session
        if short in _PLACES:
            taints = []
        depends, live, cuts, opaque = merged(taints)
        graph = in_graphs(taints) if live else 0
        if live and torch.is_grad_enabled():
            session.alive += 1
        drawn = len(taints) == 1 and taints[0].drawn and short in _OF_ACTIONS
        first: Taint | None = None
        for output in outputs:
            reached, kept, cut = live, cuts, None
            if live and not session.opaque_depth:
                cut = self._cut(short, site, live, output, drawn)
                if cut is not None:
                    cut.graph |= graph
                    reached, kept = 0, cuts | {cut}
            elif depends and session.region is not None and not torch.is_grad_enabled():
                session.region.ops += 1  # further operations on what the region has cut off
            taint = Taint(depends, reached, kept, site, name, session.step, opaque, drawn)
            if cut is not None and _is_new_leaf(short, output):
                own = session.registry.bit(output)
                taint = replace(taint, depends=depends | own, live=own)
                session.taints[output] = taint
            elif not output.requires_grad or node_of(output) is not None or is_dead_view(output):
                session.taints[output] = taint
                base = output._base
                # written through a view; a parameter stays one (nn.Embedding clears its padding)
                if base is not None and short.endswith("_") and not isinstance(base, nn.Parameter):
                    session.taints[base] = self._with_the_rest(base, output, taint)
            if cut is not None and short in _SHARING and address_of(output):
                memory = StorageWeakRef(output.untyped_storage())
                session.severed[address_of(output)] = (memory, taint)
            mark_origin(output, NodeOrigin(name, site, session.step))
            first = first or taint
        assert first is not None
        return first

    def _with_the_rest(self, base: Tensor, part: Tensor, taint: Taint) -> Taint:
        """What a tensor depends on after a part of it was written: the rest stays what it was."""
        before = self.session.taints.get(base)
        if before is None or part.numel() >= base.numel():
            return taint
        depends, live, cuts, opaque = merged([before, taint])
        return replace(taint, depends=depends, live=live, cuts=cuts, opaque=opaque)

    def _cut(
        self, short: str, site: Site | None, live: int, output: Tensor, drawn: bool
    ) -> Cut | None:
        """The cut that this call made, if its output is out of autograd's sight."""
        session = self.session
        step, shape = session.step, shape_of(output)
        if output.requires_grad and not is_dead_view(output) and not _is_new_leaf(short, output):
            if short in _ZERO_DERIVATIVE:
                kind, region = "zero", None
            elif short == "normal":  # it needs gradient, and passes zeros to mean and std
                kind, region = "sample", None
            else:
                return None
        else:
            region = None
            if short in _EXPLICIT:
                kind = "sample" if drawn else "explicit"
            elif short in _SAMPLERS:
                kind = "sample"
            elif not (output.is_floating_point() or output.is_complex()):
                kind = "integer"
            else:
                region = self._region()
                kind = "region" if region is not None else "explicit"
        if region is not None:
            region.ops += 1
            key: Any = region
            where = region.site
        else:
            key, where = (kind, short, site, step), site
        return session.cuts.enter(
            key, lambda: Cut(kind, short, where, step, 0, region, shape=shape), live
        )

    def _array(
        self, short: str, site: Site | None, taints: list[Taint], tensor: Tensor, array: Any
    ) -> None:
        """Arrays share memory with their tensor: known again by their address."""
        taint = self._outside("explicit", short, site, taints)
        self.session.arrays[_address(array)] = taint
        if taint.depends and tensor.is_floating_point():
            with self.session.pause():
                values = values_of(tensor)
                if values is not None:
                    self.session.returned.keep_array(values, taint)

    def _of_array(self, value: Any) -> list[Taint]:
        taint = self.session.arrays.get(_address(value)) if self.session.arrays else None
        return [] if taint is None else [taint]

    def remade(self, parameter: Tensor, data: Tensor) -> None:
        """`nn.Parameter(computed)`: a new leaf, without the graph of what it was computed from."""
        session = self.session
        if not self.on or session.paused or node_of(data) is None:
            return
        taint = session.taint_of(data)
        if taint is None or not taint.live:
            return
        cut = self._outside("explicit", "Parameter", here(session.module_path), [taint])
        own = session.registry.bit(parameter)
        session.taints[parameter] = replace(cut, depends=cut.depends | own, live=own)

    def from_numpy(self, array: Any, tensor: Tensor) -> None:
        """`torch.from_numpy` passes by the mode; the watch tells us of it."""
        taints = self._of_array(array)
        if not taints and self.session.returned:
            taints = self.session.held_by(tensor)
        if not self.on or self.session.paused or self.session.drowsy or self.session.asleep:
            return
        if taints:
            site = here(self.session.module_path)
            self._spread("torch.from_numpy", "from_numpy", site, taints, [tensor])
        elif self.session.wants("op"):
            site = here(self.session.module_path)
            call = OpCall("torch.from_numpy", site, (array,), {}, [], [], [tensor], None, tensor)
            self.session.tell("op", call)

    def _scalar(self, short: str, site: Site | None, taints: list[Taint], result: Any) -> None:
        made = running_constructor() if short == "__float__" else None
        if made is not None:
            taint = self._outside("explicit", made, site, taints)
        else:
            taint = self._outside("scalar", short, site, taints)
        if taint.depends:
            for number in _floats(result):
                self.session.numbers.keep(number, taint)
                self.session.returned.keep(number, taint)

    def _outside(self, kind: str, short: str, site: Site | None, taints: list[Taint]) -> Taint:
        """The taint of what left torch: a Python number, an array."""
        depends, live, cuts, opaque = merged(taints)
        session = self.session
        if live:
            key = (kind, short, site, session.step)
            cut = session.cuts.enter(key, lambda: Cut(kind, short, site, session.step, 0), live)
            cut.graph |= in_graphs(taints)
            cuts = cuts | {cut}
        return Taint(depends, 0, cuts, site, short, session.step, opaque)


def _is_new_leaf(short: str, output: Tensor) -> bool:
    """`torch.tensor(values, requires_grad=True)`: needs gradient, and has none to pass on."""
    return short in _COPIES and output.requires_grad and output.is_leaf


# looks that are facts


def _grad_off(session: Session, args: Any) -> None:
    # torch's distributions draw without gradients: that is a sample, not a mistake
    kind = "sample" if within("distributions") else "no_grad"
    session.region = Region(kind, session.entering or session.here())


def _switched(session: Session, args: Any) -> None:
    tensor = args[0]
    if tensor.is_leaf and tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
        session.registry.made(tensor, session.here(), session.step)
        stored = session.taints.get(tensor)
        if stored is not None and not stored.live:
            # what it was made from stays cut off; what is made of it has a gradient for it
            bit = session.registry.bit(tensor)
            session.taints[tensor] = replace(stored, depends=stored.depends | bit, live=bit)
    if isinstance(tensor, torch.nn.Parameter):
        session.registry.switched(tensor, session.here, user_lines)


def _gradient_set(session: Session, args: Any) -> None:
    with session.pause():
        session.add_event("grad_set", parameter=args[0], empty=args[1] is None)


def _gradient_read(session: Session, args: Any) -> None:
    if asked_by_user(3):
        tensor = args[0]
        if not tensor.is_leaf and tensor.requires_grad and not tensor.retains_grad:
            session.add_event("no_grad_kept", tensor=weakref.ref(tensor))
        bit = session.registry.known_bit(args[0])
        session.gradients_read |= bit
        session.read_since_backward |= bit


def _initialised(session: Session, args: Any) -> None:
    tensor = next((a for a in args if a is not None), None)
    if isinstance(tensor, nn.Parameter):
        session.registry.initialised(tensor, session.here())


def _zeroed(session: Session, args: Any) -> None:
    tensor = next((a for a in args if a is not None), None)
    if isinstance(tensor, nn.Parameter):
        session.registry.zeroed_at[tensor] = session.here()


_CONSTANT = {"torch.nn.init.zeros_", "torch.nn.init.constant_"}
_RANDOM = {
    f"torch.nn.init.{name}_"
    for name in ("uniform", "normal", "trunc_normal", "kaiming_uniform", "kaiming_normal")
}
_BEFORE = {"torch.Tensor.grad.__set__": _gradient_set, "torch.Tensor.grad": _gradient_read}
_AFTER = {
    "torch.Tensor.requires_grad_": _switched,
    "torch.Tensor.requires_grad.__set__": _switched,
}


def _address(array: Any) -> int | None:
    interface = getattr(array, "__array_interface__", None)
    return None if interface is None else interface["data"][0]


def _floats(value: Any) -> Iterator[float]:
    if type(value) is float:
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _floats(item)
