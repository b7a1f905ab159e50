"""Which episodes a run sees, and when: a function of (seed, epoch, batch) alone.

There is no sampler state to store: order, augmentation and refinement noise each have a generator
made anew from these numbers, so that a resumed run goes on with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import torch

from arc_refine.batch import Batch, BatchInputs, collate
from arc_refine.config import TrainConfig
from arc_refine.data import (
    MAX_SIDE,
    Curriculum,
    Episode,
    Task,
    augment,
    leave_one_out,
    load_tasks,
    split_tasks,
    test_episodes,
)
from arc_refine.features import describe, features


def generator(purpose: str, *numbers: int) -> torch.Generator:
    """A random generator of its own for this purpose and these numbers."""
    words = ":".join([purpose, *map(str, numbers)])
    seed = int.from_bytes(sha256(words.encode()).digest()[:8], "big") >> 1
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Training and held-out tasks of a run, disjoint as whole tasks."""

    config: TrainConfig
    training: tuple[Task, ...]
    held_out: tuple[Task, ...]
    curriculum: Curriculum

    def split_hash(self) -> str:
        """Of the ids on both sides: two runs with one hash had the same split."""
        sides = [" ".join(task.id for task in side) for side in (self.training, self.held_out)]
        return sha256("|".join(sides).encode()).hexdigest()[:16]

    def order(self, epoch: int) -> tuple[Episode, ...]:
        """As many episodes as there are in all: an epoch whose curriculum allows fewer goes
        through these again, in another order."""
        episodes: list[Episode] = []
        while len(episodes) < len(self.curriculum.episodes):
            draw = generator("order", self.config.seed, epoch, len(episodes))
            episodes += self.curriculum.sample(epoch, draw)
        return tuple(episodes[: len(self.curriculum.episodes)])

    def batches(self) -> int:
        """How many batches an epoch has; the last may be smaller."""
        whole = math.ceil(len(self.curriculum.episodes) / self.config.batch_size)
        return min(whole, self.config.max_batches or whole)

    def episodes(self, epoch: int, number: int, order: Sequence[Episode]) -> list[Episode]:
        """The episodes of one batch, augmented."""
        size = self.config.batch_size
        chosen = order[number * size : (number + 1) * size]
        if not self.config.augment:
            return list(chosen)
        draw = generator("augment", self.config.seed, epoch, number)
        return [augment(episode, draw) for episode in chosen]

    def batch(self, episodes: Sequence[Episode], *numbers: int) -> Batch:
        """Collated; with `shuffle_text` every text is one of another task."""
        batch = collate(episodes)
        if self.config.shuffle_text:
            batch = replace(batch, inputs=self.shuffled(batch.inputs, *numbers))
        return batch.to(self.config.device)

    def shuffled(self, inputs: BatchInputs, *numbers: int) -> BatchInputs:
        """An ablation: the text says nothing about the task, drawn anew every time."""
        draw = generator("text", self.config.seed, *numbers)
        texts = []
        for episode in inputs.episodes:
            others = [task for task in self.training if task.id != episode.task_id]
            other = others[int(torch.randint(len(others), (), generator=draw))]
            texts.append(describe(features(other.demos), other.demos))
        return replace(inputs, texts=tuple(texts))

    def held_out_episodes(self) -> list[Episode]:
        return [episode for task in self.held_out for episode in test_episodes(task)]


def load_data(config: TrainConfig) -> RunData:
    tasks = load_tasks(config.data)
    fitting = [task for task in tasks if largest_side(task) <= config.max_side]
    if not fitting:
        raise ValueError(
            f"None of the {len(tasks)} tasks of {config.data} has grids of at most "
            f"{config.max_side} a side. Raise --max-side; ARC grids have up to {MAX_SIDE}."
        )
    training, held_out = split_tasks(fitting, held_out=config.held_out, seed=config.seed)
    if config.max_tasks is not None:
        training = training[: config.max_tasks]
    episodes = tuple(episode for task in training for episode in leave_one_out(task))
    if not episodes or not held_out:
        raise ValueError(
            f"{len(fitting)} tasks give {len(episodes)} training episodes and {len(held_out)} "
            "held-out tasks, expected at least one of each. Give more tasks with two or more "
            "demonstrations, or another --held-out."
        )
    caps = (144, 400, 900) if config.curriculum else (900,)
    return RunData(
        config=config,
        training=training,
        held_out=held_out,
        curriculum=Curriculum(episodes=episodes, max_areas=caps),
    )


def largest_side(task: Task) -> int:
    return max(max(grid.shape) for p in (*task.demos, *task.tests) for grid in (p.input, p.output))
