"""Directional derivatives of anything that depends on parameters, by three methods.

    pushforward:   f(theta) and D_v f           (D_v D_v f: `numerics.second_order`)
    pullback:      the gradient of a scalar

`jvp` is one forward pass with dual numbers. `double_backward` uses reverse mode only: J^T u is
linear in u, and its derivative in u along v is J v; plain autograd, so that Functions that know
nothing of torch.func have it too. `central` is two plain forwards, O(step^2) away from the truth
and all that remains when a model cannot be differentiated twice, as with fused attention kernels,
which have neither forward mode nor a double backward. Gradients of single rollouts are in
`numerics.rollout_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from entropy_experiments.distributed import current, is_shard, local_part, shards_of
from entropy_experiments.types import Params, check_params

How = Literal["jvp", "double_backward", "central"]

NO_DERIVATIVE = (
    "not implemented",
    "does not support it",
    "forward AD",
    "functorch",
    "torch.func",
    "vmap",
    "setup_context",
    "not differentiable",
    "does not require grad",
    "in-place",
    "inplace",
)
"""In the messages of torch about an operation that cannot be differentiated in some way."""
NEAR = 4.0
"""Learning rates from theta to the points of a first difference: about the step it speaks of."""
ROUNDINGS = 2.0**12
"""And at least so many roundings of theta, so that theta + h v is where it should be."""
IN_CACHE = 2**14
AUTOCAST_DEVICES = tuple(
    device
    for device in ("cpu", "cuda", "xpu", "mps", "hpu", "ipu", "xla", "mtia", "privateuseone")
    if torch.amp.is_autocast_available(device)
)
"""Kinds of devices whose autocast torch switches one by one."""


class NoDerivativeError(ValueError):
    """A model that cannot be differentiated this way; the message says what to do."""


def pushforward(
    f: Callable[[Params], Any],
    params: Params,
    v: Params,
    *,
    how: How = "jvp",
    step: float | None = None,
) -> tuple[Any, Any]:
    """f(params) and its derivative along v, both with f's own structure of tensors."""
    params, v = _aligned(params, v)
    if how in ("jvp", "double_backward"):
        with differentiating(how), no_autocast():
            if how == "double_backward":
                return _double_backward(f, params, v)
            with torch.no_grad():
                return dual(f, (params,), (v,))
    if how == "central":
        with torch.no_grad(), no_autocast():
            return f(params), _difference(f, params, v, step)
    raise ValueError(f"how={how!r}; expected one of {get_args(How)}.")


@contextmanager
def differentiating(how: str) -> Iterator[None]:
    """Errors of torch about missing derivatives become one line that says what to do."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        reason = first_line(error)
        unsupported = isinstance(error, NotImplementedError) or any(
            w in reason for w in NO_DERIVATIVE
        )
        if isinstance(error, torch.OutOfMemoryError) or not unsupported:
            raise
        raise NoDerivativeError(
            f"An operation of the model cannot be differentiated by {how!r} ({reason}). Use "
            "mode='auto' (predict.method: auto), which takes the first way that works; a "
            "fused attention kernel has none but 'reverse' and 'central': load the model with "
            "attn_implementation='eager' or 'sdpa'."
        ) from error


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a line of ours."""
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:200].rstrip(". ")


def pushforwards(
    f: Callable[[Params], Any],
    params: Params,
    many: Sequence[Params],
    *,
    how: How = "jvp",
    lr: float | None = None,
) -> tuple[Any, list[Any]]:
    """f(params) and its derivatives along several directions.

    By jvp they share one forward. By central they share f(params): 1 + 2 K forwards in all, over
    steps of about `lr` (None: where rounding and truncation balance).
    """
    if how == "central":
        with torch.no_grad(), no_autocast():
            return f(params), [
                _difference(f, *_aligned(params, v), difference_step(params, v, lr)) for v in many
            ]
    if how != "jvp" or len(many) == 1:
        results = [pushforward(f, params, v, how=how) for v in many]
        return results[0][0], [slope for _, slope in results]
    stacked = {
        name: torch.stack([v[name].to(theta.device, theta.dtype) for v in many])
        for name, theta in params.items()
    }
    shape: list[Any] = []

    def along(v: Params) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        here, slope = pushforward(f, params, v)
        leaves, structure = tree_flatten(here)
        shape.append(structure)
        return tuple(leaves), tuple(tree_flatten(slope)[0])

    unbatched_and_batched: Any = (None, 0)
    here, slopes = vmap(along, out_dims=unbatched_and_batched)(stacked)
    return tree_unflatten(list(here), shape[0]), [
        tree_unflatten([slope[k] for slope in slopes], shape[0]) for k in range(len(many))
    ]


