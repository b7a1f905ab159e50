"""Document 004's entry point for batch jobs: an influence study, planned in this file.

    python entropy_experiments/scripts/run_entropy_influence_large.py
    python .../run_entropy_influence_large.py --config my.yaml --checkpoint D

Edit ETAS, WORKSPACE and EVALUATION_REQUESTS below. The run directory is printed at the end: it has
summary.json, per-eta aggregates, the NumPy dumps, and the two analysis scripts. The same plan for
the same checkpoint gives the same folder, and a study that was killed goes on where it stopped.
`entropy-probe influence` does the same from a configuration alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from entropy_experiments.cli.job import ending
from entropy_experiments.entropy_influence import EntropyInfluencePlan, EntropyInfluenceRunner
from entropy_experiments.fisher_kernel import BatchRequest, WorkspaceSpec
from entropy_experiments.pipelines.probe_sampling import open_checkpoint
from entropy_experiments.report.influence_tables import influence_report

# Step sizes; the first is the reference of the delta matrix. None: the learning rate of the
# checkpoint, its half and its quarter (a line needs two).
ETAS: list[float] | None = None
# Step sizes at which single rollouts are measured. None: as ETAS.
PER_SEQUENCE_ETAS: list[float] | None = None
# The update batch: the recorded one, or e.g. params={"batch": "drawn", "prompts": 16, "group": 8}.
WORKSPACE = WorkspaceSpec(kind="update")
# One entry for each evaluation batch.
EVALUATION_REQUESTS = [BatchRequest(kind="evaluation")]
# Directions and step sizes per pass. None: as many as share work.
GRAD_CHUNK_SIZE: int | None = None
# Sequences per pass with gradient. None: the configuration's.
MICROBATCH_SIZE: int | None = None

HELPERS = ("analyze_grad_linearity.py", "plot_grad_delta_samples.py")


def plan(lr: float, out: Path | None = None) -> EntropyInfluencePlan:
    """The constants above, for a checkpoint whose next step has the learning rate `lr`."""
    return EntropyInfluencePlan(
        workspace=WORKSPACE,
        evaluation_requests=EVALUATION_REQUESTS,
        etas=ETAS or [lr, lr / 2, lr / 4],
        per_sequence_etas=PER_SEQUENCE_ETAS,
        grad_chunk_size=GRAD_CHUNK_SIZE,
        microbatch_size=MICROBATCH_SIZE,
        run_directory=out,
    )


def main(
    config: Annotated[
        str | None, typer.Option("--config", help="YAML file, or the name of a template.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Instead of the configuration's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory [results/entropy_influence/...].")
    ] = None,
) -> None:
    """Run the study that this file plans."""
    with ending(debug=False):
        runner = EntropyInfluenceRunner(config)
        lr = open_checkpoint(runner.config, checkpoint).optimizer.lr
        summary = runner.run(plan(lr, out), checkpoint_path=checkpoint)
        folder = Path(summary["run_directory"])
        for name in HELPERS:
            if not (folder / name).exists():  # somebody's own version stays
                shutil.copy(Path(__file__).parent / name, folder / name)
        print("\n".join([*influence_report(summary), f"Files: {folder}"]))


if __name__ == "__main__":
    typer.run(main)
