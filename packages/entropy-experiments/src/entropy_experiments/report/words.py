"""What a report says in sentences, and its numbers in words, as `results.numbers` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from entropy_experiments.results import AnyNumber, InfluenceResult, ProbeLog, ProbeResult

MINUS = "−"
AGREEMENT = 0.1
"""Of the measured change: how much one or two orders may leave over and still agree with it."""


def sentence(
    *, update: str, change: AnyNumber, level: float | None, unit: str, predicted: AnyNumber | None
) -> str:
    """The verdict: what the update does to the entropy, how sure that is, what was predicted."""
    value, interval = change["value"], change.get("interval")
    doubted = change.get("trusted") is False
    size = plain(abs(value), 2)
    share = f", {abs(value) / level:.1%} of it" if level and not doubted else ""
    if interval is None:
        text = (
            f"{update} changes the policy’s entropy by {number(value)} nats per {unit}{share}; "
            "without an interval nobody knows how sure that is"
        )
    elif interval[0] <= 0 <= interval[1]:
        text = (
            f"{update} changes the policy’s entropy by {number(value)} nats per {unit} (95 % "
            f"{ends(interval)}): too little to tell from nothing with these rollouts"
        )
    else:
        verb = "lowers" if value < 0 else "raises"
        low, high = sorted(abs(end) for end in interval)  # sizes, as the verb has the sign
        bar = f" (95 % {plain(low, 2)} to {plain(high, 2)})"
        text = f"{update} {verb} the policy’s entropy by {size} nats per {unit}{bar}{share}"
    if predicted is not None:
        unsure = " (not trusted)" if predicted.get("trusted") is False else ""
        text += f"; first order predicts {number(predicted['value'])}{unsure}"
    why = ", for the reasons given" if change.get("why_not") else ""
    return f"Not trusted{why}: {text}." if doubted else f"{text}."


def of_probe(
    results: ProbeResult | ProbeLog,
    predicted: AnyNumber | None,
    measured: AnyNumber | None,
    unit: str,
) -> str:
    """The verdict on what `entropy-probe run` found: of its results, or of a log of them."""
    change = measured or predicted
    if change is None:
        return f"Neither predicted nor measured: only the entropy of {results['checkpoint']}."
    return sentence(
        update=made_by_training(results),
        change=change,
        level=results["H_orig"],
        unit=unit,
        predicted=predicted if measured is not None else None,
    )


def gap(estimate: AnyNumber) -> str:
    return f"Predicted minus measured, paired: {with_bar(estimate, 2)}."


def with_bar(estimate: AnyNumber, digits: int = 3) -> str:
    """A value and, where there is one, its interval."""
    bar = estimate.get("interval")
    return number(estimate["value"], digits) + ("" if bar is None else f" (95 % {ends(bar)})")


def made_by_training(results: ProbeResult | ProbeLog) -> str:
    """Which update `results`, of `entropy-probe run` or of a log of it, are about."""
    step, certificate = results.get("made_step") or {}, results.get("step_certificate") or {}
    return made_by(
        results["checkpoint"],
        real=results["update"] != "hypothetical",
        bound=results["update"] != "imported",
        checked=bool(certificate) or bool(step.get("of_recorded_gradient")),
        apart=bool(certificate.get("apart") or step.get("other_start")),
        altered=step.get("altered") or (),
    )


def made_by_study(summary: InfluenceResult) -> str:
    """The same of an influence study: a recorded step that is apart is refused there, an imported
    one is hypothetical."""
    checked = "unchecked" not in (summary["update"].get("certified") or {})
    uncertified = of_uncertified_import(summary)
    return made_by(
        summary["checkpoint"],
        real=summary["update"]["real"] or uncertified,
        bound=not uncertified,
        checked=checked,
    )


def of_uncertified_import(summary: InfluenceResult) -> bool:
    """Whether a study is of an imported batch that nothing compares with training's step."""
    update = summary.get("update")
    if update is None:  # a part of a summary
        return False
    certified = update.get("certified") or {}
    return not update["real"] and "unchecked" in certified and "another_step" not in certified


def study_certificate(summary: InfluenceResult) -> list[str]:
    """The step certificate of an influence study, a sentence; none of a hypothetical update, and
    none where the headline says why the step was not checked."""
    certified = (summary.get("update") or {}).get("certified") or {}
    if "step_distance" not in certified:
        return []
    earlier = (  # what a study of an earlier version stored
        f"the step rebuilt here is {certified['step_distance']:.2g} of its size away from the one "
        "that training made"
    )
    return [f"Step certificate: {certified.get('certificate', earlier)}."]


