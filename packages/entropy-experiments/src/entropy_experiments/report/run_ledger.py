"""The ledger of a run as a page and a figure show it: sums over groups of its tokens, and no more.

Every token of every batch has its dH and dR in run_ledger.parquet. Added up by group and step,

    dH(g, t) = sum of dH over the tokens of batch t in group g        likewise dH_a, dH_b, dR, ...
    s.e.     = |sum dH_a - sum dH_b|                                  the two halves of E
    95 %     = dH -+ 12.7 s.e.                                        one degree of freedom
    rate     = dH(g) / dR(g), nats per unit of reward
    its s.e. = |(dH_a - dH_b) - rate (dR_a - dR_b)| / |dR|            both halves move together

A rate is shown where dR is more than two standard errors from 0: below, its sign is a coin's. The
groups of each grouping add up to `lines.batches`. by_layer.parquet has only the size of each
standard error, so there the rate's is the largest that the two sizes allow.

The lowest of many noisy sums are low by luck, too. `Selection` says how much: the same number of
prompts chosen by one half of E and added up by the other, both ways,

    sum over the lowest by a of dH_b + sum over the lowest by b of dH_a

Tables with a row group a step are read one step at a time, and what is shown of a step is copied
out of it: what is held does not grow with the run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from entropy_experiments.artifacts import sha256
from entropy_experiments.results.run_ledger import (
    AGAIN,
    LAYER_TABLE,
    MANIFEST_FILE,
    PROMPT_TABLE,
    TEXT_TABLE,
    TOKEN_TABLE,
    RunLedgerResult,
    read_ledger_table,
    read_run_ledger,
)

GROUPINGS = {
    "difficulty": "difficulty",
    "class": "token class",
    "sign": "sign of advantage",
    "position": "position in the response",
    "prompt": "prompt",
    "layer": "layer",
}
"""In the order of the page's list."""
DEAREST = 20
MOST_GROUPS = 8
"""Of prompts and layers that are named; the others are added up in one."""
MOST_BINS = 120
"""Bars of a drawing; a longer run has several steps in each."""
ROLLOUTS_OF_PROMPT, ROLLOUTS_OF_TEXT = 6, 3
SOLVED = ("never solved", "solved up to 1/3", "solved 1/3 to 2/3", "solved above 2/3")
ALWAYS, UNKNOWN, REST = "always solved", "not known", "all others"
SIGNS = ("below 0", "0", "above 0")
COLUMNS = ("dH", "dH_a", "dH_b", "dR", "dR_a", "dR_b")
ROLLOUT_COLUMNS = (*COLUMNS, "logprob", "entropy", "advantage", "reward")
"""Of a rollout that the page shows."""
SURE = 2.0
"""Standard errors of dR above which a rate is shown."""
OF_HALVES = 12.7
"""Standard errors in the half width of a 95 % interval: Student's t of one degree of freedom, which
is what two halves have. No group is singled out within its interval."""
CONFIRMED = 0.5
"""Of the dearest prompts' sum: what the other half of E must find in them before they are advised.
"""


class Rate(TypedDict):
    value: float
    stderr: float | None


class Group(TypedDict):
    name: str
    tokens: int | None
    """None: a layer has no tokens of its own."""
    dH: float
    dH_stderr: float
    dR: float | None
    dR_stderr: float | None
    rate: Rate | None
    """Nats per unit of reward; None: dR is not sure, or not known."""
    dH_by_bin: list[float]
    dR_by_bin: list[float] | None


class Grouping(TypedDict):
    key: str
    title: str
    groups: list[Group]


class DearPrompt(TypedDict):
    prompt: str
    text: str
    solved: float | None
    rollouts: int
    tokens: int
    dH: float
    dH_stderr: float
    dR: float | None
    dR_stderr: float | None
    rate: Rate | None
    uids: list[str]
    """Of its rollouts that lowered the entropy most, as far as the page holds them."""


DearText = TypedDict(
    "DearText",
    {
        "text": str,
        "class": str,
        "count": int,
        "dH": float,
        "dH_stderr": float,
        "dR": float | None,
        "dR_stderr": float | None,
        "rate": Rate | None,
        "places": list[tuple[str, int]],
    },
)
"""`places`: (uid, index of the token in its rollout) where it cost most."""


class Selection(TypedDict):
    """The dearest of many, and what they are without the luck of having been chosen."""

    chosen: int
    of: int
    in_sample: float
    """Sum of their dH."""
    cross_fitted: float
    """Chosen by one half of E, added up by the other."""
    correlation: float | None
    """Of the two halves' sums over all groups."""


