"""Why the ledger of a run is not trusted."""

from __future__ import annotations

from collections.abc import Sequence

from entropy_experiments.pipelines.run_ledger.window import Window
from entropy_experiments.results import JSONObject
from entropy_experiments.results.run_ledger import Arrival
from entropy_experiments.types import Estimate
from entropy_experiments.update.certificate import APART, CLOSE


def ledger_doubts(
    steps: Sequence[JSONObject], window: Window, replays: Sequence[Arrival], rest: Estimate
) -> list[str]:
    """Why the ledger is not trusted; empty: it is."""
    doubts = []
    apart = [s for s, facts in zip(window.steps, steps) if not facts["step_distance"] <= APART]
    if apart:
        worst = max(facts["step_distance"] for facts in steps)
        doubts.append(
            f"{len(apart)} of {len(steps)} steps rebuilt here are not the steps that training made "
            f"(the first is step {apart[0]}, the worst is {worst:.0%} away): their tokens' shares "
            "are of other steps"
        )
    other = {
        step: facts["gradient_distance"]
        for step, facts in zip(window.steps, steps)
        if facts["gradient_distance"] is not None and not facts["gradient_distance"] <= APART
    }
    if other:
        doubts.append(
            f"{len(other)} of {len(steps)} gradients rebuilt here are not those that training used "
            f"(the first is of step {min(other)}, the worst is {max(other.values()):.0%} away): "
            "momentum hides it in the step, and their tokens' shares are of another loss"
        )
    late = [one for one in replays if one["distance"] > CLOSE]
    if late:
        worst = max(late, key=lambda one: one["distance"])
        doubts.append(
            f"the replay from checkpoint {worst['start']} arrives {worst['distance']:.1%} of the "
            f"way off checkpoint {worst['end']}"
        )
    if rest.interval is not None and not rest.covers(0.0):
        doubts.append(
            f"the path leaves {rest.value:.3g} nats of the measured change unexplained, more than "
            "chance: steps are too long for it, or evaluation prompts too few"
        )
    return doubts
