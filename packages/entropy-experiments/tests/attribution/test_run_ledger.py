"""The ledger of a run against brute force, on a policy small enough to enumerate.

Twelve recorded AdamW steps after three that nobody recorded: two groups with rates and decays of
their own, gradient clipping, a KL term, an entropy bonus, and every batch used twice, so that the
second step of each is stale. torch's own optimizer makes the steps. The truth about a token is slow
and obvious: its own gradient, times what Adam makes of it in every later step, dotted with the
gradient of the exact entropy (of the exact reward) at both ends of that step.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from entropy_experiments import Objective, UpdateBatch, loss_gradient
from entropy_experiments.attribution import run_ledger as module
from entropy_experiments.attribution.run_ledger import (
    ENTROPY,
    REWARD,
    TANGENT,
    LedgerStep,
    RunLedger,
    columns_of,
    momentum_shares,
    run_ledger,
    slopes_at,
    step_shares,
)
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.types import Direction
from entropy_experiments.update.optimizer import read_state
from entropy_experiments.update.recursion import first_moment, step_recursion
from oracles.enumeration import all_rollouts, exact_entropy, plain_scores
from oracles.transformer import TransformerPolicy
from tolerances import EXACT

pytestmark = pytest.mark.exact

EARLIER, STEPS = 3, 12
RATES = (0.004, 0.001)
OBJECTIVE = Objective(loss="grpo", beta=0.1, entropy_coef=0.02)
MAX_NORM = 0.05
OPTIONS = EstimatorOptions(microbatch=64)
KINDS = ("adamw", "adam", "amsgrad", "maximize", "scheduled", "sgd", "sgd_nesterov")


def at(policy: Any, params: Any) -> Any:
    """The same policy with other parameters."""
    other = copy.copy(policy)
    other.params = {name: theta.detach().clone() for name, theta in params.items()}
    return other


@dataclass(frozen=True)
class Run:
    steps: list[LedgerStep]
    evaluations: list[Any]
    gains: list[dict[str, torch.Tensor]]
    """lr / ((1 - b1^n) den) of every step, from torch's state after it."""
    clips: list[float]
    reward_N: torch.Tensor


def batches(policy: Any, seed: int, count: int) -> list[UpdateBatch]:
    """A new batch every second step: the second has old log-probs of the parameters before."""
    generator = torch.Generator().manual_seed(seed)
    listed = all_rollouts(policy)
    out: list[UpdateBatch] = []
    for _ in range(count):
        picked = torch.randperm(len(listed), generator=generator)[:5]
        rollouts = replace(listed.take(picked), weight_N=None, share=1.0)
        shape = tuple(rollouts.tokens_NS.shape)
        noise = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
        with torch.no_grad():
            now_NS, _ = plain_scores(policy, policy.params, rollouts)
        out.append(
            UpdateBatch(
                rollouts=rollouts, advantage_NS=noise[0], ref_logprob_NS=now_NS + 0.3 * noise[1]
            )
        )
    return out


def optimizer_of(kind: str, leaves: dict[str, torch.Tensor], scale: float) -> Any:
    head = [leaf for name, leaf in leaves.items() if name.startswith("head")]
    body = [leaf for name, leaf in leaves.items() if not name.startswith("head")]
    low, high = (scale * rate for rate in RATES)
    if kind.startswith("sgd"):
        nesterov = kind == "sgd_nesterov"
        more = {"momentum": 0.8, "dampening": 0.0 if nesterov else 0.3, "nesterov": nesterov}
        more = {} if kind == "sgd_plain" else more
        groups = [
            {"params": head, "lr": 20 * low, "weight_decay": 0.1},
            {"params": body, "lr": 20 * high, "weight_decay": 0.3},
        ]
        return torch.optim.SGD(groups, **more)
    groups = [
        {"params": head, "lr": low, "weight_decay": 0.1},
        {"params": body, "lr": high, "weight_decay": 0.5, "betas": (0.8, 0.99)},
    ]
    torch_class = torch.optim.Adam if kind == "adam" else torch.optim.AdamW
    return torch_class(
        groups, betas=(0.9, 0.95), amsgrad=kind == "amsgrad", maximize=kind == "maximize"
    )


