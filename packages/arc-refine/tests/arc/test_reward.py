"""Scores by hand, and the leave-one-out advantage: unbiased by enumeration, linear in the scale."""

from itertools import product

import numpy as np
import pytest
import torch

from arc.grids import grid, one_episode
from arc_refine.agent import AgentOutput
from arc_refine.batch import collate
from arc_refine.data import Pair
from arc_refine.reward import advantages, cell_accuracy, rewards, score


def output_of(logits_BCHW, steps=2):
    """Earlier steps are noise: only the last may count."""
    B = logits_BCHW.shape[0]
    noise = torch.randn(steps - 1, *logits_BCHW.shape, generator=torch.Generator().manual_seed(0))
    return AgentOutput(
        logits_TBCHW=torch.cat([noise.to(logits_BCHW), logits_BCHW[None]]),
        size_logits_h_BS=torch.zeros(B, 30),
        size_logits_w_BS=torch.zeros(B, 30),
        pooled_BW=torch.ones(B, 4),
    )


def two_episodes():
    demo = Pair(grid(2, 2, 0), grid(2, 2, 1))
    first = one_episode(grid(2, 2, 2), np.array([[1, 2], [3, 4]]), demo)
    # 2x2 canvas, 2x4 target: half of it cannot be predicted.
    second = one_episode(grid(2, 2, 3), np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), demo)
    return collate([first, second]).targets


def test_score_by_hand():
    targets = two_episodes()
    logits_BCHW = torch.zeros(2, 10, 2, 2, dtype=torch.float64)
    right = targets.target_BHW
    logits_BCHW.scatter_(1, right[:, None], 3.0)
    logits_BCHW[0, :, 0, 0] = 0
    logits_BCHW[0, 9, 0, 0] = 3.0  # the first episode's first cell is wrong
    output = output_of(logits_BCHW)
    assert cell_accuracy(output, targets).tolist() == [0.75, 0.5]
    total = np.log(np.exp(3) + 9)
    ce = np.array([(3 * (total - 3) + total) / 4, total - 3])
    expected = np.array([0.75, 0.5]) - 0.1 * ce
    np.testing.assert_allclose(score(output, targets).numpy(), expected, atol=1e-12)


def test_score_is_bounded():
    targets = two_episodes()
    logits_BCHW = torch.zeros(2, 10, 2, 2)
    logits_BCHW[:, 0] = 1000.0  # surely wrong everywhere: CE 1000
    assert score(output_of(logits_BCHW), targets).tolist() == [-0.5, -0.5]
    best = torch.zeros(2, 10, 2, 2).scatter_(1, targets.target_BHW[:, None], 1000.0)
    assert score(output_of(best), targets).tolist() == [1.0, 0.5]


def test_score_has_no_graph():
    targets = two_episodes()
    logits_BCHW = torch.zeros(2, 10, 2, 2, requires_grad=True)
    assert not score(output_of(logits_BCHW), targets).requires_grad


def test_advantages_by_hand():
    got = advantages(torch.tensor([[1.0], [2.0], [6.0]]))
    assert got[:, 0].tolist() == [1 - 4, 2 - 3.5, 6 - 1.5]
    with pytest.raises(ValueError, match="got rewards of 1 refinement per state; expected 2"):
        advantages(torch.ones(1, 3))


def test_the_baseline_leaves_the_gradient_unbiased():
    """E[1/K sum_k A_k grad log pi(x_k)] = grad E[R], by every joint draw of a three-way policy.

    With a baseline that includes its own reward it would be (K - 1)/K of that: the teeth.
    """
    K, reward = 3, torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    p = torch.softmax(logits, 0)
    (truth,) = torch.autograd.grad((p * reward).sum(), logits)
    p = p.detach()
    ours, naive = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for draw in product(range(3), repeat=K):
        index = torch.tensor(draw)
        chance = p[index].prod()
        scores_K3 = torch.eye(3, dtype=torch.float64)[index] - p
        r = reward[index]
        ours += chance * (advantages(r[:, None]) * scores_K3).mean(0)
        naive += chance * ((r - r.mean())[:, None] * scores_K3).mean(0)
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-12)
    torch.testing.assert_close(naive, truth * (K - 1) / K, rtol=0, atol=1e-12)
    assert (naive - truth).abs().max() > 0.05


def test_the_scale_only_multiplies():
    after = torch.randn(4, 3, dtype=torch.float64)
    before = torch.randn(3, dtype=torch.float64)
    one, five = (rewards(after, before, reward_scale=s) for s in (1.0, 5.0))
    torch.testing.assert_close(one, after - before)
    torch.testing.assert_close(advantages(five), 5 * advantages(one))
    # The common score before refining cancels in the advantage.
    torch.testing.assert_close(advantages(one), advantages(after))
