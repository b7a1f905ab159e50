"""The name and version that every result begins with, and an estimate as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

if TYPE_CHECKING:
    from entropy_experiments.types import Estimate

JSONObject = dict[str, Any]
"""A JSON object whose keys no schema names: settings of other programs, plans, provenance."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The name and the version of a result's layout."""

    name: str
    version: int
    first_nameless: bool = False
    """Files of version 1 did not say their name, or neither name nor version."""

    @property
    def stamp(self) -> Stamp:
        """The keys that every result of this schema begins with."""
        return {"format": self.name, "schema": self.version}

    def check(self, content: Mapping[str, object], path: str | Path, *, advice: str) -> None:
        """Raise ValueError unless `content` is of this schema, in the version read here.

        Args:
            content: The JSON object of a file.
            path: Where it was read.
            advice: What to do about it, as a sentence.
        """
        name, version = content.get("format"), content.get("schema")
        if self.first_nameless:
            name, version = name or self.name, 1 if version is None else version
        if (name, version) == (self.name, self.version):
            return
        newer = isinstance(version, int) and version > self.version and name == self.name
        if newer:
            advice = f"A newer version of entropy-experiments wrote it: upgrade. Or: {advice}"
        raise ValueError(
            f"{path} has format {content.get('format')!r}, schema {content.get('schema')!r}; "
            f"this version reads {self.name!r}, schema {self.version}. {advice}"
        )

    def read(self, path: Path, *, what: str, expected: str, advice: str) -> JSONObject:
        """The JSON object of a file, checked.

        Args:
            path: Of the file.
            what: This schema's result in a word.
            expected: Which file it is, should there be none.
            advice: What to do about a file that cannot be read, as a sentence.
        """
        if not path.is_file():
            raise FileNotFoundError(f"No file {path}; expected {expected}.")
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON ({error}). {advice}") from error
        nameless = self.name if self.first_nameless else None
        if not isinstance(content, dict) or content.get("format", nameless) != self.name:
            raise ValueError(
                f"{path} is no {what}; expected format {self.name!r}. Give another file."
            )
        self.check(content, path, advice=advice)
        return content


PROBE = Schema(name="entropy_experiments.probe", version=1, first_nameless=True)
PROBE_LOG = Schema(name="entropy_experiments.probe_log", version=1, first_nameless=True)
MEASUREMENTS = Schema(name="entropy_experiments.measurements", version=1)
INFLUENCE = Schema(name="entropy_experiments.influence", version=2)
"""2: measured changes are shared among evaluation rollouts as the first-order matrix is."""
EVALUATION = Schema(name="entropy_experiments.evaluation", version=1)
TRAJECTORY = Schema(name="entropy_experiments.checkpoints.runs", version=1)
"""The name is that of the module which wrote the first of these files."""
RUN_LEDGER = Schema(name="entropy_experiments.run_ledger", version=1)
TRAINING_ROW = Schema(name="entropy_experiments.training_row", version=1, first_nameless=True)
TRAINING = Schema(name="entropy_experiments.training", version=1, first_nameless=True)


class Stamp(TypedDict):
    """What every result says of itself."""

    format: str
    schema: int


class Number(TypedDict):
    """A value, with as much of its error bar as its source knows."""

    value: float
    interval: list[float] | None
    stderr: NotRequired[float | None]
    bias: NotRequired[float | None]
    noise_floor: NotRequired[float | None]
    k_hat: NotRequired[float | None]
    trusted: NotRequired[bool | None]
    why_not: NotRequired[list[str]]


class EstimateResult(TypedDict):
    """An `Estimate`, complete."""

    value: float
    interval: list[float] | None
    stderr: float | None
    bias: float | None
    noise_floor: float | None
    k_hat: float | None
    trusted: bool
    why_not: list[str]


AnyNumber = Number | EstimateResult


class WeightsResult(TypedDict):
    """Importance weights of a measured change."""

    ESS: float
    ESS_fraction: float
    w_max: float
    w_min: float
    clip_fraction: float
    k_hat: float | None
    kl: float
    samples_needed: float | None
    rollouts: NotRequired[int]


class MeasuredResult(EstimateResult):
    """A measured change of a study: an estimate and its weights in one object."""

    ESS: float
    ESS_fraction: float
    w_max: float
    w_min: float
    clip_fraction: float
    kl: float
    samples_needed: float | None


def numbers(estimate: Estimate) -> EstimateResult:
    """An estimate as JSON: never NaN, null where there is no such number."""
    return {
        "value": estimate.value,
        "stderr": finite(estimate.stderr),
        "interval": None if estimate.interval is None else list(estimate.interval),
        "bias": finite(estimate.bias),
        "noise_floor": finite(estimate.noise_floor),
        "k_hat": finite(getattr(estimate.diagnostics.get("weights"), "k_hat", None)),
        "trusted": estimate.trusted,
        "why_not": list(estimate.why_not),
    }


def weights_of(change: Estimate) -> WeightsResult:
    """The importance weights behind a measured change."""
    weights = change.diagnostics["weights"]
    return {
        "ESS": weights.ess,
        "ESS_fraction": weights.ess_fraction,
        "w_max": weights.w_max,
        "w_min": weights.w_min,
        "clip_fraction": weights.clip_fraction,
        "k_hat": finite(weights.k_hat),
        "kl": weights.kl,
        "samples_needed": finite(weights.samples_needed),
    }


def finite(x: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return x if x is not None and math.isfinite(x) else None


DIFFERENTIATED = {
    "double_backward": "by two backward passes: the model has no forward mode",
    "reverse": "by one gradient, without error bars",
    "central": "by one gradient, with the spread of differences for error bars",
}
"""Forward mode is the rule, and not worth a line."""
