"""A training whose rewards are all equal from its first step on learns nothing: it is ended.

Advantages compare the responses to one prompt. Where all of a group are rewarded alike they are 0,
and so is the gradient; if that is true of every group of the first steps, something is wrong with
the reward or the task, and a hundred more steps would not mend it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

STEPS = 5
"""Of a run's beginning. A group of a hard task may be unlucky, all of five steps are not."""
METRIC = "frac_reward_zero_std"
"""TRL's: the share of groups without any spread (tests hold the name)."""


KEPT = "equal_rewards"
"""Under `stateful_callbacks` of trainer_state.json: a run that is resumed counts on."""


class EqualRewardsError(Exception):
    """Every group of the first steps had equal rewards; the message is the diagnosis."""


class EqualRewards(TrainerCallback):
    """Ends a run that began with equal rewards; `refuse` then says so."""

    def __init__(self, functions: Sequence[str], *, group: int) -> None:
        self.functions, self.group = tuple(functions), group
        self.trainer: Any = None
        self._equal: list[bool] = []
        self._from_the_start = False
        self._reward: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        kept: Any = state.stateful_callbacks.get(KEPT) if state.global_step else {"equal": []}
        equal = kept.get("equal") if isinstance(kept, dict) else None
        self._from_the_start = isinstance(equal, list)
        if isinstance(kept, dict) and isinstance(equal, list):
            self._equal = [bool(value) for value in equal]
            reward = kept.get("reward")
            self._reward = reward if isinstance(reward, float) else None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        looked = self._look()
        if looked and len(self._equal) >= STEPS and all(self._equal):
            control.should_training_stop = True
        if self._from_the_start:
            state.stateful_callbacks[KEPT] = {"equal": self._equal, "reward": self._reward}

    def _look(self) -> bool:
        """Whether the last step is counted; later steps of a run that has learned are not."""
        metrics = self.trainer._metrics["train"]
        shares = metrics.get(METRIC) or []
        if not self._from_the_start or not shares or len(self._equal) >= STEPS:
            return False
        self._equal.append(float(shares[-1]) == 1.0)
        rewards = metrics.get("reward") or []
        self._reward = float(rewards[-1]) if rewards else None
        return True

    def refuse(self, *, cut_short: bool = False) -> None:
        """Raise if the run's beginning was such; `cut_short`: a doctor has ended it already."""
        if cut_short:
            self._look()
        enough = bool(self._equal) if cut_short else len(self._equal) >= STEPS
        if not enough or not all(self._equal):
            return
        reward = "" if self._reward is None else f" (last: {self._reward:.3g} on average)"
        raise EqualRewardsError(
            f"All {self.group} responses to each prompt of the first {len(self._equal)} steps had "
            f"equal rewards from {', '.join(self.functions)}{reward}: there is no advantage, so no "
            "gradient, and nothing is learned. Check the reward on a few responses, choose a task "
            "that the policy sometimes solves, or raise max_completion_length or num_generations."
        )
