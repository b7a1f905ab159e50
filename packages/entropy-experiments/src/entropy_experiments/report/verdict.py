"""The verdict in words: what the update does to entropy, and how far to believe it."""

from __future__ import annotations

import math

from entropy_experiments.findings import Findings
from entropy_experiments.report.amounts import AGREEMENT
from entropy_experiments.results import DIFFERENTIATED
from entropy_experiments.types import Estimate


def verdict(found: Findings) -> list[str]:
    """Lines to print, the answer first."""
    return [
        *_headline(found),
        *_comparison(found),
        *_origin(found),
        *_trust(found),
        *_provenance(found),
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


def _headline(found: Findings) -> list[str]:
    change = found.change or (found.predicted.total if found.predicted else None)
    rate = f"at learning rate {found.lr:.3g}"
    if found.lr_changed:
        rate += f" instead of {found.lr_stored:.3g}"
    lines = [*_which_step(found, rate), *_assumed(found)]
    lines += [f"  NOT AS TRAINING ASKED: {text}" for text in found.asked_otherwise]
    unit = found.level.estimand.unit
    lines.append(
        f"  entropy now      {found.level.value:.4f} nats per {unit}"
        f" at temperature {found.level.estimand.temperature:g}{_distribution(found)}"
    )
    if found.predicted is not None:
        lines.append(
            f"  predicted change {spoken(found.predicted.total)}, {SLOPE_FORM[found.form]} form"
        )
        if found.to_go is not None:
            lines.append(f"    less variance  {spoken(found.to_go)}, in the to-go form")
    if found.change is not None:
        lines.append(f"  measured change  {spoken(found.change)}, {WEIGHTS[found.form]} weights")
    if change is not None and found.level.value > 0:
        lines.append(f"  that is          {change.value / found.level.value:+.2%} of the entropy")
    return lines


def _distribution(found: Findings) -> str:
    """Said where training did not sample from the policy whose entropy this is."""
    if not found.sampling:
        return ""
    top_p = found.level.estimand.top_p
    kept = "the full softmax" if top_p == 1 else f"the softmax cut at top_p = {top_p:g}"
    return f", of {kept} (training sampled with {', '.join(found.sampling)})"


def _which_step(found: Findings, rate: str) -> list[str]:
    """The first sentence claims no more than was checked."""
    after, made = found.checkpoint, found.made
    if not found.real:
        return [f"A hypothetical update from {after} (its batch was drawn for this probe), {rate}:"]
    if made.altered:
        return [
            f"A hypothetical update from {after}: training's own batch with "
            f"{', '.join(made.altered)}, {rate}:"
        ]
    certificate = found.certificate
    why = f" ({'; '.join(made.reasons)})" if made.reasons else ""
    if certificate is not None and certificate.apart:
        return [
            f"This is not the step that training made: after {after}, the step rebuilt from the "
            f"recorded batch is {certificate.relative_error:.0%} away from it{why}. About the "
            f"rebuilt step, {rate}:"
        ]
    if made.loss_differs and not made.of_gradient:
        return [
            f"This is not the step that training made: after {after}, the gradient rebuilt from "
            f"the recorded batch is {made.gradient_distance:.0%} away from training's{why}. About "
            f"the rebuilt step, {rate}:"
        ]
    lines = [f"The update that training made after {after}, {rate}:"]
    if certificate is None and not made.of_gradient:
        lines = [
            f"The update that the batch recorded after {after} makes, {rate} (not checked against "
            "the step that training made):"
        ]
    if made.of_gradient and made.loss_differs:
        lines.append(
            f"  by the gradient that training recorded; the one rebuilt from its batch is "
            f"{made.gradient_distance:.0%} away{why}, so there is no split by rollout or token"
        )
    return lines


def _assumed(found: Findings) -> list[str]:
    """What had to be assumed belongs beside what rests on it."""
    if not found.assumed:
        return []
    named = ", ".join(f"{name} = {value}" for name, value in found.assumed.items())
    return [
        "  ASSUMED, not read from any file (set them in the config, or in entropy_probe.json): "
        f"{named}"
    ]


def _comparison(found: Findings) -> list[str]:
    lines = []
    if found.difference is not None and found.change is not None:
        gap = found.difference
        share = (
            f", {abs(gap.value / found.change.value):.1%} of the change"
            if found.change.value and not _lost(found.change)
            else ""
        )
        lines.append(f"  difference       {spoken(gap)}, paired{share}")
    if found.bend is not None and found.predicted is not None:
        lines.append(f"  curvature adds   {spoken(found.bend)}; {_reach(found.bend, found)}")
    if found.difference is not None and found.difference.interval is not None:
        lines.append(f"  so the prediction {_agreement(found)}")
    if found.bend is None and found.predicted is not None:
        lines.append(
            "  no curvature, hence no linear range (predict.curvature: false, method: "
            "reverse and top_p below 1 have none)"
        )
    if found.predicted is None:
        lines.append("  the prediction was skipped (predict.enabled: false)")
    if found.change is None:
        lines.append("  the measurement was skipped (measure.enabled: false)")
    return lines


def _reach(bend: Estimate, found: Findings) -> str:
    if not bend.trusted:
        return "not trusted, so how far the straight line holds is not known"
    if found.linear_range is None:
        return (
            "how far the straight line holds is not known: the predicted change is below its own "
            "noise"
        )
    return f"the straight line holds within 10 % up to learning rate {_rate(found.linear_range)}"


def _agreement(found: Findings) -> str:
    """Whether prediction and measurement agree, said only as far as the paired interval reaches."""
    gap, change = found.difference, found.change
    assert gap is not None
    assert gap.interval is not None
    assert change is not None
    if max(map(abs, gap.interval)) <= AGREEMENT * abs(change.value):
        return f"agrees with the measurement, to within {AGREEMENT:.0%} of the change"
    predicted = found.predicted.total if found.predicted else None
    below = _lost(change)
    if below and (gap.covers(0.0) or (predicted is not None and _lost(predicted))):
        return "agrees with the measurement, whose change is below its own noise"
    if below:
        share = " (whose change is below its own noise)"
    else:
        share = f" ({abs(gap.value / change.value):.0%} off)" if change.value else ""
    off = f"does not agree with the measurement{share}"
    known = found.bend is not None and found.bend.trusted
    reach = found.linear_range if known else None
    if abs(gap.value) > AGREEMENT * abs(change.value) and reach is not None and found.lr > reach:
        return (
            f"{off}: the step is too long for a straight line, {found.lr / reach:.2g} times its "
            "linear range"
        )
    if gap.covers(0.0):
        return (
            "cannot be distinguished from the measurement, nor shown to agree within "
            f"{AGREEMENT:.0%}: the paired interval is too wide. More evaluation rollouts "
            "(data.evaluation_prompts) would decide"
        )
    if found.bend is None:
        return off
    if not known:
        return f"{off}, and its curvature is not trusted to say why"
    rest = gap + found.bend
    if rest.covers(0.0) or abs(rest.value) <= AGREEMENT * abs(change.value):
        return f"{off}: it misses by its curvature"
    return f"{off}: its curvature does not account for that, two orders do not suffice here"


def _origin(found: Findings) -> list[str]:
    if found.predicted is None:
        return []
    total, lines = found.predicted.total, found.predicted.lines
    baseline, eventual = found.baseline, found.gradient_eventual
    in_the_end = found.baseline_eventual
    assert baseline is not None
    assert in_the_end is not None
    assert eventual is not None
    direct, state = (found.terms[name] for name in ("direct", "state"))
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
        f"{_early(found)}",
    ]


