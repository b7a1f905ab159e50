"""The whole ledger of a step that is about to be made: `analyze_step` on the live policy, as files.

What `entropy-probe influence` reads from a checkpoint and its recorded batch is here already: the
policy and the optimizer before the step, the batch that it learns from, and the rollouts that the
probe evaluates it on. The numbers are that command's, since both call the same stages, and so are
the files, which `entropy-probe report` reads:

    FOLDER/step_N/summary.json, tokens.parquet, ..., manifest.json

The step is rebuilt from its batch, since a rollout's share of the gradient is in no `.grad`. How
far the rebuilt step is from the trainer's own is among the notes of summary.json, and so are the
lines' sum and the online prediction, which is another way to the same number. Step N counts
from 0 and is the one made from checkpoint-N. The first step is never explained: LoRA's B is zero
there, and Adam without moments scales up the rounding of the gradients behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.artifacts import digest_of
from entropy_experiments.attribution.analyze import StepAnalysis, StepOptions, analyze_step
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.checkpoints.training_facts import FACTS_FILE, FactsFile
from entropy_experiments.config import Config, parse_config
from entropy_experiments.config.sections import BatchRequest
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import norm, shifted
from entropy_experiments.online.record import facts_of
from entropy_experiments.online.trl_versions import tokenizer_of
from entropy_experiments.pipelines.influence.batches import EvaluationBatch, folded
from entropy_experiments.pipelines.influence.files import StudyFiles
from entropy_experiments.pipelines.influence.packing import step_json
from entropy_experiments.pipelines.influence.results import EvaluationResults, StudyResults
from entropy_experiments.pipelines.influence.stages import rollouts_digest
from entropy_experiments.pipelines.influence.store import (
    RunDirectory,
    batch_digest,
    digest_of_tensors,
)
from entropy_experiments.pipelines.influence.summary_json import changes, ledger_json
from entropy_experiments.pipelines.probe_inputs import WEIGHTS_NOTE, limits_of
from entropy_experiments.pipelines.probe_sampling import prompts_of
from entropy_experiments.pipelines.run_conditions import analysis_conditions
from entropy_experiments.pipelines.training_facts import TrainingFacts, resolve_facts
from entropy_experiments.results import INFLUENCE, numbers
from entropy_experiments.types import Direction, Rollouts, UpdateBatch
from entropy_experiments.update.live import live_direction, live_state

ADAMS = (torch.optim.Adam, torch.optim.AdamW)
NAME = "eval_00"
"""The evaluation batch in the names of files."""
MEASURED_ROLLOUTS = 1
"""Update rollouts whose own direction is measured, too: training waits meanwhile."""


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


def ledger_options(facts: TrainingFacts, microbatch: int) -> StepOptions:
    """How it is analysed: the estimand of the online prediction, and no more than a ledger."""
    return StepOptions(
        objective=facts.objective,
        max_grad_norm=facts["max_grad_norm"] or None,
        estimator=EstimatorOptions(
            form="per_decision",  # whose derivative is the to-go form
            horizon=facts["max_completion_length"],
            microbatch=microbatch,
        ),
        measured_rollouts=MEASURED_ROLLOUTS,
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
    facts: FactsFile,
    divisor: float | None = None,
) -> Path:
    """The run directory of the step that `optimizer` is about to make."""
    read = {**facts_of(trainer, facts), "divisor": divisor}
    training = resolve_facts(
        {"top_p": 1.0}, read, dict.fromkeys(read, f"the trainer ({FACTS_FILE})")
    )
    evaluation_batch = folded(
        EvaluationBatch(
            name=NAME,
            request=BatchRequest(kind="evaluation"),
            rollouts=evaluation,
            reward_N=None,
            notes=_notes(evaluation, batch, evaluated),
        ),
        StepOptions.folds,
    )
    options = replace(ledger_options(training, microbatch), folds=evaluation_batch.folds)
    with analysis_conditions():
        hashes = {"parameters in memory": digest_of_tensors(policy.params)}
        run = RunDirectory(folder / f"step_{step}")
        key = _key(options, hashes, batch, evaluation)
        run.bind(key, overwrite=True)  # a resumed training makes some of its steps again
        analysis = analyze_step(policy, optimizer, batch, evaluation, options)
        momentum_decay, coupled_decay = momentum_of(live_state(policy.params, optimizer))
        dtype = str(next(iter(policy.params.values())).dtype).removeprefix("torch.")
        results = StudyResults(
            folder=run.folder,
            checkpoint=f"step_{step}",
            step=step,
            base=f"the policy in training, {dtype}",
            config=_as_config(options),
            decode=tokenizer_of(trainer).decode,
            batch=batch,
            real=True,
            bound=True,
            objective=options.objective,
            direction=analysis.direction,
            step_json={**step_json(analysis.rebuilt), "certified": {}},
            momentum_decay=momentum_decay,
            coupled_decay=coupled_decay,
            estimand=options.estimator.estimand(policy),
            mode=analysis.mode,
            clip=options.clip,
            etas=(analysis.direction.lr,),
            per_sequence_etas=(analysis.direction.lr,),
            evaluations=(_evaluation_results(evaluation_batch, analysis),),
            notes=(
                *training.notes,
                *limits_of(policy.model, training, real=True),
                f"the lines sum to {analysis.predicted.value:.6g}; the online prediction of this "
                f"step is {predicted:.6g}",
                _distance(analysis.direction, live_direction(policy.params, gradient, optimizer)),
            ),
            assumed=training.assumed,
            not_verifiable=(WEIGHTS_NOTE,),
            timings=_timings(analysis.seconds),
            input_hashes=hashes,
        )
        files, arrays, _ = StudyFiles(results).made(key)
        run.write(files, key, arrays)
    return run.folder


def _evaluation_results(batch: EvaluationBatch, analysis: StepAnalysis) -> EvaluationResults:
    return EvaluationResults(
        name=batch.name,
        request=batch.request,
        rollouts=batch.rollouts,
        reward_N=None,
        notes=batch.notes,
        level=numbers(analysis.level),
        matrix=analysis.matrix,
        tokens=analysis.tokens,
        changes=changes(analysis.changes),
        measured_rows=analysis.measured_rows,
        rollout_changes=changes(analysis.rollout_changes),
        ledgers={"entropy": ledger_json(analysis.ledger), "reward": None},
    )


def _key(
    options: StepOptions, hashes: Mapping[str, str], batch: UpdateBatch, evaluation: Rollouts
) -> str:
    """All that the numbers of a ledger depend on."""
    return digest_of(
        "online",
        INFLUENCE.version,
        {name: value for name, value in provenance().items() if name != "git"},
        hashes,
        asdict(options),
        rollouts_digest(batch.rollouts),
        batch_digest(batch),
        rollouts_digest(evaluation),
    )


def _as_config(options: StepOptions) -> Config:
    """config.yaml of a ledger: what would ask `entropy-probe influence` for these numbers."""
    estimator = options.estimator
    return parse_config(
        {
            "measure": {"weighting": estimator.form},
            "memory": {
                "microbatch_size": estimator.microbatch,
                "forward_batch_size": estimator.forward_size,
            },
            "influence": {"plots": False, "measured_rollouts": options.measured_rollouts},
        },
    )


def _timings(seconds: Mapping[str, float]) -> dict[str, float]:
    """Under the names of a study's stages."""
    of_step = {name: seconds[name] for name in ("step", "lines") if name in seconds}
    others = {name: value for name, value in seconds.items() if name not in of_step}
    names = {"rollouts": "rollouts_00"}
    return {**of_step, **{f"{NAME}_{names.get(k, k)}": value for k, value in others.items()}}


def _notes(evaluation: Rollouts, batch: UpdateBatch, evaluated: str) -> tuple[str, ...]:
    source = f"evaluation rollouts are those of the online probe ({evaluated})"
    prompts = prompts_of(evaluation)
    shared = len(prompts & prompts_of(batch.rollouts))
    if not shared:
        return (source,)
    return (
        source,
        f"{shared} of {len(prompts)} evaluation prompts are prompts of the update batch, which the "
        "update moves most; an eval_dataset of other prompts would tell of those",
    )


def _distance(rebuilt: Direction, real: Direction) -> str:
    size = norm(real.total)
    gap = norm(shifted(rebuilt.total, real.total, -1.0)) / size if size else 0.0
    return (
        f"the step rebuilt from the batch differs from the trainer's own by {gap:.1e} of its size"
    )
