"""The results of `entropy-probe measure` as text. Without torch."""

from __future__ import annotations

from typing import cast

from entropy_experiments.results import JSONObject, MeasurementsResult, RepeatMean


def measurement_report(results: MeasurementsResult | JSONObject) -> list[str]:
    """The summary as lines of text."""
    results = cast(MeasurementsResult, results)
    repeats, plan = results["repeats"], results["plan"]
    count = len(repeats)
    lines = [
        f"Entropy change of the update after {results['checkpoint']} ({repeats[0]['update']}), in "
        f"nats per {results['unit']}, over {count} repeat{'s' if count > 1 else ''} of "
        f"{repeats[0]['B_E']} prompts:"
    ]
    for entry in results["summary"]:
        means = {name: entry.get(name) for name in ("measured", "linear", "linquad")}
        times = entry["eta"] / results["learning_rate"]
        lines.append(f"  eta {entry['eta']:g} ({times:g} x the learning rate)")
        lines += [
            f"    {name:9s}{_shown(mean)}{_untrusted(mean)}"
            for name, mean in means.items()
            if mean is not None
        ]
        lines += [
            f"    {name} - measured{_shown(number)}, paired"
            for name, number in entry["differences"].items()
        ]
        lines += [
            f"    measured, clip {clip}{_shown(number)}" for clip, number in entry["clips"].items()
        ]
    if count == 1 and plan["repeats"] == 1:
        lines.append("One repeat: intervals are over its prompts. measure.repeats draws more.")
    lines.append(f"Saved: {results['results_path']}")
    return lines


def _shown(number: RepeatMean) -> str:
    if number["interval"] is None:
        return f" {number['mean']:+.4g} (no interval)"
    low, high = number["interval"]
    return f" {number['mean']:+.4g} (95% {low:+.3g} to {high:+.3g})"


def _untrusted(number: RepeatMean) -> str:
    doubtful = number["repeats"] - number["trusted"]
    return f"  not trusted in {doubtful} of {number['repeats']}" if doubtful else ""
