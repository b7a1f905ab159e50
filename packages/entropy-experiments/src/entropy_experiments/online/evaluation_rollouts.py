"""Evaluation rollouts of a probe that watches training.

They stand for the policy at the step in question. Rollouts that were drawn some steps ago carry the
log-probs of the policy that drew them, and every number is weighted accordingly; when the weights
no longer allow it, the estimate says so and is not trusted.

| buffer | rollouts | what it costs |
|---|---|---|
| `Fresh` | drawn anew at every k-th probed step | sampling |
| `Fixed` | the same ones all along | nothing, and trust fades as the policy moves |
| `Supplied` | what the trainer hands over: the half that this step does not learn from | nothing |

The training batch itself is no evaluation set: it made the update that is judged on it. How it can
serve all the same is in `estimate.own_batch`.

`make_draw` draws fresh ones; each rank draws its share of the prompts. The uniforms of a rollout
depend on the seed, the step and its prompt alone, so the global random numbers of training are not
touched, and the number of ranks changes no draw.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from entropy_experiments.distributed import ALONE, Ranks
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.types import Rollouts


@runtime_checkable
class Buffer(Protocol):
    def at(self, step: int) -> Rollouts:
        """Rollouts for this step, the same on every rank."""
        ...

    def scored(self, logprob_NS: Tensor) -> None:
        """The log-probs of what `at` gave, under the policy of that step."""
        ...

    def release(self) -> None:
        """The step is over: let go of what the next probed step will not use."""
        ...


class Fresh:
    """Rollouts from `draw(step)`, used for `uses` probed steps in turn."""

    def __init__(self, draw: Callable[[int], Rollouts], *, uses: int = 1) -> None:
        if uses < 1:
            raise ValueError(f"uses is {uses}; expected at least 1, the probed steps that share.")
        self._draw, self._uses = draw, uses
        self._held: Rollouts | None = None
        self._used = 0

    def at(self, step: int) -> Rollouts:
        if self._held is None or self._used >= self._uses:
            self._held, self._used = None, 0  # not two sets of rollouts at once
            self._held = self._draw(step)
        self._used += 1
        return self._held

    def scored(self, logprob_NS: Tensor) -> None:
        self._held = _drawn_by(self._held, logprob_NS)

    def release(self) -> None:
        if self._used >= self._uses:
            self._held = None


class Fixed:
    """One set of rollouts for the whole training."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._held: Rollouts | None = rollouts

    def at(self, step: int) -> Rollouts:
        assert self._held is not None
        return self._held

    def scored(self, logprob_NS: Tensor) -> None:
        self._held = _drawn_by(self._held, logprob_NS)

    def release(self) -> None:
        pass


class Supplied:
    """Rollouts that the training loop hands over before each step it wants probed."""

    def __init__(self) -> None:
        self._held: Rollouts | None = None

    def put(self, rollouts: Rollouts) -> None:
        self._held = rollouts

    def at(self, step: int) -> Rollouts:
        if self._held is None:
            raise ValueError(
                f"Step {step} has no evaluation rollouts. Call put(rollouts) before before_step()."
            )
        return self._held

    def scored(self, logprob_NS: Tensor) -> None:
        pass

    def release(self) -> None:
        self._held = None


def _drawn_by(held: Rollouts | None, logprob_NS: Tensor) -> Rollouts | None:
    """Later steps see who drew these; the first scoring is by the policy that did."""
    if held is None or held.behaviour_logprob_NS is not None:
        return held
    return replace(held, behaviour_logprob_NS=logprob_NS)


def make_draw(
    generator: SampleGenerator,
    prompts: Callable[[int], Sequence[Sequence[int]]],
    *,
    group: int = 1,
    ranks: Ranks = ALONE,
) -> Callable[[int], Rollouts]:
    """A `draw(step)` for `Fresh`: `group` responses to each of `prompts(step)`, given as tokens."""

    def draw(step: int) -> Rollouts:
        problems = [
            Problem(id=f"{step}:{i}", prompt="", answer="", facts={"ids": tuple(ids)})
            for i, ids in enumerate(prompts(step))
        ]

        def mine() -> Rollouts | None:
            own = list(ranks.shard(problems))
            if not own:
                return None
            drawn = generator.generate(own, group=group, name="online")
            return replace(drawn, behaviour_logprob_NS=None, text=None)

        parts = ranks.all_gather(mine)
        return merge_shards([part for part in parts if part is not None], group)

    return draw


def merge_shards(parts: Sequence[Rollouts], group: int) -> Rollouts:
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
