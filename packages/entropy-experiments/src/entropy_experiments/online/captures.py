"""What a TRL trainer computes on the way to a step and does not keep: rewards, masks of the loss.

Three of its methods are wrapped on the instance for the time of the training:

    _calculate_rewards                          rewards of every function, of all ranks
    _generate_and_score_completions             they join the batch, and are shuffled with it
    get_high_entropy_mask, get_off_policy_mask  factors of each token's policy loss

Arguments and results pass through untouched, so training is the same bit for bit. What cannot be
kept of them is told once, and training goes on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from entropy_experiments.sampling.advantages import weighted_rewards
from entropy_experiments.sampling.importers import BY_FUNCTION, POLICY_FACTOR, REWARD

LOG = logging.getLogger("entropy_experiments.online")
T = TypeVar("T")
MASKS = ("get_high_entropy_mask", "get_off_policy_mask")
GENERATES, REWARDS = "_generate_and_score_completions", "_calculate_rewards"


class Captures:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._rewards_NF: Tensor | None = None
        passes = trainer.args.gradient_accumulation_steps
        self._masks: dict[str, deque[Tensor]] = {name: deque(maxlen=passes) for name in MASKS}
        self._wrapped: list[str] = []
        self._told = False
        wraps = {REWARDS: self._rewarding, GENERATES: self._generating}
        for name, wrap in {**wraps, **dict.fromkeys(MASKS, self._masking)}.items():
            original = getattr(trainer, name, None)
            if original is not None and name not in vars(trainer):
                setattr(trainer, name, wrap(name, original))
                self._wrapped.append(name)

    def restore(self) -> None:
        """The trainer has its own methods again."""
        for name in self._wrapped:
            delattr(self.trainer, name)
        self._wrapped = []

    def factors(self, passes: int) -> list[Tensor | None]:
        """Of the step at hand, one for each of its microbatches (this rank's)."""
        found: list[Tensor | None] = [None] * passes
        for masks in self._masks.values():
            for i, mask_NT in enumerate(list(masks)[-passes:] if masks else ()):
                before = found[i]
                found[i] = mask_NT if before is None else before * mask_NT
        return found

    def with_factors(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            part if factor is None else {**part, POLICY_FACTOR: factor}
            for part, factor in zip(parts, self.factors(len(parts)), strict=True)
        ]

    def _rewarding(self, _: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def rewards(inputs: Any, prompts: Any, *args: Any, **kwargs: Any) -> Tensor:
            found_NF = original(inputs, prompts, *args, **kwargs)
            self._rewards_NF = self._kept(lambda: self._own(found_NF, len(prompts)), None)
            return found_NF

        return rewards

    def _own(self, reward_NF: Tensor, count: int) -> Tensor:
        """Of all ranks' rewards this one's."""
        first = self.trainer.accelerator.process_index * count
        return reward_NF[first : first + count].detach().clone()

    def _kept(self, work: Callable[[], T], otherwise: T) -> T:
        """`work()`; training must not feel that it failed."""
        try:
            return work()
        except Exception as error:  # the trainer is another than we know
            level = logging.DEBUG if self._told else logging.WARNING
            self._told = True
            LOG.log(
                level,
                "Something of this trainer could not be recorded; training goes on. %s: %s",
                type(error).__name__,
                error,
            )
            return otherwise

    def _generating(
        self, _: str, original: Callable[..., Mapping[str, Any]]
    ) -> Callable[..., Mapping[str, Any]]:
        def generated(*args: Any, **kwargs: Any) -> Mapping[str, Any]:
            self._rewards_NF = None
            batch = original(*args, **kwargs)
            return self._kept(lambda: self._with_rewards(batch), batch)

        return generated

    def _with_rewards(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        reward_NF = self._rewards_NF
        if reward_NF is None or len(reward_NF) != len(batch["prompt_ids"]):
            return batch
        weights = getattr(self.trainer, "reward_weights", None)
        weights = [1.0] * reward_NF.shape[1] if weights is None else weights.tolist()
        total_N = weighted_rewards(reward_NF.double(), weights)
        return {**batch, BY_FUNCTION: reward_NF, REWARD: total_N}

    def _masking(self, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        kept = self._masks[name]

        def masked(*args: Any, **kwargs: Any) -> Tensor:
            mask_NT = original(*args, **kwargs)
            self._kept(lambda: kept.append(mask_NT.detach().to("cpu", torch.float32)), None)
            return mask_NT

        return masked
