"""Published per-token proxies of an entropy change: the columns `proxy_...` of tokens.parquet.

    p, l, A   probability, log-prob and advantage of the token that was drawn
    h         entropy of the distribution that it was drawn from

Each is a closed form for one softmax that moves along its own plain gradient. It knows neither the
optimizer nor what tokens share: `influence`, in the same table, knows both. Above 0 means that
entropy falls, unless a proxy says otherwise.

A new proxy is one function here, listed in `PROXIES`: its name is the column, its docstring the
documentation, its source is part of a study's key. Its test is a loop in test_proxies.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from entropy_experiments.types import Scores, UpdateBatch

Proxy = Callable[[UpdateBatch, Scores], Tensor]
"""(batch, its scores as the loss sees them) -> [N, S], read where the loss counts tokens."""


def covariance(batch: UpdateBatch, scores: Scores) -> Tensor:
    """`(A - mean A) (l - mean l)`, means over the tokens of the batch.

    The Cov of Clip-Cov and KL-Cov (arXiv 2505.22617). Its mean is how fast entropy falls where
    each logit moves by its token's advantage.
    """
    return _centred(batch.advantage_NS, batch) * _centred(scores.logprob_NS, batch)


def omega(batch: UpdateBatch, scores: Scores) -> Tensor:
    """`(A / p_old) p (1 - p) (l + h)`.

    STEER's Omega (arXiv 2510.10150), whose code then takes the absolute value. p_old is p where the
    batch was drawn from the policy that is updated.
    """
    l_NS, h_NS = (x_NS.double() for x_NS in scores)
    old_NS = l_NS if batch.old_logprob_NS is None else batch.old_logprob_NS.double()
    ratio_NS = (l_NS - old_NS).exp()
    return batch.advantage_NS.double() * ratio_NS * (1 - l_NS.exp()) * (l_NS + h_NS)


def s_star(batch: UpdateBatch, scores: Scores) -> Tensor:
    """`p (l + h)`: how fast entropy falls as the token's logit rises, whatever the advantage.

    S* of Clip_B (arXiv 2602.03392), which centres it over the batch.
    """
    l_NS, h_NS = (x_NS.double() for x_NS in scores)
    return l_NS.exp() * (l_NS + h_NS)


PROXIES: tuple[Proxy, ...] = (covariance, omega, s_star)


def _centred(x_NS: Tensor, batch: UpdateBatch) -> Tensor:
    """Without its mean over the tokens that the loss counts."""
    x_NS, weight_N1 = x_NS.double(), batch.rollouts.weight_N[:, None]
    total = torch.where(batch.counted_NS, weight_N1 * x_NS, 0.0).sum()
    return x_NS - total / torch.where(batch.counted_NS, weight_N1, 0.0).sum()
