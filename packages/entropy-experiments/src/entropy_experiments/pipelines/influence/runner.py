"""What changed the entropy: a whole study of one update, from a plan to a run directory.

    runner = EntropyInfluenceRunner(config)
    summary = runner.run(EntropyInfluencePlan(etas=[4e-3], evaluation_requests=[BatchRequest()]))

The run directory is found by what was asked: the same plan for the same checkpoint gives the same
folder, a study that was killed goes on from its last finished stage, and a finished one is read.

The folder has the last command's answers. An answer that was there and is not asked for again is
gone from summary.json, and the HTML report that showed it is gone too; stages are kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropy_experiments.artifacts import digest_of
from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.token_rows import table_version
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.config import Config, as_config
from entropy_experiments.config.sections import BatchRequest
from entropy_experiments.config.sections import Workspace as WorkspaceSpec
from entropy_experiments.distributed import current
from entropy_experiments.pipelines.influence.batches import check_requests, gather_study
from entropy_experiments.pipelines.influence.earlier_steps import record_digests
from entropy_experiments.pipelines.influence.files import TABLE_FACTS, StudyFiles
from entropy_experiments.pipelines.influence.results import study_results
from entropy_experiments.pipelines.influence.rollout_sources import is_own_folder
from entropy_experiments.pipelines.influence.sharded import check_sharded_study
from entropy_experiments.pipelines.influence.stages import Study, to_stderr
from entropy_experiments.pipelines.influence.store import RunDirectory, open_run
from entropy_experiments.pipelines.influence.summary_json import budget_json, prediction_json
from entropy_experiments.pipelines.probe_sampling import OpenCheckpoint, contents, open_checkpoint
from entropy_experiments.pipelines.run_conditions import analysis_conditions
from entropy_experiments.report.figures.style import can_draw
from entropy_experiments.report.notebook import InfluenceSummary, WhatIfAnswers
from entropy_experiments.results import INFLUENCE, InfluenceResult
from entropy_experiments.sampling.dumps.formats import dump_files
from entropy_experiments.study_files import PAGE

__all__ = [
    "BatchRequest",
    "EntropyInfluencePlan",
    "EntropyInfluenceRunner",
    "WorkspaceSpec",
    "what_if_from",
]

RESULTS = Path("results") / "entropy_influence"
NOT_RESULTS = ("detailed_logging", "output", "training", "experiment")
"""Sections that change no number of a study."""
QUESTIONS = (
    *("what_if", "confirm", "entropy_budget", "ranked_tokens"),
    *("fisher", "fisher_centred", "plots"),
)
"""Asked of a study that is there: its arrays stay, and beside them are the last command's answers.
"""


@dataclass(frozen=True, kw_only=True)
class EntropyInfluencePlan:
    """What to study; None: what the configuration's `influence` section says.

    Args:
        workspace: Where the update batch comes from.
        evaluation_requests: The evaluation batches.
        etas: Step sizes; the first is the reference eta of the matrix.
        per_sequence_etas: Step sizes of the measurement rollout by rollout.
        grad_chunk_size: Directions and step sizes per pass over the evaluation batch.
        microbatch_size: Rollouts in a pass.
        measured_rollouts: Update rollouts whose own direction is also measured: how many, or which.
        finite: Fill the matrix with measured changes instead of first-order ones.
        leave_one_out: Rollouts without which the whole step is rebuilt and measured.
        fisher: Also the Fisher kernel.
        fisher_centred: The kernel of centred scores.
        what_if: Questions such as "drop=negative".
        confirm: Make and measure the what-ifs' steps.
        entropy_budget: Find the learning rate that changes entropy by this many nats.
        plots: Also draw figures.
        run_directory: Where the study is kept.

    Examples:
        >>> plan = EntropyInfluencePlan(etas=[4e-3], what_if=["drop=negative"])
        >>> plan.applied(parse_config({})).influence.what_if
        ('drop=negative',)
    """

    workspace: WorkspaceSpec | None = None
    evaluation_requests: Sequence[BatchRequest] | None = None
    etas: Sequence[float] | None = None
    per_sequence_etas: Sequence[float] | None = None
    grad_chunk_size: int | None = None
    microbatch_size: int | None = None
    measured_rollouts: int | Sequence[int] | None = None
    finite: bool | None = None
    leave_one_out: Sequence[int] | None = None
    fisher: bool | None = None
    fisher_centred: bool | None = None
    what_if: Sequence[str] | None = None
    confirm: bool | None = None
    entropy_budget: float | None = None
    plots: bool | None = None
    run_directory: str | Path | None = None

    def applied(self, config: Config) -> Config:
        """The configuration with this plan in place of its own; checked as a file would be."""
        changes: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None:
                changes[f"influence.{name}"] = _plain(value)
        return config.replaced(changes, where="plan") if changes else config


def _plain(value: Any) -> Any:
    if isinstance(value, WorkspaceSpec | BatchRequest):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


class EntropyInfluenceRunner:
    """Runs influence studies: which tokens, rollouts and terms changed the entropy.

    The model, the optimizer's state and the random state stay as they are.
    The run directory is found by what was asked: the same plan for the same checkpoint gives the
    same folder, a study that was killed goes on from its last finished stage, and a finished one is
    read.

    Args:
        config: A configuration, a dict, the path of a YAML file or a template's name; None: the
            quick start.
        quiet: Nothing on standard error.

    Examples:
        >>> runner = EntropyInfluenceRunner({"influence": {"measured_rollouts": 4}}, quiet=True)
        >>> summary = runner.run(EntropyInfluencePlan(etas=[4e-3]))  # doctest: +SKIP
        >>> isinstance(runner.config, Config)
        True
    """

    def __init__(
        self, config: Config | Mapping[str, Any] | str | Path | None = None, *, quiet: bool = False
    ) -> None:
        self.config: Config = as_config(config)
        self._quiet = quiet

    def run(
        self,
        plan: EntropyInfluencePlan | None = None,
        *,
        checkpoint_path: str | Path | None = None,
        overwrite: bool = False,
        momentum_batches: int | None = None,
    ) -> InfluenceSummary:
        """summary.json as a dict, and `run_directory`, where the other files are.

        `momentum_batches`: split the momentum of a recorded run's step among at most so many of
        the batches before it; None: as many as matter, at a bearable cost; 0: leave it one line.
        """
        config = plan.applied(self.config) if plan is not None else self.config
        check_requests(config)
        check_sharded_study(config, momentum_batches=momentum_batches or 0)
        influence = config.influence
        _check_etas(influence.learning_rates or (), influence.rollout_learning_rates or ())
        for text in config.influence.what_if:
            whatif.parse(text)  # a typing mistake costs no minutes
        ranks = current()
        say = None if self._quiet or not ranks.first else to_stderr
        with analysis_conditions():
            probed = open_checkpoint(config, checkpoint_path, may_shard=True)
            rates = influence.learning_rates or (probed.optimizer.lr,)
            _check_etas(rates, influence.rollout_learning_rates or ())
            study_key = _study_key(config, probed)
            questions = influence.model_dump(mode="json", include=set(QUESTIONS))
            # Drawings are made up for once matplotlib is there.
            questions["plots"] = influence.plots and can_draw()
            questions["momentum"] = [
                momentum_batches,
                {} if momentum_batches == 0 else _earlier_record(probed, momentum_batches),
            ]
            key = digest_of(study_key, questions, {"table": table_version()})
            place = influence.folder
            name = f"{probed.checkpoint.name}_{study_key[:8]}"
            run = RunDirectory(RESULTS / name if place is None else place)
            ranks.broadcast_from_zero(lambda: run.bind(study_key, overwrite=overwrite))
            with _released_unused(run):
                summary = self._studied(
                    config, probed, run, key, say, anew=overwrite, momentum=momentum_batches
                )
        return InfluenceSummary({**summary, "run_directory": str(run.folder)})

    def _studied(
        self,
        config: Config,
        probed: OpenCheckpoint,
        run: RunDirectory,
        key: str,
        say: Callable[[str], None] | None,
        *,
        anew: bool,
        momentum: int | None,
    ) -> InfluenceResult:
        """Compute what is not there yet; returns summary.json.

        `anew`: the files of a finished study, too, are made again from its stages.
        """
        influence, ranks = config.influence, current()
        finished, inputs = ranks.broadcast_from_zero(lambda: not anew and run.finished(key)), None
        if not finished or influence.update_batch.save_path is not None:  # which may be new
            inputs = gather_study(config, probed, quiet=self._quiet)
        if inputs is not None and not finished:
            study = Study(inputs, run.stages, say=say, momentum_batches=momentum)
            with closing(study.clock):
                files, arrays, summary = StudyFiles(study_results(study)).made(key)

            def write() -> None:
                before = run.answers()
                gone = run.write(files, key, arrays)
                if say is not None:
                    for line in removal_notes(before, summary, gone, run.folder):
                        say(line)

            ranks.broadcast_from_zero(write)
        elif say is not None:
            say(f"{run.folder}: finished already, nothing was computed")
        return ranks.broadcast_from_zero(lambda: open_run(run.folder).summary())


@contextmanager
def _released_unused(run: RunDirectory) -> Iterator[None]:
    """A study that failed before it computed anything does not claim its folder."""
    try:
        yield
    except BaseException:
        if current().first:
            run.release()
        raise


def what_if_from(
    folder: str | Path, questions: Sequence[str], *, entropy_budget: float | None = None
) -> WhatIfAnswers:
    """What-ifs from a run directory's token tables: arithmetic, no model is loaded.

    Args:
        folder: Of a finished study.
        questions: Such as "drop=negative" or "lr=2e-6".
        entropy_budget: Find the learning rate that changes entropy by this many nats.

    Returns:
        The predictions, by evaluation batch.

    Raises:
        ValueError: If the folder is no finished study, or a question cannot be read.

    Examples:
        >>> what_if_from("study_340", ["drop=negative"])  # doctest: +SKIP
        >>> what_if_from("no_such_study", ["drop=negative"])
        Traceback (most recent call last):
        FileNotFoundError: ...
    """
    run = open_run(folder)
    summary, out = run.summary(), []
    for evaluation in summary["evaluations"]:
        name = f"{evaluation['name']}_tokens.parquet"
        table = run.table(name)
        facts = (table.schema.metadata or {}).get(TABLE_FACTS)
        if facts is None:
            raise ValueError(
                f"{run.folder / name} does not say which step it belongs to; expected a table "
                "written by `entropy-probe influence`. Run the study again."
            )
        token_table = whatif.TokenTable.from_rows(table.to_pydict(), json.loads(facts))
        predictions = [whatif.repredict(token_table, text) for text in questions]
        budget = None
        if entropy_budget is not None and not out:  # of the first evaluation batch
            budget = budget_json(evaluation["ledger"]["entropy"], summary["lr"], entropy_budget)
        out.append(
            {
                "name": evaluation["name"],
                "what_if": [
                    {"name": p.name, "prediction": prediction_json(p), "text": str(p)}
                    for p in predictions
                ],
                "entropy_budget": budget,
            }
        )
    return WhatIfAnswers({"run_directory": str(run.folder), "evaluations": out})


def _check_etas(etas: Sequence[float], per_sequence_etas: Sequence[float]) -> None:
    """Files are named by eta to six digits, and both lists name files of the same folders."""
    union = list(dict.fromkeys((*etas, *per_sequence_etas)))
    lists = {
        "influence.learning_rates": etas,
        "influence.rollout_learning_rates": per_sequence_etas,
        "influence.learning_rates with influence.rollout_learning_rates": union,
    }
    for name, rates in lists.items():
        if len({f"{eta:g}" for eta in rates}) < len(rates):
            raise ValueError(
                f"{name} is {list(rates)}; expected step sizes that differ in their "
                "first six digits, which name the files. Give each once."
            )


def _study_key(config: Config, probed: OpenCheckpoint) -> str:
    """Everything that decides the arrays of a study, known before anything is drawn."""
    settings = {
        name: value for name, value in config.documents().items() if name not in NOT_RESULTS
    }
    influence = dict(settings["influence"])
    for name in (*QUESTIONS, "run_directory"):
        influence.pop(name)
    influence["workspace"] = {**influence["workspace"], "save_path": None}
    settings["influence"] = influence
    settings["rollouts"] = {"load": settings["rollouts"]["load"]}
    checkpoint = probed.checkpoint
    # Its files are hashed below.
    sharding = settings["checkpoint"]["sharding"]
    settings["checkpoint"] = {"dtype": settings["checkpoint"]["dtype"]}
    asked = (config.influence.update_batch, *config.influence.evaluation_batches)
    if sharding != "none":  # such a study has fewer parts
        settings["checkpoint"]["sharding"] = sharding
    named = [
        config.influence.update_batch.load_path,
        *(file for request in asked for file in _files_named(request.params)),
    ]
    return digest_of(
        INFLUENCE.version,
        settings,
        {name: value for name, value in provenance().items() if name != "git"},
        dict(checkpoint.hashes),
        contents(config, probed, named),
    )


def _earlier_record(probed: OpenCheckpoint, count: int | None) -> dict[str, list[str]]:
    return current().broadcast_from_zero(
        lambda: record_digests(probed.checkpoint.path, probed.checkpoint.step, count)
    )


def _files_named(params: Mapping[str, Any]) -> list[str | Path]:
    """The files of a request of kind from_file: a dump may be one step of a large folder."""
    path = params.get("path")
    if path is None:
        return []
    if is_own_folder(Path(path)) or not Path(path).exists():
        return [path]
    return [*dump_files(path, params.get("step"), params.get("ranks"))]


def removal_notes(
    before: InfluenceResult | None, after: InfluenceResult, gone: Sequence[str], folder: Path
) -> list[str]:
    """`before`, `after`: summary.json; `gone`: files that were deleted. Empty: nothing was lost."""
    had, has = [] if before is None else _answers(before), _answers(after)
    lost = list(dict.fromkeys(answer[0] for answer in had if answer not in has))
    lines = []
    if lost:
        lines.append(
            f"{folder} answers the last command: answers of an earlier one, not asked for again, "
            f"were removed ({', '.join(lost)}). To have them back, add these to the command; "
            "what was computed for them is kept."
        )
    if PAGE in gone:
        lines.append(
            f"{folder / PAGE} showed the earlier answers and was removed. Write it again: "
            f"entropy-probe report {folder}"
        )
    return lines


def _answers(summary: InfluenceResult) -> list[tuple[str, str]]:
    """Each answer that a summary has: the option that asks for it, and of what."""
    options: list[tuple[str, str]] = []
    for evaluation in summary.get("evaluations", ()):
        answers = evaluation.get("what_if") or ()
        options += [(f"--what-if '{one['name']}'", "") for one in answers]
        confirmed = (one for one in answers if one.get("confirmation") is not None)
        options += [("--confirm", one["name"]) for one in confirmed]
        if evaluation.get("fisher") is not None:
            options.append(("--fisher", ""))
        budget = evaluation.get("entropy_budget")
        if budget is not None:
            options.append((f"--entropy-budget {budget['budget']:g}", ""))
    return options
