"""What else could have been: answers of an influence study to its questions, in words.

A question that has no answer is told with the reason; it has cost the study nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from entropy_experiments.report.amounts import spoken, value_of

CONTRIBUTORS = 3
"""Update rollouts told for each evaluation rollout that moved."""


def left_out(evaluation: Mapping[str, Any]) -> list[str]:
    found = evaluation.get("leave_one_out")
    if not found:
        return []
    lines = ["Steps made anew without a rollout (its share is what it did in the step as made):"]
    for one in found:
        if "error" in one:
            lines.append(f"  without rollout {one['rollout']}: no answer. {one['error']}")
            continue
        lines.append(
            f"  without rollout {one['rollout']}: predicted {spoken(one['first_order'])}, measured "
            f"{value_of(one['measured']):+.4g}; leaving it out is worth "
            f"{-value_of(one['difference']):+.2e}, its share was {one['influence']:+.2e}"
        )
    return lines


def fisher(evaluation: Mapping[str, Any]) -> list[str]:
    found = evaluation.get("fisher")
    if not found:
        return []
    if "error" in found:
        return [f"Fisher kernel: no answer. {found['error']}"]
    gap, r = found["relative_gap"], found["correlation"]
    agree = "nothing moved" if gap is None else f"they differ by {gap:.0%} of the measured"
    lines = [
        "Fisher kernel: log-probs of evaluation rollouts, moved by the gradient part of the step "
        f"at eta {found['eta']:g}:",
        f"  predicted against measured: {'' if r is None else f'correlation {r:.4f}, '}{agree}",
    ]
    for one in found["moved"]:
        most = ", ".join(
            f"{c['rollout']} ({c['value']:+.2g})" for c in one["contributors"][:CONTRIBUTORS]
        )
        lines.append(
            f"  evaluation rollout {one['rollout']}: predicted {one['predicted']:+.3g}, measured "
            f"{one['measured']:+.3g}; most by update rollouts {most}"
        )
    return lines


def what_if(evaluation: Mapping[str, Any]) -> list[str]:
    results = evaluation.get("what_if")
    if not results:
        return []
    lines = ["What if (advantages, normalisers, P and clip factor as they were):"]
    for result in results:
        if "error" in result:
            lines.append(f"  {result['name']}: no answer. {result['error']}")
            continue
        predicted = result["prediction"]
        error = predicted.get("change_stderr")
        lines.append(
            f"  {result['name']}: predicted {predicted['total']:+.4g} nats instead of "
            f"{predicted['recorded']:+.4g}, a difference of {predicted['change']:+.3g}"
            f"{'' if error is None else f' +- {error:.0e}'} "
            f"({predicted['changed_tokens']} tokens changed)"
        )
        lines += [f"    {note}" for note in predicted.get("notes", ())]
        lines += _confirmed(result.get("confirmation"), predicted["change"])
    return lines


def _confirmed(found: Mapping[str, Any] | None, predicted: float) -> list[str]:
    """The effect first: a step that came out as predicted may still differ little from another."""
    if found is None:
        return []
    if "error" in found:
        return [f"    not made: {found['error']}"]
    lines = []
    if "change" in found:  # against the step as it was, both measured
        lines.append(
            f"    effect {_effect(found)}: predicted {predicted:+.3g}, measured "
            f"{spoken(found['change'])} against the step as it was"
        )
    lines.append(f"    the whole step, made and measured: {spoken(found['measured'])}")
    if found.get("agrees") is None:
        return [*lines, "    no interval, so nothing is confirmed"]
    settled = "explained" if found.get("accounted") else "NOT explained"
    beyond = found.get("beyond_linear", False)
    if not found["agrees"]:
        lines.append(f"    its prediction is outside the measured interval, {settled} by")
    elif found.get("accounted") and not beyond:
        lines.append("    its prediction is inside the measured interval: confirmed, as a whole")
    else:
        doubt = "not confirmed" if found.get("accounted") else "NOT explained by"
        lines.append(f"    its prediction is inside the measured interval, but {doubt}")
    gap = value_of(found["recomputed"]) - value_of(found["frozen"])
    parts = [f"denominator and clip {gap:+.2g}"]
    if found.get("curvature") is not None:
        parts.append(f"curvature {value_of(found['curvature']):+.2g}")
    parts.append(f"rest {value_of(found['rest']):+.2g}")
    lines.append(f"    measured - predicted: {', '.join(parts)}")
    if beyond:
        lines.append(
            "    beyond the linear range: curvature or rest is over half of the slope's share"
        )
    return lines


def _effect(found: Mapping[str, Any]) -> str:
    seen = found.get("effect")
    if seen is None and found.get("effect_agrees") is not None:  # an older summary
        seen = "as predicted" if found["effect_agrees"] else "not as predicted"
    if seen is None:
        return "unknown (no interval)"
    # What was hoped for and did not come must not be read over.
    return seen.replace("not as predicted", "NOT as predicted")


def budget(evaluation: Mapping[str, Any]) -> list[str]:
    found = evaluation.get("entropy_budget")
    if not found:
        return []
    curved, wanted = found.get("curved"), f"To change the entropy by {found['budget']:+.4g} nats: "
    if "error" in found:
        return [f"{wanted}no answer. {found['error']}"]
    told = f"{wanted}learning rate {found['linear']:.4g} by the slope alone"
    if found.get("curvature_known", True):
        told += f", {'none' if curved is None else f'{curved:.4g}'} with curvature"
    return [told, *(f"  {note}" for note in found.get("notes", ()))]
