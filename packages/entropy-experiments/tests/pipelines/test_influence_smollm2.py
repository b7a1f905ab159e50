"""Token influences of a real language model: SmolLM2-135M with a LoRA adapter. Slow."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import torch

from entropy_experiments import Objective, entropy_gradient, first_order
from entropy_experiments.attribution.tokens import TokenInfluence, token_influence
from entropy_experiments.estimate.options import slope_estimand
from entropy_experiments.models.precision import true_float64
from entropy_experiments.numerics.derivatives import dot, pullback
from entropy_experiments.pipelines.probe_inputs import ProbeInputs, gather
from entropy_experiments.update.adamw import compute_update_vector_adamw
from pipelines.test_smollm2 import QUESTIONS, _example, _need_smollm2

pytestmark = pytest.mark.contract

JVP_FP32, CENTRAL_FP32, SUM_FP32, SUM_FP64 = 1e-5, 1e-3, 1e-4, 1e-9
OBJECTIVE = Objective(loss="dapo", entropy_coef=0.01)


def _inputs(folder: Any) -> ProbeInputs:
    example = _example()
    sizes = {"prompts": 5, "update_prompts": 2, "group": 2, "tokens": 10}
    given = Namespace(questions=QUESTIONS, out=folder, attempts=1, microbatch=4, steps=2, **sizes)
    checkpoint = example.made_checkpoint(folder, QUESTIONS, steps=2)
    inputs = gather(example.probe_config(given, checkpoint), None)
    # In ten tokens nobody earns a reward: advantages are given here.
    sign_N = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64)
    advantage_NS = sign_N[:, None].expand(inputs.update.rollouts.tokens_NS.shape).clone()
    return replace(inputs, update=replace(inputs.update, advantage_NS=advantage_NS))


def _found(inputs: ProbeInputs, mode: str, *, folds: int = 2) -> tuple[TokenInfluence, Any]:
    direction, _, stats = compute_update_vector_adamw(
        inputs.policy, inputs.update, OBJECTIVE, inputs.optimizer, max_grad_norm=1.0, microbatch=4
    )
    found = token_influence(
        inputs.policy,
        inputs.evaluation,
        inputs.policy,
        inputs.update,
        OBJECTIVE,
        direction,
        estimand=slope_estimand(inputs.policy, form="to_go"),
        scores=stats.found.scores,
        mode=mode,  # type: ignore[arg-type]
        folds=folds,
        microbatch=4,
    )
    return found, direction


def _gap(inputs: ProbeInputs, found: TokenInfluence, direction: Any) -> float:
    slope = first_order(inputs.policy, inputs.evaluation, direction, repackings=0, microbatch=4)
    parts = [*found.rollout_N.tolist(), *found.baseline.values()]
    assert all(parts)
    return abs(direction.lr * slope.value - sum(parts)) / sum(map(abs, parts))


def _explicit(inputs: ProbeInputs, direction: Any, estimand: Any) -> torch.Tensor:
    policy, batch = inputs.policy, inputs.update
    g_H = entropy_gradient(policy, inputs.evaluation, estimand=estimand, microbatch=4)
    weights, out = OBJECTIVE.token_weights(batch), []
    for i in range(len(batch.rollouts)):
        row = torch.tensor([i])
        part, weight = batch.take(row, slice(None)), weights.take(row, slice(None))
        _, g_i = pullback(
            lambda p: OBJECTIVE.weighted(policy.score(p, part.rollouts), part, weight),
            policy.params,
        )
        v_i = {
            name: -direction.preconditioner[name].double() * direction.clip_factor * g.double()
            for name, g in g_i.items()
        }
        out.append(direction.lr * dot(g_H, v_i))
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.slow
def test_influences_of_smollm2(tmp_path):
    """Explicit gradients per rollout, two forwards, and the sum rule in fp32 and fp64."""
    _need_smollm2()
    inputs = _inputs(tmp_path)
    found, direction = _found(inputs, "jvp")
    want_N = _explicit(inputs, direction, found.estimand)

    def away(got_N: torch.Tensor) -> float:
        return float((got_N - want_N).norm() / want_N.norm())

    central, _ = _found(inputs, "central", folds=1)
    reached = {
        "jvp": (away(found.rollout_N), JVP_FP32),
        "central": (away(central.rollout_N), CENTRAL_FP32),
        "sum, fp32": (_gap(inputs, found, direction), SUM_FP32),
    }
    true_float64(inputs.checkpoint.model)
    reached["sum, fp64"] = (_gap(inputs, *_found(inputs, "jvp")), SUM_FP64)
    print(reached)
    for what, (error, tolerance) in reached.items():
        assert error <= tolerance, what
