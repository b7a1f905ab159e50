"""Every offline estimate on two and three ranks against one process, with shares of unequal size.

Scores must be the same bits: a rank's rows plus zeros. What is summed over rollouts is added in
another order, in fp64.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from entropy_experiments import (
    AdamGroup,
    Estimate,
    Objective,
    OptimizerState,
    UpdateBatch,
    compute_update_vector_adamw,
    curvature,
    first_order,
    first_order_by_part,
)
from entropy_experiments.attribution import whatif
from entropy_experiments.attribution.finite import finite_columns
from entropy_experiments.attribution.fisher import fisher_blocks
from entropy_experiments.attribution.ledger import entropy_ledger
from entropy_experiments.attribution.matrix import influence_matrix
from entropy_experiments.attribution.terms import line_directions
from entropy_experiments.attribution.tokens import token_influence
from entropy_experiments.distributed import ALONE, RankError, Ranks, across, announced
from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.measured import measured_many
from entropy_experiments.estimate.options import slope_estimand
from entropy_experiments.estimate.own_batch import OwnBatch, own_slopes
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.estimate.reward import reward_curvature, reward_slope
from entropy_experiments.estimate.support import Support
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import norm
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.sampling.rollout_files import RolloutStore
from entropy_experiments.types import Rollouts, Scores
from oracles.enumeration import all_rollouts
from oracles.processes import on_ranks
from oracles.tiny_models import tiny_model, tiny_tokenizer
from oracles.transformer import TransformerPolicy
from tolerances import INVARIANT

pytestmark = pytest.mark.invariant

PROMPTS, MICROBATCH, LR = 5, 2, 0.02
SIZES = [2, pytest.param(3, marks=pytest.mark.slow)]
ETAS = (0.02, 0.2)
MODES = ("jvp", "double_backward", "central", "reverse")
FORMS = ("to_go", "matched")
SHARE = 0.2
"""Of the work, beside a rank's own microbatches: checks that every rank makes."""


class Counting(TransformerPolicy):
    """Counts the rollouts that it is asked to score."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.scored = 0

    def score(self, params: Any, rollouts: Rollouts) -> Scores:
        self.scored += len(rollouts)
        return super().score(params, rollouts)


class World:
    """Five prompts with two or three rollouts each; thirteen in all, seven to learn from."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"prompts": PROMPTS, "horizon": 3}
        self.policy: Any = Counting(5, temperature=0.7, **options)
        self.trained: Any = Counting(5, temperature=1.0, **options)
        everything = all_rollouts(self.policy)
        generator = torch.Generator().manual_seed(3)
        order_N = torch.randperm(len(everything), generator=generator)
        kept = {p: (everything.prompt_N[order_N] == p).nonzero()[:, 0] for p in range(PROMPTS)}

        def rows(counts: tuple[int, ...], start: int) -> Rollouts:
            picked = [kept[p][start : start + n] for p, n in enumerate(counts)]
            return _plain(everything.take(order_N[torch.cat(picked)]))

        self.evaluation = rows((3, 2, 3, 2, 3), 0)
        rollouts = rows((2, 1, 1, 1, 2), 4)
        now_NS = score_all(self.trained, self.trained.params, rollouts, microbatch=64).logprob_NS
        noise_NS = torch.randn(2, *now_NS.shape, generator=generator, dtype=torch.float64)
        advantage_N = torch.randn(len(rollouts), generator=generator, dtype=torch.float64)
        self.batch = UpdateBatch(
            rollouts=rollouts,
            advantage_NS=advantage_N[:, None].expand(now_NS.shape),
            old_logprob_NS=now_NS + 0.3 * noise_NS[0],
            ref_logprob_NS=now_NS + 0.5 * noise_NS[1],
            reward_N=advantage_N,
        )
        self.reward_N = torch.randn(13, generator=generator, dtype=torch.float64)
        self.objective = Objective(clip_low=0.1, clip_high=0.15, beta=0.3, entropy_coef=0.2)
        state = {
            name: {
                "step": 3,
                "exp_avg": 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype),
                "exp_avg_sq": 0.1 * torch.rand(p.shape, generator=generator, dtype=p.dtype),
            }
            for name, p in self.policy.params.items()
        }
        group = AdamGroup(
            names=tuple(self.policy.params), lr=LR, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
        )
        self.optimizer = OptimizerState(groups=(group,), state=state)