class LedgerRollout(TypedDict):
    """One rollout of a batch, as rows of the token table."""

    uid: str
    step: int
    prompt: str
    columns: Mapping[str, np.ndarray]
    """`ROLLOUT_COLUMNS`, copied: a slice would keep its whole step in memory."""
    texts: list[str]


class RunLedgerView(TypedDict):
    summary: RunLedgerResult
    bins: list[tuple[int, int]]
    """First and last step of each bar."""
    groupings: list[Grouping]
    absent: dict[str, str]
    """Groupings that the tables have no data for, and why."""
    prompts: list[DearPrompt]
    texts: list[DearText]
    prompt_selection: Selection
    text_selection: Selection
    rollouts: list[LedgerRollout]
    prompt_texts: dict[str, str]
    folder: NotRequired[str]


def run_ledger_view(folder: str | Path) -> RunLedgerView:
    """Everything that a page shows of a finished run directory.

    Args:
        folder: As `entropy-probe explain` wrote it.

    Returns:
        The summary, sums by group and step, the dearest prompts and texts with their rollouts.

    Raises:
        FileNotFoundError: If the folder is not finished.
        ValueError: If a file is damaged.
    """
    folder = Path(folder)
    summary = read_run_ledger(folder)
    steps = [step["step"] for step in summary["steps"]]
    bins = step_bins(steps)
    bin_of = {step: at for at, (low, high) in enumerate(bins) for step in range(low, high + 1)}
    by_prompt = read_ledger_table(folder, PROMPT_TABLE).to_pylist()
    by_text = read_ledger_table(folder, TEXT_TABLE).to_pylist()
    named = [row["prompt"] for row in sorted(by_prompt, key=_size)[:MOST_GROUPS]]
    solved = {row["prompt"]: row["solved"] for row in by_prompt}
    classes = {row["text"]: row["class"] for row in by_text}
    dear = [row for row in sorted(by_prompt, key=_cost) if row["dH"] < 0][:DEAREST]
    dear_texts = [row for row in sorted(by_text, key=_cost) if row["dH"] < 0][:DEAREST]
    sums = {name: _Sums(bins=len(bins)) for name in GROUPINGS if name != "layer"}
    best_rollouts: dict[str, list[tuple[float, LedgerRollout]]] = {
        row["prompt"]: [] for row in dear
    }
    best_places: dict[str, list[tuple[float, LedgerRollout, int]]] = {
        row["text"]: [] for row in dear_texts
    }
    halves: dict[str, dict[str, np.ndarray]] = {"prompt": {}, "text": {}}
    for table in step_tables(folder):
        columns = {name: table.column(name) for name in table.column_names}
        at = bin_of[int(columns["step"][0].as_py())]
        values = {name: _values(columns[name]) for name in COLUMNS}
        prompt_T = np.asarray(columns["prompt"].to_pylist(), dtype=object)
        text_T = np.asarray(columns["text"].to_pylist(), dtype=object)
        labels = {
            "difficulty": _mapped(prompt_T, lambda p: difficulty(solved.get(p))),
            "class": _mapped(text_T, lambda t: classes[t]),
            "sign": np.asarray(SIGNS, dtype=object)[
                (np.sign(columns["advantage"].to_numpy()) + 1).astype(int)
            ],
            "position": _mapped(columns["position"].to_numpy(), position_label),
            "prompt": _mapped(prompt_T, lambda p: p if p in named else REST),
        }
        for name, label_T in labels.items():
            sums[name].add(at, label_T, values)
        _add_halves(halves["prompt"], prompt_T, values)
        _add_halves(halves["text"], text_T, values)
        _remember(columns, values["dH"], prompt_T, text_T, best_rollouts, best_places)
    groupings = [_grouping(name, one, named) for name, one in sums.items()]
    groupings.append(_layers(step_tables(folder, LAYER_TABLE), bin_of, len(bins)))
    absent = {}
    if all(value is None for value in solved.values()):
        groupings = [one for one in groupings if one["key"] != "difficulty"]
        absent["difficulty"] = "the batches do not say which responses were right"
    order = list(GROUPINGS)
    groupings.sort(key=lambda one: order.index(one["key"]))
    kept: dict[str, LedgerRollout] = {}
    prompts = [
        _dear_prompt(row, halves["prompt"][row["prompt"]], best_rollouts[row["prompt"]], kept)
        for row in dear
    ]
    texts = [
        _dear_text(row, halves["text"][row["text"]], best_places[row["text"]], kept)
        for row in dear_texts
    ]
    shown = {one["prompt"] for one in kept.values()}
    return {
        "summary": summary,
        "bins": bins,
        "groupings": groupings,
        "absent": absent,
        "prompts": prompts,
        "texts": texts,
        "prompt_selection": selection(_half_sums(halves["prompt"]), len(dear)),
        "text_selection": selection(_half_sums(halves["text"]), len(dear_texts)),
        "rollouts": list(kept.values()),
        "prompt_texts": {
            row["prompt"]: row["prompt_text"]
            for row in by_prompt
            if row["prompt"] in shown or row["prompt"] in named
        },
    }


