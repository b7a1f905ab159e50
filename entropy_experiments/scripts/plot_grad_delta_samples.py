"""Document 004's helper: draw selected update rollouts' changes over the step size.

    python results/entropy_influence/RUN/plot_grad_delta_samples.py     # of the folder it lies in
    python entropy_experiments/scripts/plot_grad_delta_samples.py RUN 3 7

Without numbers: the six rollouts that moved most. The drawing goes to RUN/plots/.
"""

from pathlib import Path
from typing import Annotated

import typer

from entropy_experiments.cli.job import ending
from entropy_experiments.report.figures.samples import plot_grad_delta_samples


def main(
    run: Annotated[Path, typer.Argument()] = Path(__file__).parent,
    rollouts: Annotated[list[int] | None, typer.Argument()] = None,
) -> None:
    """Draw rollouts of a run directory."""
    with ending(debug=False):
        print(plot_grad_delta_samples(run, rollouts or None))


if __name__ == "__main__":
    typer.run(main)