def pullback(f: Callable[[Params], Tensor], params: Params) -> tuple[Tensor, dict[str, Tensor]]:
    """A scalar and its gradient. A parameter that does not reach the scalar is an error."""
    if shards_of(params).size > 1:
        raise ValueError(
            "The gradient of one scalar for sharded parameters: it would be that of every rank's "
            "scalar together. Expected pullback_sum, whose gradient is of their sum; what needs "
            "gradients one by one (an influence matrix) needs a whole model on every rank."
        )
    return _pulled_back(f, params)


def _pulled_back(f: Callable[[Params], Tensor], params: Params) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: _leaf(value) for name, value in params.items()}
    with torch.enable_grad(), no_autocast():
        value = f(leaves)
    if not value.requires_grad:
        raise ValueError(
            "The loss does not depend on any parameter: it is a constant. Was it computed under "
            "no_grad, or from an empty response mask?"
        )
    with no_autocast():  # backward's products, too, would be made in half
        grads = torch.autograd.grad(value, tuple(leaves.values()), allow_unused=True)
    missing = [name for name, grad in zip(leaves, grads, strict=True) if grad is None]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(grads)} parameters get no gradient: {missing[:5]}. Either "
            "the policy does not use them (leave them out of params), or reentrant gradient "
            "checkpointing hides them (use use_reentrant=False)."
        )
    return value.detach(), dict(zip(leaves, (g for g in grads if g is not None), strict=True))


def _leaf(value: Tensor) -> Tensor:
    """To differentiate at. A shard's gradient is a sum over ranks: autograd must not round it."""
    value = value.detach()
    return (value.double() if is_shard(value) else value).requires_grad_()


def pullback_sum(
    parts: Iterable[Callable[[Params], Tensor]], params: Params
) -> tuple[float, dict[str, Tensor], int]:
    """Value and gradient of a sum of scalars, one graph at a time; and how many there were."""
    ranks, holders = current(), shards_of(params)
    if holders.size > 1 and ranks.size == 1:
        raise ValueError(
            f"The parameters are sharded over {holders.size} ranks, and the work is not shared by "
            "them: each would add the whole gradient once more. Compute inside "
            "distributed.across(policy.ranks)."
        )

    def local() -> list[Tensor]:
        value, total = torch.zeros(2, dtype=torch.float64), GradientSum(params)
        for part in ranks.shard(parts):
            one, grads = _pulled_back(part, params)
            value += torch.tensor([float(one), 1.0], dtype=torch.float64)
            total.add(grads)
        return [value, *total.sums]

    (value, count), *sums = ranks.all_reduce(local)
    return float(value), as_gradients(sums, params), int(count)


class GradientSum:
    """Gradients of microbatches added up in fp64, so that their order leaves no trace.

    Each microbatch's gradient is the same on whichever rank it is computed; what is added in fp64
    and then rounded to the gradients' own precision is the same for any number of ranks.
    """

    def __init__(self, params: Params) -> None:
        self._sums = {
            name: torch.zeros_like(theta, dtype=torch.float64) for name, theta in params.items()
        }

    def add(self, gradients: Params) -> None:
        for name, gradient in gradients.items():
            self._sums[name] += gradient.detach()

    @property
    def sums(self) -> list[Tensor]:
        """In the order of the parameters, as `as_gradients` takes them."""
        return list(self._sums.values())


def as_gradients(sums: Iterable[Tensor], params: Params) -> dict[str, Tensor]:
    """Sums by name, in the precision of the parameters; half precision becomes fp32."""
    return {
        name: total.to(torch.promote_types(theta.dtype, torch.float32))
        for (name, theta), total in zip(params.items(), sums, strict=True)
    }


def dual(f: Callable[..., Any], at: tuple[Any, ...], along: tuple[Any, ...]) -> tuple[Any, Any]:
    """torch.func.jvp, whose declared type also allows for auxiliary outputs."""
    value, slope = jvp(f, at, along)[:2]
    return value, slope


