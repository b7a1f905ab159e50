"""Several parameter settings of adapters in one pass: document 004's many v_i at a time.

Where adapters are all that is trained, the rows of several settings are stacked: x W' is one
product for all of them, and each block of rows gets adapters of its own, by the products of a pass
of its own. Scores are those of single passes up to rounding; on the CPU this was written on, the
same bits, but for small inputs. `influence.grad_chunk_size` says how many settings go together.

It is worth 1.01 to 1.5 times on a CPU (`benchmarks.settings`), most at small microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from entropy_experiments.models.call_conditions import forward_as
from entropy_experiments.models.lora import (
    Adapter,
    adapters_of,
    add_adapters,
    are_alike,
    is_plain_lora,
)
from entropy_experiments.types import Params

STACKED_TOKENS = (32, 1024)
"""Tokens of one setting from which on several share a pass, and of all settings in one.

Products of fewer rows may round differently in a larger one; of more they are no quicker in it."""


def settings_in_a_pass(tokens: int) -> int:
    """How many settings of so many tokens each to have in one pass."""
    fewest, most = STACKED_TOKENS
    return most // tokens if fewest <= tokens <= most else 1


def may_stack(layers: Mapping[Any, str], names: Collection[str]) -> bool:
    """Whether settings of these parameters can go through the layers in one pass, as things stand.

    They must all be adapters of these layers, and every layer the formula above and no more (in
    half precision, too, where it is computed as peft does).
    """
    held = {
        f"{home}.{kind}.{name}.weight": getattr(layer, kind)[name].weight
        for layer, home in layers.items()
        for kind in ("lora_A", "lora_B")
        for name in layer.active_adapters
    }
    # One weight in two layers has one name; the other layer would not find it among the settings.
    tied = any(weight.requires_grad and name not in names for name, weight in held.items())
    return (
        not tied
        and held.keys() >= set(names)
        and all("forward" not in layer.__dict__ and is_plain_lora(layer) for layer in layers)
    )


@contextmanager
def stacked_adapters(
    layers: Mapping[Any, str], settings: Sequence[Params], rows: int
) -> Iterator[None]:
    """Inside, every input has `rows` rows for each setting, one block after another."""
    with ExitStack() as stack:
        for layer, name in layers.items():
            each = [adapters_of(layer, f"{name}.", params) for params in settings]
            stack.enter_context(forward_as(layer, _stacked(layer, each, rows * len(settings))))
        yield


def _stacked(layer: Any, settings: Sequence[Sequence[Adapter]], rows: int) -> Callable[..., Any]:
    def forward(x: Tensor) -> Tensor:
        if not len(x) or len(x) % rows:
            # Tokens that were dealt out among experts, say: whose are they?
            raise ValueError(
                f"A layer with adapters got an input of shape {tuple(x.shape)}; expected {rows} "
                f"rows, one block for each of {len(settings)} parameter settings. Give each a pass "
                "of its own: influence.grad_chunk_size: 1, or policy.score."
            )
        x_TD = x.reshape(-1, x.shape[-1])
        y_TO = layer.base_layer(x_TD)
        blocks = (part.chunk(len(settings)) for part in (x_TD, y_TO))
        for adapters, x_tD, y_tO in zip(settings, *blocks, strict=True):
            weights = [weight for one in adapters for weight in (one.a_RD, one.b_OR)]
            add = add_adapters if are_alike(x_tD, y_tO, *weights) else _add_as_peft
            add(adapters, x_tD, y_tO)
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])

    return forward


def _add_as_peft(adapters: Sequence[Adapter], x_TD: Tensor, y_TO: Tensor) -> None:
    """The same step by step: half precision is what the whole sum is rounded to at the end."""
    total_TO = y_TO
    for one in adapters:
        inner_TR = nn.functional.linear(x_TD.to(one.a_RD.dtype), one.a_RD)
        total_TO = total_TO + nn.functional.linear(inner_TR, one.b_OR) * one.scale
    y_TO.copy_(total_TO)