def _early(found: Findings) -> str:
    """Bias correction enlarges the first steps; later ones take less of what momentum keeps."""
    young = found.stats.step < 1 / (1 - found.momentum_decay)
    return ", overstated this early in training" if young else ""


def _trust(found: Findings) -> list[str]:
    lines = []
    if found.mode in DIFFERENTIATED:
        lines.append(f"Differentiated {DIFFERENTIATED[found.mode]} ({found.mode}).")
    if found.change is not None:
        weights = found.change.diagnostics["weights"]
        k_hat = "" if weights.k_hat is None else f", k-hat {weights.k_hat:.2f}"
        lines.append(
            f"Importance weights: ESS {weights.ess:.1f} of {weights.rollouts} rollouts, largest "
            f"{weights.w_max:.2f}, KL per response {weights.kl:.2g}{k_hat}"
        )
    spoken_of = [
        ("prediction", found.predicted.total if found.predicted else None),
        ("measurement", found.change),
        ("curvature", None if found.bend is None or found.bend.trusted else found.bend),
    ]
    if found.predicted and found.predicted.total.trusted:
        gradient = found.predicted.lines["gradient"]
        spoken_of.append(("gradient's line", None if gradient.trusted else gradient))
    for name, estimate in spoken_of:
        if estimate is None:
            continue
        if estimate.trusted:
            lines.append(f"The {name} is trusted.")
        else:
            lines.append(f"The {name} is NOT trusted: {'; '.join(estimate.why_not)}.")
    if found.certificate is not None:
        at = f", at the stored rate {found.lr_stored:.3g}" if found.lr_changed else ""
        lines.append(f"Step certificate{at}: {found.certificate}.")
    elif found.certificate_absent:
        lines.append(f"No step certificate: {found.certificate_absent}.")
    return lines


def _provenance(found: Findings) -> list[str]:
    lines = [f"Note: {note}." for note in found.notes]
    if not found.assumed:
        lines.append("Every training fact was read or given; none is assumed.")
    if found.not_verifiable:
        lines.append("Not verifiable from the files: " + "; ".join(found.not_verifiable) + ".")
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
