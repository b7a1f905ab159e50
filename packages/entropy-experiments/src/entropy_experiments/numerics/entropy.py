"""Log-prob of the drawn token and entropy of its distribution, from logits or hidden states.

With z = logits / temperature, d = z - max z, e = exp d, s = sum e:

    h = log s - sum(e d) / s        l_y = d_y - log s
    dh/dz = -p (log p + h)          dl_y/dz = onehot_y - p

In fp32 at a 152k vocabulary this form of h errs below 1e-5, where -sum p log p errs 1e-4.
Logits of half precision go to fp32 first. Work is done in chunks of tokens, and each chunk's
derivative rule recomputes its logits, so that [N, S, V] is never in memory.

Below 1, `top_p` defines another *distribution*: the softmax restricted to the smallest set of
likeliest tokens with that much mass, its support frozen under differentiation.
`nucleus_fingerprint` tells whether two parameter settings share a support; where they do not, the
entropy jumps and no slope predicts it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from entropy_experiments.numerics.forward_mode import refuse_nested_forward_mode
from entropy_experiments.numerics.head import FAR_BELOW, head_scores, most_rows
from entropy_experiments.types import Rollouts, Scores

Place = tuple[Tensor, Tensor]
CHUNK_BYTES = 160 * 2**20
"""Logits of one chunk. A thinner matrix product is slower: 2.1 times at a fifth of this size."""
CACHE_BYTES = 2 * 2**20
"""Rows of logits treated at once within a chunk, small enough to stay in the cache: at eight times
this size they take 2.7 (V = 8k) to 3.9 times (49k) as long."""


def token_scores(
    logits_TV: Tensor,
    token_T: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-prob, entropy) of T tokens from their logits, which are already in memory.

    Args:
        logits_TV: One row per token: the distribution that it was drawn from.
        token_T: The tokens drawn.
        temperature: Divides the logits.
        top_p: Below 1: the softmax restricted to the likeliest tokens with that much mass.
        chunk: Rows at a time; None: as many as 160 MiB of logits hold.

    Returns:
        Two tensors [T], differentiable in forward and reverse mode; nats.

    Raises:
        ValueError: If a token is not among the columns of the logits.

    Examples:
        >>> import torch
        >>> logprob_T, entropy_T = token_scores(torch.zeros(1, 4), torch.tensor([2]))
        >>> round(float(logprob_T), 4), round(float(entropy_T), 4)  # -log 4 and log 4
        (-1.3863, 1.3863)
    """
    _check_tokens(token_T, logits_TV.shape[-1])
    size = chunk or _rows_in(CHUNK_BYTES, logits_TV.shape[-1])
    parts = [
        _LogitScores.apply(logits_CV, token_C, temperature, top_p)
        for logits_CV, token_C in zip(logits_TV.split(size), token_T.split(size), strict=True)
    ]
    return _join(parts)


