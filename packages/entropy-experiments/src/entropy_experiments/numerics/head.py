"""Token scores through the LM head, one tile of the vocabulary at a time.

A tile holds the logits z of some tokens and some columns of the vocabulary, and stays in the cache
from the product that makes it to the sums that use it up. With m its largest, d = z - m, e = exp d:

    s_b = sum e            t_b = sum e d                     of every tile b
    S = sum w_b s_b        T = sum w_b (t_b + (m_b - M) s_b)      M = max m_b,  w_b = exp(m_b - M)
    l = z_y - M - log S    h = log S - T / S

With M, log S and h the derivatives need one tile at a time, too:

    p = exp(z - M - log S)      dl = dz_y - sum p dz         dh = -sum p dz (log p + h)

(M + log S in one number would lose digits where all logits are large.)

In reverse mode every rule makes its logits again. Dual numbers go through the tiles as they are:
a custom rule would make the logits a third time.

Against rows of logits as wide as the vocabulary this takes about half the time on a CPU (V = 32k
and 49k), and no memory to speak of. A support cut at top_p needs whole rows: `numerics.entropy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.numerics.forward_mode import (
    linear_of_rows,
    only_forward_mode,
    refuse_nested_forward_mode,
)

TILE_BYTES = {"cpu": 2**21}
"""The size of a tile: on a CPU what the cache of a core holds."""
OTHER_TILE_BYTES = 160 * 2**20
"""Elsewhere calls are dear and memory is quick."""
NARROWEST = 256
"""Columns of a tile; a thinner product is slower."""
FAR_BELOW = -1e9
"""Stands for -inf in d = z - max z: its exp is 0, and 0 * d stays 0 instead of NaN."""


def head_scores(
    hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None, token_T: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-prob of the token, entropy) for each of T states, in the precision of these.

    A head in half precision is cast one tile at a time.
    """
    with torch.autocast(hidden_TD.device.type, enabled=False):
        if only_forward_mode():
            return _scores(hidden_TD, head_VD, bias_V, token_T)[:2]
        return _HeadScores.apply(hidden_TD, head_VD, bias_V, token_T)[:2]


def most_rows(head_VD: Tensor) -> int:
    """Tokens that go through the head together."""
    return _tile_bytes(head_VD.device) // (4 * min(NARROWEST, len(head_VD)))


