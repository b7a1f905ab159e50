"""A policy whose entropy collapses under GRPO: every step predicted and measured, one explained.

Which tokens of that step's batch destroyed most entropy, and what if the tokens of bad answers had
been left out: predicted from the token table, then made and measured.

The run is shipped with the package: a small Qwen2 on Countdown, trained with TRL. Nothing is
downloaded.

    python examples/collapse.py --out build/demo
    python examples/collapse.py --out build/demo --first 10 --last 20     # a part of the run
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from entropy_experiments.config import load_config
from entropy_experiments.pipelines.influence.runner import (
    EntropyInfluencePlan,
    EntropyInfluenceRunner,
)
from entropy_experiments.pipelines.probe import OfflineEntropyProbe
from entropy_experiments.pipelines.trajectory import (
    TrajectoryStep,
    probe_trajectory,
    write_trajectory,
)
from entropy_experiments.report.figures.write import write_figures
from entropy_experiments.report.html.page import write_report
from entropy_experiments.report.influence_tables import influence_report
from entropy_experiments.report.trajectory import HEADING, step_line
from entropy_experiments.report.verdict import spoken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="files go here")
    parser.add_argument("--prompts", type=int, default=48, help="evaluation prompts")
    parser.add_argument("--first", type=int, default=0, help="first step shown")
    parser.add_argument("--last", type=int, help="last checkpoint used (default: all)")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count() or 1))
    given = parser.parse_args()
    config = (
        load_config()
        .under(given.out)
        .with_overrides(
            [
                f"data.evaluation_prompts={given.prompts}",
                "memory.microbatch_size=64",
                "sampling.batch_size=256",
            ]
        )
    )

    print("A GRPO run, each update predicted before it is made and measured after it:\n")
    print(HEADING)
    seen: list[TrajectoryStep] = []

    def show(step: TrajectoryStep) -> None:
        seen.append(step)
        print(step_line(step, seen[0].level.value), flush=True)

    run = probe_trajectory(
        config.with_overrides(["measure.weighting=per_decision"]),
        steps=slice(given.first, None if given.last is None else given.last + 1),
        workers=given.workers,
        say=show,
    )
    print("\nFrom the first checkpoint to the last, entropy per token changed by")
    print(f"  predicted, summed over the steps  {spoken(run.predicted)}")
    print(f"  the same to second order          {spoken(run.second_order)}")
    print(f"  measured, summed over the steps   {spoken(run.measured)}")
    print(f"  fresh rollouts at both ends       {spoken(run.fresh)}")
    trajectory = write_trajectory(run, given.out / "trajectory.json")
    figure, *_ = write_figures(trajectory, given.out / "figures", columns=2, suffixes=[".png"])

    print("\nOne of these steps, closely:\n")
    results = OfflineEntropyProbe(config, quiet=True).run_mixed_probe()
    print("\n".join(results["verdict"]))

    print("\nWhich tokens of its batch did it, and what if:\n")
    plan = EntropyInfluencePlan(
        measured_rollouts=1,
        what_if=["drop=negative"],
        confirm=True,
        run_directory=given.out / "influence",
    )
    study = EntropyInfluenceRunner(config, quiet=True).run(plan, overwrite=True)
    print("\n".join(influence_report(study, sections=("ledger", "trust", "tokens", "what_if"))))
    print(f"\nThe curve:    {figure}\nThe log:      {results['log_path']}")
    print(f"Every token:  {given.out / 'influence' / 'tokens.parquet'}")
    report = write_report(given.out / "influence", given.out / "report.html", trajectory=trajectory)
    print(f"The report:   {report} (open it in a browser)")
    print("\nYour own checkpoint:\n  entropy-probe run --checkpoint path/to/checkpoint-340")
    print("  entropy-probe influence --checkpoint path/to/checkpoint-340")


if __name__ == "__main__":
    main()
