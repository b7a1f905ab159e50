"""Fifteen numbers and a sentence about a task, from its demonstrations alone.

Neither the query nor the target is an argument: what is not passed cannot leak. Sizes enter as
logarithms of ratios over log 30 and as sides over 30, counts over 10, shares as they are, so that
every number is finite and lies in [-1, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

import numpy as np

from arc_refine.data import COLOURS, MAX_SIDE, Pair

TEMPLATE = (
    "{demos} demonstrations. Sizes {input_sizes} to {output_sizes}. "
    "Colours {input_colours} to {output_colours}, new {new_colours}, lost {lost_colours}. "
    "Changed {changed}. Symmetric {symmetric}."
)
"""Fields that `describe` fills in."""


def _log_ratio(out: float, into: float) -> float:
    return log(out / into) / log(MAX_SIDE)


def _colours(grid: np.ndarray) -> frozenset[int]:
    return frozenset(int(c) for c in np.unique(grid))


def _same_size(pair: Pair) -> bool:
    return pair.input.shape == pair.output.shape


def _changed(pair: Pair) -> float:
    """Share of cells that differ; 0 where the sizes do, which `same_size` then tells apart."""
    return float(np.mean(pair.input != pair.output)) if _same_size(pair) else 0.0


def _symmetric(pair: Pair) -> bool:
    y = pair.output
    return bool((y == y[::-1]).all() or (y == y[:, ::-1]).all())


PER_PAIR: dict[str, Callable[[Pair], float]] = {
    "log_area_ratio": lambda p: _log_ratio(p.output.size, p.input.size) / 2,
    "log_height_ratio": lambda p: _log_ratio(p.output.shape[0], p.input.shape[0]),
    "log_width_ratio": lambda p: _log_ratio(p.output.shape[1], p.input.shape[1]),
    "input_height": lambda p: p.input.shape[0] / MAX_SIDE,
    "input_width": lambda p: p.input.shape[1] / MAX_SIDE,
    "output_height": lambda p: p.output.shape[0] / MAX_SIDE,
    "output_width": lambda p: p.output.shape[1] / MAX_SIDE,
    "input_colours": lambda p: len(_colours(p.input)) / COLOURS,
    "output_colours": lambda p: len(_colours(p.output)) / COLOURS,
    "new_colours": lambda p: len(_colours(p.output) - _colours(p.input)) / COLOURS,
    "lost_colours": lambda p: len(_colours(p.input) - _colours(p.output)) / COLOURS,
    "changed_cells": _changed,
    "same_size": lambda p: float(_same_size(p)),
    "symmetric_output": lambda p: float(_symmetric(p)),
}
"""Each is averaged over the demonstrations."""
FEATURE_NAMES = (*PER_PAIR, "demonstrations")


def features(demos: Sequence[Pair]) -> np.ndarray:
    """float32[15], in the order of FEATURE_NAMES."""
    means = [float(np.mean([value(pair) for pair in demos])) for value in PER_PAIR.values()]
    # The largest task has 10 demonstrations; a task of one's own may have more.
    return np.asarray([*means, min(len(demos) / 10, 1.0)], dtype=np.float32)


def describe(feature_values: np.ndarray, demos: Sequence[Pair], *, template: str = TEMPLATE) -> str:
    """The prompt text: `template` with what the demonstrations show."""
    named = dict(zip(FEATURE_NAMES, feature_values.tolist()))
    inputs = frozenset[int]().union(*(_colours(p.input) for p in demos))
    outputs = frozenset[int]().union(*(_colours(p.output) for p in demos))
    fields = {
        "demos": str(len(demos)),
        "input_sizes": _sizes([p.input for p in demos]),
        "output_sizes": _sizes([p.output for p in demos]),
        "input_colours": _listed(inputs),
        "output_colours": _listed(outputs),
        "new_colours": _listed(outputs - inputs),
        "lost_colours": _listed(inputs - outputs),
        "changed": f"{named['changed_cells']:.0%}" if named["same_size"] else "unknown",
        "symmetric": f"{named['symmetric_output']:.0%}",
    }
    try:
        return template.format(**fields)
    except (KeyError, IndexError) as error:
        raise ValueError(
            f"the prompt template uses {error}; expected fields of {', '.join(fields)}. "
            "Correct the template."
        ) from error


def _sizes(grids: Sequence[np.ndarray]) -> str:
    """Each size once, in order of appearance."""
    return " ".join(dict.fromkeys(f"{g.shape[0]}x{g.shape[1]}" for g in grids))


def _listed(colours: frozenset[int]) -> str:
    return "".join(str(c) for c in sorted(colours)) or "none"
