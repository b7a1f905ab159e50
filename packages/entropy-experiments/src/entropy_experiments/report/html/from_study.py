"""What an influence study's run directory has for a report; no model, no tokenizer.

`covariance`: influence against probability and advantage. The entropy falls where what is likely is
made likelier: to first order by the covariance of log-prob and advantage. Two views: single tokens,
and sums over cells of probability x advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from entropy_experiments.report import words
from entropy_experiments.report.html import books
from entropy_experiments.report.html.influence_charts import FULL
from entropy_experiments.report.html.momentum import momentum_section
from entropy_experiments.report.html.token_views import MOST_TOKENS, token_views
from entropy_experiments.report.influence_tables import RELIABLE, influence_report
from entropy_experiments.report.momentum import (
    MOMENTUM,
    largest,
    momentum_lines,
    one_line_because,
    split_of,
)
from entropy_experiments.report.sections import (
    CovarianceCells,
    CovarianceSection,
    EnvironmentSection,
    LedgerSection,
    MatrixSection,
    OtherBatch,
    ReportData,
    RolloutRow,
    RolloutsSection,
    TextsSection,
    Verdict,
    WhatIfSection,
)
from entropy_experiments.report.words import contains_zero, left_over, signed
from entropy_experiments.results import EvaluationBatch, InfluenceResult
from entropy_experiments.study_files import RunFiles, open_run

COLUMNS = (
    *("rollout", "prompt", "k", "logprob", "probability", "entropy", "advantage", "reward"),
    *("influence", "stderr", "stable", "counted"),
)
CELLS = (160, 400)
"""Rows and columns of the matrix that are drawn; more are added up in blocks."""
FAINT = 0.05
"""Of the full colour: what eyes take for blank."""
WORDS_OF_ABSENT = {"fisher": "the Fisher kernel"}
"""Of summary.json's `absent`; the matrix is named where its section would be."""
EARLIER = "the run was written by an earlier version; run the study again to have it"
LARGEST, REST = 1_000, 1_500
"""Tokens drawn: those of most influence, and a random part of the others."""
PROBABILITY = (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
PARTS = 3
"""Advantages of one sign are cut into so many parts of about equal size."""


def study_data(
    folder: str | Path, *, evaluation: str | None = None, most_tokens: int = MOST_TOKENS
) -> ReportData:
    """The sections that a study has."""
    run = open_run(folder)
    summary = run.summary()
    batch = _chosen(summary["evaluations"], evaluation, run.folder)
    ledger, lr = batch["ledger"]["entropy"], summary["lr"]
    unit = (batch.get("estimand") or {}).get("unit", "token")
    measured = [(float(eta), at["full"]) for eta, at in batch["aggregate"].items()]
    absent: dict[str, str] = {
        WORDS_OF_ABSENT[name]: reason
        for name, reason in (summary.get("absent") or {}).items()
        if name in WORDS_OF_ABSENT
    }
    books_shown = _ledger(batch, unit, absent)
    if (reason := one_line_because(batch)) is not None:
        absent["the momentum by the batches it came from"] = reason
    texts, by_cell = _tokens(run, batch, absent, most_tokens)
    return {
        "kind": "influence",
        "title": f"What changed the entropy at {summary['checkpoint']}",
        "checkpoint": summary["checkpoint"],
        "source": run.folder.name,
        "key": summary["key"],
        "lr": lr,
        "unit": unit,
        "level": batch["level"],
        "predicted": ledger["predicted"],
        "measured": ledger["measured"],
        "difference": None,
        "sizes": {"B_E": batch["prompts"], "B_U": summary["update"]["prompts"]},
        "seconds": sum(summary["timings"].values()),
        "absent": absent,
        "verdict": _verdict(summary, batch, unit),
        "curve": books.curve(lr, ledger["predicted"], ledger["curvature"], measured),
        "ledger": books_shown,
        "momentum": momentum_section(run, batch),
        "weights": books.weights(measured),
        "rollouts": _rollouts(batch),
        "texts": texts,
        "covariance": by_cell,
        "what_if": _what_if(batch, absent),
        "matrix": _matrix(run, batch, summary, absent),
        "others": [_other(one) for one in summary["evaluations"] if one is not batch],
        "assumed": {
            "assumed": summary["assumed"],
            "not_verifiable": summary["not_verifiable"],
            "notes": [*summary["notes"], *batch["notes"]],
        },
        "environment": _environment(run, summary, batch),
    }


def _chosen(
    evaluations: Sequence[EvaluationBatch], name: str | None, folder: Path
) -> EvaluationBatch:
    by_name = {one["name"]: one for one in evaluations}
    if name is not None and name not in by_name:
        raise ValueError(f"No evaluation batch {name!r} in {folder}; it has {list(by_name)}.")
    return evaluations[0] if name is None else by_name[name]


def _verdict(summary: InfluenceResult, evaluation: EvaluationBatch, unit: str) -> Verdict:
    ledger, reward = evaluation["ledger"]["entropy"], evaluation["ledger"].get("reward")
    predicted, measured = ledger["predicted"], ledger["measured"]
    rest, points = ledger["unexplained"], []
    share = predicted["value"]
    withheld = evaluation["cancellation"]["withheld"]
    lines = sorted(ledger["lines"].items(), key=lambda pair: -abs(pair[1]["this_step"]))
    if lines and share and not withheld and not contains_zero(predicted):
        sentences = [
            f"{line['this_step'] / share:.0%} {books.LINE_NAMES.get(name, name)}"
            + (_by_batches(evaluation, share) if name == MOMENTUM else "")
            for name, line in lines
            if abs(line["this_step"] / share) >= 0.005
        ]
        points.append(f"Of the predicted change: {words.signed(', '.join(sentences))}.")
    if reward is not None:
        bought = reward["measured"]
        points.append(f"Expected reward changes by {words.with_bar(bought)}.")
    if rest is not None and rest["interval"] is not None:
        points.append(
            f"Unexplained by all lines and curvature: {words.with_bar(rest, 2)}, "
            f"{left_over(rest, measured)}."
        )
    tokens = evaluation["reliability"]
    if tokens is not None:
        advice = "" if tokens >= RELIABLE else "; read groups, not single tokens"
        points.append(f"Reliability of single tokens {tokens:.2f} (two halves of E){advice}.")
    unchecked = (summary["update"].get("certified") or {}).get("unchecked")
    if unchecked:
        points.append(f"No step certificate: {unchecked}.")
    points += words.study_certificate(summary)
    points += words.sampling_points(summary["notes"])
    return {
        "sentence": words.sentence(
            update=words.made_by_study(summary),
            change=measured,
            level=evaluation["level"]["value"],
            unit=unit,
            predicted=predicted,
        ),
        "points": points,
        "trusted": predicted["trusted"] and measured["trusted"],
        "doubts": [*words.doubts_of(predicted, measured), *evaluation["doubts"]],
        "text": influence_report(summary),
    }


def _by_batches(evaluation: EvaluationBatch, total: float) -> str:
    """Beside the share of the momentum: whose it is."""
    momentum = split_of(evaluation)
    if momentum is None:
        return ""
    parts = [
        f"{name} {line['this_step'] / total:.0%}"
        for name, line in momentum_lines(momentum).items()
        if abs(line["this_step"] / total) >= 0.005
    ]
    named = [f"batch {one['step']}" for one in largest(momentum)[:3]]
    most = f"; most by {', '.join(named)}" if named else ""
    return f" ({', '.join(parts)}{most})"


def _ledger(evaluation: EvaluationBatch, unit: str, absent: dict[str, str]) -> LedgerSection:
    if evaluation["ledger"].get("reward") is None:
        absent["the reward's ledger"] = (
            "needs rewards of the evaluation rollouts and two or more per prompt (influence.reward)"
        )
    return books.ledger(books.study_books(evaluation, unit))


def _rollouts(evaluation: EvaluationBatch) -> RolloutsSection:
    groups = evaluation["groups"]["rollout"]
    rows: list[RolloutRow] = [{"rollout": int(name), **group} for name, group in groups.items()]
    return {"rows": sorted(rows, key=lambda row: row["value"])}


def _tokens(
    run: RunFiles, evaluation: EvaluationBatch, absent: dict[str, str], most: int
) -> tuple[TextsSection, CovarianceSection | None]:
    name = f"{evaluation['name']}_tokens.parquet"
    table = run.table(name)
    columns = {c: table.column(c).to_numpy(zero_copy_only=False) for c in COLUMNS}
    whole = "piece" in table.column_names
    pieces = table.column("piece" if whole else "text").to_pylist()
    texts = run.json("update_rollouts.json") if "update_rollouts.json" in run else None
    if texts is None:
        absent["prompts, and spaces between tokens"] = EARLIER
    folds = sum(c.startswith("fold_") for c in table.column_names)
    by_cell = covariance(columns)
    if by_cell is None:
        absent["probability and advantage"] = "no token of this batch has any influence"
    views = token_views(columns, pieces, texts, folds, most_tokens=most)
    return views, by_cell


def _what_if(evaluation: EvaluationBatch, absent: dict[str, str]) -> WhatIfSection | None:
    answers, without = evaluation.get("what_if") or [], evaluation.get("leave_one_out") or []
    budget = evaluation.get("entropy_budget")
    if not answers and not without and budget is None:
        absent["what if"] = "nothing was asked (entropy-probe influence --what-if drop=negative)"
        return None
    measured = evaluation["ledger"]["entropy"]["measured"]
    return {"asked": answers, "without": without, "budget": budget, "measured": measured}


def _matrix(
    run: RunFiles, evaluation: EvaluationBatch, summary: InfluenceResult, absent: dict[str, str]
) -> MatrixSection | None:
    name = f"{evaluation['name']}_delta_matrix.npy"
    if name not in run:
        absent["the matrix"] = (summary.get("absent") or {}).get("matrix") or EARLIER
        return None
    matrix_EN = run.array(name)
    if not np.isfinite(matrix_EN).all():
        absent["the matrix"] = (
            "single rollouts were measured (influence.measured_matrix), not every pair"
        )
        return None
    rows_E = np.argsort(matrix_EN.sum(1), kind="stable")
    columns_N = np.argsort(matrix_EN.sum(0), kind="stable")
    drawn, sizes = matrix_EN[rows_E][:, columns_N], []
    for axis, most in enumerate(CELLS):
        size = -(-drawn.shape[axis] // most)
        sizes.append(size)
        if size > 1:
            drawn = np.add.reduceat(drawn, np.arange(0, drawn.shape[axis], size), axis=axis)
    return {
        "values": drawn.tolist(),
        "blank": _blank(matrix_EN, drawn),
        "rows": rows_E[:: sizes[0]].tolist(),
        "columns": columns_N[:: sizes[1]].tolist(),
        "block": sizes,
        "shape": list(matrix_EN.shape),
        "eta": summary["reference_eta"],
    }


def _blank(matrix_EN: np.ndarray, drawn: np.ndarray) -> str:
    """What the blank part of the drawing is: white, or black in dark mode."""
    rollouts = matrix_EN.shape[1]
    none = int((matrix_EN == 0).all(0).sum())
    sentence = "Blank is no influence."
    if none:
        sentence = (
            f"Blank is no influence: {none} of {rollouts} update rollouts have none at all, since "
            "their advantage is 0 (all responses to their prompt got the same reward) or the loss "
            "does not count them."
        )
    sizes = np.sort(np.abs(drawn), axis=None)
    full, other = sizes[min(len(sizes) - 1, int(FULL * len(sizes)))], sizes[sizes > 0]
    if len(other):
        sentence += (
            f" Of the other cells {(other < FAINT * full).mean():.0%} are nearly blank: below a "
            "twentieth of the full colour, which one cell in a hundred exceeds."
        )
    return sentence


def _other(evaluation: EvaluationBatch) -> OtherBatch:
    ledger = evaluation["ledger"]["entropy"]
    return {
        "name": evaluation["name"],
        "kind": evaluation["kind"],
        "rollouts": evaluation["rollouts"],
        "prompts": evaluation["prompts"],
        "level": evaluation["level"],
        "predicted": ledger["predicted"],
        "measured": ledger["measured"],
    }


def _environment(
    run: RunFiles, summary: InfluenceResult, evaluation: EvaluationBatch
) -> EnvironmentSection:
    update = summary["update"]
    versions = {k: v for k, v in summary["provenance"].items() if not isinstance(v, dict)}
    return {
        "facts": {
            "base": summary["base"],
            "learning rate": words.plain(summary["lr"]),
            "update batch": f"{update['rollouts']} rollouts of {update['prompts']} prompts, "
            f"{update['tokens']} counted tokens",
            "evaluation batch": f"{evaluation['name']}: {evaluation['rollouts']} rollouts of "
            f"{evaluation['prompts']} prompts, {evaluation['tokens']} tokens",
            "loss": ", ".join(f"{k} {v}" for k, v in update["objective"].items()),
            "clip factor": words.plain(update["clip_factor"]),
            "precision": ", ".join(
                f"{k} {v}" for k, v in summary["provenance"]["precision"].items()
            ),
            "seconds": f"{sum(summary['timings'].values()):.0f}",
            "study": summary["key"][:16],
        },
        "versions": versions,
        "config": run.read("config.yaml").decode() if "config.yaml" in run else None,
    }


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