class _HeadScores(torch.autograd.Function):
    """Gives (l, h, log S, M); keeps hidden states and head, never logits.

    M is a constant to all rules: what l and h are does not depend on it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None, token_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _scores(hidden_TD, head_VD, bias_V, token_T)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, entropy_T, logsum_T, top_T = output
        ctx.mark_non_differentiable(top_T)
        # A head that does not move gets the tangent None, not [V, D] zeros to multiply with.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, entropy_T, logsum_T, top_T)
        ctx.save_for_forward(*inputs, entropy_T, logsum_T, top_T)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # Whoever calls backward may be under autocast, though the forward was not.
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            hidden_TD, head_VD, bias_V, token_T, entropy_T, logsum_T, top_T = ctx.saved_tensors
            unused_T = torch.zeros_like(entropy_T)
            gl_T, gh_T, glogsum_T, _ = (unused_T if g is None else g for g in grads)
            needs_hidden, needs_head, needs_bias = ctx.needs_input_grad[:3]
            flat_T1 = (glogsum_T - gl_T - gh_T * entropy_T)[:, None]
            ghidden_TD, ghead, gbias = torch.zeros_like(hidden_TD), [], []
            for start, z_TB in _tiles(hidden_TD, head_VD, bias_V):
                logp_TB = _below(z_TB, top_T, bias_V) - logsum_T[:, None]
                g_TB = logp_TB.exp() * (flat_T1 - gh_T[:, None] * logp_TB)
                inside_T, column_T = _inside(token_T, start, z_TB.shape[1])
                g_TB = g_TB.scatter_add(
                    1, column_T[:, None], torch.where(inside_T, gl_T, 0)[:, None]
                )
                if needs_hidden:
                    head_BD = head_VD[start : start + z_TB.shape[1]].to(g_TB.dtype)
                    ghidden_TD = ghidden_TD + g_TB @ head_BD
                if needs_head:
                    ghead.append((g_TB.mT @ hidden_TD).to(head_VD.dtype))
                if needs_bias:
                    gbias.append(g_TB.sum(0))
            return (
                ghidden_TD if needs_hidden else None,
                torch.cat(ghead) if needs_head else None,
                torch.cat(gbias) if needs_bias else None,
                None,
            )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        refuse_nested_forward_mode()
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            hidden_TD, head_VD, bias_V, token_T, entropy_T, logsum_T, top_T = ctx.saved_tensors
            dhidden_TD, dhead_VD, dbias_V, _ = tangents
            mean_T = torch.zeros_like(entropy_T)
            dz_T, dentropy_T = mean_T, mean_T
            for start, z_TB in _tiles(hidden_TD, head_VD, bias_V):
                columns = slice(start, start + z_TB.shape[1])
                terms = []
                if dhidden_TD is not None:
                    terms.append(dhidden_TD @ head_VD[columns].to(z_TB.dtype).mT)
                if dhead_VD is not None:
                    terms.append(hidden_TD @ dhead_VD[columns].to(z_TB.dtype).mT)
                if dbias_V is not None:
                    terms.append(dbias_V[columns].expand(z_TB.shape))
                dz_TB = sum(terms[1:], terms[0])
                logp_TB = _below(z_TB, top_T, bias_V) - logsum_T[:, None]
                weighted_TB = logp_TB.exp() * dz_TB
                mean_T = mean_T + weighted_TB.sum(1)
                dentropy_T = dentropy_T - (weighted_TB * (logp_TB + entropy_T[:, None])).sum(1)
                dz_T = dz_T + _of_token(dz_TB, token_T, start)
            return dz_T - mean_T, dentropy_T, mean_T, None


def _scores(
    hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None, token_T: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tiles = []
    for start, z_TB in _tiles(hidden_TD, head_VD, bias_V):
        # With its tangent: a shift of all logits cancels here, not in the last digits of T / S.
        # Where a whole tile is banned its largest is -inf, and -inf - -inf would be NaN.
        # amax: max(1) looks for the place, too, and takes nine times as long.
        top_T = z_TB.amax(1).clamp_min(torch.finfo(z_TB.dtype).min)
        d_TB = _below(z_TB, top_T, bias_V)
        e_TB = d_TB.exp()
        tiles.append((top_T, e_TB.sum(1), (e_TB * d_TB).sum(1), _of_token(z_TB, token_T, start)))
    top_BT, s_BT, t_BT, z_BT = (torch.stack(values) for values in zip(*tiles, strict=True))
    top_T = top_BT.amax(0)
    below_BT = top_BT - top_T
    weight_BT = below_BT.exp()
    s_T = (weight_BT * s_BT).sum(0)
    t_T = (weight_BT * (t_BT + below_BT.clamp_min(FAR_BELOW) * s_BT)).sum(0)
    logsum_T = s_T.log()
    return z_BT.sum(0) - top_T - logsum_T, logsum_T - t_T / s_T, logsum_T, top_T


def _tiles(
    hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None
) -> Iterator[tuple[int, Tensor]]:
    """(first column, logits) of every tile."""
    size = max(NARROWEST, _tile_bytes(head_VD.device) // (4 * max(1, len(hidden_TD))))
    for start in range(0, len(head_VD), size):
        rows = slice(start, min(start + size, len(head_VD)))
        yield start, linear_of_rows(hidden_TD, head_VD, bias_V, rows)


def _below(z_TB: Tensor, top_T: Tensor, bias_V: Tensor | None) -> Tensor:
    """z - top. Tokens can be banned, with z = -inf, by a bias only."""
    d_TB = z_TB - top_T[:, None]
    return d_TB if bias_V is None else d_TB.clamp_min(FAR_BELOW)


def _of_token(x_TB: Tensor, token_T: Tensor, start: int) -> Tensor:
    """x at each token's own column; 0 where that is in another tile."""
    inside_T, column_T = _inside(token_T, start, x_TB.shape[1])
    return torch.where(inside_T, x_TB.gather(1, column_T[:, None]).squeeze(1), 0)


def _inside(token_T: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    column_T = token_T - start
    inside_T = (column_T >= 0) & (column_T < columns)
    return inside_T, torch.where(inside_T, column_T, 0)


def _tile_bytes(device: torch.device) -> int:
    return TILE_BYTES.get(device.type, OTHER_TILE_BYTES)
