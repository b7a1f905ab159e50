"""The verdict in words: what the update does to entropy, and how far to believe it."""

from __future__ import annotations

import math

from entropy_experiments.findings import Findings
from entropy_experiments.report.words import AGREEMENT, NOT_TRAININGS
from entropy_experiments.results import DIFFERENTIATED
from entropy_experiments.types import Estimate


def verdict(findings: Findings) -> list[str]:
    """Lines to print, the answer first."""
    return [
        *_headline(findings),
        *_comparison(findings),
        *_origin(findings),
        *_trust(findings),
        *_provenance(findings),
    ]


def spoken(estimate: Estimate) -> str:
    """A change with its interval, signs always shown."""
    bar = (
        "no interval"
        if estimate.interval is None
        else f"95% {estimate.interval[0]:+.3g} to {estimate.interval[1]:+.3g}"
    )
    return f"{estimate.value:+.4g} nats ({bar})"


SLOPE_FORM = {"snis": "matched", "per_decision": "to-go"}
WEIGHTS = {"snis": "whole-response", "per_decision": "per-decision"}


def _headline(findings: Findings) -> list[str]:
    change = findings.change or (findings.predicted.total if findings.predicted else None)
    rate = f"at learning rate {findings.lr:.3g}"
    if findings.lr_changed:
        rate += f" instead of {findings.lr_stored:.3g}"
    lines = [*_which_step(findings, rate), *_assumed(findings)]
    lines += [f"  NOT AS TRAINING ASKED: {text}" for text in findings.asked_otherwise]
    unit = findings.level.estimand.unit
    lines.append(
        f"  entropy now      {findings.level.value:.4f} nats per {unit}"
        f" at temperature {findings.level.estimand.temperature:g}{_distribution(findings)}"
    )
    if findings.predicted is not None:
        lines.append(
            f"  predicted change {spoken(findings.predicted.total)}, "
            f"{SLOPE_FORM[findings.form]} form"
        )
        if findings.to_go is not None:
            lines.append(f"    less variance  {spoken(findings.to_go)}, in the to-go form")
    if findings.change is not None:
        lines.append(
            f"  measured change  {spoken(findings.change)}, {WEIGHTS[findings.form]} weights"
        )
    if change is not None and findings.level.value > 0:
        share = change.value / findings.level.value
        shown = f"{share:+.2%}" if abs(share) >= 0.5e-4 or not share else "less than 0.01%"
        lines.append(f"  that is          {shown} of the entropy")
    return lines


def _distribution(findings: Findings) -> str:
    """Said where training did not sample from the policy whose entropy this is."""
    if not findings.sampling:
        return ""
    top_p = findings.level.estimand.top_p
    kept = "the full softmax" if top_p == 1 else f"the softmax cut at top_p = {top_p:g}"
    return f", of {kept} (training sampled with {', '.join(findings.sampling)})"


def _which_step(findings: Findings, rate: str) -> list[str]:
    """The first sentence claims no more than was checked."""
    after, check = findings.checkpoint, findings.made
    if not findings.real:
        return [f"A hypothetical update from {after} (its batch was drawn for this probe), {rate}:"]
    if check.altered:
        return [
            f"A hypothetical update from {after}: training's own batch with "
            f"{', '.join(check.altered)}, {rate}:"
        ]
    certificate = findings.certificate
    why = f" ({'; '.join(check.reasons)})" if check.reasons else ""
    if check.other_start:
        return [
            f"This is not the step that training made after {after}: {check.other_start}. About "
            f"the step rebuilt from the checkpoint's weights, {rate}:"
        ]
    if certificate is not None and certificate.apart:
        return [
            f"This is not the step that training made: after {after}, the step rebuilt from the "
            f"recorded batch is {certificate.relative_error:.0%} away from it{why}. About the "
            f"rebuilt step, {rate}:"
        ]
    if check.loss_differs and not check.of_gradient:
        return [
            f"This is not the step that training made: after {after}, the gradient rebuilt from "
            f"the recorded batch is {check.gradient_distance:.0%} away from training's{why}. About "
            f"the rebuilt step, {rate}:"
        ]
    lines = [f"The update that training made after {after}, {rate}:"]
    if not findings.checked and not check.bound:
        lines = [f"The step from this batch at {after}, {rate} ({NOT_TRAININGS}):"]
    elif not findings.checked:
        lines = [
            f"The update that the batch recorded after {after} makes, {rate} (not checked against "
            "the step that training made):"
        ]
    if check.of_gradient and check.loss_differs:
        lines.append(
            f"  by the gradient that training recorded; the one rebuilt from its batch is "
            f"{check.gradient_distance:.0%} away{why}, so there is no split by rollout or token"
        )
    return lines


