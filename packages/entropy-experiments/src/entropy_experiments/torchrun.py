"""What torchrun says in the environment, read strictly. Without torch: help answers at once."""

from __future__ import annotations

import os
import re


def ranks_of_job() -> tuple[int, int]:
    """(rank, how many), as torchrun says."""
    rank, ranks = variable("RANK", 0), variable("WORLD_SIZE", 1)
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(
            f"RANK is {rank} and WORLD_SIZE {ranks} in the environment; expected a rank from 0 to "
            "below WORLD_SIZE, as torchrun sets them. Unset both to run alone."
        )
    return rank, ranks


def variable(name: str, default: int) -> int:
    """A whole number of torchrun's in the environment."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise ValueError(
            f"{name} is {text[:40]!r} in the environment; expected a whole number, as torchrun "
            f"sets it. Unset {name} to run alone."
        )
    return int(text)
