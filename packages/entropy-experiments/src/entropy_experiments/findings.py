"""Everything one probe run found, and its numbers under the names users know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from entropy_experiments.attribution.eventual import eventual
from entropy_experiments.results import PROBE, JSONObject, ProbeResult, finite, numbers, weights_of
from entropy_experiments.types import Attribution, Estimate, Rollouts, Scores, UpdateBatch
from entropy_experiments.types.direction import BASELINE_PARTS
from entropy_experiments.update.adamw import UpdateStats
from entropy_experiments.update.certificate import (
    APART,
    FingerprintCertificate,
    StepCertificate,
)


@dataclass(frozen=True, kw_only=True)
class MadeCheck:
    """What is known about whether the step analysed is the one that training made."""

    of_gradient: bool = False
    """It is made of the gradient that training recorded, whatever its loss was."""
    gradient_distance: float | None = None
    """Of the gradient rebuilt from the batch from the recorded one, relative to that."""
    altered: tuple[str, ...] = ()
    """Facts of the loss for which the config asks for something else."""
    reasons: tuple[str, ...] = ()
    """Why a rebuilt step may be another than training's."""
    unfollowed: tuple[str, ...] = ()
    """Options of training's loss that a rebuilt step does not have."""
    other_start: str = ""
    """Why training's step was not made from the weights of the checkpoint."""
    bound: bool = True
    """The batch names the weights that it was drawn from, and they are the checkpoint's."""
    other_count: str = ""
    """Why the optimizer's state may be another step's than the weights'."""

    @property
    def loss_differs(self) -> bool:
        """The loss rebuilt from the batch is not the one that training had."""
        return self.gradient_distance is not None and self.gradient_distance > APART

    def doubt(self, certificate: StepCertificate | FingerprintCertificate | None) -> str:
        """Why whole-step numbers are not trusted; empty: nothing here speaks against them."""
        if self.other_start and not self.altered:
            return f"this is not the step that training made: {self.other_start}"
        if certificate is not None and certificate.apart:
            return (
                "this is not the step that training made: it is "
                f"{certificate.relative_error:.0%} away from it"
            )
        if self.loss_differs and not self.of_gradient:
            return (
                "this is not the step that training made: the gradient rebuilt from the batch is "
                f"{self.gradient_distance:.0%} away from the recorded one"
            )
        if certificate is None and self.other_count:
            return self.other_count
        if certificate is None and not self.of_gradient and self.unfollowed and not self.altered:
            return (
                f"not followed here: {'; '.join(self.unfollowed)}; and "
                "nothing was recorded to check the step by"
            )
        return ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Findings:
    """Changes are in nats, at the learning rate of the step; a skipped phase leaves None."""

    checkpoint: str
    step: int | None
    base: str
    lr: float
    lr_stored: float
    """Of the step that training made: recorded, or what the optimizer holds; `lr` is another one
    only if the config says so. 0: no step follows, or the recorded one moved nothing."""
    momentum_decay: float
    """b1: a batch's gradient acts on 1 / (1 - b1) steps' worth in the end."""
    coupled_decay: bool
    """Weight decay is added to the gradient (Adam with L2) and lives on in momentum as it does."""
    level: Estimate
    """H before the step."""
    predicted: Attribution | None
    """lr times the slope, with the lines momentum, decay and gradient."""
    to_go: Estimate | None
    """The prediction in the form of least variance, where `predicted` is paired with snis."""
    bend: Estimate | None
    """lr^2 / 2 times the curvature."""
    linear_range: float | None
    """The eta up to which the bend is within 10 % of the slope, at its interval's larger end.

    None without a curvature, and where the slope's own interval contains 0: 10 % of what?
    """
    measured: Mapping[float, Estimate] | None
    """By eta; the learning rate is among them."""
    real: bool
    """The update batch was recorded in training; otherwise it was drawn for the probe."""
    certificate: StepCertificate | FingerprintCertificate | None
    certificate_absent: str
    """Why there is none."""
    stats: UpdateStats
    retries: int | None
    """Groups drawn in place of groups with equal rewards; None: the batch was not drawn here."""
    evaluation: Rollouts
    evaluation_scores: Scores
    update: UpdateBatch
    assumed: Mapping[str, Any]
    """Training facts that no file states: the value assumed for each."""
    read: Mapping[str, str]
    """Training facts with the file that states each."""
    not_verifiable: tuple[str, ...]
    notes: tuple[str, ...]
    sampling: tuple[str, ...] = ()
    """Options by which training sampled from another distribution than the policy probed."""
    asked_otherwise: tuple[str, ...] = ()
    """In which way prompts are put in another form than training's."""
    timing: Mapping[str, float]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    made: MadeCheck = field(default_factory=MadeCheck)

    @property
    def checked(self) -> bool:
        """The step is the one that training made, by a certificate or by its own gradient."""
        if self.certificate is not None:
            return not self.certificate.apart
        return self.made.of_gradient

    @property
    def lr_changed(self) -> bool:
        """The step asked about is longer or shorter than the one training made."""
        followed = self.lr_stored > 0 or self.real  # a recorded step may have moved nothing
        return followed and self.lr != self.lr_stored

    @property
    def form(self) -> str:
        """Of the importance weights; the prediction is the derivative of that measurement."""
        return self.level.estimand.form

    @property
    def change(self) -> Estimate | None:
        """The measured change at the learning rate."""
        return None if self.measured is None else self.measured[self.lr]

    @property
    def mode(self) -> str | None:
        """How the prediction was differentiated: jvp, double_backward, reverse or central."""
        return None if self.predicted is None else self.predicted.total.diagnostics.get("mode")

    @property
    def difference(self) -> Estimate | None:
        """Predicted minus measured, paired: the same rollouts."""
        if self.predicted is None or self.change is None:
            return None
        return self.predicted.total - self.change

    @property
    def terms(self) -> dict[str, Estimate]:
        """The direct and the state term of the prediction; empty when it was skipped."""
        if self.predicted is None:
            return {}
        total = self.predicted.total
        terms = {name: total.diagnostics[name] for name in ("direct", "state")}
        # Reverse mode has plain numbers per unit learning rate: no rollouts, no error bars.
        return {
            name: term
            if isinstance(term, Estimate)
            else Estimate.build(value=self.lr * term, estimand=total.estimand)
            for name, term in terms.items()
        }

    @property
    def baseline(self) -> Estimate | None:
        """What momentum and decay alone do to the entropy, to first order."""
        if self.predicted is None:
            return None
        first, *rest = (self.predicted.lines[name] for name in BASELINE_PARTS)
        for line in rest:
            first = first + line
        return first

    @property
    def gradient_eventual(self) -> Estimate | None:
        """What this batch does through this step and, as momentum, through those that follow."""
        return self._eventual("gradient")

    @property
    def baseline_eventual(self) -> tuple[Estimate, Estimate] | None:
        """What decay does in the end, and what decay and this batch do together: for a share.

        Momentum has none: it is what earlier batches do in the end.
        """
        decay, gradient = self._eventual("decay"), self._eventual("gradient")
        if decay is None or gradient is None:
            return None
        return decay, decay + gradient

    def _eventual(self, part: str) -> Estimate | None:
        if self.predicted is None:
            return None
        line = self.predicted.lines[part]
        return eventual(part, line, self.momentum_decay, coupled_decay=self.coupled_decay)

    def _repr_html_(self) -> str:
        from entropy_experiments.report.notebook import probe_html

        return probe_html(results_of(self), self.level.estimand.unit)


