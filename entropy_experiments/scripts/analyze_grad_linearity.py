"""Document 004's helper: is each rollout's measured change a straight line in the step size?

    python results/entropy_influence/RUN/analyze_grad_linearity.py      # of the folder it lies in
    python entropy_experiments/scripts/analyze_grad_linearity.py RUN

Fits and their goodness, rollout by rollout: `entropy_experiments.report.linearity`. A template for
analyses of your own: `fits` has every number of the table.
"""

from pathlib import Path
from typing import Annotated

import typer

from entropy_experiments.cli.job import ending
from entropy_experiments.report.linearity import analyze_grad_linearity


def main(run: Annotated[Path, typer.Argument()] = Path(__file__).parent) -> None:
    """Print the fits of a run directory."""
    with ending(debug=False):
        fits = analyze_grad_linearity(run)
        print(f"{sum(fit.linear for fit in fits)} of {len(fits)} are straight lines")


if __name__ == "__main__":
    typer.run(main)
