"""The batch of an optimizer step from the tensors that a training loop has in its hands.

    input_ids, attention_mask [N, S]    prompt and response, padded on either side
    response_mask [N, T]                tokens that the policy drew
    advantages [N] or [N, T]            old_logprobs, ref_logprobs [N, T]

A tensor with T < S columns is about the last T tokens: the responses alone, where prompts are
padded to one width (TRL, verl), or all tokens but the first, as `logits[:, :-1]` scores them.

`concatenate` joins the microbatches of a step, of whatever width, and numbers them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.types import Rollouts, UpdateBatch
from entropy_experiments.types.rollouts import check_logprobs


def batch_from_tensors(
    *,
    input_ids: Tensor,
    attention_mask: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rewards: Tensor | None = None,
    loss_mask: Tensor | None = None,
    prompt_index: Tensor | Sequence[Any] | None = None,
    microbatch: Tensor | None = None,
    eos: int | Iterable[int] | None = None,
) -> UpdateBatch:
    """The update batch of one optimizer step, copied to the CPU.

    Args:
        input_ids: [N, S] prompts and responses, padded on either side.
        attention_mask: [N, S] where there is a token.
        response_mask: [N, S], or [N, T] for the last T tokens: where the policy drew the token.
        advantages: [N] of each rollout, or [N, T] of each token.
        old_logprobs: [N, T] the denominator of the ratio; None: the policy's own (ratio 1).
        ref_logprobs: [N, T] of the reference model, where the loss has a KL term.
        rewards: [N], if they are known.
        loss_mask: [N, T] tokens that the loss counts, if those are not all that were drawn.
        prompt_index: [N] equal for rollouts of one prompt (numbers or texts); None: those whose
            tokens before the response are equal.
        microbatch: [N] which backward pass a rollout was in; None: all in one.
        eos: Ids that end a response: one without any was truncated. None: none was.

    Returns:
        The batch, as the mathematics reads it.

    Raises:
        ValueError: If shapes, masks or values do not fit together.

    Examples:
        >>> import torch
        >>> batch = batch_from_tensors(
        ...     input_ids=torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]]),
        ...     attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        ...     response_mask=torch.tensor([[1, 1], [1, 0]]),  # of the last two columns
        ...     advantages=torch.tensor([1.0, -1.0]),
        ... )
        >>> batch.rollouts.response_NS.int().tolist(), batch.rollouts.prompt_N.tolist()
        ([[0, 0, 1, 1], [0, 0, 1, 0]], [0, 0])
    """
    tokens_NS = _tensor("input_ids", input_ids)
    if tokens_NS.dim() != 2 or tokens_NS.is_floating_point():
        raise ValueError(
            f"input_ids is {_words(tokens_NS)}; expected integers of shape [rollouts, tokens], "
            "prompts and responses together."
        )
    n, s = tokens_NS.shape
    attention_NS = _mask("attention_mask", attention_mask, n, s)
    if _tensor("attention_mask", attention_mask).shape[1] != s:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} columns; expected those of input_ids, "
            f"{s}: it marks the tokens of prompts, too."
        )
    response_NS = _mask("response_mask", response_mask, n, s)
    rollouts = Rollouts(
        tokens_NS=tokens_NS.long(),
        attention_NS=attention_NS,
        response_NS=response_NS,
        prompt_N=_prompts(prompt_index, tokens_NS, attention_NS, response_NS),
        truncated_N=_truncated(tokens_NS, response_NS, eos),
    )

    def values(name: str, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        value_NS = _last(name, _floats(name, value), n, s)
        _refuse_short(name, value, response_NS)
        return torch.where(response_NS, value_NS, 0.0)

    advantages = _floats("advantages", advantages)
    if advantages.dim() == 1:
        if len(advantages) != n:
            raise ValueError(
                f"advantages has {len(advantages)} entries; expected one for each of {n} rollouts."
            )
        advantages = advantages[:, None].expand(n, s)
    advantage_NS = values("advantages", advantages)
    assert advantage_NS is not None  # it is no optional tensor
    old_NS, ref_NS = values("old_logprobs", old_logprobs), values("ref_logprobs", ref_logprobs)
    check_logprobs("old_logprobs", old_NS, response_NS)
    check_logprobs("ref_logprobs", ref_NS, response_NS)
    loss_NS = None
    if loss_mask is not None:
        loss_NS = _mask("loss_mask", loss_mask, n, s)
        _refuse_short("loss_mask", loss_mask, response_NS)
    return UpdateBatch(
        rollouts=rollouts,
        advantage_NS=advantage_NS,
        reward_N=None if rewards is None else _floats("rewards", rewards).double(),
        old_logprob_NS=old_NS,
        ref_logprob_NS=ref_NS,
        microbatch_N=None if microbatch is None else _tensor("microbatch", microbatch).long(),
        loss_NS=None if loss_NS is None or torch.equal(loss_NS, response_NS) else loss_NS,
    )


def concatenate(batches: Sequence[UpdateBatch]) -> UpdateBatch:
    """One batch of several, each a microbatch of its own; prompts are told apart by tokens.

    Args:
        batches: Of one step, in their order; those that are cut into microbatches stay so.

    Returns:
        A batch of all their rollouts, padded on the right to the widest.

    Raises:
        ValueError: If there is none, or one has log-probs, rewards or weights that another lacks.

    Examples:
        >>> from entropy_experiments.toy import BigramPolicy
        >>> batch = BigramPolicy().update_batch(seed=1)
        >>> joined = concatenate([batch, batch])
        >>> len(joined.rollouts), joined.microbatch_N.unique().tolist()
        (64, [0, 1])
    """
    if not batches:
        raise ValueError("A step has no batch; expected at least one.")
    if len(batches) == 1:
        return batches[0]
    for name in ("old_logprob_NS", "ref_logprob_NS", "reward_N"):
        have = [getattr(batch, name) is not None for batch in batches]
        if any(have) and not all(have):
            raise ValueError(
                f"{name} is in {sum(have)} of {len(have)} parts of the step; expected it in all "
                "of them, or in none."
            )
    if any(_weighted(batch.rollouts) for batch in batches):
        raise ValueError(
            "A part of the step has rollouts of unequal weight_N; expected uniform weights, which "
            "the whole batch has again."
        )
    width = max(batch.rollouts.tokens_NS.shape[1] for batch in batches)

    def wide(values: Iterable[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in values])

    def optional(name: str) -> Tensor | None:
        values = [getattr(batch, name) for batch in batches]
        return None if values[0] is None else wide(values)

    tokens_NS = wide(b.rollouts.tokens_NS for b in batches)
    attention_NS = wide(b.rollouts.attention_NS for b in batches)
    response_NS = wide(b.rollouts.response_NS for b in batches)
    rollouts = Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=attention_NS,
        response_NS=response_NS,
        prompt_N=_by_tokens(tokens_NS, attention_NS, response_NS),
        truncated_N=torch.cat([b.rollouts.truncated_N for b in batches]),
        uid=_names([b.rollouts for b in batches]),
    )
    counted = any(batch.loss_NS is not None for batch in batches)
    return UpdateBatch(
        rollouts=rollouts,
        advantage_NS=wide(b.advantage_NS for b in batches),
        reward_N=None
        if batches[0].reward_N is None
        else torch.cat([b.reward_N for b in batches if b.reward_N is not None]),
        old_logprob_NS=optional("old_logprob_NS"),
        ref_logprob_NS=optional("ref_logprob_NS"),
        microbatch_N=_numbered(batches),
        loss_NS=wide(b.counted_NS for b in batches) if counted else None,
    )


def _names(parts: Sequence[Rollouts]) -> tuple[str | None, ...] | None:
    """What a framework calls the rollouts; None: no part has names."""
    if all(part.uid is None for part in parts):
        return None
    return tuple(name for part in parts for name in part.uid or (None,) * len(part))


def _numbered(batches: Sequence[UpdateBatch]) -> Tensor:
    numbers, first = [], 0
    for batch in batches:
        own_N = batch.microbatch_N
        own_N = torch.zeros_like(batch.rollouts.prompt_N) if own_N is None else own_N
        _, own_N = torch.unique(own_N, return_inverse=True)
        numbers.append(own_N + first)
        first += int(own_N.max()) + 1
    return torch.cat(numbers)


def _weighted(rollouts: Rollouts) -> bool:
    return bool((rollouts.weight_N != rollouts.weight_N[0]).any())


def _prompts(
    prompt_index: Tensor | Sequence[Any] | None,
    tokens_NS: Tensor,
    attention_NS: Tensor,
    response_NS: Tensor,
) -> Tensor:
    if prompt_index is None:
        return _by_tokens(tokens_NS, attention_NS, response_NS)
    labels = prompt_index.tolist() if hasattr(prompt_index, "tolist") else list(prompt_index)  # type: ignore[union-attr]
    if len(labels) != len(tokens_NS):
        raise ValueError(
            f"prompt_index has {len(labels)} entries; expected one for each of {len(tokens_NS)} "
            "rollouts."
        )
    return _numbered_by(labels)


def _by_tokens(tokens_NS: Tensor, attention_NS: Tensor, response_NS: Tensor) -> Tensor:
    """Rollouts with the same tokens before the response share a number."""
    before_NS = attention_NS & (response_NS.int().cumsum(1) == 0)
    rows = zip(tokens_NS, before_NS, strict=True)
    return _numbered_by([tuple(tokens_S[before_S].tolist()) for tokens_S, before_S in rows])


def _numbered_by(labels: Sequence[Any]) -> Tensor:
    seen: dict[Any, int] = {}
    return torch.tensor([seen.setdefault(label, len(seen)) for label in labels])


def _truncated(tokens_NS: Tensor, response_NS: Tensor, eos: int | Iterable[int] | None) -> Tensor:
    """A response whose last token is no end-of-sequence was cut off."""
    if eos is None:
        return torch.zeros(len(tokens_NS), dtype=torch.bool)
    ends = torch.tensor([eos] if isinstance(eos, int) else sorted(eos))
    places_S = torch.arange(tokens_NS.shape[1])
    last_N1 = torch.where(response_NS, places_S, 0).amax(1, keepdim=True)
    return ~torch.isin(tokens_NS.gather(1, last_N1).squeeze(1), ends)


def _last(name: str, value: Tensor, n: int, s: int) -> Tensor:
    """[N, S] of a tensor about the last of the S tokens."""
    if value.dim() != 2 or len(value) != n or not 1 <= value.shape[1] <= s:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; expected ({n}, {s}) as input_ids, or "
            f"({n}, T) for the last T of its tokens."
        )
    return torch.nn.functional.pad(value, (s - value.shape[1], 0))


def _refuse_short(name: str, value: Tensor, response_NS: Tensor) -> None:
    """No value is made up for a token that a tensor does not cover."""
    absent = response_NS.shape[1] - value.shape[1]
    uncovered = int(response_NS[:, :absent].sum())
    if uncovered:
        first = int(response_NS.any(0).int().argmax())
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, the last {value.shape[1]} of "
            f"{response_NS.shape[1]} tokens, and {uncovered} of {int(response_NS.sum())} response "
            f"tokens are before them; expected at least {response_NS.shape[1] - first} columns"
            + (", or one dimension for a value of each rollout." if name == "advantages" else ".")
        )


def _mask(name: str, value: Tensor, n: int, s: int) -> Tensor:
    value = _tensor(name, value)
    if value.is_floating_point() and bool(((value != 0) & (value != 1)).any()):
        raise ValueError(f"{name} has values other than 0 and 1; expected a mask.")
    return _last(name, value.bool(), n, s)


def _floats(name: str, value: Tensor) -> Tensor:
    value = _tensor(name, value)
    if not value.is_floating_point():
        raise ValueError(f"{name} is {_words(value)}; expected floating point.")
    return value


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; expected a tensor.")
    return value.detach().cpu()


def _words(value: Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}"
