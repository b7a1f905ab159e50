"""A policy whose model is cut over the ranks (FSDP2): for models larger than one device.

    every layer     gathered for its own computation, and dropped again
    embeddings, head, last norm     gathered for the whole pass
    gradients       reduce-scattered: each rank keeps the *sum* over ranks for its shards

`params` are the shards, under the model's own names (torch's DTensor: the global shape, a local
part). FSDP gathers the model's own parameters and nothing else, so `functional_call` cannot hand it
others: `score` writes those that differ into the shards, runs, and puts the bits back. Gradients
come through one autograd Function, whose backward is FSDP's: for an estimator a sharded policy is
differentiable like any other, once and in reverse. There is no forward mode.

Gradients of fp32 parameters travel and are added in fp64, and are read before FSDP rounds them: so
they are those of one process to the last bit, and what magnifies that bit (a difference along a
direction made of them) is, too.

A pass needs all ranks at once. The ranks' microbatches are different, their number is not:
`Rollouts.split` adds idle ones (see `lockstep`). Sampling is one long pass, in which rank 0 draws
for all. Each pass begins with `Ranks.agree`, so a rank that fails between passes ends the others
there. One that fails *inside* a pass cannot be heard by ranks that wait for its share of a layer;
it raises, and the others notice that its process ends. What cannot be sharded (`check_shardable`)
is refused before anything is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import get_interpreter_stack
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from entropy_experiments.distributed import (
    LOST,
    LostRankError,
    RankError,
    Ranks,
    hold_shards,
    known_to_all,
    local_part,
)
from entropy_experiments.models.call_conditions import causal_lm
from entropy_experiments.models.positions import Contexts
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.threads import same_threads
from entropy_experiments.types import OptimizerState, Params, Rollouts, Scores, check_params

NEEDED = (
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_all_reduce_hook",
)
"""Of FSDP2's modules; torch got them later than `fully_shard` itself."""
TRIED = "2.13"
"""The version of torch that shards in the tests."""
T = TypeVar("T")
MODES = ("central", "reverse")
CLOSED_CONNECTION = ("gloo/transport", "NCCL", "Connection closed by peer")
"""In the message of an exchange that broke inside a pass."""


