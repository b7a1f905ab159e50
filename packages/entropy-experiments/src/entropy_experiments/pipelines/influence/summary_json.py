"""Estimates, ledgers and counterfactuals as JSON: what stages keep and summary.json says."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.fisher import top_contributors
from entropy_experiments.attribution.ledger import Ledger
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.results import (
    BudgetAnswer,
    ConfirmationAnswer,
    FisherAnswer,
    LedgerResult,
    MovedRollout,
    WhatIfPrediction,
    finite,
    numbers,
    weights_of,
)
from entropy_experiments.types import Estimate

CONTRIBUTORS = 5
"""Update rollouts named for each evaluation rollout whose log-prob they moved."""


def changes(measured: Mapping[tuple[str, float], Estimate]) -> Stage:
    """Measured changes as `name|eta`: numbers and weights, contributions by evaluation rollout.

    Contributions are those of `attribution.finite`: split as the first-order matrix is.
    """
    named = {f"{name}|{eta!r}": change for (name, eta), change in measured.items()}
    return Stage(
        facts={name: {**numbers(change), **weights_of(change)} for name, change in named.items()},
        tensors={name: change.diagnostics["contribution_N"] for name, change in named.items()},
    )


def ledger_json(found: Ledger) -> LedgerResult:
    return {
        "quantity": found.quantity,
        "lines": {
            name: {
                "this_step": line.value,
                "eventual": found.eventual[name].value,
                "stderr": line.stderr,
                "interval": None if line.interval is None else list(line.interval),
                "trusted": line.trusted,
                "why_not": list(line.why_not),
            }
            for name, line in found.lines.items()
        },
        "predicted": numbers(found.predicted),
        "curvature": None if found.curvature is None else numbers(found.curvature),
        "measured": numbers(found.measured),
        "unexplained": None if found.unexplained is None else numbers(found.unexplained),
        "predicted_by_prompt": None
        if found.predicted_by_prompt is None
        else numbers(found.predicted_by_prompt),
        "notes": list(found.notes),
    }


def moved_rollouts(stage: Stage) -> list[MovedRollout]:
    """Of every evaluation rollout the change predicted and measured, and who made most of it."""
    share_EN, measured_E = stage.tensors["contribution_EN"], stage.tensors["measured_E"]
    predicted_E = share_EN.sum(1)
    return [
        {
            "rollout": i,
            "predicted": float(predicted_E[i]),
            "measured": float(measured_E[i]),
            "contributors": [
                {"rollout": one.rollout, "value": one.value}
                for one in top_contributors(share_EN[i], CONTRIBUTORS)
            ],
        }
        for i in range(len(measured_E))
    ]


def fisher_json(stage: Stage, moved: list[MovedRollout]) -> FisherAnswer:
    """How well the kernel predicts log-prob changes; `moved`: the rollouts to name."""
    share_EN, measured_E = stage.tensors["contribution_EN"], stage.tensors["measured_E"]
    predicted_E = share_EN.sum(1)
    size, gap = (float(x_E.norm()) for x_E in (measured_E, predicted_E - measured_E))
    both = torch.stack([predicted_E, measured_E])
    varied = len(measured_E) > 1 and bool((both.std(1) > 0).all())
    return {
        "eta": stage.facts["eta"],
        "centred": stage.facts["centred"],
        "correlation": float(torch.corrcoef(both)[0, 1]) if varied else None,
        "relative_gap": gap / size if size else None,
        "moved": moved,
    }


def prediction_json(found: whatif.Prediction) -> WhatIfPrediction:
    return {
        "total": found.total,
        "change": found.change,
        "gradient": found.gradient,
        "baseline": dict(found.baseline),
        "recorded": found.recorded,
        "stderr": found.stderr,
        "change_stderr": found.change_stderr,
        "lr": found.lr,
        "changed_tokens": found.tokens,
        "notes": list(found.notes),
    }


def confirmation_json(found: whatif.Confirmation) -> ConfirmationAnswer:
    return {
        "frozen": numbers(found.frozen),
        "recomputed": numbers(found.recomputed),
        "curvature": None if found.curvature is None else numbers(found.curvature),
        "measured": numbers(found.measured),
        "change": numbers(found.change),
        "effect_agrees": found.effect_agrees,
        "explained": {name: numbers(part) for name, part in found.explained.items()},
        "rest": numbers(found.rest),
        "clip_factors": list(found.clip_factors),
        "agrees": found.agrees,
        "accounted": found.accounted,
        "beyond_linear": found.beyond_linear,
        "confirmed": found.confirmed,
        "effect": found.effect_in_words,
        "text": str(found),
    }


def budget_json(ledger: LedgerResult, lr: float, budget: float) -> BudgetAnswer:
    """The learning rate that changes the entropy by so much, from a ledger's numbers."""
    slope = ledger["predicted"]["value"] / lr
    bend = None if ledger["curvature"] is None else 2 * ledger["curvature"]["value"] / lr**2
    found = whatif.entropy_budget(slope, bend, budget)
    return {
        "budget": budget,
        "linear": found.linear,
        "curved": found.curved,
        "linear_range": finite(found.linear_range),
        "curvature_known": bend is not None,
        "notes": list(found.notes),
        "text": str(found),
    }