def _plain(rollouts: Rollouts) -> Rollouts:
    """A sample, not the population, so that error bars are real."""
    return replace(rollouts, weight_N=None, share=1.0)


def _everything(thorough: bool) -> dict[str, Any]:
    w, speaks = World(), dict[str, Any](microbatch=MICROBATCH, repackings=0)
    policy, rollouts = w.policy, w.evaluation
    direction, _, stats = compute_update_vector_adamw(
        w.trained, w.batch, w.objective, w.optimizer, max_grad_norm=0.05, microbatch=MICROBATCH
    )
    out: dict[str, Any] = {f"step {name}": part for name, part in direction.parts.items()}
    base = score_all(policy, policy.params, rollouts, microbatch=MICROBATCH)
    out |= {"scores E": list(base), "scores U": list(stats.found.scores)}
    out |= {"loss": [stats.loss, stats.grad_norm, stats.found.microbatches]}
    out["level"] = entropy_level(policy, rollouts, microbatch=MICROBATCH, base=base, repackings=3)
    for mode in MODES if thorough else MODES[:1]:
        for form in FORMS if thorough else FORMS[:1]:
            found = first_order_by_part(policy, rollouts, direction, mode=mode, form=form, **speaks)
            out[f"slope {mode} {form}"] = [found.total, *found.lines.values()]
    out["baseline"] = first_order(policy, rollouts, direction, baseline=True, **speaks)
    out["curvature"] = curvature(policy, rollouts, direction, **speaks)
    changes = measured_many(policy, rollouts, {"v": direction}, ETAS, symmetric=True, **speaks)
    out["measured"] = list(changes.values())
    rewarded = (policy, rollouts, w.reward_N, direction)
    out["reward"] = [reward_slope(*rewarded, **speaks), reward_curvature(*rewarded, **speaks)]

    update = (w.trained, w.batch, w.objective)
    estimand = slope_estimand(policy, form="to_go")
    asked: dict[str, Any] = {"estimand": estimand, "microbatch": MICROBATCH}
    tokens = {
        mode: token_influence(policy, rollouts, *update, direction, mode=mode, **asked)
        for mode in (("jvp", "central") if thorough else ("jvp",))
    }
    for mode, found in tokens.items():
        out[f"tokens {mode}"] = [found.value_NS, found.fold_KNS, found.rollout_N]
    fold_N = rollouts.prompt_N % 2
    several: dict[str, Any] = {
        "block_bytes": 4 * 8 * sum(p.numel() for p in policy.params.values())
    }
    matrix = influence_matrix(
        policy,
        rollouts,
        *update,
        direction,
        extra=direction.parts,
        fold_N=fold_N,
        **several,
        **asked,
    )
    assert matrix.passes > 1
    out["matrix"] = [matrix.matrix_EN, *matrix.extra_EX.values()]
    out |= {f"g_H {k}": g for k, g in enumerate(matrix.g_K)}
    out["scored"] = [policy.scored, w.trained.scored]
    if not thorough:
        return out
    lines = line_directions(*update, direction, microbatch=MICROBATCH)
    out |= {f"line {name}": line for name, line in lines.items()}
    finite = finite_columns(policy, rollouts, lines, ETAS, grad_chunk=3, **asked)
    out["finite"] = [change.diagnostics["contribution_N"] for change in finite.values()]
    kernel = fisher_blocks(
        policy,
        rollouts,
        w.batch.rollouts,
        direction.preconditioner,
        centred=True,
        microbatch=MICROBATCH,
        **several,
    )
    out["fisher"] = list(kernel)
    book = entropy_ledger(
        policy, rollouts, *update, direction, momentum_decay=0.9, microbatch=MICROBATCH
    )
    out["ledger"] = [book.predicted, *book.lines.values()]
    confirmed = whatif.confirm(
        policy,
        rollouts,
        w.trained,
        tokens["jvp"],
        direction,
        w.optimizer,
        "drop=negative",
        max_grad_norm=0.05,
        **speaks,
    )
    out["what if"] = [confirmed.frozen, confirmed.recomputed, confirmed.measured]
    own = OwnBatch(batch=w.batch, objective=w.objective)
    gradient = stats.found.gradient
    out["own batch"] = list(
        own_slopes(w.trained, own, direction, gradient, mode="jvp", microbatch=MICROBATCH)
    )
    narrow: Any = TransformerPolicy(5, prompts=PROMPTS, horizon=3, top_p=0.9)
    support = Support(narrow, rollouts, MICROBATCH)
    out["support"] = [support._here_NS]
    out["scored"] = [policy.scored, w.trained.scored]
    return out