class ShardedModel(nn.Module):
    """A model cut over `ranks`, layer by layer; `run_pass` runs something with it, on all of them.

    The model is changed in place: its parameters become shards. Everything that is not in a
    decoder layer belongs to this module, so that it is there for whatever `run_pass` runs, not only
    inside the forward of a module of its own: the head's weights are used without the head.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        check_shardable(model, ranks)
        self.model: nn.Module = model
        self.ranks: Ranks = ranks
        # Once and for all: what is trained does not change when an adapter is switched off.
        self._names = tuple(n for n, p in model.named_parameters() if p.requires_grad)
        mesh = mesh or mesh_of(ranks, next(model.parameters()).device.type)
        precision = _reduction(model)
        self._groups: dict[str, FSDPModule] = {}
        """By parameter: the module that FSDP reduces its gradient with."""
        self._sums: dict[FSDPModule, Tensor] = {}
        """Of the last backward: gradients summed over ranks, flat, before FSDP rounds them."""
        for module in (*decoder_layers(model), self):
            # Without resharding, written shards would not be seen by the next pass.
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
            self._own_group(cast(FSDPModule, module))
        for module in self._fsdp_modules():
            # The sum over ranks, not FSDP's mean; as a plain sum, since gloo has no other.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # Experts that are used on one rank only.
            module.set_reduce_scatter_unused_params(True, recurse=False)
            module.set_all_reduce_hook(partial(self._sums.__setitem__, module))
        self._failed = False

    def _own_group(self, module: FSDPModule) -> None:
        """What became shards with this module is reduced with it."""
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, DTensor):
                self._groups.setdefault(name, module)

    def gradient_shards(self) -> dict[str, Tensor | None]:
        """Of the last backward, as precise as they were summed; taken: they are kept no longer."""
        try:
            return {
                name: None if shard.grad is None else self._unrounded(name, shard)
                for name, shard in self.shards.items()
            }
        finally:
            self.drop_gradients()

    def drop_gradients(self) -> None:
        self._sums.clear()
        for shard in self.shards.values():
            shard.grad = None

    def _unrounded(self, name: str, shard: DTensor) -> Tensor:
        """The part of its group's sums that FSDP rounded to this gradient: at the same place."""
        gradient: Any = shard.grad
        sums = self._sums.get(self._groups[name])
        if sums is None or gradient.dtype != torch.float32:
            return gradient
        rounded = gradient.to_local()
        fits = rounded.storage_offset() + rounded.numel() <= sums.numel()
        own = sums.as_strided(rounded.size(), rounded.stride(), rounded.storage_offset() * fits)
        if not fits or not bool(((own.to(rounded.dtype) == rounded) | rounded.isnan()).all()):
            raise RuntimeError(
                f"FSDP of torch {torch.__version__} keeps the gradient of {name} elsewhere than in "
                f"torch {TRIED}, with which sharding works; expected the sum that it rounded. "
                f"Install torch {TRIED}, or set checkpoint.sharding: none."
            )
        return _as_shard(own, shard)

    @property
    def shards(self) -> dict[str, DTensor]:
        """The trainable parameters of the model, by its own names."""
        parameters: dict[str, Any] = dict(self.model.named_parameters())
        return {name: parameters[name] for name in self._names}

    def forward(self, work: Callable[[], T]) -> T:
        return work()

    def run_pass(self, work: Callable[[], T]) -> T:
        """What `work` gives, which calls the model; every rank must come, with work of its own."""
        return self.run_in_step(lambda: self(work))

    def run_in_step(self, work: Callable[[], T]) -> T:
        """`work` with FSDP's exchanges inside, in step with the other ranks."""
        if self._failed:
            # The others know of that pass, or are gone: an exchange of flags would wait for them.
            raise known_to_all(
                RuntimeError(
                    "An earlier pass of the sharded model failed half-way: the ranks are no longer "
                    "in step. Load the model again, in new processes."
                )
            )
        self.ranks.agree(passing=True)
        try:
            with same_threads():
                return work()
        except BaseException as error:
            self._failed = True  # after Ctrl-C too
            _reshard(self._fsdp_modules(), error)
            if not isinstance(error, Exception) or isinstance(error, RankError):
                raise
            if any(word in str(error) for word in CLOSED_CONNECTION):
                raise LostRankError(LOST.format(str(error).splitlines()[0])) from error
            # The others wait inside the pass and would not hear: they notice that this one ends.
            raise known_to_all(error) from None

    @contextmanager
    def hold_values(self, params: Params) -> Iterator[None]:
        """Inside, the shards have these values; outside, their own bits again."""
        own = {name: local_part(shard) for name, shard in self.shards.items()}
        before: dict[str, Tensor] = {}
        try:
            for name, mine in own.items():
                wanted = local_part(params[name]).to(mine.dtype)  # a leaf may be wider
                if mine.data_ptr() != wanted.data_ptr() and not torch.equal(mine, wanted):
                    before[name] = mine.clone()
                    mine.copy_(wanted)
            yield
        finally:
            for name, value in before.items():
                own[name].copy_(value)

    def cut(self, whole: Params) -> dict[str, DTensor]:
        """Shards of whole tensors, which every rank has, each as its parameter is cut."""
        shards = self.shards
        return {name: _shard_like(value, shards[name]) for name, value in whole.items()}

    def cut_state(self, optimizer: OptimizerState) -> OptimizerState:
        """An optimizer's memory, cut as the parameters are."""
        shards = self.shards
        return replace(
            optimizer,
            state={
                name: {
                    key: _shard_like(value, shards[name])
                    if isinstance(value, Tensor) and value.shape == shards[name].shape
                    else value
                    for key, value in entry.items()
                }
                for name, entry in optimizer.state.items()
            },
        )

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.modules() if isinstance(module, FSDPModule)]


def _reshard(modules: Sequence[FSDPModule], error: BaseException) -> None:
    """After a pass that ended with `error`, which is what went wrong, whatever happens here."""
    for module in modules:
        try:
            module.reshard()
        except Exception as second:
            error.add_note(f"Its layers could not be dropped, either: {second!r}")


