"""Drawings of a finished study, for its plots/: the only place where a study calls the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from entropy_experiments.report.figures.study import study_plots
from entropy_experiments.report.figures.style import INSTALL, can_draw
from entropy_experiments.results import InfluenceResult
from entropy_experiments.study_files import ArrayFacts, NewFiles

NOT_DRAWN = f"plots/ is left out: matplotlib is not installed ({INSTALL})"


def study_drawings(
    folder: Path,
    contents: Mapping[str, bytes],
    arrays: Mapping[str, ArrayFacts],
    summary: InfluenceResult,
) -> dict[str, bytes]:
    """PNG files by name, made from the study's other files; none without matplotlib."""
    if not can_draw():
        return {}
    return study_plots(NewFiles(folder=folder, contents=contents, described=arrays), summary)
