"""The whole ledger of a step that is about to be made: the offline influence study, in memory.

What `entropy-probe influence` reads from a checkpoint and its recorded batch is here already: the
policy and the optimizer before the step, the batch that it learns from, and the rollouts that the
probe evaluates it on. They are handed to the same stages, so every number is that command's, and so
are the files, which `entropy-probe report` reads:

    FOLDER/step_N/summary.json, tokens.parquet, ..., manifest.json

The step is rebuilt from its batch, since a rollout's share of the gradient is in no `.grad`. How
far the rebuilt step is from the trainer's own is among the notes of summary.json, and so are the
lines' sum and the online prediction, which is another way to the same number. Step N counts
from 0 and is the one made from checkpoint-N. The first step is never explained: LoRA's B is zero
there, and Adam without moments scales up the rounding of the gradients behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.artifacts import digest_of
from entropy_experiments.checkpoints.load import Checkpoint
from entropy_experiments.checkpoints.training_facts import FACTS_FILE
from entropy_experiments.config import Config, parse_config
from entropy_experiments.config.estimates import BatchRequest
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import norm, shifted
from entropy_experiments.online.facts_file import facts_of
from entropy_experiments.pipelines.influence.batches import EvaluationBatch, StudyInputs, folded
from entropy_experiments.pipelines.influence.evaluation import evaluations_of
from entropy_experiments.pipelines.influence.files import StudyFiles
from entropy_experiments.pipelines.influence.ledgers import ledgers
from entropy_experiments.pipelines.influence.stages import Study
from entropy_experiments.pipelines.influence.store import RunDirectory, digest_of_tensors
from entropy_experiments.pipelines.probe_inputs import ProbeInputs, limits_of
from entropy_experiments.pipelines.probe_sampling import prompts_of
from entropy_experiments.pipelines.run_conditions import analysis_conditions
from entropy_experiments.pipelines.step_facts import training_facts
from entropy_experiments.types import Direction, Rollouts, UpdateBatch
from entropy_experiments.update.live import live_direction, live_state

LEDGERS = "entropy_probe_ledgers"
"""Folder of the run directories, in the trainer's output folder."""
ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def refuse_ledger(every: int | None, evaluation: Any) -> None:
    """Options that cannot give a ledger, before any training."""
    if every is None:
        return
    if every < 1:
        raise ValueError(f"ledger_every is {every}; expected at least 1, or None for no ledger.")
    if isinstance(evaluation, str) and evaluation == "batch":
        raise ValueError(
            "ledger_every with evaluation='batch': every rollout of the ledger would be judged by "
            "itself, and looks better than it is. Expected evaluation rollouts that the step does "
            "not learn from: 'fresh', 'half' or Rollouts of your own."
        )


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, ADAMS):
        raise ValueError(
            f"ledger_every with {type(optimizer).__name__}: expected torch's Adam or AdamW, whose "
            "step is split into momentum, decay and rollouts. Leave ledger_every out; prediction "
            "and measurement need no ledger."
        )


def due(every: int | None, step: int) -> bool:
    """Whether step `step`, counted from 0, has its ledger written."""
    return every is not None and step > 0 and step % every == 0


def ledger_config(microbatch: int) -> Config:
    """The study's settings: the estimand of the online prediction, and no more than a ledger."""
    return parse_config(
        {
            "measure": {"weighting": "per_decision"},  # whose derivative is the to-go form
            "memory": {"microbatch_size": microbatch, "forward_batch_size": microbatch},
            "influence": {"plots": False, "measured_rollouts": 1},
        },
    )


