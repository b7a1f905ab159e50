"""Small tasks made here, so that most tests need no data file and name no task of ARC."""

import numpy as np

from arc_refine.data import Episode, EpisodeInputs, Pair, Task, leave_one_out


def grid(height: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 10, (height, width))


def flip_task(name: str = "flip", *, side: int = 4, demos: int = 3, seed: int = 0) -> Task:
    """The output is the input mirrored; sizes vary by one."""
    pairs = []
    for d in range(demos + 1):
        x = grid(side + d % 2, side, seed + d)
        pairs.append(Pair(x, x[:, ::-1]))
    return Task(name, tuple(pairs[:demos]), tuple(pairs[demos:]))


def double_task(name: str = "double", *, side: int = 3, demos: int = 2, seed: int = 50) -> Task:
    """Each cell becomes 2x2."""
    pairs = []
    for d in range(demos + 1):
        x = grid(side, side - d % 2, seed + d)
        pairs.append(Pair(x, np.kron(x, np.ones((2, 2), dtype=int))))
    return Task(name, tuple(pairs[:demos]), tuple(pairs[demos:]))


def episodes() -> list[Episode]:
    """Five episodes of two tasks: different sizes, and one or two demonstrations each."""
    return [*leave_one_out(flip_task()), *leave_one_out(double_task())]


def one_episode(query: np.ndarray, target: np.ndarray, *demos: Pair) -> Episode:
    return Episode(EpisodeInputs("made", demos, query), target)