def token_scores_from_hidden(
    hidden_TD: Tensor,
    head_VD: Tensor,
    token_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same through the LM head, one chunk of logits at a time.

    Half-precision states and heads are multiplied in fp32: logits rounded to bf16 would cost
    hundredths of a nat.
    """
    hidden_TD = _full(hidden_TD)
    bias_V = None if bias_V is None else _full(bias_V)
    _check_tokens(token_T, len(head_VD))
    nucleus_only = top_p < 1.0  # which needs whole rows of logits
    rows = _rows_in(CHUNK_BYTES, len(head_VD)) if nucleus_only else most_rows(head_VD)
    tokens = max(1, len(token_T))
    size = chunk or ceil(tokens / ceil(tokens / rows))
    if nucleus_only or (head_VD.requires_grad and tokens > size):
        # Of a trained head the chunks' gradients are added in fp32, and rounded once.
        head_VD = _full(head_VD)
    if not nucleus_only and temperature != 1.0:
        hidden_TD = hidden_TD / temperature
        bias_V = None if bias_V is None else bias_V / temperature
    parts = [
        _NucleusScores.apply(hidden_CD, head_VD, bias_V, token_C, temperature, top_p)
        if nucleus_only
        else head_scores(hidden_CD, head_VD, bias_V, token_C)
        for hidden_CD, token_C in zip(hidden_TD.split(size), token_T.split(size), strict=True)
    ]
    return _join(parts)


def _check_tokens(token_T: Tensor, vocabulary: int) -> None:
    if is_batchedtensor(token_T) or not token_T.numel():
        return
    low, high = (int(end) for end in token_T.aminmax())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ValueError(
            f"A response has the token {wrong}; expected 0 to {vocabulary - 1}, the rows of the "
            "LM head. Labels of -100 and padding beyond the head are no tokens: leave them out of "
            "response_NS."
        )


def before_response(
    x_RSX: Tensor, rollouts: Rollouts, place: Place | None = None
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(where the response tokens are, what predicts them): the shift by one, here and nowhere else.

    The state or the logits *before* a token are those of the distribution it was drawn from.
    `place`: row and column of x for every token of the rollouts, where x is laid out otherwise.
    """
    rows_T, columns_T = rollouts.response_NS.nonzero(as_tuple=True)
    before = (rows_T, columns_T - 1)
    if place is not None:
        before = (place[0][before], place[1][before])
    return (rows_T, columns_T), x_RSX[before]


def response_scores(
    hidden_RSD: Tensor,
    head_VD: Tensor,
    rollouts: Rollouts,
    *,
    place: Place | None = None,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    chunk: int | None = None,
) -> Scores:
    """Scores of the response positions only, from the decoder's states and the LM head.

    Args:
        hidden_RSD: The decoder's last states; the state *before* a token predicts it.
        head_VD: The LM head's weight.
        rollouts: Which tokens are responses.
        place: Row and column of `hidden_RSD` for every token, where it is not laid out as the
            rollouts.
        bias_V: The LM head's bias, if it has one.
        temperature: Divides the logits.
        top_p: Below 1: the softmax restricted to the likeliest tokens with that much mass.
        chunk: Tokens at a time; None: as memory allows. [N, S, V] is never in memory.

    Returns:
        Scores [N, S], zero outside the response.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> rollouts = BigramPolicy().draw(seed=2)
        >>> hidden_NSD = torch.zeros(*rollouts.tokens_NS.shape, 3)  # of a model that knows nothing
        >>> scores = response_scores(hidden_NSD, torch.ones(5, 3), rollouts)
        >>> round(float(scores.entropy_NS[0, 1]), 4)  # log 5
        1.6094
    """
    where, hidden_TD = before_response(hidden_RSD, rollouts, place)
    logprob_T, entropy_T = token_scores_from_hidden(
        hidden_TD,
        head_VD,
        rollouts.tokens_NS[where],
        bias_V=bias_V,
        temperature=temperature,
        top_p=top_p,
        chunk=chunk,
    )
    empty_NS = logprob_T.new_zeros(rollouts.tokens_NS.shape)
    return Scores(empty_NS.index_put(where, logprob_T), empty_NS.index_put(where, entropy_T))


def nucleus(z_TV: Tensor, top_p: float) -> Tensor:
    """True for the likeliest tokens until their mass reaches top_p; z is after the temperature."""
    order_TV = z_TV.argsort(dim=-1, descending=True, stable=True)
    mass_TV = z_TV.softmax(-1).gather(-1, order_TV)
    kept_TV = mass_TV.cumsum(-1) - mass_TV < top_p
    return torch.zeros_like(kept_TV).scatter(-1, order_TV, kept_TV)


def nucleus_fingerprint(logits_TV: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """One integer per token that changes when its top-p support does."""
    vocabulary = logits_TV.shape[-1]
    generator = torch.Generator().manual_seed(vocabulary)
    # Random 62-bit names, added with wrap-around: two supports collide with probability 2^-62.
    name_V = torch.randint(2**62, (vocabulary,), generator=generator).to(logits_TV.device)
    inside_TV = nucleus(_at_temperature(logits_TV, temperature), top_p)
    return torch.where(inside_TV, name_V, 0).sum(-1)


def response_support(
    hidden_RSD: Tensor,
    head_VD: Tensor,
    rollouts: Rollouts,
    *,
    place: Place | None = None,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    top_p: float,
) -> Tensor:
    """Fingerprints of the response positions' top-p supports, as `response_scores` sees them.

    Two parameter settings whose fingerprints differ have another support: there the entropy jumps,
    and no slope predicts it.

    Args:
        hidden_RSD: The decoder's last states.
        head_VD: The LM head's weight.
        rollouts: Which tokens are responses.
        place: Row and column of `hidden_RSD` for every token, where it is not laid out as the
            rollouts.
        bias_V: The LM head's bias, if it has one.
        temperature: Divides the logits.
        top_p: The mass that the support has.

    Returns:
        [N, S] integers, zero outside the response.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> rollouts = BigramPolicy().draw(seed=2)
        >>> hidden_NSD = torch.zeros(*rollouts.tokens_NS.shape, 3)
        >>> support_NS = response_support(hidden_NSD, torch.ones(5, 3), rollouts, top_p=0.5)
        >>> len(support_NS[rollouts.response_NS].unique())  # the same three tokens everywhere
        1
    """
    where, hidden_TD = before_response(hidden_RSD, rollouts, place)
    hidden_TD, head_VD = _full(hidden_TD), _full(head_VD)
    fingerprint_T = torch.cat(
        [
            nucleus_fingerprint(
                _logits(hidden_CD, head_VD, bias_V), temperature=temperature, top_p=top_p
            )
            for hidden_CD in hidden_TD.split(_rows_in(CACHE_BYTES, head_VD.shape[0]))
        ]
    )
    return torch.zeros_like(rollouts.tokens_NS).index_put(where, fingerprint_T)


class _LogitScores(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits_TV: Tensor, token_T: Tensor, temperature: float, top_p: float
    ) -> tuple[Tensor, Tensor]:
        return _scores(logits_TV, token_T, temperature, top_p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        logits_TV, token_T, ctx.temperature, ctx.top_p = inputs
        ctx.save_for_backward(logits_TV, token_T)
        ctx.save_for_forward(logits_TV, token_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits_TV, token_T = ctx.saved_tensors
        return _pull(logits_TV, token_T, ctx.temperature, ctx.top_p, *grads), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor]:
        refuse_nested_forward_mode()
        logits_TV, token_T = ctx.saved_tensors
        return _push(logits_TV, token_T, ctx.temperature, ctx.top_p, tangents[0])


class _NucleusScores(torch.autograd.Function):
    """Whole rows through the head. Keeps hidden states and head: every rule makes logits again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        hidden_TD: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        token_T: Tensor,
        temperature: float,
        top_p: float,
    ) -> tuple[Tensor, Tensor]:
        return _scores(_logits(hidden_TD, head_VD, bias_V), token_T, temperature, top_p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.temperature, ctx.top_p = inputs
        # A head that does not move gets the tangent None, not [V, D] zeros to multiply with.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden_TD, head_VD, bias_V, token_T = ctx.saved_tensors
        logits_TV = _logits(hidden_TD, head_VD, bias_V)
        unused_T = torch.zeros_like(logits_TV[:, 0])
        both = (unused_T if grad is None else grad for grad in grads)
        g_TV = _pull(logits_TV, token_T, ctx.temperature, ctx.top_p, *both)
        needs_hidden, needs_head, needs_bias = ctx.needs_input_grad[:3]
        return (
            g_TV @ head_VD if needs_hidden else None,
            g_TV.mT @ hidden_TD if needs_head else None,
            g_TV.sum(0) if needs_bias else None,
            None,
            None,
            None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor]:
        refuse_nested_forward_mode()
        hidden_TD, head_VD, bias_V, token_T = ctx.saved_tensors
        dhidden_TD, dhead_VD, dbias_V, *_ = tangents
        terms = []
        if dhidden_TD is not None:
            terms.append(dhidden_TD @ head_VD.mT)
        if dhead_VD is not None:
            terms.append(hidden_TD @ dhead_VD.mT)
        if dbias_V is not None:
            terms.append(dbias_V.expand(len(token_T), -1))
        logits_TV = _logits(hidden_TD, head_VD, bias_V)
        return _push(logits_TV, token_T, ctx.temperature, ctx.top_p, sum(terms[1:], terms[0]))


def _logits(hidden_TD: Tensor, head_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    with torch.autocast(hidden_TD.device.type, enabled=False):
        logits_TV = hidden_TD @ head_VD.mT
    return logits_TV if bias_V is None else logits_TV + bias_V


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _at_temperature(logits_TV: Tensor, temperature: float) -> Tensor:
    logits_TV = _full(logits_TV)
    return logits_TV if temperature == 1.0 else logits_TV / temperature


def _shifted(logits_TV: Tensor, temperature: float, top_p: float) -> Tensor:
    """d = z - max z, with everything outside the distribution's support far below."""
    z_TV = _at_temperature(logits_TV, temperature)
    d_TV = (z_TV - z_TV.amax(-1, keepdim=True)).clamp_min(FAR_BELOW)
    if top_p < 1.0:
        d_TV = d_TV.masked_fill(~nucleus(z_TV.detach(), top_p), FAR_BELOW)
    return d_TV


def _scores(
    logits_TV: Tensor, token_T: Tensor, temperature: float, top_p: float
) -> tuple[Tensor, Tensor]:
    def rows(logits_TV: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
        d_TV = _shifted(logits_TV, temperature, top_p)
        e_TV = d_TV.exp()
        s_T = e_TV.sum(-1)
        logprob_T = _at(d_TV, token_T) - s_T.log()
        # A drawn token outside the support has probability 0, not e^FAR_BELOW.
        logprob_T = torch.where(logprob_T <= FAR_BELOW / 2, -torch.inf, logprob_T)
        return logprob_T, s_T.log() - (e_TV * d_TV).sum(-1) / s_T

    return _join(_in_cache(rows, logits_TV, token_T))


def _distribution(logits_TV: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """p and log p + h, from which both derivative rules follow."""
    d_TV = _shifted(logits_TV, temperature, top_p)
    logp_TV = d_TV - d_TV.exp().sum(-1, keepdim=True).log()
    p_TV = logp_TV.exp()
    return p_TV, logp_TV - (p_TV * logp_TV).sum(-1, keepdim=True)


def _pull(
    logits_TV: Tensor,
    token_T: Tensor,
    temperature: float,
    top_p: float,
    glogprob_T: Tensor,
    gentropy_T: Tensor,
) -> Tensor:
    def rows(logits_TV: Tensor, token_T: Tensor, gl_T: Tensor, gh_T: Tensor) -> Tensor:
        p_TV, surprise_TV = _distribution(logits_TV, temperature, top_p)
        g_TV = -p_TV * (gl_T[:, None] + gh_T[:, None] * surprise_TV)
        g_TV = g_TV.scatter_add(-1, token_T[:, None], gl_T[:, None].to(g_TV.dtype))
        return (g_TV if temperature == 1.0 else g_TV / temperature).to(logits_TV.dtype)

    return torch.cat(_in_cache(rows, logits_TV, token_T, glogprob_T, gentropy_T))


def _push(
    logits_TV: Tensor, token_T: Tensor, temperature: float, top_p: float, dlogits_TV: Tensor
) -> tuple[Tensor, Tensor]:
    def rows(logits_TV: Tensor, token_T: Tensor, dlogits_TV: Tensor) -> tuple[Tensor, Tensor]:
        p_TV, surprise_TV = _distribution(logits_TV, temperature, top_p)
        dz_TV = _at_temperature(dlogits_TV, temperature)
        weighted_TV = p_TV * dz_TV
        return _at(dz_TV, token_T) - weighted_TV.sum(-1), -(weighted_TV * surprise_TV).sum(-1)

    return _join(_in_cache(rows, logits_TV, token_T, dlogits_TV))


def _at(x_TV: Tensor, token_T: Tensor) -> Tensor:
    return x_TV.gather(-1, token_T[:, None]).squeeze(-1)


def _rows_in(size: int, vocabulary: int) -> int:
    return max(1, size // (4 * vocabulary))


def _in_cache(f: Callable[..., Any], logits_TV: Tensor, *others: Tensor) -> list[Any]:
    """f on a few rows at a time, of all tensors alike."""
    size = _rows_in(CACHE_BYTES, logits_TV.shape[-1])
    return [f(*rows) for rows in zip(*(x.split(size) for x in (logits_TV, *others)), strict=True)]


def _join(parts: list[Any]) -> tuple[Tensor, Tensor]:
    logprob, entropy = zip(*parts, strict=True)
    return torch.cat(logprob), torch.cat(entropy)
