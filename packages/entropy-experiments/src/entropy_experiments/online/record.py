"""Every step's batch on disk, and all that the offline commands need to ask about it later.

    DIR/step_N/update_batch     what step N (counted from 0) learned from: tokens, masks,
                                advantages, old log-probs, the rewards of every rollout
    DIR/step_N/evaluation       what it was probed with, if it was
    DIR/step_N/made_step        fingerprints of the gradient that was used and of the step made
    DIR/prompts                 the prompts of training and evaluation, with every column
    DIR/entropy_probe.json      the training facts
    DIR/entropy_probe_record.json   trainer, options, rewards, prompts (`training_record`)
    checkpoint-N/...            all but the prompts, beside each checkpoint that the trainer saves,
                                and beside the one that it was resumed from; there, where it is
                                small enough or asked for, the gradient itself

The copies beside a checkpoint name the weights they belong to, and are what the offline commands
read: `entropy-probe run --checkpoint checkpoint-N` replays the step that was made from it.

`entropy_probe.json` holds what decides a step and is in no checkpoint. The trainer's settings say
most of it. What they cannot know (which dataset, which rewards) comes from whoever set the training
up, and wins; notes of both are kept.

Here is what a TRL trainer has of all this; `step_recorder` takes it from a loop of your own, and
`record_files` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from entropy_experiments.checkpoints.recorded_step import base_fingerprint, base_location
from entropy_experiments.checkpoints.training_facts import KNOWN_FACTS, FactsFile
from entropy_experiments.checkpoints.training_record import SCHEMA, RecordContent, RecordedRewards
from entropy_experiments.distributed import Ranks
from entropy_experiments.loss_names import Loss
from entropy_experiments.online.record_files import PROMPTS, RecordFiles, name_parameters
from entropy_experiments.online.record_sources import rewards_entry, write_prompts
from entropy_experiments.online.trl_options import (
    recorded_options,
    recorded_trainer,
    rounded_steps,
    sampled_otherwise,
    unfollowed,
)
from entropy_experiments.online.trl_trainer import (
    Captures,
    step_microbatches,
    token_divisor,
    trainer_facts,
    unwrapped_optimizer,
    update_batch,
)
from entropy_experiments.online.trl_versions import prompt_ids
from entropy_experiments.sampling.importers import BY_FUNCTION
from entropy_experiments.types import Params, Rollouts


class Recorder:
    """What a TRL trainer holds of each step, into a run's record."""

    def __init__(self, folder: Path, facts: FactsFile, *, gradient: bool | None = None) -> None:
        refuse_unknown(facts)
        self.folder, self.facts = folder, facts
        self.files = RecordFiles(folder, gradient=gradient)

    def begin(self, trainer: Any, model: Any, ranks: Ranks) -> None:
        """What does not change in training: prompts, rewards, options, the base."""
        # Of an earlier training of the same trainer, whose checkpoints are not this one's.
        self.files.forget()
        if ranks.rank:
            return
        data = {"train": trainer.train_dataset, "eval": trainer.eval_dataset}
        if isinstance(data["eval"], dict):  # several evaluation sets: the first, as the probe does
            data["eval"] = next(iter(data["eval"].values()), None)
        content: RecordContent = {
            "schema": SCHEMA,
            "trainer": recorded_trainer(trainer),
            "options": recorded_options(trainer.args),
            "unfollowed": [*unfollowed(trainer), *rounded_steps(model)],
            "sampling": sampled_otherwise(trainer),
            "rewards": recorded_rewards(trainer),
            "prompts": write_prompts(
                self.folder / PROMPTS, data, lambda prompt: prompt_ids(trainer, prompt)
            ),
            "base": base_fingerprint(model),
            "base_location": base_location(model),
        }
        self.files.describe(content, facts_of(trainer, self.facts))

    def record(
        self,
        trainer: Any,
        step: int,
        ranks: Ranks,
        *,
        gradient: Mapping[str, Tensor | None],
        params: Params,
        captures: Captures | None,
    ) -> None:
        """The batch of the step at hand, and its gradient's fingerprint."""
        batch = update_batch(trainer, ranks, captures)
        parts = step_microbatches(trainer, ranks)
        if ranks.rank:
            return
        more = {"divisor": token_divisor(trainer), "rewards": _by_function(parts, trainer)}
        more = {name: value for name, value in more.items() if value is not None}
        self.files.add_batch(batch, step, facts_of(trainer, self.facts), more=more)
        lr = float(unwrapped_optimizer(trainer.optimizer).param_groups[0]["lr"])
        self.files.add_gradient(gradient, params, step, lr=lr, ranks=ranks)

    def after_step(self, step: int, params: Params, ranks: Ranks) -> None:
        """The optimizer has stepped: what became of the parameters."""
        self.files.after_step(step, params, ranks)

    def evaluated(self, rollouts: Rollouts, step: int, ranks: Ranks) -> None:
        """The rollouts that the step at hand was probed with."""
        if not ranks.rank:
            self.files.add_evaluation(rollouts, step)

    def saved(self, trainer: Any, checkpoint: Path, ranks: Ranks) -> None:
        """The trainer has just written this checkpoint: the next step's batch belongs to it."""
        if not ranks.rank and checkpoint.is_dir():
            model = trainer.accelerator.unwrap_model(trainer.model)
            name_parameters(checkpoint, model, unwrapped_optimizer(trainer.optimizer))
            facts = facts_of(trainer, self.facts)
            self.files.add_checkpoint(checkpoint, trainer.state.global_step, facts)

    def resumed(self, trainer: Any, checkpoint: Path, ranks: Ranks) -> None:
        """Training goes on from this checkpoint: so does the step at hand.

        One of another run, outside the trainer's folder, is left as it is.
        """
        own = checkpoint.resolve().parent == Path(trainer.args.output_dir).resolve()
        if not ranks.rank and own and checkpoint.is_dir():
            facts = facts_of(trainer, self.facts)
            self.files.resume(checkpoint, trainer.state.global_step, facts)