def _assumed(findings: Findings) -> list[str]:
    """What had to be assumed belongs beside what rests on it."""
    if not findings.assumed:
        return []
    named = ", ".join(f"{name} = {value}" for name, value in findings.assumed.items())
    return [
        "  ASSUMED, not read from any file (set them in the config, or in entropy_probe.json): "
        f"{named}"
    ]


def _comparison(findings: Findings) -> list[str]:
    lines = []
    if findings.difference is not None and findings.change is not None:
        gap = findings.difference
        share = (
            f", {abs(gap.value / findings.change.value):.1%} of the change"
            if findings.change.value and not _lost(findings.change)
            else ""
        )
        lines.append(f"  difference       {spoken(gap)}, paired{share}")
    if findings.bend is not None and findings.predicted is not None:
        lines.append(
            f"  curvature adds   {spoken(findings.bend)}; {_reach(findings.bend, findings)}"
        )
    if findings.difference is not None and findings.difference.interval is not None:
        lines.append(f"  so the prediction {_agreement(findings)}")
    if findings.bend is None and findings.predicted is not None:
        lines.append(
            "  no curvature, hence no linear range (predict.curvature: false, method: "
            "reverse and top_p below 1 have none)"
        )
    if findings.predicted is None:
        lines.append("  the prediction was skipped (predict.enabled: false)")
    if findings.change is None:
        lines.append("  the measurement was skipped (measure.enabled: false)")
    return lines


def _reach(bend: Estimate, findings: Findings) -> str:
    if not bend.trusted:
        return "not trusted, so how far the straight line holds is not known"
    if findings.linear_range is None:
        return (
            "how far the straight line holds is not known: the predicted change is below its own "
            "noise"
        )
    return f"the straight line holds within 10 % up to learning rate {_rate(findings.linear_range)}"


def _agreement(findings: Findings) -> str:
    """Whether prediction and measurement agree, said only as far as the paired interval reaches."""
    gap, change = findings.difference, findings.change
    assert gap is not None
    assert gap.interval is not None
    assert change is not None
    if max(map(abs, gap.interval)) <= AGREEMENT * abs(change.value):
        return f"agrees with the measurement, to within {AGREEMENT:.0%} of the change"
    predicted = findings.predicted.total if findings.predicted else None
    below = _lost(change)
    if below and (gap.covers(0.0) or (predicted is not None and _lost(predicted))):
        return "agrees with the measurement, whose change is below its own noise"
    if below:
        share = " (whose change is below its own noise)"
    else:
        share = f" ({abs(gap.value / change.value):.0%} off)" if change.value else ""
    off = f"does not agree with the measurement{share}"
    curved = findings.bend is not None and findings.bend.trusted
    reach = findings.linear_range if curved else None
    if abs(gap.value) > AGREEMENT * abs(change.value) and reach is not None and findings.lr > reach:
        return (
            f"{off}: the step is too long for a straight line, {findings.lr / reach:.2g} times its "
            "linear range"
        )
    if gap.covers(0.0):
        return (
            "cannot be distinguished from the measurement, nor shown to agree within "
            f"{AGREEMENT:.0%}: the paired interval is too wide. More evaluation rollouts "
            "(data.evaluation_prompts) would decide"
        )
    if findings.bend is None:
        return off
    if not curved:
        return f"{off}, and its curvature is not trusted to say why"
    rest = gap + findings.bend
    if rest.covers(0.0) or abs(rest.value) <= AGREEMENT * abs(change.value):
        return f"{off}: it misses by its curvature"
    return f"{off}: its curvature does not account for that, two orders do not suffice here"