def update_kind(*, real: bool, bound: bool, checked: bool) -> str:
    """What `update` of a result says.

    Args:
        real: The batch was recorded in training, or is said to have been.
        bound: It names the weights that it was drawn from, and they are the checkpoint's.
        checked: The step is the one that training made, by a certificate or its own gradient.
    """
    if not real:
        return "hypothetical"
    return "recorded" if bound or checked else "imported"


def results_of(findings: Findings) -> ProbeResult:
    """The result keys of the documents, and `estimates` with all that belongs to each number."""
    rollouts, batch = findings.evaluation, findings.update
    out: JSONObject = {
        **PROBE.stamp,
        "checkpoint": findings.checkpoint,
        "learning_rate": findings.lr,
        "unit": findings.level.estimand.unit,
        "H_orig": findings.level.value,
        "B_E": len(rollouts.prompt_N.unique()),
        "B_U": len(batch.rollouts.prompt_N.unique()),
        "avg_generation_length": float(rollouts.tokens_N.double().mean()),
        "update": update_kind(
            real=findings.real, bound=findings.made.bound, checked=findings.checked
        ),
        "assumed": dict(findings.assumed),
        "not_verifiable": list(findings.not_verifiable),
        "notes": list(findings.notes),
        "timing": dict(findings.timing),
    }
    if findings.real:
        out["made_step"] = {
            "of_recorded_gradient": findings.made.of_gradient,
            "gradient_distance": findings.made.gradient_distance,
            "reasons": list(findings.made.reasons),
            "altered": list(findings.made.altered),
            **({"other_start": start} if (start := findings.made.other_start) else {}),
        }
    if batch.reward_N is not None and not bool(batch.reward_N.isnan().all()):
        out["avg_reward"] = float(batch.reward_N.double().nanmean())
    estimates = {"H_orig": findings.level}
    if findings.predicted is not None:
        total = findings.predicted.total
        out |= {
            "deltaH1": total.value,
            "bars_dot": total.value / findings.lr,
            "mode": findings.mode,
        }
        estimates |= {
            "deltaH1": total,
            "baseline": findings.baseline,
            "bars_dot": total / findings.lr,
        }
        if findings.to_go is not None:
            out["deltaH1_to_go"] = findings.to_go.value
            estimates["deltaH1_to_go"] = findings.to_go
        estimates |= {name: findings.predicted.lines[name] for name in findings.predicted.lines}
        estimates |= findings.terms
        estimates["gradient_eventual"] = findings.gradient_eventual
    if findings.bend is not None:
        out |= {
            "curvature_term": findings.bend.value,
            "linear_range": finite(findings.linear_range),
        }
        estimates["curvature_term"] = findings.bend
    if findings.change is not None and findings.measured is not None:
        weights = findings.change.diagnostics["weights"]
        out |= {
            "deltaH_true": findings.change.value,
            "H_upd": findings.level.value + findings.change.value,
            "diagnostics": weights_of(findings.change),
            "sweep": [
                {"eta": eta, **numbers(change), "diagnostics": weights_of(change)}
                for eta, change in sorted(findings.measured.items())
            ],
        }
        out["diagnostics"]["rollouts"] = weights.rollouts
        estimates |= {"deltaH_true": findings.change, "H_upd": findings.level + findings.change}
    if findings.difference is not None:
        out["difference"] = findings.difference.value
        estimates["difference"] = findings.difference
    if findings.certificate is not None:
        out["step_certificate"] = {
            "passed": findings.certificate.passed,
            "apart": findings.certificate.apart,
            "share": findings.certificate.share,
            "cosine": findings.certificate.cosine,
            "relative_error": findings.certificate.relative_error,
        }
    out["estimates"] = {name: numbers(e) for name, e in estimates.items() if e is not None}
    return out  # pyright: ignore[reportReturnType]  # its keys come and go with the phases
