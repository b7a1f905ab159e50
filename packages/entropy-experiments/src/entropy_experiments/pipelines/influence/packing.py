"""Results of a study's stages, to tensors and back: what is on disk is what was computed.

A direction, a token table and a matrix are read back bit by bit, so a study that was interrupted
goes on with the very numbers it had. A direction that is cut over ranks, as large as the model, is
not kept: it is made again from the same batch, to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from entropy_experiments.attribution.jacobian import Differences
from entropy_experiments.attribution.matrix import Column, InfluenceMatrix
from entropy_experiments.attribution.step import RebuiltStep
from entropy_experiments.attribution.tokens import TokenInfluence
from entropy_experiments.distributed import is_shard
from entropy_experiments.numerics.weights import WeightDiagnostics
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.results import Certified, StepResult
from entropy_experiments.types import (
    Direction,
    Estimand,
    Estimate,
    Params,
    Rollouts,
    Scores,
    UpdateBatch,
)
from entropy_experiments.types.estimate import Influence
from entropy_experiments.update.objective import Objective

_BETWEEN = "|"
_ESTIMATE, _WEIGHTS = "estimate", "logweight_N"
_UNITS = ("value_C", "prompt_C", "stratum_C")


def pack_params(groups: Mapping[str, Params]) -> dict[str, Tensor]:
    """Named sets of parameters under flat names."""
    return {
        f"{group}{_BETWEEN}{name}": value
        for group, params in groups.items()
        for name, value in params.items()
    }


def unpacked(tensors: Mapping[str, Tensor], names: list[str]) -> dict[str, dict[str, Tensor]]:
    out: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, value in tensors.items():
        group, between, name = key.partition(_BETWEEN)
        if between and group in out:
            out[group][name] = value
    return out


def step_json(rebuilt: RebuiltStep) -> StepResult:
    """JSON of a step: what summary.json says of it."""
    return {
        "norms": dict(rebuilt.norms),
        "loss": rebuilt.loss,
        "precision": dict(rebuilt.precision),
        "clip_factor": rebuilt.direction.clip_factor,
    }


def pack_step(rebuilt: RebuiltStep, certified: Certified) -> Stage:
    direction = rebuilt.direction
    assert direction.preconditioner is not None  # an AdamW step has one
    groups = {**direction.parts, "preconditioner": direction.preconditioner}
    if is_shard(next(iter(direction.preconditioner.values()))):
        groups = {}
    return Stage(
        facts={
            **step_json(rebuilt),
            "certified": certified,
            "parts": list(direction.parts),
            "lr": direction.lr,
        },
        tensors={**pack_params(groups), **pack_scores(rebuilt.scores)},
    )


def unpack_step(stage: Stage, device: torch.device) -> RebuiltStep:
    facts = stage.facts
    return RebuiltStep(
        direction=_direction(stage, device),
        scores=unpack_scores(stage),
        loss=facts["loss"],
        norms=facts["norms"],
        precision=facts["precision"],
    )


def _direction(stage: Stage, device: torch.device) -> Direction:
    parts = stage.facts["parts"]
    groups = unpacked(stage.tensors, [*parts, "preconditioner"])
    groups = {g: {n: x.to(device) for n, x in params.items()} for g, params in groups.items()}
    return Direction(
        parts={part: groups[part] for part in parts},
        lr=stage.facts["lr"],
        preconditioner=groups["preconditioner"],
        clip_factor=stage.facts["clip_factor"],
    )


def pack_scores(scores: Scores) -> dict[str, Tensor]:
    return {"logprob_NS": scores.logprob_NS, "entropy_NS": scores.entropy_NS}


def unpack_scores(stage: Stage) -> Scores:
    return Scores(stage.tensors["logprob_NS"], stage.tensors["entropy_NS"])


def pack_estimate(estimate: Estimate) -> Stage:
    """A measured change with its influence values, so that others can be paired with it."""
    (units,) = estimate.influences  # of one sample of rollouts
    weights = asdict(estimate.diagnostics["weights"])
    logweight_N = weights.pop(_WEIGHTS)
    infinite = [name for name, x in weights.items() if x == float("inf")]
    facts = {
        "value": estimate.value,
        "noise_floor": estimate.noise_floor,
        "given_reasons": list(estimate.given_reasons),
        "sample": units.sample,
        "weights": {name: x for name, x in weights.items() if name not in infinite},
        "infinite": infinite,  # JSON has no infinity
    }
    tensors = {f"{_ESTIMATE}{_BETWEEN}{name}": getattr(units, name) for name in _UNITS}
    return Stage(
        facts={_ESTIMATE: facts},
        tensors={**tensors, f"{_ESTIMATE}{_BETWEEN}{_WEIGHTS}": logweight_N},
    )


def unpack_estimate(stage: Stage, estimand: Estimand) -> Estimate:
    facts = stage.facts[_ESTIMATE]
    tensors = unpacked(stage.tensors, [_ESTIMATE])[_ESTIMATE]
    weights = {**facts["weights"], **dict.fromkeys(facts["infinite"], float("inf"))}
    units = Influence(**{name: tensors[name] for name in _UNITS}, sample=facts["sample"])
    return Estimate.build(
        value=facts["value"],
        estimand=estimand,
        influences=[units],
        noise_floor=facts["noise_floor"],
        diagnostics={"weights": WeightDiagnostics(**weights, logweight_N=tensors[_WEIGHTS])},
        why_not=facts["given_reasons"],
    )


def pack_tokens(influence: TokenInfluence) -> Stage:
    assert influence.share_K is not None
    return Stage(
        facts={
            "baseline": dict(influence.baseline),
            "modules": {name: dict(parts) for name, parts in influence.modules.items()},
            "module_folds": {
                name: {part: value_K.tolist() for part, value_K in parts.items()}
                for name, parts in influence.module_folds.items()
            },
            "doubts": list(influence.doubts),
            "differences": [list(one) for one in influence.differences],
            "reach": influence.reach,
        },
        tensors={
            **pack_scores(influence.scores),
            "coefficient_logprob_NS": influence.coefficient.logprob_NS,
            "coefficient_entropy_NS": influence.coefficient.entropy_NS,
            "slope_logprob_KNS": influence.slope_K.logprob_NS,
            "slope_entropy_KNS": influence.slope_K.entropy_NS,
            "share_K": influence.share_K,
        },
    )


def unpack_tokens(
    stage: Stage,
    batch: UpdateBatch,
    objective: Objective,
    direction: Direction,
    estimand: Estimand,
) -> TokenInfluence:
    """All but g_H, which nothing after the table reads."""
    facts, tensors = stage.facts, stage.tensors
    return TokenInfluence(
        batch=batch,
        objective=objective,
        scores=unpack_scores(stage),
        coefficient=Scores(tensors["coefficient_logprob_NS"], tensors["coefficient_entropy_NS"]),
        slope_K=Scores(tensors["slope_logprob_KNS"], tensors["slope_entropy_KNS"]),
        lr=direction.lr,
        clip_factor=direction.clip_factor,
        estimand=estimand,
        baseline=facts["baseline"],
        modules=facts["modules"],
        g_H={},
        module_folds={
            name: {p: torch.tensor(x_K, dtype=torch.float64) for p, x_K in parts.items()}
            for name, parts in facts["module_folds"].items()
        },
        share_K=tensors["share_K"],
        # Of stages that an earlier version wrote there is nothing to say.
        differences=tuple(Differences(*one) for one in facts.get("differences", ())),
        reach=facts.get("reach", 0.0),
        doubts=tuple(facts["doubts"]),
    )


def pack_matrix(matrix: InfluenceMatrix) -> Stage:
    return Stage(
        facts={
            "extra": [column for column in matrix.columns_C if isinstance(column, str)],
            "update_rollouts": matrix.update_rollouts,
            "doubts": list(matrix.doubts),
            "passes": matrix.passes,
            "folds": len(matrix.g_K),
        },
        tensors={
            **pack_params({f"g_{k}": g for k, g in enumerate(matrix.g_K)}),
            "top_N": matrix.top_N,
            "bottom_N": matrix.bottom_N,
            "dtop_NC": matrix.dtop_NC,
            "dbottom_NC": matrix.dbottom_NC,
        },
    )


def unpack_matrix(
    stage: Stage, evaluation: Rollouts, estimand: Estimand, lr: float, device: torch.device
) -> InfluenceMatrix:
    names = [f"g_{k}" for k in range(stage.facts["folds"])]
    folds = unpacked(stage.tensors, names)
    columns: tuple[Column, ...] = (
        *range(stage.facts["update_rollouts"]),
        *stage.facts["extra"],
    )
    return InfluenceMatrix(
        evaluation=evaluation,
        estimand=estimand,
        lr=lr,
        columns_C=columns,
        doubts=tuple(stage.facts["doubts"]),
        passes=stage.facts["passes"],
        g_K=tuple({key: g.to(device) for key, g in folds[name].items()} for name in names),
        top_N=stage.tensors["top_N"],
        bottom_N=stage.tensors["bottom_N"],
        dtop_NC=stage.tensors["dtop_NC"],
        dbottom_NC=stage.tensors["dbottom_NC"],
    )
