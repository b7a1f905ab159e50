"""Fresh evaluation rollouts from the policy in training: each rank draws its share of the prompts.

Which uniforms a rollout uses depends on the seed, the step and its prompt alone, so the global
random numbers of training are not touched, and the number of ranks changes no draw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from entropy_experiments.distributed import ALONE, Ranks
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.types import Rollouts


def drawer(
    generator: SampleGenerator,
    prompts: Callable[[int], Sequence[Sequence[int]]],
    *,
    group: int = 1,
    ranks: Ranks = ALONE,
) -> Callable[[int], Rollouts]:
    """A `draw(step)` for `Fresh`: `group` responses to each of `prompts(step)`, given as tokens."""

    def draw(step: int) -> Rollouts:
        asked = [
            Problem(id=f"{step}:{i}", prompt="", answer="", facts={"ids": tuple(ids)})
            for i, ids in enumerate(prompts(step))
        ]

        def mine() -> Rollouts | None:
            own = list(ranks.shard(asked))
            if not own:
                return None
            drawn = generator.generate(own, group=group, name="online")
            return replace(drawn, behaviour_logprob_NS=None, text=None)

        parts = ranks.all_gather(mine)
        return dealt([part for part in parts if part is not None], group)

    return draw


def dealt(parts: Sequence[Rollouts], group: int) -> Rollouts:
    """One batch of what the ranks drew, in the order in which the prompts were dealt to them."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.tokens_NS.shape[1] for part in parts)
    order = sorted(
        (p, rank, row)
        for rank, part in enumerate(parts)
        for row, p in enumerate(part.prompt_N.tolist())
    )
    sizes = [0, *torch.tensor([len(part) for part in parts]).cumsum(0).tolist()]
    rows_N = torch.tensor([sizes[rank] + row for _, rank, row in order])

    def joined(name: str) -> Tensor:
        values = [getattr(part, name) for part in parts]
        wide = [pad(x, (0, width - x.shape[1])) if x.dim() == 2 else x for x in values]
        return torch.cat(wide)[rows_N]

    return Rollouts(
        tokens_NS=joined("tokens_NS"),
        attention_NS=joined("attention_NS"),
        response_NS=joined("response_NS"),
        prompt_N=torch.arange(len(rows_N) // group).repeat_interleave(group),
        truncated_N=joined("truncated_N"),
    )


def chosen_rows(size: int, count: int, seed: int, step: int) -> list[int]:
    """Different rows of a dataset for a step, the same on every rank."""
    name = json.dumps(["evaluation prompts", seed, step]).encode()
    number = int.from_bytes(hashlib.sha256(name).digest()[:7], "big")
    generator = torch.Generator().manual_seed(number)
    return torch.randperm(size, generator=generator)[:count].tolist()
