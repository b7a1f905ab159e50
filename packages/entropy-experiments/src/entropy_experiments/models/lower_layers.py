"""Decoder layers below all that is trained: what they give is the same under every setting.

Where training moves the upper layers only (adapters on some of them, a frozen lower half), a sweep
over step sizes or directions needs the lower ones once. Their states are kept from the first pass
over a microbatch and handed on in the others: the very same numbers, if hidden states are all that
a layer hands to the next. `SequenceProcessor` tries that before it relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from entropy_experiments.models.calling import forward_as, nothing_differentiated


def lower_layers(model: nn.Module, trained: Sequence[str]) -> tuple[nn.Module, ...]:
    """Layers before the first with a trained parameter; none, if one is outside of the layers.

    An embedding comes before them all, a norm after them: by its name it could be either.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = {n: m for n, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)}
    homes = [
        next((i for i, name in enumerate(layers) if parameter.startswith(f"{name}.")), 0)
        for parameter in trained
    ]
    return tuple(layers.values())[: min(homes)]


class Below:
    """Lower layers in several passes over the same tokens: computed in the first of them."""

    def __init__(self, layers: Sequence[nn.Module], rows: int) -> None:
        self._layers, self._rows = layers, rows
        self._states: Tensor | None = None

    @contextmanager
    def once(self, stacked: int = 1) -> Iterator[None]:
        """Inside, they give what they gave before; with `stacked`, that many blocks of it."""
        with ExitStack() as stack:
            if self._layers and nothing_differentiated():
                *lower, last = self._layers
                if self._states is None:
                    stack.enter_context(forward_as(last, self._kept(last.forward)))
                else:
                    kept = self._states.repeat(stacked, 1, 1)
                    stack.enter_context(forward_as(last, lambda *_, **__: kept))
                    for layer in lower:
                        stack.enter_context(forward_as(layer, _handed_on))
            yield

    def _kept(self, own_forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            found = own_forward(*args, **kwargs)
            # Of anything but [rows, S, D] it is not known what may be repeated.
            if isinstance(found, Tensor) and found.dim() == 3 and len(found) == self._rows:
                self._states = found.clone()  # what flows on may be changed in place
            return found

        return forward


def _handed_on(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else kwargs["hidden_states"]
