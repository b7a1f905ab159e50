"""What a trainer logged of all its steps, probed or not, and which ledgers lie beside them.

trainer_state.json counts a step when it is made: its row k speaks of the step that the probe's rows
call k - 1, and of the rollouts that step learned from. TRL's own `entropy` is that of the training
batch at the sampling temperature, before the step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATE = "trainer_state.json"
LEDGERS = "entropy_probe_ledgers"
LOGGED = ("entropy", "reward")


def trainer_state(folder: Path) -> dict[str, Any]:
    """The trainer_state.json that has come furthest; empty where there is none yet."""
    states = []
    for path in (folder / STATE, *folder.glob(f"checkpoint-*/{STATE}")):
        try:
            state = json.loads(path.read_bytes())
            states.append((int(state["global_step"]), path.name, state))
            state["log_history"][:0]  # a list, or not a trainer's file
        except (OSError, ValueError, KeyError, TypeError):
            continue  # absent or being written: steps are told where they are known
    return max(states, key=lambda state: state[:2], default=(0, "", {}))[2]


def logged(state: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """(step as the probe counts, value) of everything in LOGGED that the trainer wrote."""
    out: dict[str, dict[int, float]] = {name: {} for name in LOGGED}
    for row in state.get("log_history", ()):
        for name in LOGGED:
            value = row.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                out[name][int(row["step"]) - 1] = float(value)
    return {name: sorted(values.items()) for name, values in out.items()}


def ended(state: Mapping[str, Any]) -> bool:
    """Whether the trainer has made all the steps that it was to make."""
    most = state.get("max_steps")
    return bool(most) and state["global_step"] >= most


def ledgers(folder: Path) -> list[dict[str, Any]]:
    """Run directories of single steps, with what they predicted and measured."""
    studies = []
    for place in (folder / LEDGERS).glob("step_*"):
        try:
            summary = json.loads((place / "summary.json").read_bytes())
            entropy = summary["evaluations"][0]["ledger"]["entropy"]
            predicted, measured = entropy["predicted"], entropy["measured"]
            step = int(place.name.removeprefix("step_"))
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            continue  # not finished yet
        page = next(n for n in ("report.html", "summary.json") if (place / n).is_file())
        studies.append(
            {
                "step": step,
                "folder": place.relative_to(folder).as_posix(),
                "page": page,
                "predicted": predicted,
                "measured": measured,
            }
        )
    return sorted(studies, key=lambda study: study["step"])
