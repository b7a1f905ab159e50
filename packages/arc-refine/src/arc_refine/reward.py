"""What a refinement was worth, and its advantage over the others of the same state.

    S = cell accuracy - 0.1 min(CE, 5),   R_k = S(e + a_k) - S(e)
    A_k = R_k - mean_{j != k} R_j

Dense and bounded: S lies in [-0.5, 1]. Advantages are linear in `reward_scale`, so a scale of 5 is
a five times larger policy gradient, which Adam divides out again but for its epsilon, the entropy
bonus and the clipping.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from arc_refine.agent import AgentOutput
from arc_refine.batch import BatchTargets
from arc_refine.data import IGNORE

CE_WEIGHT = 0.1
CE_CAP = 5.0


@torch.no_grad()
def cell_accuracy(output: AgentOutput, targets: BatchTargets) -> Tensor:
    """Share of each target's cells predicted right; those beyond the canvas are wrong. [B]"""
    right_BHW = output.logits_TBCHW[-1].argmax(1) == targets.target_BHW
    counts_B = (right_BHW & targets.valid_BHW).sum((1, 2))
    return counts_B.to(output.logits_TBCHW.dtype) / targets.cells_B


@torch.no_grad()
def score(output: AgentOutput, targets: BatchTargets) -> Tensor:
    """S of every episode, [B]."""
    logits_BCHW = output.logits_TBCHW[-1]
    if logits_BCHW.dtype in (torch.float16, torch.bfloat16):
        logits_BCHW = logits_BCHW.float()
    ce_BHW = cross_entropy(logits_BCHW, targets.target_BHW, ignore_index=IGNORE, reduction="none")
    ce_B = ce_BHW.sum((1, 2)) / targets.valid_BHW.sum((1, 2))
    return cell_accuracy(output, targets).to(ce_B.dtype) - CE_WEIGHT * ce_B.clamp(max=CE_CAP)


def rewards(after_KB: Tensor, before_B: Tensor, *, reward_scale: float = 1.0) -> Tensor:
    """reward_scale (S(e + a_k) - S(e)), [K, B]."""
    return reward_scale * (after_KB - before_B)


def advantages(rewards_KB: Tensor) -> Tensor:
    """Leave-one-out: each reward less the mean of the *other* K - 1, [K, B], without a graph."""
    K = rewards_KB.shape[0]
    if K < 2:
        raise ValueError(
            f"got rewards of {K} refinement per state; expected 2 or more, for a baseline that "
            "leaves one out. Use 4."
        )
    rewards_KB = rewards_KB.detach()
    others_KB = (rewards_KB.sum(0) - rewards_KB) / (K - 1)
    return rewards_KB - others_KB