def require_full_precision(params: Params) -> None:
    """fp32 means fp32: entropy changes are smaller than what TF32 drops."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest" and any(p.dtype == torch.float32 for p in params.values()):
        raise RuntimeError(
            f"float32 matrix products run at precision {precision!r}, which drops digits that "
            "entropy changes need; expected 'highest'. Call "
            "torch.set_float32_matmul_precision('highest')."
        )


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 products in fp32 inside, whatever a training around it uses; as it was outside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with no_autocast():
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def no_autocast() -> Iterator[None]:
    """Products in the precision of their factors, whoever has switched autocast on around it.

    A change of entropy is the difference of two nearly equal numbers, and bf16 has three digits.
    """
    with ExitStack() as stack:
        for device in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def shifted(params: Params, v: Params, step: float) -> dict[str, Tensor]:
    """theta + step v, in the parameters' own dtype."""
    return {
        name: torch.add(value.detach(), v[name].detach().to(value.dtype), alpha=step)
        for name, value in params.items()
    }


def dot(a: Params, b: Params) -> float:
    """Inner product, accumulated in fp64; of shards, over all ranks that hold one."""
    total = sum(_dot64(local_part(x), local_part(b[name])) for name, x in a.items())
    return over_shards(total, a)


def dots(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Inner products of many pairs, as `dot` gives each; of shards, in one exchange."""
    mine = [_dot64(local_part(x), local_part(y)) for x, y in pairs]
    holders = shards_of({str(i): x for i, (x, _) in enumerate(pairs)})
    if holders.size == 1:
        return mine
    return holders.all_reduce(lambda: [torch.tensor(mine, dtype=torch.float64)])[0].tolist()


def over_shards(mine: float, params: Params) -> float:
    """The sum of a number over all ranks that hold shards of the parameters."""
    holders = shards_of(params)
    if holders.size == 1:
        return mine
    return float(holders.all_reduce(lambda: [torch.tensor(mine, dtype=torch.float64)])[0])


def _dot64(x: Tensor, y: Tensor) -> float:
    return sum(float(torch.dot(a.double(), b.double())) for a, b in in_cache(x, y))


def in_cache(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one size, flat and a few numbers at a time.

    On a CPU: a copy of all parameters in fp64 goes through memory, a copy of these does not.
    """
    size = IN_CACHE if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    return zip(*(x.detach().flatten().split(size) for x in tensors), strict=True)


def norm(params: Params) -> float:
    total = 0.0
    for value in params.values():
        total += sum(square_sum(part) for (part,) in in_cache(local_part(value)))
    return over_shards(total, params) ** 0.5


def square_sum(x: Tensor) -> float:
    """In fp64."""
    x = x.double()
    return float(torch.dot(x, x))


def central_step(params: Params, v: Params, *, power: float) -> float:
    """Where rounding and truncation balance: eps^power of the parameters' size along v."""
    size = norm(v)
    if size == 0:
        return 1.0
    eps = max(torch.finfo(value.dtype).eps for value in params.values())
    return eps**power * max(norm(params), 1.0) / size


def difference_step(params: Params, v: Params, lr: float | None) -> float:
    """How far a first difference goes along v: a few learning rates, within what rounding allows.

    At the balance alone it was 9 to 21 % off on full fine-tunes in fp32.
    """
    balance, size = central_step(params, v, power=1 / 3), norm(v)
    if lr is None or size == 0:
        return balance
    eps = max(torch.finfo(value.dtype).eps for value in params.values())
    return min(balance, max(NEAR * lr, ROUNDINGS * eps * max(norm(params), 1.0) / size))


def _aligned(params: Params, v: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    check_params("direction", v, params)
    plain = {name: value.detach() for name, value in params.items()}
    return plain, {name: v[name].detach().to(value.dtype) for name, value in params.items()}


def _difference(
    f: Callable[[Params], Any], params: Params, v: Params, step: float | None = None
) -> Any:
    step = step or central_step(params, v, power=1 / 3)
    plus, minus = (f(shifted(params, v, c * step)) for c in (1, -1))
    return tree_map(lambda a, b: (a - b) / (2 * step), plus, minus)


def _double_backward(f: Callable[[Params], Any], params: Params, v: Params) -> tuple[Any, Any]:
    """f and J v. Parameters that f does not read have no part in it."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad():
        outputs, structure = tree_flatten(f(leaves))
        weights = [torch.zeros_like(out, requires_grad=True) for out in outputs]
        grads = torch.autograd.grad(
            outputs, tuple(leaves.values()), weights, create_graph=True, allow_unused=True
        )
        along = [
            (grad * v[name]).sum()
            for name, grad in zip(leaves, grads, strict=True)
            if grad is not None
        ]
        slopes = torch.autograd.grad(sum(along), weights)  # type: ignore[arg-type]
    return tuple(
        tree_unflatten([x.detach() for x in part], structure) for part in (outputs, slopes)
    )
