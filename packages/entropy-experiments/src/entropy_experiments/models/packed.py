"""Rollouts as the model gets them: no padding on the left, and in shared rows where they can be."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from entropy_experiments.models.shared_prompts import Rows
from entropy_experiments.types import Rollouts


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Rollouts in rows of their own or shared, and the way back."""

    rollouts: Rollouts
    original: Rollouts
    start_N: Tensor
    rows: Rows | None

    @classmethod
    def of(cls, rollouts: Rollouts, device: torch.device) -> Packed:
        length_N = rollouts.attention_NS.sum(1)
        start_N = rollouts.attention_NS.int().argmax(1)
        column_S = torch.arange(int(length_N.max()), device=length_N.device)
        inside_NS = column_S < length_N[:, None]
        source_NS = (start_N[:, None] + column_S).clamp(max=rollouts.tokens_NS.shape[1] - 1)
        tokens_NS = rollouts.tokens_NS.gather(1, source_NS)
        packed = replace(
            rollouts,
            # Whatever stood in the padding (-100, say) must be a token that can be embedded, and
            # an ordinary one: where the row of a padding token is zero, a model may have states of
            # no spread there, and a derivative that is not finite. Nothing looks at it, but zero
            # times NaN is NaN.
            tokens_NS=torch.where(inside_NS, tokens_NS, tokens_NS[:, :1]).to(device),
            attention_NS=inside_NS.to(device),
            response_NS=(inside_NS & rollouts.response_NS.gather(1, source_NS)).to(device),
            prompt_N=rollouts.prompt_N.to(device),
            weight_N=rollouts.weight_N.to(device),
            truncated_N=rollouts.truncated_N.to(device),
            behaviour_logprob_NS=None,
            text=None,
        )
        return cls(rollouts=packed, original=rollouts, start_N=start_N, rows=None)

    @property
    def inputs(self) -> Tensor:
        """Tokens as the model gets them."""
        return self.rollouts.tokens_NS if self.rows is None else self.rows.tokens_RS

    @property
    def place(self) -> tuple[Tensor, Tensor] | None:
        """Row and column of every token's state; None: those of the rollouts."""
        return None if self.rows is None else self.rows.place

    def back(self, x_NS: Tensor) -> Tensor:
        """From packed columns to those of the rollouts as given, on their device."""
        column_S = torch.arange(self.original.tokens_NS.shape[1], device=self.start_N.device)
        source_NS = (column_S - self.start_N[:, None]).clamp(0, x_NS.shape[1] - 1)
        x_NS = x_NS.to(source_NS.device)
        return torch.where(self.original.response_NS, x_NS.gather(1, source_NS), 0)