def _by_function(parts: list[dict[str, Any]], trainer: Any) -> dict[str, list[float | None]] | None:
    """Each reward function's values, in the batch's order; None where it had no opinion."""
    if any(part.get(BY_FUNCTION) is None for part in parts):
        return None
    value_NF = torch.cat([part[BY_FUNCTION].cpu().double() for part in parts])
    names = [one["name"] for one in recorded_rewards(trainer)["functions"]]
    for name, infinite in zip(names, value_NF.isinf().any(0).tolist(), strict=True):
        if infinite:
            raise ValueError(
                f"The reward function {name!r} gave an infinite reward; expected finite numbers, "
                "which a record can hold and advantages can be made of. Bound what it returns."
            )
    return {
        name: [None if value != value else value for value in value_NF[:, i].tolist()]
        for i, name in enumerate(names)
    }


def refuse_unknown(facts: Mapping[str, object]) -> None:
    """A name that the offline commands would refuse, before it is in every checkpoint."""
    for name in facts:
        if name not in KNOWN_FACTS:
            near = get_close_matches(name, KNOWN_FACTS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"facts has {name!r}.{hint} Expected names among {', '.join(KNOWN_FACTS)}."
            )


def facts_of(trainer: Any, own_facts: FactsFile) -> FactsFile:
    read = trainer_facts(trainer)
    if read.get("loss") not in get_args(Loss):
        read.pop("loss", None)  # the record names it among what is not followed
    return {**read, **own_facts}


def recorded_rewards(trainer: Any) -> RecordedRewards:
    """The record's entry."""
    names: list[str] = list(getattr(trainer, "reward_func_names", ()))
    weights = getattr(trainer, "reward_weights", None)
    return rewards_entry(list(trainer.reward_funcs), names, weights)
