"""`entropy-probe explain`: the ledger of a recorded run, from its checkpoints to a run directory.

`run_ledger/` has the parts: which checkpoints (`window`), the backward walk over them (`walk`) with
the states of the run (`states`, between sparse checkpoints by `replay`) and the evaluation rollouts
(`evaluation`), and what becomes of it (`rows`, `summary`, `doubts`, `files`, `folder`).
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from entropy_experiments.checkpoints.recorded_run import find_run
from entropy_experiments.checkpoints.runs import embedded_trajectory
from entropy_experiments.config import Config
from entropy_experiments.distributed import current
from entropy_experiments.pipelines.influence.store import StageStore
from entropy_experiments.pipelines.run_conditions import analysis_conditions, refuse_sharding
from entropy_experiments.pipelines.run_ledger.evaluation import Evaluations
from entropy_experiments.pipelines.run_ledger.files import write_run_ledger
from entropy_experiments.pipelines.run_ledger.folder import bind, is_finished, ledger_key
from entropy_experiments.pipelines.run_ledger.stages import LedgerStages, Say
from entropy_experiments.pipelines.run_ledger.states import RunStates
from entropy_experiments.pipelines.run_ledger.summary import ledger_summary
from entropy_experiments.pipelines.run_ledger.walk import Walk
from entropy_experiments.pipelines.run_ledger.window import ExplainOptions, find_window
from entropy_experiments.results import RunLedgerResult
from entropy_experiments.results.run_ledger import read_run_ledger

__all__ = ["ExplainOptions", "explain"]

RESULTS = Path("results") / "run_ledger"


def explain(
    config: Config,
    run: str | Path | None = None,
    options: ExplainOptions | None = None,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    say: Say | None = None,
) -> RunLedgerResult:
    """Who changed the entropy and the reward of a run: every token of every batch.

    Args:
        config: How rollouts are drawn and entropy is estimated.
        run: Folder of the checkpoints; None: the embedded run.
        options: Which part of the run, and how.
        out: Run directory; None: results/run_ledger/...
        overwrite: Replace another ledger there.
        say: Called with a line of progress.

    Returns:
        summary.json, and `run_directory`, where the tables are.

    Raises:
        FileNotFoundError: If there is no such run, or it recorded no batches.
        ValueError: If the window has gaps, or a replay does not arrive.

    Examples:
        >>> summary = explain(parse_config({}), options=ExplainOptions(end=3))  # doctest: +SKIP
        >>> explain(parse_config({}), "no_such_run")
        Traceback (most recent call last):
        FileNotFoundError: Run not found: no_such_run; ...
    """
    options, ranks = options or ExplainOptions(), current()
    recorded = find_run(embedded_trajectory() if run is None else Path(run))
    window = find_window(recorded, options)
    refuse_sharding(config)
    with analysis_conditions():
        key = ranks.broadcast_from_zero(lambda: ledger_key(config, recorded, window, options))
        name = "embedded" if run is None else recorded.folder.resolve().name
        folder = Path(out) if out is not None else RESULTS / f"{name}_{key[:8]}"
        ranks.broadcast_from_zero(lambda: bind(folder, key, overwrite=overwrite))
        if ranks.broadcast_from_zero(lambda: is_finished(folder, key)):
            if say is not None:
                say(f"{folder}: finished already, nothing was computed")
        else:
            config = config.replaced(
                {"sampling.save": str(folder / "rollouts")}, where="entropy-probe explain"
            )
            stages = LedgerStages(store=StageStore(folder / "stages"), key=key)
            walk = Walk(
                window=window,
                options=options,
                states=RunStates(
                    config=config, run=recorded, window=window, stages=stages, say=say
                ),
                evaluations=Evaluations(
                    config=config, run=recorded, window=window, options=options
                ),
                stages=stages,
                say=say,
            )
            walk.go()
            summary = ledger_summary(
                map(walk.facts, window.checkpoints),
                walk.replays(),
                window,
                options,
                key=key,
                run=recorded.folder.name,
            )
            ranks.broadcast_from_zero(
                lambda: write_run_ledger(folder, key, summary, walk.stored_steps())
            )
        summary = ranks.broadcast_from_zero(lambda: read_run_ledger(folder))
    return cast(RunLedgerResult, {**summary, "run_directory": str(folder)})
