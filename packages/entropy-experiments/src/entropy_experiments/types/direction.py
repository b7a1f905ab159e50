"""An update direction per unit learning rate, and the optimizer state it is rebuilt from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from sys import float_info
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.types.rollouts import Params, Policy

BASELINE_PARTS = ("momentum", "decay")
SMALLEST_RATE = float_info.min


@dataclass(frozen=True, kw_only=True, eq=False)
class Direction:
    """v in theta + eta v, as named parts whose sum it is.

    A rebuilt optimizer step has the parts momentum, decay and gradient; an observed one has the
    single part observed, since the parameters alone do not say what moved them.

    Args:
        parts: Parameters-shaped tensors by the name of the part.
        lr: The learning rate of the step: theta + lr * total is where it ends.
        preconditioner: P in gradient = -P c g_L: what one unit of loss gradient becomes in this
            step (negative for an optimizer that maximizes).
        clip_factor: c, by which the gradient was scaled.

    Raises:
        ValueError: If there are no parts, their names or shapes differ, a value is not finite, or
            `lr` is not positive.

    Examples:
        >>> import torch
        >>> parts = {"decay": {"w": -torch.ones(2)}, "gradient": {"w": torch.ones(2)}}
        >>> v = Direction(parts=parts, lr=0.1)
        >>> v.total["w"].tolist(), v.only("decay").total["w"].tolist()
        ([0.0, 0.0], [-1.0, -1.0])
    """

    parts: Mapping[str, Params]
    lr: float
    preconditioner: Params | None = None
    clip_factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("Direction has no parts; expected at least one, such as 'gradient'.")
        if not (isfinite(self.lr) and self.lr > 0):
            raise ValueError(
                f"Direction has learning rate {self.lr}; expected a positive number. A schedule "
                "that ended stores 0: give the rate of the step in question as `lr`."
            )
        if self.lr < SMALLEST_RATE:
            raise ValueError(
                f"Direction has learning rate {self.lr}; expected at least {SMALLEST_RATE:.3g}, "
                "below which floating point loses its digits: no weight would move. Take a larger "
                "step."
            )
        first = next(iter(self.parts.values()))
        for part, params in self.parts.items():
            check_params(f"part {part!r} of the direction", params, first)
            check_finite(f"part {part!r} of the direction", params)
        if self.preconditioner is not None:
            check_params("preconditioner", self.preconditioner, first)

    @property
    def total(self) -> Params:
        parts = tuple(self.parts.values())
        return {name: sum_of(part[name] for part in parts) for name in parts[0]}

    @property
    def momentum(self) -> Params:
        return self._part("momentum")

    @property
    def decay(self) -> Params:
        return self._part("decay")

    @property
    def gradient(self) -> Params:
        return self._part("gradient")

    def only(self, *names: str) -> Direction:
        """The direction made of these parts alone, such as the baseline: momentum and decay."""
        return Direction(
            parts={name: self._part(name) for name in names},
            lr=self.lr,
            preconditioner=self.preconditioner,
            clip_factor=self.clip_factor,
        )

    def _part(self, name: str) -> Params:
        if name not in self.parts:
            raise KeyError(
                f"This direction has no part {name!r}; it has {sorted(self.parts)}. An observed "
                "step has no parts: rebuild it with compute_update_vector_adamw to get them."
            )
        return self.parts[name]


@dataclass(frozen=True, kw_only=True)
class AdamGroup:
    """Hyper-parameters of one Adam or AdamW parameter group, as the optimizer stores them.

    Args:
        names: Parameters of the group.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the denominator.
        weight_decay: Its coefficient.
        amsgrad: Whether the denominator keeps the running maximum.
        maximize: Whether the optimizer ascends.
        decoupled: True: AdamW's decay, which acts on the parameters. False: Adam's, which is added
            to the gradient.

    Examples:
        >>> group = AdamGroup(names=("w",), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        >>> group.decoupled
        True
    """

    names: tuple[str, ...]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    amsgrad: bool = False
    maximize: bool = False
    decoupled: bool = True

    @classmethod
    def of(cls, group: Mapping[str, Any], names: tuple[str, ...], *, decoupled: bool) -> AdamGroup:
        """From one of torch's param_groups, live or stored."""
        b1, b2 = group["betas"]
        return cls(
            names=names,
            lr=float(group["lr"]),
            betas=(float(b1), float(b2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            amsgrad=bool(group.get("amsgrad", False)),
            maximize=bool(group.get("maximize", False)),
            decoupled=decoupled,
        )


@dataclass(frozen=True, kw_only=True)
class SGDGroup:
    """Hyper-parameters of one SGD parameter group.

    Args:
        names: Parameters of the group.
        lr: Learning rate.
        momentum: Of the buffer; 0: there is none.
        dampening: Of what enters the buffer.
        weight_decay: Its coefficient; it is added to the gradient.
        nesterov: Whether the step looks ahead.
        maximize: Whether the optimizer ascends.

    Examples:
        >>> SGDGroup(names=("w",), lr=0.1, momentum=0.9).nesterov
        False
    """

    names: tuple[str, ...]
    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerState:
    """Everything the next step needs besides the gradient, by parameter *name*.

    Args:
        groups: Hyper-parameters, group by group.
        state: By parameter, tensors and counts under torch's own keys; no entry: the optimizer has
            not stepped yet.

    Raises:
        ValueError: If a parameter is in two groups, state belongs to no group, or there is no
            group.

    Examples:
        >>> group = AdamGroup(names=("w",), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
        >>> OptimizerState(groups=(group,), state={}).lr
        0.001
    """

    groups: tuple[AdamGroup, ...] | tuple[SGDGroup, ...]
    state: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        names = [name for group in self.groups for name in group.names]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"Parameters {twice} are in more than one group; expected one each.")
        foreign = sorted(set(self.state) - set(names))
        if foreign:
            raise ValueError(f"State belongs to no group: {foreign[:5]} ({len(foreign)} in all).")
        if not self.groups:
            raise ValueError("OptimizerState has no groups; expected at least one.")

    @property
    def lr(self) -> float:
        """eta: the learning rate of the first group that has parameters."""
        return next(group.lr for group in self.groups if group.names)


def check_params(what: str, got: Params, expected: Params) -> None:
    """Refuse a mapping whose names or shapes are not those expected."""
    missing, unknown = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"{what} does not fit the parameters: missing {missing[:8]}, unknown {unknown[:8]}. "
            "It belongs to another model, or the names were prefixed on the way."
        )
    for name, value in expected.items():
        if got[name].shape != value.shape:
            raise ValueError(
                f"{what} has shape {tuple(got[name].shape)} for {name!r}; expected "
                f"{tuple(value.shape)}. It belongs to a model of another size."
            )
        kinds = ["a shard" if hasattr(x, "device_mesh") else "whole" for x in (got[name], value)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{what} has {kinds[0]} for {name!r}; expected {kinds[1]}, as the parameters are. "
                "A sharded policy's `cut` makes shards of whole tensors, `full_tensor()` the "
                "reverse."
            )


def check_finite(what: str, params: Params) -> None:
    for name, tensor in params.items():
        # Of a shard, this rank's part: the others look at theirs.
        own: Any = getattr(tensor.detach(), "to_local", None)
        value = tensor if own is None else own()
        if not bool(torch.isfinite(value).all()):
            bad = int((~torch.isfinite(value)).sum())
            raise ValueError(
                f"{what} has {bad} non-finite values of {value.numel()} in {name!r}; expected "
                "finite numbers. The step that made them must be skipped, not probed."
            )


def check_direction(policy: Policy, direction: Direction) -> None:
    if not isinstance(direction, Direction):
        raise TypeError(
            f"Got a {type(direction).__name__} as direction; expected a Direction. "
            "compute_update_vector_adamw returns (direction, baseline, stats)."
        )
    check_params("direction", next(iter(direction.parts.values())), policy.params)


def sum_of(tensors: Any) -> Tensor:
    first, *rest = tensors
    for tensor in rest:
        first = first + tensor
    return first