NOT_TRAININGS = (
    "not checked against the step that training made; nothing says that this is its batch"
)


def made_by(
    checkpoint: str,
    *,
    real: bool,
    checked: bool,
    bound: bool = True,
    apart: bool = False,
    altered: Sequence[str] = (),
) -> str:
    """Which update: called training's only where that was checked.

    Args:
        checkpoint: Its name.
        real: Whether the batch is one of training's, or is said to be.
        checked: Whether the step was compared with the one made, or is of its recorded gradient.
        bound: Whether something besides the batch's place says that it is this step's: the weights
            that it names, or a certificate.
        apart: Whether they are two different steps.
        altered: What the config asks for instead of training's own loss.
    """
    if not real:
        return f"A hypothetical update from {checkpoint}"
    if altered:
        return f"A hypothetical update from {checkpoint}, training’s batch with another loss,"
    if apart:
        return f"A rebuilt update, not the step that training made after {checkpoint},"
    if not checked and not bound:
        return f"The step from this batch at {checkpoint} ({NOT_TRAININGS})"
    if not checked:
        return (
            f"The update that the batch recorded after {checkpoint} makes (not checked against "
            "the step that training made)"
        )
    return f"The update that training made after {checkpoint}"


def number(x: float | None, digits: int = 3) -> str:
    """Signed, with a true minus."""
    if x is None:
        return "–"
    whole = "#" if digits > 1 else ""  # 0.00700: as many digits as its neighbours
    return signed(f"{x:+{whole}.{digits}g}".removesuffix(".")) if x else "0"


def scaled(x: float | None, power: int, sign: str = "+") -> str:
    """In units of 10**power, so that a column has its decimal points below each other."""
    return "–" if x is None else signed(f"{x / 10.0**power:{sign}.3f}")


def unit_of(power: int) -> str:
    """A power of ten as people write it; nothing for 1."""
    digits = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return "" if power == 0 else f"10{digits} "


def fixed(x: float | None, decimals: int = 2, end: str = "") -> str:
    return "–" if x is None else f"{x:.{decimals}f}{end}"


def plain(x: float | None, digits: int = 3) -> str:
    return "–" if x is None else signed(f"{x:.{digits}g}")


def ends(interval: Sequence[float] | None, digits: int = 2) -> str:
    if interval is None:
        return "no interval"
    return f"{number(interval[0], digits)} to {number(interval[1], digits)}"


def signed(text: str) -> str:
    return text.replace("-", MINUS)


SAMPLED = "training sampled with "
"""How the note of `training_facts.sampling_notes` begins."""


def sampling_points(notes: Iterable[str]) -> list[str]:
    """Which distribution the entropies are of, where training sampled from another."""
    return [f"{note[0].upper()}{note[1:]}." for note in notes if note.startswith(SAMPLED)]


def doubts_of(*estimates: AnyNumber | None) -> list[str]:
    """Why numbers are not trusted, each reason once."""
    doubts = (why for one in estimates if one is not None for why in one.get("why_not") or ())
    return list(dict.fromkeys(doubts))


def value_of(estimate: AnyNumber) -> float:
    return estimate["value"]


def spoken(estimate: AnyNumber) -> str:
    """A change with its interval, signs always shown."""
    interval = estimate["interval"]
    bar = "no interval" if interval is None else f"95% {interval[0]:+.3g} to {interval[1]:+.3g}"
    return f"{value_of(estimate):+.4g} nats ({bar})"


def contains_zero(estimate: AnyNumber) -> bool:
    interval = estimate.get("interval")
    return interval is not None and interval[0] <= 0 <= interval[1]


def left_over(rest: AnyNumber, measured: AnyNumber) -> str:
    """What lines and curvature leave of the measured change, in words; `rest` has an interval.

    A paired interval is narrow: that it excludes 0 does not make what is left over large.
    """
    if contains_zero(rest):
        return "nothing"
    share = abs(value_of(rest) / value_of(measured)) if value_of(measured) else float("inf")
    if share <= AGREEMENT:
        return f"{share:.1%} of the change, so two orders suffice"
    return "the step is outside the range where two orders suffice"


def cell(value: float | None, width: int, form: str = "+.2e") -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
