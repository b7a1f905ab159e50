"""Checkpoints on a task: pass rate, pass@k, format, length, entropy; side by side and over steps.

Each checkpoint answers the same prompts with the same seeds. A checkpoint that is finished is on
disk, rollouts of one under way too, so a killed evaluation continues where it was. Nothing is
loaded until every checkpoint's files, the task and its rewards have been looked at.

A model cut over the processes (`checkpoint.sharding`) draws and scores like a whole one, with all
processes in step.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from entropy_experiments.artifacts import write_whole
from entropy_experiments.checkpoints.load import Checkpoint, load_checkpoint
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.config import Config, parse_config
from entropy_experiments.distributed import current
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.sharded import ShardedPolicy
from entropy_experiments.pipelines.evaluation.measures import (
    differences,
    length_quantiles,
    measures,
)
from entropy_experiments.pipelines.evaluation.request import (
    Candidate,
    Evaluation,
    EvaluationRequest,
    digest,
    prepared,
)
from entropy_experiments.pipelines.evaluation.rollout_rows import (
    check_reward,
    high_entropy_tokens,
    rollout_rows,
)
from entropy_experiments.pipelines.evaluation.store import (
    UNITS,
    EvaluationStore,
    Finished,
)
from entropy_experiments.pipelines.run_conditions import analysis_conditions, check_sharding, loaded
from entropy_experiments.report.figures.style import NEEDED, can_draw
from entropy_experiments.results import EVALUATION, EvaluationResult, JSONObject, numbers
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.sampling.rollout_files import RolloutStore

RESULTS = Path("results") / "evaluations"
PLOT = "evaluation.png"
Say = Callable[[str], None]


def evaluate_checkpoints(
    checkpoints: Sequence[str | Path] = (),
    config: Config | None = None,
    *,
    request: EvaluationRequest | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> EvaluationResult:
    """Reward, pass@k and entropy of several checkpoints on the same prompts.

    Args:
        checkpoints: Folders; a run's folder stands for its steps. None named: some of the embedded
            run.
        config: How rollouts are drawn; None: the quick start.
        request: How many prompts and responses, which k.
        out: Where results are kept; None: a folder below results/evaluations, the same for the same
            question.
        overwrite: Replace the results of another question in `out`.
        quiet: Nothing on standard error.

    Returns:
        The contents of evaluation.json.

    Examples:
        >>> few = EvaluationRequest(prompts=8, samples=4)
        >>> results = evaluate_checkpoints(["runs/grpo"], request=few)  # doctest: +SKIP
        >>> evaluate_checkpoints(["no_such_run"], request=few, quiet=True)
        Traceback (most recent call last):
        FileNotFoundError: ...
    """
    ranks = current()
    say: Say = (lambda line: None) if quiet or not ranks.first else _on_stderr
    config = config or parse_config({})
    evaluation = prepared(config, checkpoints, request or EvaluationRequest())
    check_reward(evaluation.reward, evaluation.problems)
    for note in evaluation.notes:
        say(f"note: {note}")
    store = EvaluationStore(out or _usual_folder(evaluation))
    keys = {one.label: evaluation.key(one) for one in evaluation.candidates}
    if not overwrite:
        ranks.broadcast_from_zero(lambda: store.refuse_others(evaluation.settings, keys))
    done = ranks.broadcast_from_zero(
        lambda: {label: store.get(label, key) for label, key in keys.items()}
    )
    with analysis_conditions():
        pending = [one for one in evaluation.candidates if done[one.label] is None]
        if pending:
            check_sharding(config, top_p=evaluation.distribution["top_p"])
        # What is wrong with the last one should not be told after hours of the others. Of a model
        # that is cut, every process would read the whole once more: its files have been looked at.
        for one in pending if len(pending) > 1 and config.checkpoint.sharding == "none" else ():
            _opened(evaluation, one)
            gc.collect()
        ranks.broadcast_from_zero(lambda: store.bind(evaluation.settings))
        for one in evaluation.candidates:
            if one in pending:
                rows, facts = _evaluated(evaluation, one, store, quiet=quiet)
                label = one.label
                done[label] = ranks.broadcast_from_zero(
                    lambda: store.put(label, keys[label], rows, facts)
                )
                gc.collect()  # a module holds itself in cycles; the next one needs its memory
                say(f"{one.label}: evaluated in {facts['seconds']:.1f} s")
            else:
                say(f"{one.label}: found in {store.folder}")
    result = _result(
        evaluation, store, {name: one for name, one in done.items() if one is not None}
    )

    def write() -> EvaluationResult:
        result["plot"] = _plotted(result, store, say)
        store.finish(result)
        return result

    return ranks.broadcast_from_zero(write)


def _usual_folder(evaluation: Evaluation) -> Path:
    task = "".join(c if c.isalnum() else "_" for c in evaluation.settings["dataset"])
    return RESULTS / f"{task}_{digest([evaluation.key(one) for one in evaluation.candidates])[:12]}"


def _opened(
    evaluation: Evaluation, candidate: Candidate, *, quiet: bool = True
) -> tuple[Checkpoint, SampleGenerator, list[Problem]]:
    """A checkpoint that can be asked, and the problems in its words; or an error that says why."""
    settings, config = evaluation.settings, evaluation.config
    load = partial(
        load_checkpoint,
        candidate.layout.named,
        base=config.checkpoint.base,
        backbone=config.checkpoint.backbone,
        dtype=config.checkpoint.dtype,
        read_optimizer=False,
    )
    checkpoint, sharded = loaded(config, load)
    if sharded is None:
        policy = SequenceProcessor(
            checkpoint.model, temperature=settings["temperature"], top_p=settings["top_p"]
        )
    else:
        policy = ShardedPolicy(sharded, temperature=settings["temperature"])
    generator = SampleGenerator(
        policy,
        checkpoint.tokenizer,
        max_new_tokens=evaluation.horizon,
        stop=settings["stop"],
        batch_size=config.sampling.batch_size,
        master_seed=settings["seed"],
        progress=not quiet and current().first,
    )
    problems = evaluation.problems_for(checkpoint.tokenizer)
    for problem in problems:
        generator.prompt_ids(problem)  # refuses prompts that the model has no room for
    return checkpoint, generator, problems


def _evaluated(
    evaluation: Evaluation, candidate: Candidate, store: EvaluationStore, *, quiet: bool
) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """(rows, facts) of one checkpoint."""
    begun, settings = time.perf_counter(), evaluation.settings
    checkpoint, generator, problems = _opened(evaluation, candidate, quiet=quiet)
    generator.store = RolloutStore(store.folder / UNITS / digest(generator.identity())[:16])
    policy, samples = generator.policy, settings["samples"]
    rollouts = generator.generate_evaluation_batch(problems, group=samples)
    microbatch = evaluation.config.forward_batch_size
    scores = score_all(policy, policy.params, rollouts, microbatch=microbatch)
    # By one rank: a judge that is asked twice may answer twice.
    rows = current().broadcast_from_zero(
        lambda: rollout_rows(
            rollouts,
            scores,
            problems,
            evaluation.reward,
            samples=samples,
            threshold=settings["threshold"],
        )
    )
    count = len(rollouts)
    label = {"checkpoint": [candidate.label] * count, "step": [checkpoint.step] * count}
    facts = {
        "label": candidate.label,
        "step": checkpoint.step,
        "kind": checkpoint.kind,
        "base": checkpoint.base,
        "files": dict(checkpoint.hashes),
        "high_entropy_tokens": high_entropy_tokens(rollouts, scores, checkpoint.tokenizer.decode),
        "seconds": time.perf_counter() - begun,
    }
    return {**label, **rows}, facts


def _result(
    evaluation: Evaluation, store: EvaluationStore, done: dict[str, Finished]
) -> EvaluationResult:
    options = {
        "samples": evaluation.settings["samples"],
        "ks": evaluation.request.k,
        "sampled": evaluation.distribution,
    }
    by_label = {label: measures(one.rows, **options) for label, one in done.items()}
    first, *others = by_label
    result: JSONObject = {
        **EVALUATION.stamp,
        "folder": str(store.folder),
        "settings": dict(evaluation.settings),
        "k": list(evaluation.request.k),
        "notes": list(evaluation.notes),
        "provenance": provenance(),
        "checkpoints": [
            {
                **{k: v for k, v in one.facts.items() if k not in ("key", "rows_sha256")},
                "rows": store.name_of(label),
                "measures": {name: numbers(x) for name, x in by_label[label].items()},
                "length_quantiles": length_quantiles(one.rows),
            }
            for label, one in done.items()
        ],
        "differences": [
            {
                "label": label,
                "from": first,
                "measures": {
                    name: numbers(x)
                    for name, x in differences(by_label[label], by_label[first]).items()
                },
            }
            for label in others
        ],
    }
    return cast(EvaluationResult, result)  # settings and facts are JSON of the request


def _plotted(result: EvaluationResult, store: EvaluationStore, say: Say) -> str | None:
    if not can_draw():
        say(f"no plot: {NEEDED}")
        return None
    from entropy_experiments.report.figures.evaluation import evaluation_image

    write_whole(store.folder / PLOT, evaluation_image(result))
    return PLOT


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
