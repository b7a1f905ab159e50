"""What-ifs on the run shipped with the package: table arithmetic against the model itself.

The slow way makes the loss anew and differentiates it through the model, multiplies by the recorded
P and clip factor, and asks `first_order` how entropy moves along that: no token table anywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from entropy_experiments import Objective
from entropy_experiments.attribution.token_rows import token_rows
from entropy_experiments.attribution.tokens import TokenInfluence, token_influence
from entropy_experiments.attribution.whatif import (
    TokenTable,
    confirm,
    facts,
    fold_columns,
    recomputed_direction,
    repredict,
)
from entropy_experiments.config import load_config
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.options import slope_estimand
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.precision import true_float64
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.pipelines.probe_inputs import ProbeInputs, gather
from entropy_experiments.types import Direction, Scores, UpdateBatch
from entropy_experiments.update.adamw import compute_update_vector_adamw
from entropy_experiments.update.gradient import loss_gradient

pytestmark = pytest.mark.naive

PROMPTS, MICROBATCH = 24, 64
FP64, FP32 = 1e-9, 1e-6


def dropped(batch: UpdateBatch, mask_NS, factor: float = 0.0) -> UpdateBatch:
    """With neither KL nor bonus in the loss, a factor on its loss is one on its advantage."""
    return replace(
        batch, advantage_NS=torch.where(mask_NS, factor * batch.advantage_NS, batch.advantage_NS)
    )


def rows(batch: UpdateBatch, *numbers: int):
    mask_NS = torch.zeros_like(batch.counted_NS)
    mask_NS[list(numbers)] = True
    return mask_NS


def cov(batch: UpdateBatch, scores: Scores):
    inside_NS, l_NS, a_NS = batch.counted_NS, scores.logprob_NS, batch.advantage_NS.double()
    cov_NS = (a_NS - a_NS[inside_NS].mean()) * (l_NS - l_NS[inside_NS].mean())
    return torch.where(inside_NS, cov_NS, -torch.inf)


INTERVENTIONS: dict[str, Any] = {
    "drop_rollouts=5,9": lambda o, b, s: (o, dropped(b, rows(b, 5, 9))),
    "reweight_rollouts=5:0.5": lambda o, b, s: (o, dropped(b, rows(b, 5), 0.5)),
    "drop_tokens=5.0": lambda o, b, s: (
        o,
        dropped(b, rows(b, 5) & (b.rollouts.response_NS.cumsum(1) == 1)),
    ),
    "drop=negative": lambda o, b, s: (o, dropped(b, b.advantage_NS < 0)),
    "drop=correct&h>0.5": lambda o, b, s: (
        o,
        dropped(b, (b.reward_N == b.reward_N.max())[:, None] & (s.entropy_NS > 0.5)),
    ),
    "reweight=p<0.5&A<0:0.25": lambda o, b, s: (
        o,
        dropped(b, (s.logprob_NS.exp() < 0.5) & (b.advantage_NS < 0), 0.25),
    ),
    "clip_low=0.05": lambda o, b, s: (replace(o, clip_low=0.05), b),
    "clip_high=0.28": lambda o, b, s: (replace(o, clip_high=0.28), b),
    "clip_cov=1:0.5:9": lambda o, b, s: (
        o,
        dropped(b, (cov(b, s) > 0.5) & (cov(b, s) < 9) & ~clipped(b, s)),
    ),
    "beta=0.04": lambda o, b, s: (replace(o, beta=0.04), b),
    "entropy_coef=0.01": lambda o, b, s: (replace(o, entropy_coef=0.01), b),
    "lr=1e-3": lambda o, b, s: (o, b),
    "drop=negative; entropy_coef=0.01; lr=1e-3": lambda o, b, s: (
        replace(o, entropy_coef=0.01),
        dropped(b, b.advantage_NS < 0),
    ),
}
"""Each as a change of objective and batch that the rest of the package knows. (With a bonus in the
loss, `drop` is more than a change of advantages: `slow` handles the last one.)"""


def clipped(batch: UpdateBatch, scores: Scores):
    if batch.old_logprob_NS is None:
        return torch.zeros_like(batch.counted_NS)
    ratio_NS = (scores.logprob_NS - batch.old_logprob_NS).exp()
    high_NS = (batch.advantage_NS > 0) & (ratio_NS > 1.2)
    return high_NS | ((batch.advantage_NS < 0) & (ratio_NS < 0.8))


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    inputs: ProbeInputs
    policy: Any
    batch: UpdateBatch
    objective: Objective
    direction: Direction
    found: TokenInfluence


def world(inputs: ProbeInputs, policy, batch: UpdateBatch) -> World:
    objective = inputs.facts.objective
    direction, _, _ = compute_update_vector_adamw(
        policy,
        batch,
        objective,
        inputs.optimizer,
        max_grad_norm=inputs.facts["max_grad_norm"],
        microbatch=MICROBATCH,
    )
    found = token_influence(
        policy,
        inputs.evaluation,
        policy,
        batch,
        objective,
        direction,
        estimand=slope_estimand(policy, form="to_go", horizon=inputs.horizon),
        microbatch=MICROBATCH,
    )
    return World(
        inputs=inputs,
        policy=policy,
        batch=batch,
        objective=objective,
        direction=direction,
        found=found,
    )


def gathered(folder) -> ProbeInputs:
    config = load_config().under(folder)
    return gather(
        config.with_overrides(
            [
                f"batch_config.B_E={PROMPTS}",
                f"memory_config.microbatch_size={MICROBATCH}",
                "generation.gen_batch_size=256",
                "importance.is_mode=per_decision",
            ]
        ),
        None,
    )


def with_reference(inputs: ProbeInputs, policy, batch: UpdateBatch) -> UpdateBatch:
    with inputs.checkpoint.model.disable_adapter():
        found = score_all(policy, policy.params, batch.rollouts, microbatch=MICROBATCH)
    return replace(batch, ref_logprob_NS=found.logprob_NS)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> World:
    """A few of the recorded rollouts, in true fp64, with ratios away from 1."""
    inputs = gathered(tmp_path_factory.mktemp("probe"))
    policy = SequenceProcessor(true_float64(inputs.checkpoint.model))
    part = inputs.update.take(torch.arange(32), slice(None))
    uniform_N = torch.full((32,), 1 / 32, dtype=torch.float64)
    batch = replace(part, rollouts=replace(part.rollouts, weight_N=uniform_N, share=1.0))
    batch = with_reference(inputs, policy, batch)
    here_NS = score_all(policy, policy.params, batch.rollouts, microbatch=MICROBATCH).logprob_NS
    noise_NS = torch.randn(
        here_NS.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return world(inputs, policy, replace(batch, old_logprob_NS=here_NS + 0.2 * noise_NS))


def slow(made: World, text: str) -> tuple[Direction, Direction]:
    """The frozen and the real step of an intervention, from `loss_gradient` of a changed batch."""
    objective, batch = INTERVENTIONS[text](made.objective, made.batch, made.found.scores)
    found = loss_gradient(made.policy, batch, objective, microbatch=MICROBATCH).gradient
    if "; entropy_coef" in text:  # dropped tokens have no bonus either: take theirs back
        gone_NS = made.batch.counted_NS & (made.batch.advantage_NS < 0)
        back = bonus_gradient(made, objective, gone_NS)
        found = {name: g - back[name] for name, g in found.items()}
    lr = 1e-3 if "lr" in text else made.direction.lr
    frozen = recomputed_direction(made.policy.params, found, made.direction, lr=lr)
    real = recomputed_direction(
        made.policy.params,
        found,
        made.direction,
        lr=lr,
        optimizer=made.inputs.optimizer,
        max_grad_norm=made.inputs.facts["max_grad_norm"],
    )
    return frozen, real


def bonus_gradient(made: World, objective: Objective, mask_NS):
    """Of the entropy bonus of some tokens, differentiated through the model on its own."""
    e_NS = torch.where(mask_NS, objective.token_weights(made.batch).entropy_NS, 0.0)
    out = {name: torch.zeros_like(p) for name, p in made.policy.params.items()}
    for rows_N, columns, part in made.batch.rollouts.split(MICROBATCH):
        leaves = {name: p.detach().requires_grad_() for name, p in made.policy.params.items()}
        h_NS = made.policy.score(leaves, part).entropy_NS
        bonus = -objective.entropy_coef * (e_NS[rows_N, columns].to(h_NS) * h_NS).sum()
        grads = torch.autograd.grad(bonus, tuple(leaves.values()))
        out = {name: out[name] + g for name, g in zip(leaves, grads, strict=True)}
    return out


def predicted(made: World, direction: Direction) -> float:
    found = first_order(
        made.policy,
        made.inputs.evaluation,
        direction,
        microbatch=MICROBATCH,
        repackings=0,
        horizon=made.inputs.horizon,
    )
    return direction.lr * found.value


@pytest.mark.parametrize("text", INTERVENTIONS)
def test_arithmetic_is_the_model_s_answer(small, text):
    got = repredict(small.found, text)
    expected = predicted(small, slow(small, text)[0])
    assert abs(got.total - expected) <= FP64 * abs(expected)
    assert abs(got.change) > 1e4 * FP64 * abs(got.recorded)  # each of them matters
    assert got.tokens > 0 or text.startswith("lr")


def test_kl_cov_is_the_model_s_answer(small):
    """|l - l_old| of the top tokens, differentiated through the model on its own."""
    scores, batch = small.found.scores, small.batch
    count = int(0.05 * int(batch.counted_NS.sum()))
    top = cov(batch, scores).flatten().topk(count).indices
    objective = replace(small.objective, clip_low=None, clip_high=None)
    plain = loss_gradient(small.policy, batch, objective, microbatch=MICROBATCH).gradient
    leaves = {name: p.detach().requires_grad_() for name, p in small.policy.params.items()}
    gap_NS = small.policy.score(leaves, batch.rollouts).logprob_NS - batch.old_logprob_NS
    c_NS = objective.token_weights(batch).policy_NS
    penalty = 0.5 * (c_NS.flatten()[top] * gap_NS.abs().flatten()[top]).sum()
    grads = torch.autograd.grad(penalty, tuple(leaves.values()))
    both = {name: plain[name] + g for name, g in zip(leaves, grads, strict=True)}
    frozen = recomputed_direction(small.policy.params, both, small.direction, lr=small.direction.lr)
    got, expected = repredict(small.found, "kl_cov=0.05:0.5"), predicted(small, frozen)
    assert abs(got.total - expected) <= FP64 * abs(expected)
    assert abs(got.change) > 1e-3 * abs(got.recorded)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_whole_recorded_batch(tmp_path, dtype):
    """As shipped: 384 recorded rollouts, ratios 1. In fp32 rounding is a share of the parts.

    The slow way is taken in fp64 either way: in fp32 it errs by three times as much as ours.
    """

    def whole(exact: bool) -> World:
        inputs = gathered(tmp_path / str(exact))
        model = inputs.checkpoint.model
        policy = SequenceProcessor(true_float64(model)) if exact else inputs.policy
        return world(inputs, policy, with_reference(inputs, policy, inputs.update))

    truth = whole(exact=True)
    made = truth if dtype == "float64" else whole(exact=False)
    for text in INTERVENTIONS:
        got, expected = repredict(made.found, text), predicted(truth, slow(truth, text)[0])
        parts = float(got.value_NS.sum(1).abs().sum()) + sum(map(abs, got.baseline.values()))
        scale = parts if dtype == "float32" else abs(expected)
        assert abs(got.total - expected) <= FP32 * scale, text
        if text.startswith("clip_") and "cov" not in text:
            assert got.change == 0
            assert "every ratio is 1" in got.notes[0]
    for text in ("drop=negative", "clip_cov=0.01", "entropy_coef=0.01"):
        found = confirmed(made, text)
        assert found.agrees or found.accounted, str(found)


def confirmed(made: World, text: str):
    return confirm(
        made.policy,
        made.inputs.evaluation,
        made.policy,
        made.found,
        made.direction,
        made.inputs.optimizer,
        text,
        max_grad_norm=made.inputs.facts["max_grad_norm"],
        microbatch=MICROBATCH,
        repackings=0,
    )


@pytest.mark.parametrize("text", ["drop=negative", "entropy_coef=0.01"])
def test_a_confirmation_takes_the_real_step(small, text):
    got, (frozen, real) = confirmed(small, text), slow(small, text)
    for estimate, step in ((got.frozen, frozen), (got.recomputed, real)):
        expected = predicted(small, step)
        assert abs(estimate.value - expected) <= FP64 * abs(expected)
    assert abs(got.prediction.total - got.frozen.value) <= FP64 * abs(got.frozen.value)
    assert got.agrees or got.accounted
    assert got.measured.interval[0] < got.measured.value < got.measured.interval[1]
    assert got.clip_factors == (small.direction.clip_factor, real.clip_factor)


@pytest.fixture(scope="module")
def saved(small, tmp_path_factory) -> TokenTable:
    """Written and read again: no model, no policy, no rollouts."""
    path = tmp_path_factory.mktemp("table") / "tokens.parquet"
    table = pyarrow.table({**token_rows(small.found), **fold_columns(small.found)})
    said = json.dumps(facts(small.found)).encode()
    pyarrow.parquet.write_table(table.replace_schema_metadata({b"facts": said}), path)
    read = pyarrow.parquet.read_table(path)
    return TokenTable.from_rows(read.to_pydict(), json.loads(read.schema.metadata[b"facts"]))


@pytest.mark.parametrize(
    "text", [*INTERVENTIONS, "kl_cov=0.05:0.5", "clip_cov=0.01:0.5:9:3", "drop=influence<0", ()]
)
def test_a_saved_table_gives_the_same_numbers(small, saved, text):
    there, here = repredict(saved, text), repredict(small.found, text)
    assert there.total == here.total
    assert (there.stderr, there.change_stderr) == (here.stderr, here.change_stderr)
    assert (there.tokens, there.notes, there.name) == (here.tokens, here.notes, here.name)


def test_a_table_without_folds_lacks_only_standard_errors(small):
    table = TokenTable.from_rows(token_rows(small.found), facts(small.found))
    there, here = repredict(table, "drop=negative"), repredict(small.found, "drop=negative")
    assert abs(there.total - here.total) <= 1e-13 * abs(here.total)
    assert there.stderr is None
    assert here.stderr is not None