@cache
def recorded(
    kind: str = "adamw", seed: int = 0, scale: float = 1.0, steps: int = STEPS, stretch: float = 0.0
) -> Run:
    """`stretch`: after every step the parameters move on by so much, which nothing rebuilds."""
    policy = TransformerPolicy(seed, vocabulary=3, horizon=3)
    leaves = {n: p.detach().clone().requires_grad_() for n, p in policy.params.items()}
    optimizer = optimizer_of(kind, leaves, scale)
    drawn = batches(policy, seed + 1, (EARLIER + steps) // 2 + 1)
    listed = all_rollouts(policy)
    reward_N = torch.rand(
        len(listed), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    made: list[Any] = []
    gains: list[Any] = []
    clips: list[float] = []
    old_NS = None
    for step in range(EARLIER + steps):
        if kind == "scheduled":
            for group in optimizer.param_groups:
                group.setdefault("initial", group["lr"])
                group["lr"] = group["initial"] * (1 + step % 4) / 3
        here = at(policy, leaves)
        batch = drawn[step // 2]
        if step % 2 == 0:
            with torch.no_grad():
                old_NS, _ = plain_scores(here, here.params, batch.rollouts)
        batch = replace(batch, old_logprob_NS=old_NS)
        gradient = loss_gradient(here, batch, OBJECTIVE, microbatch=64).gradient
        for name, leaf in leaves.items():
            leaf.grad = gradient[name].clone()
        state = read_state(optimizer, leaves)
        size = torch.nn.utils.clip_grad_norm_(list(leaves.values()), MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            for leaf in leaves.values():
                leaf += stretch * torch.sin(leaf)
        if step < EARLIER:
            continue
        clips.append(min(1.0, MAX_NORM / (float(size) + 1e-6)))
        gains.append({name: _gain(optimizer, leaf) for name, leaf in leaves.items()})
        made.append((here, batch, state))
    ends = [*(here for here, *_ in made), at(policy, leaves)]
    last = read_state(optimizer, leaves)
    states = [state for *_, state in made]
    ledger_steps = [
        LedgerStep(
            trained=here,
            after=ends[t + 1].params,
            batch=batch,
            objective=OBJECTIVE,
            optimizer=state,
            max_grad_norm=MAX_NORM,
            later=states[t + 1] if t + 1 < steps else last,
        )
        for t, (here, batch, state) in enumerate(made)
    ]
    evaluations = [(end, all_rollouts(end), reward_N) for end in ends]
    return Run(ledger_steps, evaluations, gains, clips, reward_N)


def _gain(optimizer: Any, leaf: torch.Tensor) -> torch.Tensor:
    """From torch's own state after the step."""
    group = next(g for g in optimizer.param_groups if any(p is leaf for p in g["params"]))
    if "betas" not in group:
        return torch.full_like(leaf.detach(), group["lr"])
    state, (b1, b2) = optimizer.state[leaf], group["betas"]
    count = float(state["step"])
    square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    den = (square / (1 - b2**count)).sqrt() + group["eps"]
    return group["lr"] / ((1 - b1**count) * den)


def short_of(kind: str) -> dict[str, int]:
    """AdamW's two kinds are followed for twelve steps, the others for fewer."""
    return {} if kind in ("adamw", "amsgrad") else {"steps": 4}


@cache
def ledger_of(kind: str = "adamw", **options: Any) -> RunLedger:
    run = recorded(kind, **options)
    return run_ledger(run.steps, run.evaluations, OPTIONS, tangent=True, within_prompts=False)


def exact_gradients(run: Run, quantity: str) -> list[dict[str, torch.Tensor]]:
    """By autograd of the exact value at every checkpoint."""
    out = []
    for policy, rollouts, reward_N in run.evaluations:
        leaves = {n: p.detach().requires_grad_() for n, p in policy.params.items()}
        if quantity == "entropy":
            value = exact_entropy(policy, leaves)
        else:
            l_NS, _ = plain_scores(policy, leaves, rollouts)
            value = (l_NS.sum(1).exp() / policy.prompts * reward_N).sum()
        grads = torch.autograd.grad(value, tuple(leaves.values()), allow_unused=True)
        out.append(
            {
                name: torch.zeros_like(leaf) if g is None else g
                for (name, leaf), g in zip(leaves.items(), grads, strict=True)
            }
        )
    return out


def dot(a: Any, b: Any) -> float:
    return sum(float((x * b[name]).sum()) for name, x in a.items())


def b1_of(name: str) -> float:
    return 0.9 if name.startswith("head") else 0.8


@pytest.mark.parametrize("columns", [ENTROPY, REWARD, (TANGENT,)], ids=["H", "R", "tangent"])
@pytest.mark.parametrize("kind", KINDS)
def test_lines_add_up_to_the_sum_of_first_order_changes(kind, columns):
    """Also where something else moves the parameters, which is the line `uncovered`."""
    short = short_of(kind)
    for stretch in (0.0, 1e-4):
        ledger = ledger_of(kind, stretch=stretch, **short)
        lines = ledger.lines(*columns)
        assert sum(lines.values()) == pytest.approx(ledger.total(*columns), abs=EXACT)
        assert abs(lines["momentum_before_record"]) > 1e-8
        assert (abs(lines["uncovered"]) > 1e-7) == bool(stretch)
        assert abs(lines["decay"]) > 1e-8
        for shares in ledger.shares:
            for name in columns:
                tokens = float(shares.tokens[name].sum())
                assert tokens == pytest.approx(shares.batch[name], abs=EXACT)


def test_the_total_is_the_path_of_exact_gradients():
    run, ledger = recorded(), ledger_of()
    g_H, g_R = (exact_gradients(run, quantity) for quantity in ("entropy", "reward"))
    for g, columns in ((g_H, ENTROPY), (g_R, REWARD)):
        expected = 0.0
        for t, step in enumerate(run.steps):
            change = {n: step.after[n] - p for n, p in step.trained.params.items()}
            expected += 0.5 * (dot(g[t], change) + dot(g[t + 1], change))
        assert ledger.total(*columns) == pytest.approx(expected, abs=EXACT)
    assert ledger.path.value == pytest.approx(ledger.total(*ENTROPY), abs=EXACT)


def token_gradients(step: LedgerStep) -> list[tuple[int, int, dict[str, torch.Tensor]]]:
    """(row, column, gradient) of every counted token's share of the loss."""
    policy, batch = step.trained, step.batch
    leaves = {n: p.detach().requires_grad_() for n, p in policy.params.items()}
    scores = plain_scores(policy, leaves, batch.rollouts)
    loose = [x_NS.detach().requires_grad_() for x_NS in scores]
    loss = step.objective(module.Scores(*loose), batch)
    dl_NS, dh_NS = torch.autograd.grad(loss, loose)
    out = []
    for row, column in batch.counted_NS.nonzero().tolist():
        own = (
            dl_NS[row, column] * scores[0][row, column]
            + dh_NS[row, column] * scores[1][row, column]
        )
        grads = torch.autograd.grad(
            own, tuple(leaves.values()), retain_graph=True, allow_unused=True
        )
        gradient = {
            name: torch.zeros_like(leaf) if g is None else g
            for (name, leaf), g in zip(leaves.items(), grads, strict=True)
        }
        out.append((row, column, gradient))
    return out


def brute_force(run: Run, slopes: list[Any], s: int, gradient: Any, kind: str = "adamw") -> float:
    """A share of batch s's gradient, followed through every later step of the window."""
    total = 0.0
    for t in range(s, len(run.steps)):
        for name, g in gradient.items():
            rho, alpha = (
                (0.8, 0.7 if kind == "sgd" else 1.0)
                if "sgd" in kind
                else (b1_of(name), 1 - b1_of(name))
            )
            entered = run.clips[s] * g * (-1.0 if kind == "maximize" else 1.0)
            change = run.gains[t][name] * alpha * rho ** (t - s) * entered
            if kind == "sgd_nesterov":  # lr (d + rho m)
                now = run.gains[t][name] * entered if t == s else 0.0
                change = now + rho * change
            total -= float((slopes[t][name] * change).sum())
    return total


@pytest.mark.parametrize("quantity", ["entropy", "reward"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_and_batch_is_its_share_of_every_later_step(kind, quantity):
    short = short_of(kind)
    run, ledger = recorded(kind, **short), ledger_of(kind, **short)
    g, last = exact_gradients(run, quantity), len(run.steps) - 1
    path = [{n: 0.5 * (g[t][n] + g[t + 1][n]) for n in g[t]} for t in range(last + 1)]
    columns = ENTROPY if quantity == "entropy" else REWARD
    for s in (0, last // 2, last):
        tokens_NS = sum(ledger.shares[s].tokens[name] for name in columns)
        batch = 0.0
        for row, column, gradient in token_gradients(run.steps[s]):
            expected = brute_force(run, path, s, gradient, kind)
            assert float(tokens_NS[row, column]) == pytest.approx(expected, abs=EXACT)
            batch += expected
        whole = loss_gradient(run.steps[s].trained, run.steps[s].batch, OBJECTIVE).gradient
        assert brute_force(run, path, s, whole, kind) == pytest.approx(batch, abs=EXACT)
        share = sum(ledger.shares[s].batch[name] for name in columns)
        assert share == pytest.approx(batch, abs=EXACT)
        assert abs(batch) > 1e-6


def test_without_momentum_there_is_no_moment_to_compare():
    """SGD stores none: the step is the gradient, and shows whether it is training's."""
    ledger = ledger_of("sgd_plain", steps=4)
    assert [one.gradient_distance for one in ledger.shares] == [None] * 4
    assert all(one.step_distance < EXACT for one in ledger.shares)
    lines = ledger.lines(*ENTROPY)
    assert sum(lines.values()) == pytest.approx(ledger.total(*ENTROPY), abs=EXACT)
    assert lines["momentum_before_record"] == 0
    assert abs(lines["uncovered"]) < EXACT
    assert abs(lines["batches"]) > 1e-6


def test_the_tangent_is_the_sum_of_one_step_predictions():
    run, ledger = recorded(), ledger_of()
    expected = 0.0
    for (policy, rollouts, _), step in zip(run.evaluations, run.steps):
        change = {n: step.after[n] - p for n, p in policy.params.items()}
        direction = Direction(parts={"observed": change}, lr=1.0)
        expected += first_order(policy, rollouts, direction, OPTIONS).value
    assert ledger.total(TANGENT) == pytest.approx(expected, abs=EXACT)
    assert sum(ledger.lines(TANGENT).values()) == pytest.approx(expected, abs=EXACT)
    told = sum(one.tangent.value for one in ledger.slopes[:-1])
    assert told == pytest.approx(expected, abs=EXACT)


def test_errors_of_path_and_tangent_are_of_third_and_second_order():
    """Halving every rate divides them by 8 and by 4 in the end.

    The path is near 8 from the first halving on. The tangent's steps err with both signs, and in
    part cancel: at full rate its sum is a third of their sizes, and the first ratios are -8.1 and
    1.6. Each of them goes to 4, and so does the sum.
    """
    errors = [errors_at(0.5**halvings) for halvings in range(2, 6)]
    path, tangent = (
        [before[one] / after[one] for before, after in pairwise(errors)] for one in range(2)
    )
    assert all(6 < ratio < 10 for ratio in path)
    for ratios, order in ((path, 8), (tangent, 4)):
        gaps = [abs(ratio - order) for ratio in ratios]
        assert gaps == sorted(gaps, reverse=True)  # nearer with every halving
        assert gaps[-1] < 0.05 * order


def errors_at(scale: float) -> tuple[float, float]:
    """Of path and tangent, from the exact change."""
    run, ledger = recorded(scale=scale, steps=6), ledger_of(scale=scale, steps=6)
    first, last = (
        float(exact_entropy(run.evaluations[t][0], run.evaluations[t][0].params)) for t in (0, -1)
    )
    return ledger.total(*ENTROPY) - (last - first), ledger.total(TANGENT) - (last - first)


def test_the_memo_is_what_momentum_does_with_slope_rate_and_denominator_held():
    """Step by step, with the bias correction that each later step has; teeth: K held is 6 % off."""
    run, ledger = recorded(), ledger_of()
    g_end = exact_gradients(run, "entropy")[-1]
    moment = first_moment(run.steps[-1].later, run.steps[-1].after)
    expected = all_held = 0.0
    count = EARLIER + STEPS
    for steps_on in range(1, 400):
        for name, m in moment.items():
            b1 = b1_of(name)
            gain = run.gains[-1][name] * (1 - b1**count) / (1 - b1 ** (count + steps_on))
            decayed = b1**steps_on * m
            expected -= float((g_end[name] * gain * decayed).sum())
            all_held -= float((g_end[name] * run.gains[-1][name] * decayed).sum())
    unfinished = sum(ledger.shares[-1].unfinished[name] for name in ENTROPY)
    assert unfinished == pytest.approx(expected, abs=EXACT)
    assert abs(unfinished - all_held) > 0.05 * abs(unfinished)


def test_a_moment_that_differs_from_the_recorded_batches_is_uncovered():
    """A gradient that training used and the batch does not give lives on in the stored moment."""
    run = recorded()
    steps = [replace(step) for step in run.steps]
    at_step = 4
    other = steps[at_step].optimizer
    state = {
        name: {**entry, "exp_avg": entry["exp_avg"] + 0.01 * torch.cos(entry["exp_avg"] * 50)}
        for name, entry in other.state.items()
    }
    changed = replace(other, state=state)
    steps[at_step] = replace(steps[at_step], optimizer=changed)
    steps[at_step - 1] = replace(steps[at_step - 1], later=changed)
    ledger = run_ledger(steps, run.evaluations, OPTIONS)
    lines = ledger.lines(*ENTROPY)
    assert sum(lines.values()) == pytest.approx(ledger.total(*ENTROPY), abs=EXACT)
    assert abs(sum(ledger.shares[at_step - 1].uncovered[n] for n in ENTROPY)) > 1e-7
    # Momentum hides it in the step; the gradient's own distance shows it.
    distance = ledger.shares[at_step - 1].gradient_distance
    assert distance is not None
    assert distance > 0.05
    assert ledger.shares[at_step - 1].step_distance < EXACT


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_the_momentum_of_one_step_is_the_batches_before_it(kind):
    """The last seven of them by token, and what precedes these as a line."""
    run, ledger, t = recorded(kind), ledger_of(kind), 10
    step = run.steps[t]
    gradient = loss_gradient(step.trained, step.batch, OBJECTIVE).gradient
    rebuilt = step_recursion(
        step.trained.params, gradient, step.optimizer, max_grad_norm=MAX_NORM
    ).parameters
    g = ledger.slopes[t].gradients
    carried = {
        column: {n: one.rho * one.gain * g[column][n] for n, one in rebuilt.items()}
        for column in ENTROPY
    }
    g_H = exact_gradients(run, "entropy")[t]
    line = -sum(
        float((g_H[n] * one.gain * one.rho * one.before).sum()) for n, one in rebuilt.items()
    )
    earlier = list(reversed(run.steps[t - 7 : t]))
    shares = list(momentum_shares(earlier, carried))
    parts = [sum(float(one.tokens[n].sum()) for n in ENTROPY) for one in shares]
    decay = sum(one.decay[n] for one in shares for n in ENTROPY)
    before = sum(shares[-1].momentum_before[n] for n in ENTROPY)
    assert sum(parts) + decay + before == pytest.approx(line, abs=EXACT)
    assert abs(line) > 1e-5
    for back, part in enumerate(parts, start=1):
        s = t - back
        g_s = loss_gradient(run.steps[s].trained, run.steps[s].batch, OBJECTIVE).gradient
        expected = 0.0
        for name, value in g_s.items():
            b1 = b1_of(name)
            moment = (1 - b1) * b1**back * run.clips[s] * value
            expected -= float((g_H[name] * rebuilt[name].gain * moment).sum())
        assert part == pytest.approx(expected, abs=EXACT)


MISTAKES = {
    "dropped power": ("rho", 1.0),
    "wrong bias correction": ("gain", None),
    "costate off by one": ("carried", None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_brute_force_has_teeth(mistake, monkeypatch):
    """Each mistake moves a batch's number by far more than the tolerance of the tests above."""
    run = recorded()
    right = ledger_of()

    if mistake == "costate off by one":
        # the later step's gain with this step's slope
        true_costate = module._costate

        def costate(rebuilt, slope, carried, name):
            out = true_costate(rebuilt, slope, carried, name)
            return out if carried is None else dict(carried[name])

        monkeypatch.setattr(module, "_costate", costate)
    else:

        def recursion(*args, **options):
            step = step_recursion(*args, **options)
            count = next(iter(args[2].state.values()))["step"]
            parameters = {
                name: replace(one, rho=1.0)
                if mistake == "dropped power"
                else replace(one, gain=one.gain * (1 - one.rho ** (float(count) + 1)))
                for name, one in step.parameters.items()
            }
            return replace(step, parameters=parameters)

        monkeypatch.setattr(module, "step_recursion", recursion)
        if mistake == "dropped power":
            monkeypatch.setattr(module, "_unfinished", lambda *args: 0.0)
    wrong = run_ledger(run.steps, run.evaluations, OPTIONS)
    for s in (0, 5):
        batch, truth = (
            sum(one.shares[s].batch[name] for name in ENTROPY) for one in (wrong, right)
        )
        assert abs(batch - truth) > 1e4 * EXACT
    lines = wrong.lines(*ENTROPY)
    assert abs(sum(lines.values()) - wrong.total(*ENTROPY)) > 1e4 * EXACT


def test_the_walk_is_the_same_step_by_step():
    """What the pipeline does between two stores is what `run_ledger` does in memory."""
    run, ledger = recorded(), ledger_of()
    t = STEPS - 1
    columns = columns_of(ledger.slopes[t], tangent=True)
    again = step_shares(run.steps[t], columns, ledger.slopes[t + 1].gradients, None, microbatch=3)
    for name, value_NS in ledger.shares[t].tokens.items():
        assert torch.allclose(again.tokens[name], value_NS, atol=1e-13, rtol=0)


@pytest.mark.parametrize("rewards", [False, True])
def test_passes_over_the_rollouts(rewards):
    """Entropy: E and U are each scored twice, once for a gradient (3 forwards with its backward)
    and once with derivatives along one or two directions (at most 5). So at most 8 forwards of
    E + U; the reward adds a gradient over E and two directions, no pass, over U."""
    run = recorded()
    step, scored = run.steps[-1], {"E": 0, "U": 0}

    def counting(policy: Any, name: str) -> Any:
        other = copy.copy(policy)
        other.repeatable = True

        def score(params: Any, rollouts: Any) -> Any:
            scored[name] += len(rollouts)
            return policy.score(params, rollouts)

        other.score = score
        return other

    slopes = []
    for policy, rollouts, reward_N in run.evaluations[-2:]:
        watched, paid_N = counting(policy, "E"), reward_N if rewards else None
        slopes.append(
            slopes_at(watched, rollouts, paid_N, None, step.after, replace(OPTIONS, mode="jvp"))
        )
    each = len(run.evaluations[-1][1])
    assert scored["E"] == (3 if rewards else 2) * 2 * each
    watched = replace(step, trained=counting(step.trained, "U"))
    step_shares(watched, slopes[0].gradients, slopes[1].gradients, None, mode="jvp")
    assert scored["U"] == 2 * len(step.batch.rollouts)


def test_what_does_not_fit_is_refused():
    run, ledger = recorded(), ledger_of()
    with pytest.raises(ValueError, match=r"Got 12 steps and 12 evaluations; expected one or more"):
        run_ledger(run.steps, run.evaluations[:-1], OPTIONS)
    some = [*run.evaluations[:-1], (*run.evaluations[-1][:2], None)]
    with pytest.raises(ValueError, match=r"Some evaluations have rewards and some have none"):
        run_ledger(run.steps, some, OPTIONS)
    here, there = ledger.slopes[0].gradients, ledger.slopes[1].gradients
    half = {"dH_a": there["dH_a"]}
    with pytest.raises(ValueError, match=r"after the step have columns \['dH_a'\]; expected"):
        step_shares(run.steps[0], here, half, None)
    with pytest.raises(ValueError, match=r"The costate has columns \['dH_a'\]; expected"):
        step_shares(run.steps[0], here, there, half)
    policy, rollouts, _ = run.evaluations[0]
    with pytest.raises(ValueError, match="Neither the parameters before nor those after"):
        slopes_at(policy, rollouts, None, None, None, OPTIONS)
    stale = replace(rollouts, behaviour_logprob_NS=torch.zeros(rollouts.tokens_NS.shape))
    with pytest.raises(ValueError, match="the path's error is known for fresh ones alone"):
        slopes_at(policy, stale, None, None, policy.params, OPTIONS)
