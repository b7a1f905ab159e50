"""One training run from a configuration to a summary.

Everything that can be wrong with the input is found before the folder of the run is made.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback
from transformers.utils import logging as transformers_logging

from entropy_experiments.checkpoints.runs import checkpoints_by_step
from entropy_experiments.config.training import TrainingConfig
from entropy_experiments.config.training_batch import (
    BatchPlan,
    batch_plan,
    plan_line,
    ranks_of_job,
)
from entropy_experiments.models.call_conditions import eval_mode
from entropy_experiments.models.trials import passing_tokens
from entropy_experiments.online.train.callbacks import (
    NOT_INSTALLED,
    EqualRewards,
    ProgressLines,
    TaskFacts,
    UnwatchedProbe,
    doctor_callback,
    doctor_installed,
    doctor_paused,
    doctor_summary,
    gradient_errors,
)
from entropy_experiments.online.train.folder import (
    DOCTOR_FILE,
    clear_remains,
    ended,
    last_whole_checkpoint,
    refuse_begun,
    refuse_not_begun,
    refuse_other_run,
    resume_notes,
    steps_made,
    write_config,
)
from entropy_experiments.online.train.summary import nothing_to_do, run_summary, write_summary
from entropy_experiments.online.train.trainer import (
    PartwiseGRPOTrainer,
    Task,
    build_trainer,
    load_policy,
    load_task,
)
from entropy_experiments.results import TrainingResult, TrainingUnchanged
from entropy_experiments.threads import choose_threads, chosen_threads

RECORD = "record"
PROBE_MICROBATCH = 8


def train(
    config: TrainingConfig, *, resume: bool = False, quiet: bool = False, task: Task | None = None
) -> TrainingResult | TrainingUnchanged:
    """Train; returns the summary, on every rank. `task`: problems of one's own."""
    began = time.monotonic()
    rank, ranks = ranks_of_job()
    out = Path(config.output_dir)
    plan = batch_plan(config, ranks=ranks)
    checkpoint, notes = None, list[str]()
    if resume:
        refuse_not_begun(out)
        refuse_other_run(out, config)
        checkpoint, torn = last_whole_checkpoint(out)
        notes += [f"{path.name} was cut off and is written again." for path in torn]
        if checkpoint is not None:
            steps = steps_made(checkpoint)
            if steps > config.max_steps or (steps == config.max_steps and ended(out, steps)):
                return nothing_to_do(out, checkpoint, max_steps=config.max_steps)
            notes += resume_notes(checkpoint, config, ranks)
        if rank == 0:
            clear_remains(out, torn if checkpoint is not None else checkpoints_by_step(out))
    elif rank == 0:
        refuse_begun(out)
    policy = load_policy(config)
    task = task or load_task(config, plan, tokenizer=policy[1])
    if rank == 0 and not quiet:
        _tell([*_opening(config, plan, task, checkpoint, resume), *notes])
    probe, doctor, callbacks = _watchers(config, task, out, quiet=quiet)
    equal = EqualRewards(task.functions, group=config.num_generations)
    if not config.beta and not config.trl.get("entropy_coef"):  # which have a gradient of their own
        callbacks.append(equal)
    trainer = _built(config, plan, task, policy, out, callbacks)
    equal.trainer = trainer
    trainer.unwatched = lambda: doctor_paused(doctor)
    if rank == 0:
        write_config(out, config)
    with chosen_threads():
        choose_threads(*_trial_pass(trainer.model), anew=True)
        try:
            result: Any = trainer.train(
                resume_from_checkpoint=None if checkpoint is None else str(checkpoint)
            )
        except gradient_errors():
            equal.refuse(cut_short=True)  # the reason of what the doctor found
            raise
    equal.refuse()
    before = 0 if checkpoint is None else steps_made(checkpoint)
    steps_now = trainer.state.global_step > before
    summary = run_summary(
        trainer,
        out,
        probe=probe,
        doctor=doctor_summary(doctor),
        resumed_from=checkpoint,
        seconds=time.monotonic() - began,
        loss=float(result.training_loss) if steps_now else None,
    )
    if rank == 0:
        write_summary(out, summary)
        if doctor is not None and summary["doctor"]["findings"] and not quiet:
            _tell(["", doctor.report()])
    return summary


def _trial_pass(model: Any) -> tuple[torch.device, Callable[[], object]]:
    """Where the model is, and a small pass of it."""
    tokens_NS = passing_tokens(model)

    def trial() -> object:
        with eval_mode(model):  # dropout would draw from the training's random numbers
            return model(input_ids=tokens_NS)

    return tokens_NS.device, trial


def _watchers(
    config: TrainingConfig, task: Task, out: Path, *, quiet: bool
) -> tuple[UnwatchedProbe | None, Any, list[Any]]:
    """(probe, doctor, all callbacks in their order)."""
    wanted, callbacks, facts = config.probe, list[Any](), task.facts(config)
    record = out / RECORD if wanted.enabled and wanted.record else None
    probe = None
    if wanted.enabled:
        probe = UnwatchedProbe(
            every=wanted.every,
            max_overhead=wanted.max_overhead,
            evaluation=wanted.evaluation,
            prompts=wanted.prompts,
            group=wanted.group,
            uses=wanted.uses,
            microbatch=wanted.microbatch or config.tf_micro_batch or PROBE_MICROBATCH,
            parts=wanted.parts,
            order=wanted.order,
            record=record,
            facts=facts,
            ledger_every=wanted.ledger_every,
            noise_scale=wanted.noise_scale,
            seed=wanted.seed,
        )
        callbacks.append(probe)
    callbacks.append(TaskFacts(facts, save_first=config.save_first))
    doctor = doctor_callback(config, out / DOCTOR_FILE)
    if doctor is not None:
        callbacks.append(doctor)
        if probe is not None:
            probe.watcher = doctor
    if not quiet:
        callbacks.append(ProgressLines())
    return probe, doctor, callbacks


def _built(
    config: TrainingConfig,
    plan: BatchPlan,
    task: Task,
    policy: tuple[Any, Any],
    out: Path,
    callbacks: list[Any],
) -> PartwiseGRPOTrainer:
    was_there = out.exists()
    transformers_logging.set_verbosity_warning()
    try:
        trainer = build_trainer(config, plan, task, policy, out, callbacks=callbacks)
    except BaseException:
        if not was_there and out.is_dir() and not any(out.iterdir()):
            out.rmdir()  # the Trainer makes it before it looks at its arguments
        raise
    trainer.remove_callback(PrinterCallback)  # rows on stdout, where --json writes
    for callback in callbacks:
        if isinstance(callback, TaskFacts):
            callback.trainer = trainer
    return trainer


def _opening(
    config: TrainingConfig, plan: BatchPlan, task: Task, checkpoint: Path | None, resume: bool
) -> list[str]:
    kind = "all weights" if config.lora is None else f"LoRA of rank {config.lora.r}"
    lines = [
        f"{config.model}, {kind}, on {config.dataset_name}: {len(task.training)} problems, "
        f"{len(task.held_out)} more for the probe; rewards {', '.join(task.functions)}",
        plan_line(config, plan),
    ]
    if config.doctor.enabled and not doctor_installed():
        lines.append(NOT_INSTALLED)
    if checkpoint is not None:
        lines.append(f"continuing from {checkpoint}")
    elif resume:
        lines.append(f"{config.output_dir} has no whole checkpoint yet: from the beginning")
    return lines


def _tell(lines: Sequence[str]) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)
