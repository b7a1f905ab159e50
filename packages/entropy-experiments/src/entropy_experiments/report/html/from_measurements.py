"""What a file of `entropy-probe measure` has for a report: means over its repeats, by step size.

Prediction and curvature are told at the learning rate, where a report stands:

    predicted = lr / eta x linear(eta)        curvature = (lr / eta)^2 (linquad - linear)(eta)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import yaml

from entropy_experiments.config import renamed
from entropy_experiments.report import words
from entropy_experiments.report.html import books
from entropy_experiments.report.measurements import measurement_report
from entropy_experiments.report.sections import EnvironmentSection, ReportData, Verdict, as_number
from entropy_experiments.results import (
    AnyNumber,
    EstimateResult,
    MeanPoint,
    MeasuredPoint,
    MeasurementsResult,
    Number,
    RepeatMean,
    WeightsResult,
    read_measurements,
)

ONLY_STUDIES = "only a study has it (entropy-probe influence)"
ABSENT = (
    *("the ledger", "influence by rollout", "the update rollouts", "probability and advantage"),
    *("what if", "the matrix"),
)


def measurements_data(path: Path) -> ReportData:
    """The sections that a file of measurements has."""
    result = read_measurements(path)
    lr, repeats = result["learning_rate"], result["repeats"]
    points = [
        _Point(entry, [one["points"][i] for one in repeats])
        for i, entry in enumerate(result["summary"])
    ]
    at = min(points, key=lambda point: abs(point.eta - lr))
    predicted, bend = at.scaled("linear", lr / at.eta), at.curvature((lr / at.eta) ** 2)
    sweep = [(point.eta, point.measured) for point in points if point.measured is not None]
    measured = at.measured if at.eta == lr else None
    gap = at.gap if at.eta == lr else None
    absent = dict.fromkeys(ABSENT, ONLY_STUDIES)
    if not sweep:
        absent["predicted and measured"] = "nothing was measured (measure.measured: false)"
    elif predicted is None:
        absent["predicted and measured"] = "no line was computed (measure.first_order: false)"
    return {
        "kind": "measure",
        "title": f"Entropy change at {result['checkpoint']}, over fresh batches",
        "checkpoint": result["checkpoint"],
        "source": path.name,
        "key": None,
        "lr": lr,
        "unit": result["unit"],
        "level": as_number(fmean(one["H_orig"]["value"] for one in repeats)),
        "predicted": predicted,
        "measured": measured,
        "difference": gap,
        "sizes": {"B_E": repeats[0]["B_E"], "B_U": repeats[0]["B_U"]},
        "seconds": sum(one["seconds"] for one in repeats),
        "verdict": _verdict(result, at, predicted, measured, gap),
        "curve": books.curve(lr, predicted, bend, sweep) if sweep and predicted else None,
        "weights": books.weights(sweep) if sweep else None,
        "assumed": None,
        "environment": _environment(result, path),
        "absent": absent,
        "others": [],
        "ledger": None,
        "momentum": None,
        "rollouts": None,
        "texts": None,
        "covariance": None,
        "what_if": None,
        "matrix": None,
    }


Name = Literal["measured", "linear", "linquad"]


class MeasuredMean(Number):
    """A measured change, with the weights of one of its repeats."""

    diagnostics: WeightsResult


class _Point:
    """One step size: the mean over the repeats, and what each of them had."""

    def __init__(self, entry: MeanPoint, repeats: Sequence[MeasuredPoint]) -> None:
        self.entry, self.repeats, self.eta = entry, repeats, entry["eta"]

    def mean(self, name: Name) -> Number | None:
        """As an estimate of a single run would be; None: it was not computed."""
        mean = self.entry.get(name)
        each = [estimate for one in self.repeats if (estimate := one.get(name)) is not None]
        return None if mean is None else _as_estimate(mean, each)

    @property
    def gap(self) -> Number | None:
        """The line minus the measured change, paired."""
        mean = self.entry["differences"].get("linear")
        if mean is None:
            return None
        each = [one["differences"]["linear"] for one in self.repeats if "differences" in one]
        return _as_estimate(mean, each)

    def scaled(self, name: Name, factor: float) -> Number | None:
        mean = self.mean(name)
        if mean is None or factor == 1:
            return mean
        ends, stderr = mean["interval"], mean.get("stderr")
        return {
            **mean,
            "value": factor * mean["value"],
            "stderr": None if stderr is None else abs(factor) * stderr,
            "interval": None if ends is None else sorted(factor * end for end in ends),
        }

    def curvature(self, factor: float) -> Number | None:
        """A difference of two means: of its error bar the file says nothing."""
        line, parabola = self.mean("linear"), self.mean("linquad")
        if line is None or parabola is None:
            return None
        return as_number(factor * (parabola["value"] - line["value"]))

    @property
    def measured(self) -> MeasuredMean | None:
        """With the weights of the repeat that has the fewest effective rollouts."""
        mean = self.mean("measured")
        if mean is None:
            return None
        weights = [one["diagnostics"] for one in self.repeats if "diagnostics" in one]
        return {**mean, "diagnostics": min(weights, key=lambda one: one["ESS_fraction"])}


def _as_estimate(mean: RepeatMean, each: Sequence[EstimateResult]) -> Number:
    """Trusted if every repeat is; of noise floors the largest, of reasons each once."""
    floors = [one["noise_floor"] for one in each if one["noise_floor"] is not None]
    return {
        "value": mean["mean"],
        "stderr": mean["stderr"],
        "interval": mean["interval"],
        "noise_floor": max(floors, default=None),
        "trusted": mean["trusted"] == mean["repeats"],
        "why_not": list(dict.fromkeys(why for one in each for why in one["why_not"])),
    }


def _verdict(
    result: MeasurementsResult,
    at: _Point,
    predicted: AnyNumber | None,
    measured: MeasuredMean | None,
    gap: AnyNumber | None,
) -> Verdict:
    repeats, lr = result["repeats"], result["learning_rate"]
    count, here = len(repeats), measured or at.measured or predicted or at.mean("linquad")
    kind = repeats[0]["update"]
    update = words.made_by(
        result["checkpoint"],
        real=kind != "hypothetical",
        bound=kind != "imported",
        checked=False,
    )
    if at.eta != lr and here is not predicted:
        update += f", at η {at.eta:g} instead of the learning rate {lr:g},"
    assert here is not None  # a plan computes at least one of the three
    sentence = words.sentence(
        update=update,
        change=here,
        level=fmean(one["H_orig"]["value"] for one in repeats),
        unit=result["unit"],
        predicted=predicted if measured is not None else None,
    )
    points = [
        f"Mean over {count} repeats of {repeats[0]['B_E']} fresh prompts each; intervals are the "
        "repeats’ spread. Importance weights are those of the repeat with the fewest effective "
        "rollouts."
        if count > 1
        else f"One repeat of {repeats[0]['B_E']} prompts, whose own intervals these are "
        "(measure.repeats draws more)."
    ]
    if gap is not None:
        points.append(words.gap(gap))
    shown = [one for one in (predicted, measured) if one is not None]
    return {
        "sentence": sentence,
        "points": points,
        "trusted": all(one.get("trusted") for one in shown) if shown else None,
        "doubts": words.doubts_of(predicted, measured),
        "text": measurement_report(result),
    }


def _environment(result: MeasurementsResult, path: Path) -> EnvironmentSection:
    versions = {k: v for k, v in result["provenance"].items() if not isinstance(v, dict | list)}
    sizes = (
        f"{result['repeats'][0]['B_E']} evaluation prompts, {result['repeats'][0]['B_U']} update"
    )
    return {
        "facts": {
            "file": path.name,
            "learning rate": words.plain(result["learning_rate"]),
            "batches": f"{sizes} prompts, {len(result['repeats'])} times",
        },
        "versions": versions,
        "config": yaml.safe_dump(renamed(result["config"]), sort_keys=False, allow_unicode=True),
    }
