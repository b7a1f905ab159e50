"""The output's height and width, as two 30-way classifications.

Most tasks follow one of three rules: as large as the query, as large as every demonstrated output,
or the query times a fixed ratio. For each the logits get a vote as strong as the share of the
demonstrations that the rule explains; an MLP corrects them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from arc_refine.batch import BatchInputs
from arc_refine.data import MAX_SIDE

RULES = 3


class SizeHeads(nn.Module):
    def __init__(self, width: int, prompt_width: int, *, hidden: int = 64) -> None:
        super().__init__()
        self.votes = nn.Parameter(torch.full((2, RULES), 2.0))
        self.axes = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width + prompt_width + RULES * (MAX_SIDE + 1), hidden),
                nn.GELU(),
                nn.Linear(hidden, MAX_SIDE),
            )
            for _ in range(2)
        )
        for axis in self.axes:
            last = axis[2]  # type: ignore[index]
            nn.init.normal_(last.weight, std=0.01)
            nn.init.zeros_(last.bias)

    def forward(
        self, inputs: BatchInputs, pooled_BW: Tensor, prompt_BE: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits = []
        for axis, net in enumerate(self.axes):
            rules_BRS, shares_BR = size_rules(inputs, axis)
            rules_BRS, shares_BR = rules_BRS.to(pooled_BW.dtype), shares_BR.to(pooled_BW.dtype)
            votes_BS = torch.einsum("r,br,brs->bs", self.votes[axis], shares_BR, rules_BRS)
            seen = [pooled_BW, prompt_BE, rules_BRS.flatten(1), shares_BR]
            logits.append(votes_BS + net(torch.cat(seen, dim=-1)))
        return logits[0], logits[1]


def size_rules(inputs: BatchInputs, axis: int) -> tuple[Tensor, Tensor]:
    """What each rule says of the side, one-hot [B, R, 30], and the share of demonstrations that
    it explains [B, R]. A ratio's side that is not whole, or beyond 30, gets no vote."""
    query_B = inputs.query_size_B2[:, axis]
    into_BD, out_BD = inputs.demo_in_size_BD2[..., axis], inputs.demo_out_size_BD2[..., axis]
    real_BD = inputs.demo_valid_BD
    count_B = real_BD.sum(1).clamp(1)
    # The first demonstration speaks for the rule; every other one has to agree with it.
    first_out_B, first_in_B = out_BD[:, 0], into_BD[:, 0]
    scaled_B = query_B * first_out_B
    whole_B = (scaled_B % first_in_B == 0) & (scaled_B <= MAX_SIDE * first_in_B)
    agree_RBD = torch.stack(
        [
            out_BD == into_BD,
            out_BD == first_out_B[:, None],
            (out_BD * first_in_B[:, None] == into_BD * first_out_B[:, None]) & whole_B[:, None],
        ]
    )
    shares_BR = ((agree_RBD & real_BD).sum(2) / count_B).T
    sides_BR = torch.stack([query_B, first_out_B, scaled_B // first_in_B], dim=1)
    rules_BRS = one_hot((sides_BR - 1).clamp(0, MAX_SIDE - 1), MAX_SIDE)
    return rules_BRS, shares_BR
