"""Sweeps and repeats: how well straight line and parabola predict, over fresh rollouts.

    measured    H(theta + eta v) - H(theta), under each clip
    linear      eta H'
    linquad     eta H' + eta^2 / 2 H''

Every repeat draws its own E (and its own U, unless training recorded one) from a seed of its own.
Within a repeat all three speak of the same rollouts, so their differences are paired; between
repeats nothing is shared, and the spread of the repeats is the honest error bar:

    mean over R repeats,  stderr = sd / sqrt(R),  interval by Student's t with R - 1

A finished repeat is on disk: an interrupted experiment continues with the next one.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, Literal, cast, get_args

from scipy.special import stdtrit

from entropy_experiments.artifacts import digest_of, write_whole
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.config import Config, as_config
from entropy_experiments.distributed import current
from entropy_experiments.estimate.curvature import curvature
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.level import entropy_level, within_entropy
from entropy_experiments.estimate.measured import Case, measured_many
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.findings import update_kind
from entropy_experiments.pipelines.influence.batches import gather_study
from entropy_experiments.pipelines.influence.store import Stage, StageStore
from entropy_experiments.pipelines.probe_inputs import ProbeInputs
from entropy_experiments.pipelines.probe_sampling import OpenCheckpoint, contents, open_checkpoint
from entropy_experiments.pipelines.run_conditions import analysis_conditions
from entropy_experiments.report.measurements import measurement_report
from entropy_experiments.report.notebook import Measurements
from entropy_experiments.results import (
    MEASUREMENTS,
    EstimateResult,
    MeanPoint,
    MeasuredPoint,
    MeasurementsResult,
    Repeat,
    RepeatMean,
    numbers,
    weights_of,
)
from entropy_experiments.types import Estimate
from entropy_experiments.types.estimate import CONFIDENCE, combine

__all__ = ["EntropyMeasurements", "ExperimentPlan", "measurement_report"]

MeasuredName = Literal["measured", "linear", "linquad"]
NAMES: tuple[MeasuredName, ...] = get_args(MeasuredName)
NOT_RESULTS = ("detailed_logging", "output", "rollouts", "training", "influence", "experiment")
"""Sections that change no number of an experiment, or are in its plan."""


@dataclass(frozen=True)
class ExperimentPlan:
    """What to measure: which estimates, at which step sizes, how often.

    Args:
        compute_true: The measured change.
        compute_linear: The first-order prediction.
        compute_linquad: The prediction with curvature.
        eta_list: Step sizes; None: measure.learning_rates of the config.
        repeats: Fresh batches.
        clip_overrides: Measure under each of these bounds on |log-weight| besides the config's own.

    Raises:
        ValueError: If the plan computes nothing, or a number is out of range.

    Examples:
        >>> ExperimentPlan(compute_linquad=True, eta_list=[1e-3, 4e-3]).eta_list
        (0.001, 0.004)
    """

    compute_true: bool = True
    compute_linear: bool = True
    compute_linquad: bool = False
    eta_list: Sequence[float] | None = None
    repeats: int = 1
    clip_overrides: Sequence[float | None] = ()

    def __post_init__(self) -> None:
        if not (self.compute_true or self.compute_linear or self.compute_linquad):
            raise ValueError(
                "The plan computes nothing; expected at least one of compute_true "
                "(measure.measured), compute_linear (measure.first_order) and compute_linquad "
                "(measure.second_order) to be true."
            )
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; expected 1 or more.")
        if self.eta_list is not None:
            object.__setattr__(self, "eta_list", tuple(float(eta) for eta in self.eta_list))
            etas = self.eta_list
            if not etas or len(set(etas)) < len(etas) or not all(isfinite(e) for e in etas):
                raise ValueError(
                    f"eta_list is {list(etas)}; expected one or more different finite numbers."
                )
        object.__setattr__(self, "clip_overrides", tuple(self.clip_overrides))
        bad = [clip for clip in self.clip_overrides if clip is not None and not clip > 0]
        if bad:
            raise ValueError(f"clip_overrides has {bad}; expected numbers above 0, or None.")

    @classmethod
    def of(cls, config: Config) -> ExperimentPlan:
        """What the `measure` section of a configuration says."""
        measure = config.measure
        return cls(
            compute_true=measure.measured,
            compute_linear=measure.first_order,
            compute_linquad=measure.second_order,
            eta_list=measure.learning_rates,
            repeats=measure.repeats,
            clip_overrides=measure.more_clips,
        )

    def dump(self) -> dict[str, Any]:
        return {
            "compute_true": self.compute_true,
            "compute_linear": self.compute_linear,
            "compute_linquad": self.compute_linquad,
            "eta_list": None if self.eta_list is None else list(self.eta_list),
            "repeats": self.repeats,
            "clip_overrides": list(self.clip_overrides),
        }


class EntropyMeasurements:
    """Measured, linear and linear-plus-quadratic change at every eta, over fresh batches.

    Args:
        config: A configuration, a dict, the path of a YAML file or a template's name; None: the
            quick start.
        quiet: Nothing on standard error.

    Examples:
        >>> measurements = EntropyMeasurements({"measure": {"learning_rates": [1e-3]}}, quiet=True)
        >>> results = measurements.run_experiments(ExperimentPlan(repeats=3))  # doctest: +SKIP
        >>> isinstance(measurements.config, Config)
        True
    """

    def __init__(
        self, config: Config | Mapping[str, Any] | str | Path | None = None, *, quiet: bool = False
    ) -> None:
        self.config: Config = as_config(config)
        self._quiet = quiet

    def run_experiments(
        self, plan: ExperimentPlan | None = None, *, checkpoint_path: str | Path | None = None
    ) -> Measurements:
        """JSON values: one entry per repeat, their summary, and where it was saved."""
        plan = plan or ExperimentPlan.of(self.config)
        if plan.repeats > 1 and self.config.sampling.load is not None:
            raise ValueError(
                f"measure.repeats is {plan.repeats} with sampling.load "
                f"{self.config.sampling.load}: every repeat would have the same rollouts. Leave "
                "sampling.load out, or set measure.repeats: 1."
            )
        with analysis_conditions():
            probed = open_checkpoint(self.config, checkpoint_path, may_shard=True)
            etas = plan.eta_list or self.config.measure.etas(probed.optimizer.lr)
            base_key = self._key(plan, etas, probed)
            self.config.rollout_folder.mkdir(parents=True, exist_ok=True)
            store = StageStore(self.config.rollout_folder / "measurements")
            repeats: list[Repeat] = []
            started, computed = time.monotonic(), 0
            for index in range(plan.repeats):
                seed = self.config.sampling.seed + index
                key = digest_of(base_key, seed)
                fresh = not store.holds("repeat", key)
                stage = store.once("repeat", key, lambda: self._repeat(plan, etas, seed, probed))
                repeats.append(cast(Repeat, {**stage.facts, "seconds": stage.seconds}))
                computed += fresh
                self._tell(index + 1, plan.repeats, computed, time.monotonic() - started)
        per_token = self.config.entropy.unit == "per_token"
        path = self._results_path(probed.checkpoint.name, digest_of(base_key, plan.repeats))
        results: MeasurementsResult = {
            **MEASUREMENTS.stamp,
            "unit": "token" if per_token else "sequence",
            "checkpoint": probed.checkpoint.name,
            "learning_rate": probed.optimizer.lr,
            "plan": {**plan.dump(), "eta_list": list(etas)},
            "repeats": repeats,
            "summary": _summary(repeats),
            "config": self.config.documents(),
            "provenance": {**provenance(), "files": dict(probed.checkpoint.hashes)},
            "results_path": str(path),
        }
        encoded = json.dumps(results, indent=1, allow_nan=False).encode()

        def write() -> None:
            if not path.is_file() or path.read_bytes() != encoded:  # a rerun changes nothing
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, encoded)

        current().broadcast_from_zero(write)
        return Measurements(results)

    def _key(self, plan: ExperimentPlan, etas: Sequence[float], probed: OpenCheckpoint) -> str:
        """Everything that a repeat depends on besides its seed."""
        said = {k: v for k, v in self.config.documents().items() if k not in NOT_RESULTS}
        said["probe_rework"] = {**said["probe_rework"], "master_seed": None}
        computes = {**plan.dump(), "eta_list": list(etas), "repeats": None}
        loaded = self.config.sampling.load
        versions = {k: v for k, v in provenance().items() if k != "git"}
        files = [dict(probed.checkpoint.hashes), contents(self.config, probed)]
        return digest_of(MEASUREMENTS.version, said, computes, loaded, files, versions)

    def _repeat(
        self, plan: ExperimentPlan, etas: Sequence[float], seed: int, probed: OpenCheckpoint
    ) -> Stage:
        drawn = (
            self.config.data.evaluation_rollouts == "drawn" and self.config.sampling.load is None
        )
        request = {"kind": "evaluation", "params": {"group": 1} if drawn else {}}
        config = self.config.replaced(
            {
                "sampling.seed": seed,
                "sampling.save": str(self.config.rollout_folder / f"repeat_{seed}"),
                "influence.update_batch": {},
                "influence.evaluation_batches": [request],
                "influence.reward": False,
                "influence.what_if": [],
            },
            where="repeat",
        )
        inputs = gather_study(config, probed, quiet=self._quiet).probe
        points, level = _points(inputs, plan, etas)
        return Stage(
            facts={
                "seed": seed,
                "update": update_kind(real=inputs.real, bound=inputs.bound, checked=False),
                "B_E": len(inputs.evaluation.prompt_N.unique()),
                "B_U": len(inputs.update.rollouts.prompt_N.unique()),
                "evaluation_rollouts": inputs.evaluation.fingerprint,
                "update_rollouts": inputs.update.rollouts.fingerprint,
                "H_orig": numbers(level),
                "points": points,
                "notes": list(inputs.notes),
            }
        )

    def _results_path(self, checkpoint: str, key: str) -> Path:
        if self.config.output.results_file is not None:
            return Path(self.config.output.results_file)
        logs = Path(self.config.output.folder)
        return logs / "measurements" / f"{checkpoint}_{key[:8]}.json"

    def _tell(self, done: int, total: int, computed: int, seconds: float) -> None:
        if self._quiet or not current().first:
            return
        left = ""
        if computed and done < total:
            left = f", about {seconds / computed * (total - done):.0f} s left"
        print(f"repeat {done} of {total} ({seconds:.1f} s{left})", file=sys.stderr, flush=True)


def _points(
    inputs: ProbeInputs, plan: ExperimentPlan, etas: Sequence[float]
) -> tuple[list[MeasuredPoint], Estimate]:
    """One entry per eta, and the entropy before the step."""
    policy, rollouts = inputs.policy, inputs.evaluation
    if plan.compute_linquad and not inputs.bends:
        raise ValueError(
            "measure.second_order is true with predict.method "
            f"{inputs.config.predict.method!r} (used: {inputs.mode!r}) and top_p "
            f"{policy.top_p:g}; a curvature needs a forward method and the full softmax. Use "
            "method: auto and top_p: 1, or measure.second_order: false."
        )
    direction, _ = inputs.step()
    options = inputs.estimator
    base = score_all(policy, policy.params, rollouts, microbatch=options.forward_size)
    level = entropy_level(policy, rollouts, options, base=base)
    slope = bend = None
    if plan.compute_linquad:
        bend = curvature(policy, rollouts, direction, options, repackings=0)
        slope = bend.diagnostics["slope"]
    elif plan.compute_linear:
        slope = first_order(policy, rollouts, direction, options, base=base, repackings=0)
    changes: dict[Case, Estimate] = {}
    own = inputs.config.measure.clip_log_weights
    if plan.compute_true:
        clips = tuple(dict.fromkeys((own, *plan.clip_overrides)))
        changes = measured_many(
            policy, rollouts, {"step": direction}, etas, options, base=base, clips=clips
        )
    if doubt := inputs.checkpoint.other_count:
        slope, bend = slope and slope.doubted(doubt), bend and bend.doubted(doubt)
        changes = {case: change.doubted(doubt) for case, change in changes.items()}
    return [_point(eta, plan, slope, bend, changes, own, level) for eta in etas], level


def _point(
    eta: float,
    plan: ExperimentPlan,
    slope: Estimate | None,
    bend: Estimate | None,
    changes: Mapping[Case, Estimate],
    own: float | None,
    level: Estimate,
) -> MeasuredPoint:
    estimates: dict[MeasuredName, Estimate] = {}
    if plan.compute_true:
        estimates["measured"] = changes[Case("step", eta, own)]
    if plan.compute_linear and slope is not None:
        estimates["linear"] = within_entropy(eta * slope, level)
    if slope is not None and bend is not None:
        estimates["linquad"] = within_entropy(combine([(eta, slope), (eta**2 / 2, bend)]), level)
    out: MeasuredPoint = {"eta": eta}
    for name, estimate in estimates.items():
        out[name] = numbers(estimate)
    if "measured" in estimates:
        out["diagnostics"] = weights_of(estimates["measured"])
        out["differences"] = {
            name: numbers(estimates[name] - estimates["measured"])
            for name in ("linear", "linquad")
            if name in estimates
        }
        out["clips"] = {
            _clip_name(case.clip): {**numbers(change), "diagnostics": weights_of(change)}
            for case, change in changes.items()
            if case.eta == eta and case.clip != own
        }
    return out


def _clip_name(clip: float | None) -> str:
    return "none" if clip is None else f"{clip:g}"


def _summary(repeats: Sequence[Repeat]) -> list[MeanPoint]:
    """By eta: mean and spread over the repeats, of the numbers and of their differences."""
    out: list[MeanPoint] = []
    for i, first in enumerate(repeats[0]["points"]):
        points = [repeat["points"][i] for repeat in repeats]
        entry = {
            "eta": first["eta"],
            **{
                name: _over(estimates)
                for name in NAMES
                if (estimates := [e for point in points if (e := point.get(name)) is not None])
            },
            "differences": {
                name: _over([point.get("differences", {})[name] for point in points])
                for name in first.get("differences", {})
            },
            "clips": {
                name: _over([point.get("clips", {})[name] for point in points])
                for name in first.get("clips", {})
            },
        }
        out.append(cast(MeanPoint, entry))
    return out


def _over(points: Sequence[EstimateResult]) -> RepeatMean:
    """Mean over repeats; with one repeat, that repeat's own error bar."""
    values, repeats = [estimate["value"] for estimate in points], len(points)
    trusted = sum(estimate["trusted"] for estimate in points)
    if repeats == 1:
        stderr, interval = points[0]["stderr"], points[0]["interval"]
        return {
            "mean": values[0],
            "stderr": stderr,
            "interval": interval,
            "repeats": 1,
            "trusted": trusted,
        }
    mean, stderr = statistics.fmean(values), statistics.stdev(values) / sqrt(repeats)
    half = float(stdtrit(repeats - 1, 0.5 + CONFIDENCE / 2)) * stderr
    return {
        "mean": mean,
        "stderr": stderr,
        "interval": [mean - half, mean + half],
        "repeats": repeats,
        "trusted": trusted,
    }