def _origin(findings: Findings) -> list[str]:
    if findings.predicted is None:
        return []
    total, lines = findings.predicted.total, findings.predicted.lines
    baseline, eventual = findings.baseline, findings.gradient_eventual
    in_the_end = findings.baseline_eventual
    assert baseline is not None
    assert in_the_end is not None
    assert eventual is not None
    direct, state = (findings.terms[name] for name in ("direct", "state"))
    return [
        "Where it comes from (first order):",
        f"  direct  {spoken(direct)}: the same states, other choices{_share(direct, total)}",
        f"  state   {spoken(state)}: other states visited{_share(state, total)}",
        f"  momentum {lines['momentum'].value:+.4g}, weight decay {lines['decay'].value:+.4g}, "
        f"this batch's gradient {lines['gradient'].value:+.4g}",
        f"  baseline (momentum and decay) share of this step: {_ratio(baseline, total)}; "
        f"long-run share: {_ratio(*in_the_end, digits=1)} (momentum is credited to the batches it "
        "came from)",
        f"  this batch in the end, through the momentum it leaves: {spoken(eventual)}"
        f"{_early(findings)}",
    ]


def _early(findings: Findings) -> str:
    """Bias correction enlarges the first steps; later ones take less of what momentum keeps."""
    young = findings.stats.step < 1 / (1 - findings.momentum_decay)
    return ", overstated this early in training" if young else ""


def _trust(findings: Findings) -> list[str]:
    lines, check = [], findings.made
    if findings.mode in DIFFERENTIATED:
        lines.append(f"Differentiated {DIFFERENTIATED[findings.mode]} ({findings.mode}).")
    if findings.change is not None:
        weights = findings.change.diagnostics["weights"]
        k_hat = "" if weights.k_hat is None else f", k-hat {weights.k_hat:.2f}"
        lines.append(
            f"Importance weights: ESS {weights.ess:.1f} of {weights.rollouts} rollouts, largest "
            f"{weights.w_max:.2f}, KL per response {weights.kl:.2g}{k_hat}"
        )
    spoken_of = [
        ("prediction", findings.predicted.total if findings.predicted else None),
        ("measurement", findings.change),
        ("curvature", None if findings.bend is None or findings.bend.trusted else findings.bend),
    ]
    if findings.predicted and findings.predicted.total.trusted:
        gradient = findings.predicted.lines["gradient"]
        spoken_of.append(("gradient's line", None if gradient.trusted else gradient))
    for name, estimate in spoken_of:
        if estimate is None:
            continue
        if estimate.trusted:
            of = "" if findings.checked or check.bound else ", for the step from this batch"
            lines.append(f"The {name} is trusted{of}.")
        else:
            lines.append(f"The {name} is NOT trusted: {'; '.join(estimate.why_not)}.")
    if findings.certificate is not None:
        at = f", at the stored rate {findings.lr_stored:.3g}" if findings.lr_changed else ""
        lines.append(f"Step certificate{at}: {findings.certificate}.")
    elif findings.certificate_absent:
        lines.append(f"No step certificate: {findings.certificate_absent}.")
    return lines


def _provenance(findings: Findings) -> list[str]:
    lines = [f"Note: {note}." for note in findings.notes]
    if not findings.assumed:
        lines.append("Every training fact was read or given; none is assumed.")
    if findings.not_verifiable:
        lines.append("Not verifiable from the files: " + "; ".join(findings.not_verifiable) + ".")
    return lines


def _share(part: Estimate, total: Estimate) -> str:
    return f" ({_ratio(part, total)})" if total.value else ""


def _ratio(part: Estimate, total: Estimate, digits: int = 0) -> str:
    """A share of a total; of a total lost in its own error bar there is none."""
    if _lost(total):
        return "no share given, the total's interval contains 0"
    if not total.value:
        return "no share of 0"
    share = part.value / total.value
    visible = not digits or abs(share) >= 0.5 * 0.1 ** (digits + 2)
    return f"{share:.{digits}%}" if visible else "0%"


def _lost(change: Estimate) -> bool:
    """In its own noise: the interval contains 0, so that nothing can be a share of it."""
    return change.interval is not None and change.covers(0.0)


def _rate(eta: float) -> str:
    return "any" if math.isinf(eta) else f"{eta:.2g}"