class ShardedPolicy:
    """A sharded model as the estimators see it (`types.Policy`).

    ranks = Ranks.all()
    policy = ShardedPolicy(ShardedModel(model, ranks))
    with across(ranks):
        first_order(policy, rollouts, direction, mode="central")
    """

    modes = MODES

    def __init__(
        self,
        sharded: ShardedModel,
        *,
        temperature: float = 1.0,
        chunk: int | None = None,
        checkpointing: bool = False,
    ) -> None:
        self.sharded: ShardedModel = sharded
        self.ranks: Ranks = sharded.ranks
        self.model: nn.Module = sharded.model
        self.chunk: int | None = chunk
        self.checkpointing: bool = checkpointing
        # What it finds out about the model at construction takes passes.
        self._inside: SequenceProcessor = sharded.run_pass(
            lambda: _OwnValues(
                self.model, temperature=temperature, chunk=chunk, checkpointing=checkpointing
            )
        )

    @property
    def params(self) -> dict[str, Tensor]:
        """The trainable parameters' shards by name, detached but sharing the model's memory."""
        return {name: shard.detach() for name, shard in self.sharded.shards.items()}

    @property
    def temperature(self) -> float:
        return self._inside.temperature

    @property
    def top_p(self) -> float:
        return 1.0

    @property
    def lockstep(self) -> int:
        """So many ranks must make each pass together."""
        return self.ranks.size

    @property
    def shares_prompts(self) -> bool:
        return self._inside.shares_prompts

    @property
    def logits_path(self) -> str:
        return self._inside.logits_path

    @property
    def padding_index(self) -> int | None:
        return self._inside.padding_index

    @property
    def contexts(self) -> Contexts:
        return self._inside.contexts

    @property
    def device(self) -> torch.device:
        return self._inside.device

    def at(self, temperature: float) -> ShardedPolicy:
        """The same model at another temperature."""
        return ShardedPolicy(
            self.sharded,
            temperature=temperature,
            chunk=self.chunk,
            checkpointing=self.checkpointing,
        )

    def as_trained(self) -> ShardedPolicy:
        """The same scores with the gradient that *training* takes of them."""
        other = copy(self)
        other._inside = self._inside.as_trained()
        return other

    def cut(self, whole: Params) -> dict[str, Tensor]:
        """Shards of whole tensors, which every rank has: a direction, say."""
        return {**self.sharded.cut(whole)}

    def score(self, params: Params, rollouts: Rollouts) -> Scores:
        """Of this rank's rollouts; every rank must come, with rollouts of its own."""
        if get_interpreter_stack():
            raise ValueError(
                "A sharded model inside a transform of torch.func (jvp, vjp, vmap); expected a "
                f"plain call. FSDP has no forward mode: use one of the modes {self.modes}."
            )
        check_params("params", params, self.params)
        names, values = list(params), list(params.values())
        if torch.is_grad_enabled() and any(value.requires_grad for value in values):
            return Scores(*_Scored.apply(self, rollouts, names, *values))
        with torch.no_grad():
            return self._score_pass(params, rollouts)

    def _score_pass(self, params: Params, rollouts: Rollouts) -> Scores:
        with self.sharded.hold_values(params):
            return self.sharded.run_pass(lambda: self._inside.score({}, rollouts))

    def _gradient_shards(
        self, params: Params, scores: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Gradients' shards, summed over ranks. FSDP gathers the parameters once more for this."""
        try:
            with self.sharded.hold_values(params):
                self.sharded.run_in_step(lambda: torch.autograd.backward(scores, cotangents))
            gradients = self.sharded.gradient_shards()
        finally:
            self.sharded.drop_gradients()
        return [gradients[name] for name in params]


class _OwnValues(SequenceProcessor):
    """Scores at the values that the model holds just now: nothing is put in their place."""

    @property
    def params(self) -> dict[str, Tensor]:
        return {}


class _Scored(torch.autograd.Function):
    """Scores as a function of the shards; the graph inside is FSDP's, and ends at its gathers."""

    @staticmethod
    def forward(
        ctx: Any, policy: ShardedPolicy, rollouts: Rollouts, names: list[str], *values: Tensor
    ) -> tuple[Tensor, ...]:
        params = dict(zip(names, values, strict=True))
        with torch.enable_grad():
            ctx.scores = policy._score_pass(params, rollouts)
        ctx.policy, ctx.params = policy, params
        return tuple(x_NS.detach() for x_NS in ctx.scores)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        if torch.is_grad_enabled():
            # `once_differentiable` would hand out constants where `cotangents` needs no gradient.
            raise ValueError(
                "A gradient of a sharded model's scores with create_graph=True; expected False: "
                "FSDP has no double backward. Take second derivatives with mode 'central'."
            )
        scores, ctx.scores = ctx.scores, None  # a pass's activations, no longer than needed
        if scores is None:
            raise RuntimeError(
                "A second backward through the same scores of a sharded model; expected one: the "
                "first frees what the pass kept. Score again, or add the losses up before it."
            )
        return None, None, None, *ctx.policy._gradient_shards(ctx.params, scores, cotangents)


def _reduction(model: nn.Module) -> MixedPrecisionPolicy:
    """Gradients in half precision are added over ranks in fp32, and rounded once: FSDP gives them
    back in the precision of their parameter, as autograd does in one process. Those in fp32 are
    added in fp64, as `GradientSum` does in one process."""
    trained = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
    half = trained.itemsize < torch.float32.itemsize
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else torch.float64)