def _shared(thorough: bool) -> dict[str, Any]:
    with across(Ranks.all()):
        return _everything(thorough)


def _flat(found: Any) -> Tensor:
    """The numbers of an entry, one after another, in fp64."""
    if isinstance(found, Estimate):
        found = [found.value, found.stderr or 0.0]
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, list):
        return torch.cat([_flat(x) for x in found])
    return torch.as_tensor(found).detach().double().flatten()


def _gap(one: Any, other: Any) -> float:
    """Largest difference, relative to the largest value."""
    one_X, other_X = _flat(one), _flat(other)
    return float((one_X - other_X).abs().max() / one_X.abs().max())


CASES = [
    pytest.param(2, False, marks=pytest.mark.slow),
    pytest.param(2, True, marks=pytest.mark.slow),
    pytest.param(3, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("size", "thorough"), CASES)
def test_ranks_change_no_number(size, thorough):
    alone = _everything(thorough)
    for shared in on_ranks(size, _shared, thorough):
        assert shared.keys() == alone.keys()
        for name in alone.keys() - {"scored"}:
            assert _gap(alone[name], shared[name]) <= INVARIANT, name
        exact = {"scores E", "scores U", "support"} & alone.keys()
        assert len(exact) >= 2
        for name in exact:
            assert torch.equal(_flat(alone[name]), _flat(shared[name])), name
        for mine, whole, count in zip(shared["scored"], alone["scored"], (13, 7), strict=True):
            microbatches = ceil(ceil(count / MICROBATCH) / size)
            assert mine <= whole * (microbatches * MICROBATCH / count + SHARE)


def _unsummed() -> list[float]:
    with across(Ranks.all()):
        w = World()  # with its sums: log-probs that are none are refused
        with mock.patch.object(Ranks, "all_reduce", lambda self, local: list(local())):
            direction, *_ = compute_update_vector_adamw(
                w.trained, w.batch, w.objective, w.optimizer, microbatch=MICROBATCH
            )
            scores = score_all(w.policy, w.policy.params, w.evaluation, microbatch=MICROBATCH)
    return [norm(direction.gradient), float(scores.entropy_NS.sum())]


@pytest.mark.slow
def test_the_comparison_has_teeth():
    """Shares that are not summed are far from the whole."""
    whole = _unsummed()  # alone there is nothing to sum
    for shared in on_ranks(2, _unsummed):
        for part, all_of_it in zip(shared, whole, strict=True):
            assert abs(part - all_of_it) > 0.01 * abs(all_of_it)


PROBLEMS = [Problem(id=str(i), prompt="12345678"[: 1 + i] + "=", answer="") for i in range(5)]


def _drawn(folder: str | None) -> tuple[Rollouts, int]:
    """Three rollouts for each of five prompts, in five units; and tokens drawn on this rank."""
    tokens = 0

    def told(progress: Any) -> None:
        nonlocal tokens
        tokens = progress.tokens

    generator = SampleGenerator(
        SequenceProcessor(tiny_model(seed=0)),
        tiny_tokenizer(),
        max_new_tokens=12,
        batch_size=3,
        progress=told,
        store=None if folder is None else RolloutStore(folder),
    )
    with across(Ranks.all()):
        return generator.generate_evaluation_batch(PROBLEMS, group=3), tokens


def _assert_same(one: Rollouts, other: Rollouts) -> None:
    for name in ("tokens_NS", "response_NS", "prompt_N", "truncated_N", "behaviour_logprob_NS"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.text == other.text


def _drawn_twice(folder: str) -> list[tuple[Rollouts, int]]:
    """The same batch once more after one of its units was lost."""
    first, ranks = _drawn(folder), Ranks.all()
    units = sorted(Path(folder).glob("*.unit"))
    ranks.agree()
    if ranks.first:
        units[0].unlink()
    ranks.agree()
    return [first, _drawn(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_rollouts_do_not_depend_on_the_number_of_ranks(tmp_path, size):
    undisturbed, drawn = _drawn(None)
    shared = on_ranks(size, _drawn_twice, str(tmp_path))
    assert len(RolloutStore(tmp_path)) == 5
    for found, _ in (one for each in shared for one in each):
        _assert_same(found, undisturbed)
    first, again = ([tokens for _, tokens in one] for one in zip(*shared, strict=True))
    # Every token was drawn once, by one rank, and no rank drew nothing.
    assert sum(first) == drawn
    assert all(first)
    assert sum(tokens > 0 for tokens in again) == 1  # one unit was lost, one rank draws it


@pytest.mark.slow
def test_rollouts_that_nobody_keeps_are_exchanged():
    undisturbed, drawn = _drawn(None)
    shared = on_ranks(2, _drawn, None)
    assert sum(tokens for _, tokens in shared) == drawn
    for found, _ in shared:
        _assert_same(found, undisturbed)


class Refusing(TransformerPolicy):
    def score(self, params: Any, rollouts: Rollouts) -> Scores:
        scores = super().score(params, rollouts)
        # The longest prompt's rollouts are in the last microbatches: one rank's, or the other's.
        bad_N = rollouts.attention_NS.sum(1) > 2 * PROMPTS
        return Scores(scores.logprob_NS, scores.entropy_NS.masked_fill(bad_N[:, None], torch.nan))


def _refused() -> list[str]:
    w = World()
    policy: Any = Refusing(5, prompts=PROMPTS, horizon=3)
    one = w.evaluation.take((w.evaluation.attention_NS.sum(1) <= 2 * PROMPTS).nonzero()[:, 0])
    longest = w.evaluation.attention_NS.sum(1).argmax()[None]
    rollouts = _plain(w.evaluation.take(torch.cat([torch.arange(2), longest])))
    assert len(one) > 2
    said, theirs, ranks = [], [], Ranks.all()
    with across(ranks):
        for _ in range(2):  # what caught the refusal goes on, on every rank
            with pytest.raises(ValueError, match=r"gave entropy_NS = nan for rollout 2") as caught:
                score_all(policy, policy.params, rollouts, microbatch=1)
            assert announced(caught.value)
            said.append(str(caught.value))
            theirs.append(isinstance(caught.value, RankError))
        (total,) = ranks.all_reduce(lambda: [torch.ones(1)])
    return [*said, str(float(total)), str(theirs[-1])]


@pytest.mark.slow
def test_a_refusal_on_one_rank_is_the_same_refusal_on_all():
    one, other = on_ranks(2, _refused)
    assert one[:2] == other[:2]
    assert one[2] == other[2] == "2.0"
    assert sorted((one[3], other[3])) == ["False", "True"]


def test_a_share_is_computed_alone():
    class Two(Ranks):
        def __init__(self) -> None:
            super().__init__()
            self.size = 2

    with across(Two()) as ranks:
        seen = ranks.all_reduce(lambda: [torch.tensor(_current_size())])
        assert _current_size() == 2
    assert int(seen[0]) == 1
    assert _current_size() == ALONE.size == 1


def _current_size() -> int:
    from entropy_experiments.distributed import current

    return current().size