def step_tables(folder: Path, name: str = TOKEN_TABLE) -> Iterator[Any]:
    """A table one step at a time, after its bytes were checked against the manifest."""
    import json

    import pyarrow.parquet

    path = folder / name
    listed = json.loads((folder / MANIFEST_FILE).read_bytes())["files"].get(name)
    if listed is None or not path.is_file():
        raise FileNotFoundError(f"No file {path}; expected it in a finished run directory. {AGAIN}")
    if sha256(path) != listed["sha256"]:
        raise ValueError(
            f"{path} is damaged or was changed: its sha256 is not the one in {MANIFEST_FILE}. "
            f"{AGAIN}"
        )
    with pyarrow.parquet.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            if table.num_rows:
                yield table


def step_bins(steps: Sequence[int], most: int = MOST_BINS) -> list[tuple[int, int]]:
    """(first, last) step of each bar: one step each, or as many as fit into `most` bars."""
    width = -(-len(steps) // most) if steps else 1
    return [
        (part[0], part[-1])
        for part in (steps[start : start + width] for start in range(0, len(steps), width))
    ]


def difficulty(solved: float | None) -> str:
    """By the share of rollouts that solved the prompt."""
    if solved is None:
        return UNKNOWN
    if solved >= 1:
        return ALWAYS
    return SOLVED[0] if solved <= 0 else SOLVED[1 + (solved > 1 / 3) + (solved > 2 / 3)]


def position_label(position: int) -> str:
    """Powers of two: the first token, 1, 2 to 3, 4 to 7, ..."""
    if position < 2:
        return str(int(position))
    low = 1 << (int(position).bit_length() - 1)
    return f"{low} to {2 * low - 1}"


def exchange_rate(
    dH: float, dR: float | None, apart_H: float, apart_R: float | None, *, signed: bool
) -> Rate | None:
    """Nats per unit of reward; None where the change of reward is not sure.

    Args:
        dH: Sum of both halves.
        dR: Likewise; None: no rewards.
        apart_H: First half minus second half; its size where `signed` is false.
        apart_R: Likewise.
        signed: Whether the signs of both are known.
    """
    if dR is None or apart_R is None or not dR or abs(dR) <= SURE * abs(apart_R):
        return None
    value = dH / dR
    if signed:
        return {"value": value, "stderr": abs(apart_H - value * apart_R) / abs(dR)}
    return {"value": value, "stderr": (abs(apart_H) + abs(value * apart_R)) / abs(dR)}


def stands_out(group: Group) -> bool:
    """Whether the 95 % interval of the group's change of entropy leaves out 0."""
    return abs(group["dH"]) > OF_HALVES * group["dH_stderr"]


def confirmed(chosen: Selection) -> bool:
    """Whether the dearest are dear beyond the luck of having been chosen."""
    return chosen["cross_fitted"] <= CONFIRMED * chosen["in_sample"] < 0


@dataclass
class _Sums:
    """By group: tokens, and the sums of `COLUMNS` by bin."""

    bins: int
    tokens: dict[str, int] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, at: int, label_T: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        names, index = np.unique(label_T.astype(str), return_inverse=True)
        counts = np.bincount(index, minlength=len(names)).tolist()
        parts = [np.bincount(index, weights=values[c], minlength=len(names)) for c in COLUMNS]
        for place, name in enumerate(map(str, names)):
            self.tokens[name] = self.tokens.get(name, 0) + counts[place]
            here = self.values.setdefault(name, np.zeros((len(COLUMNS), self.bins)))
            here[:, at] += [part[place] for part in parts]


def _values(column: Any) -> np.ndarray:
    """A copy; NaN where the table has null."""
    return column.to_numpy().astype(float, copy=True)


def _mapped(x_T: np.ndarray, label: Any) -> np.ndarray:
    """`label` of every entry, computed once for each different one."""
    names, index = np.unique(x_T.astype(str) if x_T.dtype == object else x_T, return_inverse=True)
    return np.asarray([label(name) for name in names.tolist()], dtype=object)[index]


def _add_halves(
    sums: dict[str, np.ndarray], label_T: np.ndarray, values: Mapping[str, np.ndarray]
) -> None:
    """Sums of `COLUMNS` by prompt, or by text."""
    names, index = np.unique(label_T.astype(str), return_inverse=True)
    parts = [np.bincount(index, weights=values[name], minlength=len(names)) for name in COLUMNS]
    for name, part in zip(names.tolist(), np.stack(parts, axis=1), strict=True):
        sums[name] = sums[name] + part if name in sums else part


def _half_sums(sums: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.array([[one[1], one[2]] for one in sums.values()]).reshape(-1, 2)


def selection(halves: np.ndarray, chosen: int) -> Selection:
    """How much of what the `chosen` lowest did is luck of the choice.

    Args:
        halves: [groups, 2], each half's dH.
        chosen: How many are chosen.
    """
    a, b = halves.T
    lowest_a, lowest_b, lowest = (np.argsort(x, kind="stable")[:chosen] for x in (a, b, a + b))
    known = len(a) > 2 and a.std() > 0 and b.std() > 0
    return {
        "chosen": chosen,
        "of": len(a),
        "in_sample": float((a + b)[lowest].sum()),
        "cross_fitted": float(b[lowest_a].sum() + a[lowest_b].sum()),
        "correlation": float(np.corrcoef(a, b)[0, 1]) if known else None,
    }


def _remember(
    columns: Mapping[str, Any],
    dH_T: np.ndarray,
    prompt_T: np.ndarray,
    text_T: np.ndarray,
    rollouts: dict[str, list[tuple[float, LedgerRollout]]],
    places: dict[str, list[tuple[float, LedgerRollout, int]]],
) -> None:
    """Keep the rollouts and places of one step that lowered the entropy most so far."""
    row_T = columns["rollout"].to_numpy()
    rows, start_R, length_R = np.unique(row_T, return_index=True, return_counts=True)
    cache: dict[int, LedgerRollout] = {}

    def rollout(place: int) -> LedgerRollout:
        if place not in cache:
            part = slice(int(start_R[place]), int(start_R[place] + length_R[place]))
            first = part.start
            cache[place] = {
                "uid": columns["uid"][first].as_py(),
                "step": columns["step"][first].as_py(),
                "prompt": columns["prompt"][first].as_py(),
                "columns": {name: _values(columns[name][part]) for name in ROLLOUT_COLUMNS},
                "texts": columns["text"][part].to_pylist(),
            }
        return cache[place]

    if not np.all(np.diff(row_T) >= 0):
        raise ValueError(f"{TOKEN_TABLE} has a step whose rollouts are not in order. {AGAIN}")
    for place in range(len(rows)):
        best = rollouts.get(str(prompt_T[start_R[place]]))
        if best is None:
            continue
        total = float(dH_T[start_R[place] : start_R[place] + length_R[place]].sum())
        if len(best) < ROLLOUTS_OF_PROMPT or total < best[-1][0]:
            best.append((total, rollout(place)))
            best.sort(key=lambda pair: (pair[0], pair[1]["uid"]))
            del best[ROLLOUTS_OF_PROMPT:]
    place_T = np.repeat(np.arange(len(rows)), length_R)
    for text, best_of in places.items():
        here = np.flatnonzero(text_T == text)
        for token in here[np.argsort(dH_T[here], kind="stable")][:ROLLOUTS_OF_TEXT].tolist():
            value, place = float(dH_T[token]), int(place_T[token])
            if len(best_of) < ROLLOUTS_OF_TEXT or value < best_of[-1][0]:
                best_of.append((value, rollout(place), token - int(start_R[place])))
                best_of.sort(key=lambda one: (one[0], one[1]["uid"], one[2]))
                del best_of[ROLLOUTS_OF_TEXT:]


def _grouping(name: str, sums: _Sums, named: Sequence[str]) -> Grouping:
    groups = [
        _group(group, sums.tokens[group], values, signed=True)
        for group, values in sums.values.items()
    ]
    groups.sort(key=_order(name, named))
    return {"key": name, "title": GROUPINGS[name], "groups": groups}


def _group(name: str, tokens: int | None, values: np.ndarray, *, signed: bool) -> Group:
    totals = dict(zip(COLUMNS, values.sum(1).tolist(), strict=True))
    rewarded = bool(np.isfinite(totals["dR"]))
    apart_H = totals["dH_a"] - totals["dH_b"]
    apart_R = totals["dR_a"] - totals["dR_b"] if rewarded else None
    dR = totals["dR"] if rewarded else None
    return {
        "name": name,
        "tokens": tokens,
        "dH": totals["dH"],
        "dH_stderr": abs(apart_H),
        "dR": dR,
        "dR_stderr": None if apart_R is None else abs(apart_R),
        "rate": exchange_rate(totals["dH"], dR, apart_H, apart_R, signed=signed),
        "dH_by_bin": values[0].tolist(),
        "dR_by_bin": values[3].tolist() if rewarded else None,
    }


def _order(name: str, named: Sequence[str]) -> Any:
    """Difficulty, position and sign have an order of their own; others go by their cost."""
    fixed: tuple[str, ...] = {
        "difficulty": (*SOLVED, ALWAYS, UNKNOWN),
        "sign": SIGNS,
        "prompt": (*named, REST),
    }.get(name, ())
    if name == "position":
        return lambda group: int(group["name"].split()[0])
    if fixed:
        return lambda group: fixed.index(group["name"])
    return lambda group: (group["dH"], group["name"])


def _layers(tables: Iterable[Any], bin_of: Mapping[int, int], bins: int) -> Grouping:
    """From by_layer.parquet; its standard errors are sizes, added as if all had one sign."""
    sums: dict[str, np.ndarray] = {}
    for row in chain.from_iterable(table.to_pylist() for table in tables):
        here = sums.setdefault(row["layer"], np.zeros((len(COLUMNS), bins)))
        absent = row["dR"] is None
        dR, spread = (np.nan, np.nan) if absent else (row["dR"], row["dR_stderr"])
        here[:, bin_of[row["step"]]] += (
            *(row["dH"], (row["dH"] + row["dH_stderr"]) / 2, (row["dH"] - row["dH_stderr"]) / 2),
            *(dR, (dR + spread) / 2, (dR - spread) / 2),
        )
    by_size = sorted(sums, key=lambda layer: (-abs(float(sums[layer][0].sum())), layer))
    named = by_size[:MOST_GROUPS] if len(by_size) > MOST_GROUPS + 1 else by_size
    others = [sums[layer] for layer in by_size if layer not in named]
    parts = {layer: sums[layer] for layer in sorted(named, key=_natural)}
    if others:
        parts[REST] = np.sum(others, axis=0)
    groups = [_group(layer, None, values, signed=False) for layer, values in parts.items()]
    return {"key": "layer", "title": GROUPINGS["layer"], "groups": groups}


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _dear_prompt(
    row: Mapping[str, Any],
    halves: np.ndarray,
    best: Sequence[tuple[float, LedgerRollout]],
    kept: dict[str, LedgerRollout],
) -> DearPrompt:
    for _, rollout in best:
        kept.setdefault(rollout["uid"], rollout)
    return {
        "prompt": row["prompt"],
        "text": row["prompt_text"],
        "solved": row["solved"],
        "rollouts": row["rollouts"],
        "tokens": row["tokens"],
        "dH": row["dH"],
        "dH_stderr": row["dH_stderr"],
        "dR": row["dR"],
        "dR_stderr": row["dR_stderr"],
        "rate": _rate(halves),
        "uids": [rollout["uid"] for _, rollout in best],
    }


def _dear_text(
    row: Mapping[str, Any],
    halves: np.ndarray,
    best: Sequence[tuple[float, LedgerRollout, int]],
    kept: dict[str, LedgerRollout],
) -> DearText:
    for _, rollout, _ in best:
        kept.setdefault(rollout["uid"], rollout)
    return {
        "text": row["text"],
        "class": row["class"],
        "count": row["count"],
        "dH": row["dH"],
        "dH_stderr": row["dH_stderr"],
        "dR": row["dR"],
        "dR_stderr": row["dR_stderr"],
        "rate": _rate(halves),
        "places": [(rollout["uid"], place) for _, rollout, place in best],
    }


def _rate(halves: np.ndarray) -> Rate | None:
    dH, dH_a, dH_b, dR, dR_a, dR_b = halves.tolist()
    if not np.isfinite(dR):
        return None
    return exchange_rate(dH, dR, dH_a - dH_b, dR_a - dR_b, signed=True)


def _size(row: Mapping[str, Any]) -> tuple[float, str]:
    return (-abs(row["dH"]), row["prompt"])


def _cost(row: Mapping[str, Any]) -> tuple[float, str]:
    return (row["dH"], str(row.get("prompt", row.get("text"))))
