"""Checkpoints on a task: pass rate, pass@k, format, length, entropy; side by side and over steps.

Each checkpoint answers the same prompts with the same seeds. A checkpoint that is finished is on
disk, rollouts of one under way too, so a killed evaluation continues where it was. Nothing is
loaded until every checkpoint's files, the task and its rewards have been looked at.

    evaluation.json           the whole result; written last
    settings.json             what the folder's numbers have in common
    checkpoints/LABEL.parquet a row per rollout
    checkpoints/LABEL.json    written after it: key, hash of the parquet file, tokens, facts
    units/                    drawn rollouts of a checkpoint under way

A checkpoint is finished if its JSON has the key of what is asked (settings and the hashes of its
files) and its parquet file has the hash that the JSON says.

A model cut over the processes (`checkpoint.sharding`) draws and scores like a whole one, with all
processes in step.
"""

from __future__ import annotations

import gc
import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from entropy_experiments.artifacts import (
    described,
    differing_keys,
    read_json_object,
    write_json,
    write_whole,
)
from entropy_experiments.checkpoints.load import Checkpoint, load_checkpoint
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.config import Config, parse_config
from entropy_experiments.distributed import current
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.sharded import ShardedPolicy
from entropy_experiments.pipelines.evaluation_measures import (
    check_reward,
    differences,
    high_entropy_tokens,
    length_quantiles,
    measures,
    rollout_rows,
)
from entropy_experiments.pipelines.evaluation_request import (
    Candidate,
    Evaluation,
    EvaluationRequest,
    digest,
    prepared,
)
from entropy_experiments.pipelines.run_conditions import analysis_conditions, check_sharding, loaded
from entropy_experiments.report.figures.style import NEEDED, can_draw
from entropy_experiments.results import (
    EVALUATION,
    EVALUATION_FILE,
    CheckpointFacts,
    EvaluationResult,
    JSONObject,
    numbers,
)
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.sampling.rollout_files import RolloutStore

RESULTS = Path("results") / "evaluations"
PLOT = "evaluation.png"
Say = Callable[[str], None]
AGAIN = "Delete it: what it holds is then computed again."
SETTINGS, CHECKPOINTS, UNITS = "settings.json", "checkpoints", "units"


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
            check_sharding(config, top_p=evaluation.settings["top_p"])
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
) -> tuple[dict[str, list[Any]], CheckpointFacts]:
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
            evaluation.reward.at_checkpoint(candidate.layout.root),
            samples=samples,
            threshold=settings["threshold"],
        )
    )
    count = len(rollouts)
    label = {"checkpoint": [candidate.label] * count, "step": [checkpoint.step] * count}
    facts: CheckpointFacts = {
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
    by_label = {
        label: measures(
            one.rows,
            samples=evaluation.settings["samples"],
            ks=evaluation.request.k,
            sampled=evaluation.sampled,
        )
        for label, one in done.items()
    }
    first, *others = by_label
    return {
        **EVALUATION.stamp,
        "folder": str(store.folder),
        "settings": evaluation.settings,
        "k": list(evaluation.request.k),
        "notes": list(evaluation.notes),
        "provenance": provenance(),
        "checkpoints": [
            {
                **one.facts,
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


def _plotted(result: EvaluationResult, store: EvaluationStore, say: Say) -> str | None:
    if not can_draw():
        say(f"no plot: {NEEDED}")
        return None
    from entropy_experiments.report.figures.charts import evaluation_image

    write_whole(store.folder / PLOT, evaluation_image(result))
    return PLOT


def _on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Finished:
    """One checkpoint's rows and facts."""

    rows: Mapping[str, list[Any]]
    facts: CheckpointFacts


class EvaluationStore:
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def refuse_others(self, settings: Mapping[str, object], keys: Mapping[str, str]) -> None:
        """Numbers of other settings do not belong here, nor of others under the same label."""
        mine, theirs = _plain(settings), read_json_object(self.folder / SETTINGS, advice=AGAIN)
        if theirs is not None and theirs != mine:
            names = differing_keys(mine, theirs)
            raise ValueError(
                f"{self.folder} holds an evaluation with other settings ({', '.join(names)}). Give "
                "another --out, or replace it with --overwrite."
            )
        if theirs is None and self.folder.is_dir() and any(self.folder.iterdir()):
            raise ValueError(
                f"{self.folder} is not empty, and holds no evaluation. Give another --out."
            )
        for label, key in keys.items():
            facts = read_json_object(self._path(label, "json"), advice=AGAIN)
            if facts is not None and facts.get("key") != key:
                raise ValueError(
                    f"{self.folder} holds another {label}, with other weights. Give another --out, "
                    "or replace it with --overwrite."
                )

    def bind(self, settings: Mapping[str, object]) -> None:
        """From here on the folder is about these settings."""
        mine, path = _plain(settings), self.folder / SETTINGS
        (self.folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        if read_json_object(path, advice=AGAIN) != mine:
            (self.folder / EVALUATION_FILE).unlink(missing_ok=True)
            for old in sorted((self.folder / CHECKPOINTS).glob("*.json")):
                old.unlink()
                old.with_suffix(".parquet").unlink(missing_ok=True)
            write_json(path, mine)

    def get(self, label: str, key: str) -> Finished | None:
        """What was finished under this very key; None: it has to be done (again)."""
        facts = read_json_object(self._path(label, "json"), advice=AGAIN)
        if facts is None or facts.pop("key", None) != key:
            return None
        path = self._path(label, "parquet")
        data = path.read_bytes() if path.is_file() else b""
        if described(data)["sha256"] != facts.pop("rows_sha256", None):
            return None
        return Finished(rows=_read(data), facts=cast(CheckpointFacts, facts))

    def put(
        self, label: str, key: str, rows: Mapping[str, list[Any]], facts: CheckpointFacts
    ) -> Finished:
        data = _parquet(rows)
        said = {**facts, "key": key, "rows_sha256": described(data)["sha256"]}
        write_whole(self._path(label, "parquet"), data)
        write_json(self._path(label, "json"), said)
        # As read, not as made: a resumed evaluation must say the same to the last bit.
        return Finished(rows=_read(data), facts=json.loads(json.dumps(facts)))

    def finish(self, result: EvaluationResult) -> None:
        write_json(self.folder / EVALUATION_FILE, result)

    def name_of(self, label: str) -> str:
        """The parquet file, as the result names it."""
        return f"{CHECKPOINTS}/{label}.parquet"

    def _path(self, label: str, suffix: str) -> Path:
        return self.folder / CHECKPOINTS / f"{label}.{suffix}"


def _plain(settings: Mapping[str, object]) -> JSONObject:
    """As JSON gives it back."""
    return json.loads(json.dumps(dict(settings)))


def _parquet(rows: Mapping[str, list[Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(dict(rows)), buffer, compression="zstd")
    return buffer.getvalue()


def _read(data: bytes) -> dict[str, list[Any]]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(io.BytesIO(data)).to_pydict()
