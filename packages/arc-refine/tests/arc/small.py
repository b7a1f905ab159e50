"""Trainings small enough for a test: made tasks of four by four cells, narrow networks."""

import json

import numpy as np
import torch

from arc_refine.config import TrainConfig
from arc_refine.episodes import generator, load_data
from arc_refine.step import train_step
from arc_refine.train import begin

NARROW = {"prompt_width": 16, "agent_width": 8, "agent_steps": 2, "batch_size": 4}


def write_tasks(folder, count=10, side=4):
    """Tasks "colour a becomes b", one file each, in the format of ARC."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for n in range(count):
        a, b = 1 + n % 9, 1 + (n + 3) % 9

        def pair(a=a, b=b):
            grid = np.where(draw.random((side, side)) < 0.5, 0, a)
            grid[0, 0] = a
            return {"input": grid.tolist(), "output": np.where(grid == a, b, grid).tolist()}

        task = {"train": [pair() for _ in range(3)], "test": [pair()]}
        (folder / f"task{n:02d}.json").write_text(json.dumps(task))
    return folder


def small_config(folder, **changes):
    return TrainConfig(**{"data": str(folder), **NARROW, "eval_batches": 1, **changes})


class Small:
    """A training about to begin, and its batches."""

    def __init__(self, folder, **changes):
        self.config = small_config(folder, **changes)
        self.data = load_data(self.config)
        self.training = begin(self.config)
        self.training.networks.train()
        self.order = self.data.order(0)

    def episodes(self, number=0):
        return self.data.episodes(0, number, self.order)

    def batch(self, number=0):
        return self.data.batch(self.episodes(number), 0, number)

    def step(self, number=0, observer=None):
        draw = generator("refine", self.config.seed, 0, number)
        return train_step(self.training, self.batch(number), draw, observer)

    @property
    def networks(self):
        return self.training.networks

    @property
    def named(self):
        return dict(self.networks.named_parameters())

    def weights(self):
        return {n: v.detach().clone() for n, v in self.networks.state().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
