"""What a user's function gave back: which quantity, of which shape, summed or averaged how.

The layout is decided once, on the plainest case, and kept: a function that changes what it returns
from case to case is wrong, not understood anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradient_doctor.conformance.golden import Scene
from gradient_doctor.conformance.signatures import ADAPTER, Form, TargetError

Key = int | str | None


@dataclass(frozen=True)
class Layout:
    """One quantity among what the function returns."""

    key: Key
    quantity: str
    kind: str
    """token, sequence or scalar."""
    reduction: str = "mean"
    """Of a sequence or scalar: mean, sum, or (scalar) sum per sequence."""
    row: bool = False
    """Width S in the sequence convention: is column t about row t, or about token t?"""

    def read(self, result: Any, scene: Scene) -> Tensor:
        """The numbers that are compared, flat and in fp64; ValueError if the shape is another."""
        value = pieces(result).get(self.key)
        if value is None or shape_kind(value) != self.kind:
            got = "nothing" if value is None else f"shape {list(value.shape)}"
            raise ValueError(f"gave {got} here, but values per {self.kind} in the plainest case")
        value = value.detach().double()
        if self.kind == "scalar":
            return value.reshape(1)
        batch, width = scene.ids_NS.shape
        if value.shape[0] != batch:
            raise ValueError(f"gave {value.shape[0]} rows for a batch of {batch}")
        if self.kind == "sequence":
            return value
        by_token_NS = torch.full((batch, width), torch.nan, dtype=torch.float64)
        got = value.shape[1]
        if got == width and self.row:
            by_token_NS[:, 1:] = value[:, :-1]
        elif got in (width, width - 1, scene.keep):
            by_token_NS[:, width - got :] = value
        else:
            raise ValueError(
                f"gave {list(value.shape)} for sequences of {width} tokens, expected "
                f"{width - 1} or {width} columns"
            )
        return by_token_NS[scene.response_NS]

    def project(self, value_NS: Tensor, counted_NS: Tensor, scene: Scene) -> Tensor:
        """Values by token, true or mistaken, as this function would have returned them."""
        if self.kind == "token":
            return value_NS[scene.response_NS]
        zeroed_NS = torch.where(counted_NS, value_NS, 0.0)
        sum_N, count_N = zeroed_NS.sum(1), counted_NS.sum(1)
        if self.kind == "sequence":
            return sum_N / count_N if self.reduction == "mean" else sum_N
        count = {"mean": count_N.sum(), "sum": 1, "sum per sequence": len(sum_N)}[self.reduction]
        return (sum_N.sum() / count).reshape(1)

    def __str__(self) -> str:
        name = {"logprob": "log-prob", "surprisal": "-log-prob"}.get(self.quantity, self.quantity)
        if self.kind == "token":
            return f"{name} per token"
        return f"{name}, {self.reduction} over " + (
            "each sequence" if self.kind == "sequence" else "tokens"
        )


def pieces(result: Any) -> dict[Key, Tensor]:
    """Float tensors of a result, by position or name. A bare one has the key None."""
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
    elif isinstance(result, tuple) and (names := getattr(result, "_fields", None)):
        result = dict(zip(names, result))
    if isinstance(result, Mapping):
        named = dict(result)
    elif isinstance(result, (tuple, list)):
        named = dict(enumerate(result))
    else:
        named = {None: result}
    tensors: dict[Key, Tensor] = {}
    for key, value in named.items():
        if isinstance(value, float):
            value = torch.tensor(value, dtype=torch.float64)
        if isinstance(value, Tensor) and value.is_floating_point():
            tensors[key] = value
    return tensors


def shape_kind(value: Tensor) -> str:
    if value.numel() == 1 and value.ndim < 2:
        return "scalar"
    return {1: "sequence", 2: "token"}.get(value.ndim, f"{value.ndim} axes")


def layouts(
    result: Any, scene: Scene, form: Form, *, name: str, returns: str | None = None
) -> list[Layout]:
    """Which piece is what: by its key, by the function's name, by its sign."""
    tensors = pieces(result)
    name = name.lower().replace("cross_entropy", "nll")
    if not tensors:
        raise TargetError(
            f"{name} returned {type(result).__name__}, expected a float tensor, a tuple or a dict "
            f"of them. {ADAPTER}"
        )
    returned: dict[Key, str] = {}
    bare = len(tensors) == 1
    for key, value in tensors.items():
        if returns is not None and bare:
            returned[key] = returns
        elif isinstance(key, str):
            if guess := _from_name(key):
                returned[key] = guess
        elif bare:
            ids = form.has("input_ids", "index", "labels", "model", "batch", "shards")
            returned[key] = (_from_name(name) or _from_sign(value)) if ids else "entropy"
        else:
            returned[key] = _from_sign(value)
    if not returned or len(set(returned.values())) < len(returned):
        raise TargetError(
            f"{name} returned {[k if isinstance(k, str) else 'tensor' for k in tensors]}, in which "
            "entropies and log-probs cannot be told apart. Return one tensor, or a dict with the "
            "keys 'entropy' and 'logprob'."
        )
    chosen = []
    for key, quantity in returned.items():
        kind = shape_kind(tensors[key])
        rows = tensors[key].shape[0] if kind == "sequence" else len(scene.ids_NS)
        if kind not in ("token", "sequence", "scalar") or rows != len(scene.ids_NS):
            raise TargetError(
                f"{name} returned shape {list(tensors[key].shape)} for a batch of "
                f"{list(scene.ids_NS.shape)} tokens, expected [N, S], [N] or one number. {ADAPTER}"
            )
        chosen.append(Layout(key, quantity, kind))
    return chosen


def _from_name(name: str) -> str | None:
    name = name.lower()
    if any(part in name for part in ("nll", "loss", "surprisal")):
        return "surprisal"
    if "entrop" in name:
        return "entropy"
    if any(part in name for part in ("logp", "log_p", "logsoftmax", "log_softmax")):
        return "logprob"
    return None


def _from_sign(value: Tensor) -> str:
    return "logprob" if bool((value <= 0).all()) else "entropy"