def write_ledger(
    folder: Path,
    *,
    trainer: Any,
    policy: SequenceProcessor,
    optimizer: torch.optim.Optimizer,
    gradient: Mapping[str, Tensor | None],
    batch: UpdateBatch,
    evaluation: Rollouts,
    evaluated: str,
    predicted: float,
    step: int,
    microbatch: int,
    facts: Mapping[str, Any],
    divisor: float | None = None,
) -> Path:
    """The run directory of the step that `optimizer` is about to make."""
    with analysis_conditions():
        inputs = _inputs(
            policy,
            live_state(policy.params, optimizer),
            batch,
            evaluation,
            checkpoint=_in_training(
                trainer, policy, step, {**facts_of(trainer, facts), "divisor": divisor}
            ),
            config=ledger_config(microbatch),
            notes=_notes(evaluation, batch, evaluated),
        )
        run = RunDirectory(folder / f"step_{step}")
        key = digest_of("online", Study(inputs, run.stages).key)
        run.bind(key, overwrite=True)  # a resumed training makes some of its steps again
        try:
            made = Study(inputs, run.stages)
            (books,) = (ledgers(found)["entropy"] for found in evaluations_of(made))
            certified = (
                f"the lines sum to {books['predicted']['value']:.6g}; the online prediction of "
                f"this step is {predicted:.6g}",
                _distance(made.direction, live_direction(policy.params, gradient, optimizer)),
            )
            probe = replace(inputs.probe, notes=(*inputs.probe.notes, *certified))
            study = Study(replace(inputs, probe=probe), run.stages)
            files, arrays, _ = StudyFiles(study).made(key)
            run.write(files, key, arrays)
        finally:
            # As large as the model, several times; and the step is past when somebody would resume.
            rmtree(run.stages.folder, ignore_errors=True)
    return run.folder


def _inputs(
    policy: SequenceProcessor,
    optimizer: Any,
    batch: UpdateBatch,
    evaluation: Rollouts,
    *,
    checkpoint: Checkpoint,
    config: Config,
    notes: tuple[str, ...],
) -> StudyInputs:
    facts = training_facts(config, checkpoint.facts, checkpoint.fact_sources)
    asked = EvaluationBatch(
        name="eval_00",
        request=BatchRequest(kind="evaluation"),
        rollouts=evaluation,
        reward_N=None,
        notes=notes,
    )
    probe = ProbeInputs(
        config=config,
        checkpoint=replace(checkpoint, optimizer=optimizer),
        policy=policy,
        facts=facts,
        optimizer=optimizer,
        horizon=facts["max_completion_length"],
        evaluation=evaluation,
        update=batch,
        real=True,
        bound=True,
        retries=None,
        notes=(*facts.notes, *limits_of(checkpoint, facts, True)),
        timing={},
    )
    return StudyInputs(
        probe=probe, evaluations=(folded(asked, config.influence.folds),), identity={"online": True}
    )


def _in_training(
    trainer: Any, policy: SequenceProcessor, step: int, facts: Mapping[str, Any]
) -> Checkpoint:
    """What a checkpoint saved at this moment would say."""
    lora = bool(getattr(policy.model, "peft_config", None))
    dtype = str(next(iter(policy.params.values())).dtype).removeprefix("torch.")
    return Checkpoint(
        model=policy.model,
        tokenizer=trainer._tokenizer,
        kind="lora" if lora else "full",
        step=step,
        path=Path(trainer.args.output_dir),
        name=f"step_{step}",
        base=f"the policy in training, {dtype}",
        optimizer=None,
        lr=None,
        facts=facts,
        fact_sources=dict.fromkeys(facts, f"the trainer ({FACTS_FILE})"),
        coverage={},
        not_verifiable=(),
        recorded=None,
        optimizer_path=None,
        hashes={"parameters in memory": digest_of_tensors(policy.params)},
    )


def _notes(evaluation: Rollouts, batch: UpdateBatch, evaluated: str) -> tuple[str, ...]:
    said = f"evaluation rollouts are those of the online probe ({evaluated})"
    asked = prompts_of(evaluation)
    shared = len(asked & prompts_of(batch.rollouts))
    if not shared:
        return (said,)
    return (
        said,
        f"{shared} of {len(asked)} evaluation prompts are prompts of the update batch, which the "
        "update moves most; an eval_dataset of other prompts would tell of those",
    )


def _distance(rebuilt: Direction, real: Direction) -> str:
    size = norm(real.total)
    gap = norm(shifted(rebuilt.total, real.total, -1.0)) / size if size else 0.0
    return (
        f"the step rebuilt from the batch differs from the trainer's own by {gap:.1e} of its size"
    )
