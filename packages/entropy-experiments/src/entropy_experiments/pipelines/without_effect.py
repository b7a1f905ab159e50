"""Settings that a batch which is not drawn leaves without effect: never ignored in silence.

A batch that training recorded, or that an earlier run saved, has its own prompts, responses and
advantages. Keys that say how to draw one then do nothing. Where somebody asked for another value,
on the command line, in Python or in a file with today's keys, that is an error; a default that a
file repeats, and the documents' files, which are older than recorded batches, get a note. Values
of the package's own templates were nobody's wish.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entropy_experiments.config import Config, ConfigError
from entropy_experiments.config.keys import shown
from entropy_experiments.types import Rollouts

DRAWING_UPDATE = (
    "data.update_prompts",
    "data.responses_per_prompt",
    "data.update_split",
    "data.resample_equal_rewards",
    "data.zero_advantage_tolerance",
    "data.max_resamples",
)
DRAWING_EVALUATION = ("data.evaluation_prompts", "data.evaluation_split")
SCORING = {
    "data.reward_functions": "reward_functions",
    "data.reward_weights": "reward_weights",
    "update.advantage": "advantage",
}
"""How a drawn batch gets its advantages, and what the same is called in the facts of training."""


@dataclass(frozen=True, kw_only=True)
class FixedBatch:
    """A batch that is not drawn here."""

    what: str
    """Which batch it is and where, as a clause."""
    instead: str
    """What to do for a drawn one, as an imperative."""
    rollouts: Rollouts

    def sizes(self, prompts: str, responses: str | None = None) -> dict[str, int]:
        """What the batch has, for the keys that ask for so many prompts and responses to each.

        Groups of several sizes are no number that a key could repeat.
        """
        _, count_P = self.rollouts.prompt_N.unique(return_counts=True)
        sizes = {prompts: len(count_P)}
        if responses is not None and len(count_P.unique()) == 1:
            sizes[responses] = int(count_P[0])
        return sizes


def update_without_effect(
    config: Config, batch: FixedBatch, facts: Mapping[str, Any], used: Collection[str] = ()
) -> list[str]:
    """Notes on keys that would draw and score an update batch, of which there is one already.

    `facts`: what is recorded of how its rewards and advantages were made. `used`: keys among
    `SCORING` that the command needs for something else.
    """
    recorded: dict[str, Any] = batch.sizes("data.update_prompts", "data.responses_per_prompt")
    recorded |= {key: facts[name] for key, name in SCORING.items() if facts.get(name) is not None}
    # Without a record, `update.advantage` tells what training did: there is nothing to contradict.
    scoring = [k for k in SCORING if k not in used and (k in recorded or k != "update.advantage")]
    return without_effect(config, (*DRAWING_UPDATE, *scoring), recorded, batch)


def evaluation_without_effect(config: Config, batch: FixedBatch) -> list[str]:
    """Notes on keys that would draw evaluation rollouts, of which there are some already."""
    recorded = batch.sizes("data.evaluation_prompts")
    return without_effect(config, DRAWING_EVALUATION, recorded, batch)


def without_effect(
    config: Config, keys: Sequence[str], recorded: Mapping[str, Any], batch: FixedBatch
) -> list[str]:
    """A note on what a file repeats of these keys; a ConfigError for what somebody asked for.

    `recorded`: what the batch has where a key asks for as much; asking for just that is no mistake.
    """
    wrong, idle = [], []
    for key in keys:
        setting = config.setting(key)
        has = recorded.get(key)
        if setting is None or (has is not None and _plain(setting.value) == _plain(has)):
            continue
        if setting.asked:
            own = "which is taken as it is" if has is None else f"which has {shown(_plain(has))}"
            wrong.append(
                f"{setting.place}: {key}: got {shown(_plain(setting.value))}, which has no effect: "
                f"{batch.what}, {own}. Leave it out, or {batch.instead}."
            )
        else:
            idle.append(key)
    if wrong:
        raise ConfigError(config.source, wrong)
    return [f"without effect: {', '.join(idle)}; {batch.what}"] if idle else []


def _plain(value: Any) -> Any:
    """Lists of a JSON file and tuples of the config mean the same."""
    return list(value) if isinstance(value, tuple | list) else value
