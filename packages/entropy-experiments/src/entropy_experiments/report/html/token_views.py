"""The update rollouts as a browser gets them: every token's text and numbers, small.

Numbers are whole multiples of a unit, texts are indices into one list:

    {"vocabulary": [...], "units": {...}, "rollouts": [{"t": [3, 7, ...], "v": [-120, 4, ...]}]}

About 20 characters per token. Elements are made by report.js, for the few rollouts in view.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import stdtrit

from entropy_experiments.report.sections import RolloutText, TextsSection
from entropy_experiments.results import UpdateText

MOST_TOKENS = 500_000
"""Beyond these, rollouts of least influence come without their tokens: a browser has limits."""
DIGITS = 1e-4
"""Unit of log-probs, entropies and advantages."""
SCALE_AT = 99.5
"""The percentile of |influence| that has the full colour."""
COUNTED, UNSTABLE, OUTSIDE = "0", "1", "2"

Columns = Mapping[str, np.ndarray]


def token_views(
    columns: Columns,
    pieces: Sequence[str],
    texts: Sequence[UpdateText] | None,
    folds: int,
    *,
    most_tokens: int = MOST_TOKENS,
) -> TextsSection:
    """`columns` are those of tokens.parquet, `texts` the rows of update_rollouts.json."""
    rollout_T = columns["rollout"]
    order = np.argsort(rollout_T, kind="stable")
    ids, starts = np.unique(rollout_T[order], return_index=True)
    influence_T, counted_T = columns["influence"], columns["counted"].astype(bool)
    total_R = np.add.reduceat(influence_T[order], starts)
    length_R = np.diff([*starts, len(order)])
    whole = _within(total_R, length_R, most_tokens)

    unit = _unit(influence_T)
    units = {"logprob": DIGITS, "entropy": DIGITS, "advantage": DIGITS, "influence": unit}
    whole_of = {
        name: _whole(columns[name], units.get(name, unit))
        for name in ("logprob", "entropy", "advantage", "influence", "stderr")
    }
    flag_T = np.where(counted_T, np.where(columns["stable"], COUNTED, UNSTABLE), OUTSIDE)
    vocabulary: dict[str, int] = {}
    by_id = {row["rollout"]: row for row in texts or ()}
    prompts: dict[str, int] = {}
    rows: list[RolloutText] = []
    for at, (i, start, length) in enumerate(zip(ids.tolist(), starts, length_R.tolist())):
        here = order[start : start + length]
        text = by_id.get(i)
        counted = here[counted_T[here]]
        row: RolloutText = {
            "i": i,
            "n": length,
            "prompt": int(columns["prompt"][here[0]]),
            "p": prompts.setdefault("" if text is None else text["prompt_text"], len(prompts)),
            "reward": _number(float(columns["reward"][here[0]])),
            "advantage": _number(columns["advantage"][counted].mean() if len(counted) else None),
            "influence": float(total_R[at]),
        }
        uid = None if text is None else text.get("uid")
        if uid is not None:
            row["uid"] = uid
        if text is not None and text.get("truncated"):
            row["truncated"] = True
        if whole[at]:
            gaps = None if text is None else text.get("gaps")
            if gaps:
                row["gaps"] = gaps
            mine = [pieces[int(k)] for k in here]
            row["t"] = [vocabulary.setdefault(piece, len(vocabulary)) for piece in mine]
            row["l"], row["h"] = (whole_of[name][here].tolist() for name in ("logprob", "entropy"))
            row["a"] = _one_or_all(whole_of["advantage"][here])
            row["v"] = whole_of["influence"][here].tolist()
            if not np.isnan(columns["stderr"][here]).any():
                row["e"] = whole_of["stderr"][here].tolist()
            row["s"] = "".join(flag_T[here])
        rows.append(row)
    return {
        "vocabulary": list(vocabulary),
        "prompts": list(prompts),
        "units": units,
        "scale": _scale(influence_T[counted_T]),
        "folds": folds,
        "t": _student(folds),
        "rollouts": rows,
        "tokens": len(order),
        "without_tokens": int(len(rows) - whole.sum()),
    }


def _within(total_R: np.ndarray, length_R: np.ndarray, most: int) -> np.ndarray:
    """Which rollouts come whole: those of most influence, until there are too many tokens."""
    by_size = np.argsort(-np.abs(total_R), kind="stable")
    whole = np.zeros(len(total_R), dtype=bool)
    whole[by_size] = np.cumsum(length_R[by_size]) <= most
    return whole


def _unit(influence_T: np.ndarray) -> float:
    """A power of ten with six digits below the largest."""
    largest = float(np.abs(influence_T).max(initial=0.0))
    return 10.0 ** (math.floor(math.log10(largest)) - 5) if largest > 0 else 1.0


def _scale(influence_T: np.ndarray) -> float:
    size_T = np.abs(influence_T[influence_T != 0])
    return float(np.percentile(size_T, SCALE_AT)) if len(size_T) else 1.0


def _whole(x_T: np.ndarray, unit: float) -> np.ndarray:
    return np.rint(np.nan_to_num(x_T) / unit).astype(np.int64)


def _one_or_all(x_T: np.ndarray) -> int | list[int]:
    return int(x_T[0]) if (x_T == x_T[0]).all() else x_T.tolist()


def _student(folds: int) -> float | None:
    """What a standard error from so few folds is multiplied with for 95 %."""
    if folds < 2:
        return None
    # Of scipy.special: scipy.stats has the same number, and takes a second to import.
    return float(stdtrit(folds - 1, 0.975))


def _number(x: float | None) -> float | None:
    return None if x is None or math.isnan(x) else float(x)
