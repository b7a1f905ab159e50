"""`entropy_probe.json`: what decides a step and is in no checkpoint. Written here and nowhere else.

The trainer's settings say most of it. What they cannot know (which dataset, which rewards) is given
by whoever set the training up, and wins; notes of both are kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from entropy_experiments.artifacts import write_whole
from entropy_experiments.checkpoints.training_facts import FACTS_FILE, KNOWN
from entropy_experiments.online.trl_batch import training_facts
from entropy_experiments.update.objective import Loss


def refuse_unknown(facts: Mapping[str, Any]) -> None:
    """A name that the offline commands would refuse, before it is in every checkpoint."""
    for name in facts:
        if name not in KNOWN:
            near = get_close_matches(name, KNOWN, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"facts has {name!r}.{hint} Expected names among {', '.join(KNOWN)}.")


def facts_of(trainer: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    read = training_facts(trainer)
    if read["loss"] not in get_args(Loss):
        del read["loss"]  # the record names it among what is not followed
    return {**read, **given}


def write_facts(folder: Path, trainer: Any, given: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(facts_of(trainer, given), indent=1, sort_keys=True) + "\n"
    write_whole(folder / FACTS_FILE, text.encode())
