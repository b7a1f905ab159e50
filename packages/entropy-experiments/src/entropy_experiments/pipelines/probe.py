"""One checkpoint: what does its next update do to the policy's entropy?

    phase 0      evaluation rollouts E are drawn; the update batch U is the recorded one, or drawn
    phase 1-3    the step is rebuilt from the optimizer's state; predicted: lr * slope of H
    phase 5      measured: the same rollouts, reweighted to speak for the updated policy

(The phases have the numbers of the earlier probe, which had a fourth.) Model, optimizer and random
state are left exactly as they were; finished rollouts are on disk as soon as they are drawn, so
that an interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from entropy_experiments.artifacts import write_whole
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.config import Config, load_config, parse_config
from entropy_experiments.distributed import current
from entropy_experiments.estimate.curvature import curvature
from entropy_experiments.estimate.first_order import first_order, first_order_by_part
from entropy_experiments.estimate.level import entropy_level, within_entropy
from entropy_experiments.estimate.measured import measured_many
from entropy_experiments.estimate.noise import REPACKINGS
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.findings import Findings, MadeCheck, results_of
from entropy_experiments.pipelines.influence.certified import certificate_of, still_open
from entropy_experiments.pipelines.probe_inputs import ProbeInputs, gather, timed
from entropy_experiments.pipelines.probe_log import DetailedLogger, messages
from entropy_experiments.pipelines.run_conditions import analysis_conditions
from entropy_experiments.report.notebook import ProbeResults
from entropy_experiments.report.verdict import verdict
from entropy_experiments.types import Attribution, Direction, Estimate, Scores


class OfflineEntropyProbe:
    r"""Predicts, measures and explains the entropy change of a checkpoint's next update.

    Args:
        config: Every section and key is optional; None: the quick start on the embedded run.
        quiet: Nothing on standard error.

    Examples:
        >>> probe = OfflineEntropyProbe({"sampling": {"max_new_tokens": 8}}, quiet=True)
        >>> results = probe.run_mixed_probe("runs/grpo/checkpoint-340")  # doctest: +SKIP
        >>> print("\n".join(results["verdict"]))  # doctest: +SKIP
        >>> isinstance(probe.config, Config)
        True
    """

    def __init__(
        self, config: Config | Mapping[str, Any] | None = None, *, quiet: bool = False
    ) -> None:
        self.config: Config = config if isinstance(config, Config) else parse_config(config or {})
        self._quiet = quiet

    @classmethod
    def from_config_file(cls, path: str | Path, *, quiet: bool = False) -> OfflineEntropyProbe:
        """Any YAML file; the names of the package's own templates work from any folder."""
        return cls(load_config(path), quiet=quiet)

    def run_mixed_probe(self, checkpoint_path: str | Path | None = None) -> ProbeResults:
        """Results under the names of the documents; prints where the log is."""
        if self.config.output.results_file is not None:  # now: a folder that is gone later, is gone
            current().broadcast_from_zero(
                lambda: _made_for(Path(str(self.config.output.results_file)))
            )
        findings, decode = self.findings(checkpoint_path)
        results = ProbeResults(results_of(findings), unit=findings.level.estimand.unit)
        results["verdict"] = verdict(findings)
        for message in messages(findings):
            self._say(message)
        log = current().broadcast_from_zero(lambda: self._written(findings, decode, results))
        if log is not None:
            results["log_path"] = log
        return results

    def _written(self, findings: Findings, decode: Any, results: ProbeResults) -> str | None:
        """Log and results.json, as the configuration asks for them; returns the log's path."""
        log = DetailedLogger(self.config).write(findings, decode)
        if log is not None:
            results["log_path"] = str(log)
            self._say(f"log: {log}")
        if self.config.output.results_file is not None:
            path = Path(self.config.output.results_file)
            write_whole(path, json.dumps(results, indent=1, allow_nan=False).encode())
        return results.get("log_path")

    def findings(self, checkpoint_path: str | Path | None = None) -> tuple[Findings, Any]:
        """(what was found, the tokenizer's decode): the numbers as Estimates, for further use."""
        with analysis_conditions():
            say = None if self._quiet else self._say
            inputs = gather(self.config, checkpoint_path, say=say, may_shard=True)
            return self._probe(inputs), inputs.checkpoint.tokenizer.decode

    def _probe(self, inputs: ProbeInputs) -> Findings:
        policy, rollouts, timing = inputs.policy, inputs.evaluation, inputs.timing
        with timed(timing, "update"):
            direction, stats = inputs.step()
        with timed(timing, "base"):
            base = score_all(
                policy, policy.params, rollouts, microbatch=inputs.estimator.forward_size
            )
            level = entropy_level(policy, rollouts, inputs.estimator, base=base)
        predicted, bend, linear_range = self._predict(inputs, direction, base)
        measured = self._measure(inputs, direction, base)
        with timed(timing, "certificate"):
            # Another model to load: by one rank.
            certificate, absent = current().broadcast_from_zero(
                lambda: certificate_of(inputs, direction)
            )
        to_go = self._to_go(inputs, direction, base)
        made = MadeCheck(
            of_gradient=inputs.has_gradient,
            gradient_distance=inputs.gradient_distance(stats.found.gradient),
            altered=inputs.altered if inputs.real else (),
            reasons=inputs.reasons if inputs.real else (),
            unfollowed=inputs.facts.unfollowed if inputs.real else (),
            other_start=inputs.other_start,
            bound=inputs.bound or not inputs.real,
            other_count=inputs.checkpoint.other_count,
        )
        if predicted is not None:
            predicted = replace(predicted, total=within_entropy(predicted.total, level))
        to_go = to_go and within_entropy(to_go, level)
        doubt = made.doubt(certificate)
        if doubt:
            predicted = predicted and predicted.doubted(doubt)
            measured = measured and {eta: x.doubted(doubt) for eta, x in measured.items()}
            bend, to_go = bend and bend.doubted(doubt), to_go and to_go.doubted(doubt)
        notes = list(inputs.notes)
        if stats.part_norms["gradient"] == 0:
            if inputs.real:  # a drawn batch comes with a note of its own
                notes.append(
                    "every group of the update batch has equal rewards: the update is momentum "
                    "and weight decay alone"
                )
            predicted = predicted and _doubted(predicted)
        timing["total"] = sum(timing.values())
        momentum_decay, coupled_decay = momentum_of(inputs.optimizer)
        return Findings(
            checkpoint=inputs.checkpoint.name,
            step=inputs.checkpoint.step,
            base=inputs.checkpoint.base,
            lr=inputs.lr,
            lr_stored=inputs.lr_stored,
            momentum_decay=momentum_decay,
            coupled_decay=coupled_decay,
            level=level,
            predicted=predicted,
            to_go=to_go,
            bend=bend,
            linear_range=linear_range,
            measured=measured,
            real=inputs.real,
            certificate=certificate,
            certificate_absent=absent,
            made=made,
            stats=stats,
            retries=inputs.retries,
            evaluation=rollouts,
            evaluation_scores=base,
            update=inputs.update,
            assumed=inputs.facts.assumed,
            read={name: source for name, source in inputs.facts.sources.items() if source},
            not_verifiable=still_open(
                inputs.not_verifiable, None if certificate is None else certificate.relative_error
            ),
            notes=tuple(notes),
            sampling=inputs.facts.sampling,
            asked_otherwise=inputs.facts.asked_otherwise,
            timing=timing,
            provenance={
                **provenance(),
                "precision": dict(stats.precision),
                "files": dict(inputs.checkpoint.hashes),
                "evaluation_rollouts": rollouts.fingerprint,
                "update_rollouts": inputs.update.rollouts.fingerprint,
                "training_facts": {k: v for k, v in inputs.facts.values.items() if v is not None},
                "coverage": dict(inputs.checkpoint.coverage),
            },
        )

    def _predict(
        self, inputs: ProbeInputs, direction: Direction, base: Scores
    ) -> tuple[Attribution | None, Estimate | None, float | None]:
        """Phases 1 to 3, in units of the step: lr times the slope, lr^2 / 2 times the curvature."""
        if not self.config.predict.enabled:
            return None, None, None
        predict, lr = self.config.predict, inputs.lr
        rollouts, policy, options = inputs.evaluation, inputs.policy, inputs.estimator
        with timed(inputs.timing, "first_order"):
            slope = first_order_by_part(
                policy,
                rollouts,
                direction,
                replace(options, repackings=REPACKINGS if predict.noise_floor else 0),
                baseline=predict.baseline,
                base=base,
            )
        self._say(f"phase 1-3: predicted ({inputs.timing['first_order']:.1f} s)")
        predicted = Attribution.of(
            lr * slope.total, {name: lr * line for name, line in slope.lines.items()}
        )
        if not predict.curvature or not inputs.bends:
            return predicted, None, None
        with timed(inputs.timing, "curvature"):
            bend = curvature(policy, rollouts, direction, replace(options, repackings=0))
        # A curvature near 0 within its error bar would promise a range that nobody has seen.
        low = bend.diagnostics["linear_range_low"]
        reach = bend.diagnostics["linear_range"] if low is None else low
        total = predicted.total
        if total.interval is not None and total.covers(0.0):
            reach = None  # a tenth of a slope that may be 0
        return predicted, lr**2 / 2 * bend, reach

    def _to_go(self, inputs: ProbeInputs, direction: Direction, base: Scores) -> Estimate | None:
        """The prediction of less variance, where the one paired with the measurement is not it."""
        if not self.config.predict.enabled or inputs.estimator.slope_form == "to_go":
            return None
        options = replace(inputs.estimator, form="per_decision", repackings=0)
        with timed(inputs.timing, "first_order"):
            slope = first_order(inputs.policy, inputs.evaluation, direction, options, base=base)
        return inputs.lr * slope

    def _measure(
        self, inputs: ProbeInputs, direction: Direction, base: Scores
    ) -> dict[float, Estimate] | None:
        """Phase 5: the measured change at every eta."""
        if not self.config.measure.enabled:
            return None
        etas = dict.fromkeys((inputs.lr, *self.config.measure.etas(inputs.lr)))
        with timed(inputs.timing, "measured"):
            changes = measured_many(
                inputs.policy,
                inputs.evaluation,
                {"step": direction},
                etas,
                inputs.estimator,
                base=base,
                clips=(self.config.measure.clip_log_weights,),
            )
        self._say(f"phase 5: measured ({inputs.timing['measured']:.1f} s)")
        return {case.eta: change for case, change in changes.items()}

    def _say(self, line: str) -> None:
        if not self._quiet and current().first:
            print(line, file=sys.stderr, flush=True)


def _doubted(predicted: Attribution) -> Attribution:
    """The gradient's line of a batch without any advantage says nothing about such batches."""
    doubt = ("no group of the update batch has an advantage",)
    gradient = predicted.lines["gradient"]
    line = replace(gradient, given_reasons=(*gradient.given_reasons, *doubt))
    return replace(predicted, lines={**predicted.lines, "gradient": line})


def _made_for(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
