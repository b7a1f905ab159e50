"""Rollouts made elsewhere, as the mathematics reads them.

`from_trl_inputs` takes the dictionaries of `GRPOTrainer._buffered_inputs` (one per accumulation
microbatch): tokens and advantages exactly as the loss saw them. `read_dump` (dumps/formats.py)
recognises what other frameworks write, and reads it. `from_trl_completions` and `from_jsonl`
(text_dumps.py) read files that kept only text: they are tokenised again, and what was lost on the
way is reported. Engine log-probs are kept as behaviour only; the ratio's denominator is always
scored by our own policy unless the trainer itself recorded it.

What TRL multiplies into each token's policy loss (vLLM's importance ratio w >= 0, and the masks of
top_entropy_quantile and off_policy_mask_threshold) is folded into the advantage:
-min(r A, clip(r) A) w = -min(r A w, clip(r) A w), and the KL term stays outside.

RLOOTrainer keeps one log-prob per response (`old_logps`), of which its loss uses nothing else: it
is spread evenly over the response's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.sampling.dumps.formats import read_dump
from entropy_experiments.sampling.text_dumps import Imported, from_jsonl, from_trl_completions
from entropy_experiments.types import Rollouts, UpdateBatch

__all__ = ["Imported", "from_jsonl", "from_trl_completions", "from_trl_inputs", "read_dump"]

TrlInputs = Mapping[str, Any]
"""A part of a batch as a TRL trainer holds it: tensors by name, as `compute_loss` gets them."""
REQUIRED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
PER_TOKEN = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "tool_mask")
POLICY_FACTOR, REWARD, BY_FUNCTION = "policy_factor", "reward", "rewards_by_function"
"""What `online.trl_trainer.Captures` adds: factors of each token's policy loss, the weighted
reward of each rollout, and its reward by each function."""
OTHER = ("num_items_in_batch", "importance_sampling_ratio", "old_logps")
OTHER = (*OTHER, POLICY_FACTOR, REWARD, BY_FUNCTION)
NO_PADDING = 1
"""TRL pads tool_mask with ones; the completion mask takes the padding away again."""


def from_trl_inputs(
    inputs: TrlInputs | Sequence[TrlInputs],
    *,
    eos: int | Iterable[int] | None = None,
    pad: int | None = None,
    check_items: bool = True,
) -> UpdateBatch:
    """The batch of one optimizer step, from one dictionary per accumulation microbatch.

    `eos`: ids that end a response, to flag truncated ones (None: none is flagged). `pad`: needed
    only when the trainer masked truncated completions. `check_items=False` accepts a part of a
    generation batch; dapo and cispo then divide by other tokens than ours will.
    """
    parts = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if not parts:
        raise ValueError("from_trl_inputs got no microbatches; expected at least one dictionary.")
    for part in parts:
        _check_keys(part)
    prompt_width = max(part["prompt_ids"].shape[1] for part in parts)
    width = max(part["completion_ids"].shape[1] for part in parts)

    def prompts(key: str) -> Tensor:
        return torch.cat([_wider(part[key].cpu(), left=prompt_width) for part in parts])

    def completions(key: str, fill: float = 0) -> Tensor:
        return torch.cat([_wider(part[key].cpu(), right=width, fill=fill) for part in parts])

    mask_NT = completions("completion_mask").bool()
    ids_NT = completions("completion_ids")
    drawn_NT = _drawn(ids_NT, mask_NT, pad)
    tool_NT = torch.ones_like(mask_NT)
    if "tool_mask" in parts[0]:
        tool_NT = completions("tool_mask", NO_PADDING).bool()
        # A truncated rollout that the trainer masked has its tool mask zeroed too.
        tool_NT = tool_NT | ~mask_NT.any(1, keepdim=True)
    prompt_mask_NP = prompts("prompt_mask").bool()
    before_NP = torch.zeros_like(prompt_mask_NP)

    def whole(value_NT: Tensor) -> Tensor:
        return torch.cat([before_NP.to(value_NT.dtype), value_NT], 1)

    def scores(key: str) -> Tensor | None:
        if key not in parts[0]:
            return None
        return whole(torch.where(mask_NT, completions(key), 0.0))

    response_NT, loss_NT = drawn_NT & tool_NT, mask_NT & tool_NT
    if check_items:
        _check_items(parts, int(loss_NT.sum()))
    behaviour_NS = scores("sampling_per_token_logps")
    if behaviour_NS is not None and not bool(torch.isfinite(behaviour_NS).all()):
        behaviour_NS = None  # vLLM reports NaN now and then; nothing computed here reads it
    rollouts = Rollouts(
        tokens_NS=torch.cat([prompts("prompt_ids"), ids_NT], 1).long(),
        attention_NS=torch.cat([prompt_mask_NP, drawn_NT], 1),
        response_NS=whole(response_NT),
        prompt_N=_prompt_index(prompts("prompt_ids"), prompt_mask_NP),
        behaviour_logprob_NS=behaviour_NS,
        truncated_N=_truncated(ids_NT, drawn_NT, eos),
    )
    microbatch_N = torch.cat(
        [torch.full((len(part["prompt_ids"]),), i) for i, part in enumerate(parts)]
    )
    return UpdateBatch(
        rollouts=rollouts,
        advantage_NS=whole(torch.where(response_NT, _advantages(parts, width), 0.0)),
        reward_N=_rewards(parts),
        old_logprob_NS=_spread_old(parts, whole(loss_NT), scores("old_per_token_logps")),
        ref_logprob_NS=scores("ref_per_token_logps"),
        microbatch_N=microbatch_N,
        loss_NS=None if torch.equal(loss_NT, response_NT) else whole(loss_NT),
    )


def _check_keys(part: TrlInputs) -> None:
    missing = [key for key in REQUIRED if key not in part]
    if missing:
        raise ValueError(
            f"TRL inputs lack {missing}; got {sorted(part)}. Expected an entry of _buffered_inputs "
            "of a GRPOTrainer or RLOOTrainer (trl 1.16), taken before the optimizer step."
        )
    readable = {*REQUIRED, *PER_TOKEN, *OTHER}
    unknown = sorted(key for key in part if key not in readable and part[key] is not None)
    if unknown:
        raise ValueError(
            f"TRL inputs have keys that this version does not understand: {unknown}. Leaving them "
            "out would rebuild another loss (images and token types, for instance, are inputs of "
            "the model)."
        )


def _wider(value: Tensor, *, left: int = 0, right: int = 0, fill: float = 0) -> Tensor:
    missing = max(left, right) - value.shape[1]
    sides = (missing, 0) if left else (0, missing)
    return torch.nn.functional.pad(value, sides, value=fill)


def _drawn(ids_NT: Tensor, mask_NT: Tensor, pad: int | None) -> Tensor:
    """Tokens the policy drew: the mask, or, where the trainer emptied it, all but the padding."""
    emptied_N = ~mask_NT.any(1)
    if not bool(emptied_N.any()):
        return mask_NT
    if pad is None:
        raise ValueError(
            f"{int(emptied_N.sum())} completions have an empty mask (mask_truncated_completions); "
            "give pad=tokenizer.pad_token_id to distinguish their tokens from padding."
        )
    # Everything up to the last token that is not padding, and at least one.
    after_NT = (ids_NT != pad).flip(1).cumsum(1).flip(1) > 0
    after_NT[:, 0] = True
    return torch.where(emptied_N[:, None], after_NT, mask_NT)


def _advantages(parts: Sequence[TrlInputs], width: int) -> Tensor:
    """[N, T]: one per completion or one per token, times what multiplies the policy loss."""

    def spread(value: Tensor) -> Tensor:
        value = value.cpu()
        if value.dim() == 1:
            value = value[:, None]
        if value.shape[1] == 1:
            return value.expand(-1, width)
        return _wider(value, right=width)

    rows = []
    for part in parts:
        advantage_NT = spread(part["advantages"])
        for key in ("importance_sampling_ratio", POLICY_FACTOR):
            if part.get(key) is not None:
                advantage_NT = advantage_NT * spread(part[key])
        rows.append(advantage_NT)
    return torch.cat(rows)


def _rewards(parts: Sequence[TrlInputs]) -> Tensor | None:
    if any(part.get(REWARD) is None for part in parts):
        return None
    return torch.cat([part[REWARD].cpu().double() for part in parts])


def _spread_old(
    parts: Sequence[TrlInputs], counted_NS: Tensor, per_token_NS: Tensor | None
) -> Tensor | None:
    if per_token_NS is not None or any(part.get("old_logps") is None for part in parts):
        return per_token_NS
    old_N = torch.cat([part["old_logps"].cpu() for part in parts])
    share_N = old_N / counted_NS.sum(1).clamp_min(1)
    return torch.where(counted_NS, share_N[:, None], 0.0)


def _check_items(parts: Sequence[TrlInputs], counted: int) -> None:
    items = parts[0].get("num_items_in_batch")
    if items is not None and int(items) != counted:
        raise ValueError(
            f"The trainer counted {int(items)} tokens in its generation batch, these "
            f"{len(parts)} microbatches have {counted}. Give every microbatch of the step "
            "(the whole of _buffered_inputs). With steps_per_generation other than "
            "gradient_accumulation_steps, or several processes, pass check_items=False: all losses "
            "but dapo and cispo are exact then."
        )


def _prompt_index(ids_NP: Tensor, mask_NP: Tensor) -> Tensor:
    """Number the prompts by first appearance; rows with the same prompt share a number."""
    seen: dict[tuple[int, ...], int] = {}
    keys = (tuple(ids_P[mask_P].tolist()) for ids_P, mask_P in zip(ids_NP, mask_NP, strict=True))
    return torch.tensor([seen.setdefault(key, len(seen)) for key in keys])


def _truncated(ids_NT: Tensor, drawn_NT: Tensor, eos: int | Iterable[int] | None) -> Tensor:
    """A rollout whose last drawn token is no end-of-sequence was cut off."""
    if eos is None:
        return torch.zeros(len(ids_NT), dtype=torch.bool)
    ends = torch.tensor([eos] if isinstance(eos, int) else sorted(eos))
    last_N = ids_NT.gather(1, drawn_NT.sum(1, keepdim=True) - 1).squeeze(1)
    return ~torch.isin(last_N, ends)
