"""Influence against probability and advantage: who is pushed, and how hard.

The entropy falls where what is likely is made likelier: to first order by the covariance of
log-prob and advantage. Two views: single tokens, and sums over cells of probability x advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from entropy_experiments.report.html.words import signed
from entropy_experiments.report.sections import CovarianceCells, CovarianceSection

LARGEST, REST = 1_000, 1_500
"""Tokens drawn: those of most influence, and a random part of the others."""
PROBABILITY = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
PARTS = 3
"""Advantages of one sign are cut into so many parts of about equal size."""


def covariance(columns: Mapping[str, np.ndarray]) -> CovarianceSection | None:
    """None: no token has influence."""
    here_C = np.flatnonzero(columns["counted"].astype(bool) & (columns["influence"] != 0))
    if not len(here_C):
        return None
    drawn_D = _drawn(here_C, columns["influence"])
    take = ("rollout", "k", "probability", "advantage", "influence", "stable")
    points = {name: columns[name][drawn_D].tolist() for name in take}
    return {
        "points": points,
        "tokens": len(here_C),
        "drawn": len(drawn_D),
        "cells": _cells(*(columns[x][here_C] for x in ("probability", "advantage", "influence"))),
    }


def _drawn(here_C: np.ndarray, influence_T: np.ndarray) -> np.ndarray:
    if len(here_C) <= LARGEST + REST:
        return here_C
    by_size = here_C[np.argsort(-np.abs(influence_T[here_C]), kind="stable")]
    rest = np.random.default_rng(0).choice(by_size[LARGEST:], REST, replace=False)
    return np.sort(np.concatenate([by_size[:LARGEST], rest]))


def _cells(p_C: np.ndarray, a_C: np.ndarray, influence_C: np.ndarray) -> CovarianceCells:
    edges = _advantage_edges(a_C)
    column_C = np.clip(np.searchsorted(PROBABILITY, p_C, side="right") - 1, 0, len(PROBABILITY) - 2)
    row_C = np.clip(np.searchsorted(edges, a_C, side="right") - 1, 0, len(edges) - 2)
    shape = (len(edges) - 1, len(PROBABILITY) - 1)
    total, count = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    np.add.at(total, (row_C, column_C), influence_C)
    np.add.at(count, (row_C, column_C), 1)
    kept = count.sum(1) > 0
    low_high = [_spoken(a_C[row_C == row]) for row in np.flatnonzero(kept)]
    return {
        "probability": [f"{a:g}–{b:g}".replace("0.", ".") for a, b in pairwise(PROBABILITY)],
        "advantage": low_high,
        "influence": total[kept].tolist(),
        "tokens": count[kept].tolist(),
    }


def _advantage_edges(a_C: np.ndarray) -> np.ndarray:
    """Zero is an edge: what is pushed up and what is pushed down are never in one cell."""
    edges = [np.array([0.0])]
    for part_C in (a_C[a_C < 0], a_C[a_C >= 0]):
        if len(part_C):
            edges.append(np.quantile(part_C, np.linspace(0, 1, PARTS + 1)))
    unique = np.unique(np.concatenate(edges))
    unique[-1] = np.nextafter(unique[-1], np.inf)
    return unique if len(unique) > 1 else np.array([unique[0], np.nextafter(unique[0], np.inf)])


def _spoken(a_R: np.ndarray) -> str:
    low, high = (signed(f"{end:+.2f}") for end in (a_R.min(), a_R.max()))
    return low if low == high else f"{low} to {high}"