def decoder_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """What is gathered at a time: the blocks that transformers says belong together."""
    names = set(getattr(causal_lm(model), "_no_split_modules", None) or ())
    layers = tuple(module for module in model.modules() if type(module).__name__ in names)
    if not layers:
        raise ValueError(
            f"{type(causal_lm(model)).__name__} names no layers that belong together "
            "(_no_split_modules); expected its decoder layers. It cannot be sharded: set "
            "checkpoint.sharding: none."
        )
    return layers


def _shard_like(value: Tensor, shard: DTensor) -> DTensor:
    """This rank's rows, copied: the whole can then be freed. Nothing is sent."""
    mesh, whole = shard.device_mesh, value.detach()
    if whole.shape != shard.shape:
        raise ValueError(
            f"Got a tensor of shape {tuple(whole.shape)} to cut as a parameter of shape "
            f"{tuple(shard.shape)}; expected the same."
        )
    pieces = dict(enumerate(whole.chunk(mesh.size(), dim=0)))  # as FSDP cuts; may be fewer
    mine = pieces.get(mesh.get_local_rank(), whole[:0]).to(shard.device, copy=True)
    return _as_shard(mine, shard)


def _as_shard(mine: Tensor, shard: DTensor) -> DTensor:
    """This rank's rows of a tensor that is cut as `shard` is. Nothing is sent."""
    return DTensor.from_local(
        mine.contiguous(),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )


def check_shardable(model: nn.Module, ranks: Ranks) -> None:
    if ranks.group is None:
        raise in_one_process()
    check_torch()
    quantised = [name for name, p in model.named_parameters() if not p.is_floating_point()]
    if quantised:
        raise ValueError(
            f"{len(quantised)} parameters are quantised ({quantised[0]} is "
            f"{model.get_parameter(quantised[0]).dtype}); expected floating point, which can be "
            "cut over ranks. Load the base without quantisation, or set checkpoint.base to the "
            "unquantised model."
        )
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(trained) > 1:
        dtypes = ", ".join(sorted(str(dtype) for dtype in trained))
        raise ValueError(
            f"The trainable parameters have several dtypes ({dtypes}); expected one, since their "
            "gradients are summed together. Set checkpoint.dtype."
        )


def check_torch(module: type = FSDPModule) -> None:
    """Before anything is cut: a mean in place of a sum would be another gradient."""
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing)} on {module.__name__}; expected "
            f"all of them, as torch {TRIED} has, with which sharding works. Upgrade torch, or set "
            "checkpoint.sharding: none."
        )


def in_one_process() -> ValueError:
    return ValueError(
        "A sharded model in 1 process; expected several. Start the command with torchrun "
        "--nproc-per-node 2 (or more), or set checkpoint.sharding: none."
    )


@cache
def mesh_of(ranks: Ranks, device: str) -> DeviceMesh:
    """A line of these ranks. On CPU its exchanges are those of `ranks`, in the same order.

    Made once: a group takes memory on its devices until the process ends.
    """
    group: Any = ranks.group
    if device != "cpu":
        group = dist.new_group(**like_group(ranks, f"cpu:gloo,{device}:nccl"))
    hold_shards(group, ranks)
    return DeviceMesh.from_group(group, device)


def like_group(ranks: Ranks, backend: str) -> dict[str, Any]:
    """For `new_group`: the same processes, who wait as long for each other, by another backend.

    The ranks' own is gloo, and parameters travel between the devices.
    """
    group: Any = ranks.group
    members = dist.get_process_group_ranks(group)
    return {
        "ranks": members,
        "backend": backend,
        # torch would take its own 10 or 30 minutes.
        "timeout": group._get_backend(torch.device("cpu")).options._timeout,
        # Otherwise torch waits for the processes outside, too, and they do not come.
        "use_local_synchronization": len(members) < dist.get_world_size(),
    }
