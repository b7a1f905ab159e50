"""Words that match their numbers: agreement, long-run shares, and what counts as correct."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from entropy_experiments.attribution import groups
from entropy_experiments.attribution.counterfactual import Recorded
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.report.html import books
from entropy_experiments.report.verdict import _agreement, verdict
from entropy_experiments.types import AdamGroup, OptimizerState, Rollouts, UpdateBatch

pytestmark = pytest.mark.naive


@dataclass(frozen=True)
class Number:
    """As much of an Estimate as the words read."""

    value: float
    half: float
    trusted: bool = True

    @property
    def interval(self):
        return self.value - self.half, self.value + self.half

    def covers(self, truth):
        return self.interval[0] <= truth <= self.interval[1]

    def __add__(self, other):
        return Number(self.value + other.value, self.half + other.half)


def words(predicted, measured, half, *, noise=0.0, bend=0.0, reach=1.0, trusted=True, sure=True):
    """Of a step at learning rate 0.01 whose paired difference has an interval of +- half.

    `sure`: the prediction's own interval excludes 0.
    """
    return _agreement(
        SimpleNamespace(
            predicted=SimpleNamespace(total=Number(predicted, 0.0 if sure else 2 * abs(predicted))),
            change=Number(measured, noise),
            difference=Number(predicted - measured, half),
            bend=Number(bend, 0.0, trusted),
            linear_range=reach,
            lr=0.01,
        )
    )


def test_it_agrees_when_the_whole_interval_is_within_a_tenth_of_the_change():
    assert words(-0.0103, -0.01, 0.0006).startswith("agrees with the measurement, to within 10%")
    assert "agrees with" not in words(-0.0103, -0.01, 0.0008)


def test_a_change_below_its_own_noise_is_no_disagreement():
    assert "below its own noise" in words(-0.0002, 0.0001, 0.0005, noise=0.0004)


def test_no_percentage_of_a_change_below_its_own_noise():
    """However far apart the two are, and however many linear ranges the step is long."""
    unsure = {"noise": 4e-4, "reach": 0.001}
    said = words(-0.0002, 0.0001, 1e-5, sure=False, **unsure)
    assert said == "agrees with the measurement, whose change is below its own noise"
    said = words(-0.001, 0.0001, 1e-5, sure=True, **unsure)
    assert said.startswith("does not agree with the measurement (whose change is below its own")
    assert "%" not in said


def test_no_linear_range_of_a_slope_lost_in_its_noise(probed):
    found, _ = probed
    sure = replace(found, bend=replace(found.bend, given_reasons=(), own_reasons=()))
    assert "holds within 10 % up to learning rate 0.25" in "\n".join(
        verdict(replace(sure, linear_range=0.25))
    )
    text = "\n".join(verdict(replace(sure, linear_range=None)))
    assert "how far the straight line holds is not known: the predicted change is below" in text
    change = replace(found.change, interval=(-1.0, 1.0))
    lost = replace(found, measured={**found.measured, found.lr: change})
    assert "of the change" not in "\n".join(verdict(lost)).partition("  difference")[2][:120]


@pytest.mark.parametrize(("interval", "reach"), [((-0.02, -0.01), 0.15), ((-0.04, 0.01), None)])
def test_the_curve_has_a_linear_range_where_its_slope_is_known(interval, reach):
    slope = {"value": -0.015, "interval": interval}
    curve = books.curve(0.1, slope, {"value": 0.001, "interval": (0.0, 0.001)}, [])
    assert curve["linear_range"] == (reach and pytest.approx(reach))
    assert curve["unsure"] == (reach is None)
    assert books.curve(0.1, slope, None, [], linear_range=0.15)["linear_range"] == reach
    for doubtful in ({"interval": None}, {"interval": (0.0, 0.001), "trusted": False}):
        curve = books.curve(0.1, slope, {"value": 0.001, **doubtful}, [])
        assert curve["linear_range"] is None


def test_a_wide_interval_decides_nothing():
    said = words(-0.013, -0.01, 0.005)
    assert said.startswith(
        "cannot be distinguished from the measurement, nor shown to agree within 10%"
    )
    assert "data.evaluation_prompts" in said


def test_a_step_too_long_for_a_straight_line_does_not_agree():
    """However wide the interval: 41 % off at thirteen times the linear range."""
    said = words(-0.0141, -0.01, 0.006, reach=0.01 / 13)
    assert said == (
        "does not agree with the measurement (41% off): the step is too long for a straight "
        "line, 13 times its linear range"
    )


def test_a_miss_is_its_curvature_or_more():
    missed = (-0.013, -0.01, 0.001)
    assert words(*missed, bend=0.003).endswith("it misses by its curvature")
    assert "its curvature does not account for that" in words(*missed, bend=0.0)


def test_a_narrow_interval_does_not_make_a_small_rest_large():
    """Two orders are 0.4 % off: the paired interval excludes 0, and the miss is the curvature."""
    said = words(-0.013, -0.01, 1e-6, bend=0.00304)
    assert said == "does not agree with the measurement (30% off): it misses by its curvature"
    assert "two orders do not suffice" in words(-0.013, -0.01, 1e-6, bend=0.0019)
    assert "two orders do not suffice" in words(-0.013, -0.01, 1e-6, bend=0.0041)


def test_a_curvature_that_is_not_trusted_explains_nothing():
    said = words(-0.0141, -0.01, 0.001, bend=0.0041, reach=0.001, trusted=False)
    assert said.endswith("(41% off), and its curvature is not trusted to say why")


def test_no_measured_change_at_all():
    assert words(-0.001, 0.0, 0.0005) == (
        "does not agree with the measurement (whose change is below its own noise): its curvature "
        "does not account for that, two orders do not suffice here"
    )


def test_coupled_decay_lives_on_in_momentum_as_the_gradient_does(probed):
    """`run` and `influence` have one rule: Adam's L2 decay is divided by 1 - b1, AdamW's is not."""
    found, _ = probed
    lines = found.predicted.lines
    decay, gradient = lines["decay"].value, lines["gradient"].value
    apart = replace(found, momentum_decay=0.9, coupled_decay=False)
    assert apart.gradient_eventual.value == pytest.approx(10 * gradient)
    joined = replace(found, momentum_decay=0.9, coupled_decay=True)
    for got, part in ((apart, decay), (joined, 10 * decay)):
        assert [x.value for x in got.baseline_eventual] == pytest.approx(
            [part, part + 10 * gradient]
        )


def test_the_eventual_share_of_a_total_lost_in_its_noise_is_withheld(probed):
    found, _ = probed
    lines = found.predicted.lines
    gradient = lines["gradient"]

    def eventual(gradient):
        """What is printed where this is the gradient's line."""
        predicted = replace(found.predicted, lines={**lines, "gradient": gradient})
        text = "\n".join(verdict(replace(found, predicted=predicted)))
        share, credited, _ = text.partition("long-run share: ")[2].partition(
            " (momentum is credited"
        )
        assert credited
        return share

    lost = replace(gradient, value=0.01 * gradient.stderr)
    assert eventual(lost) == "no share given, the total's interval contains 0"
    assert eventual(replace(gradient, value=1e3 * gradient.stderr)).endswith("%")


def group(name, **changes):
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1} | changes
    return AdamGroup(names=(name,), amsgrad=False, maximize=False, decoupled=True, **settings)


def test_groups_with_another_b1_are_refused():
    optimizer = OptimizerState(state={}, groups=(group("a"), group("b", betas=(0.5, 0.999))))
    with pytest.raises(ValueError, match=r"groups have b1 \[0\.5, 0\.9\]; expected one for all"):
        momentum_of(optimizer)


def rewarded(*rewards):
    n = len(rewards)
    rollouts = Rollouts(
        tokens_NS=torch.zeros(n, 3, dtype=torch.int64),
        attention_NS=torch.ones(n, 3, dtype=torch.bool),
        response_NS=torch.tensor([[False, True, True]] * n),
        prompt_N=torch.zeros(n, dtype=torch.int64),
    )
    return UpdateBatch(
        rollouts=rollouts,
        advantage_NS=torch.zeros(n, 3),
        reward_N=torch.tensor(rewards, dtype=torch.float32),
    )


@pytest.mark.parametrize(
    ("rewards", "correct"),
    [
        ((1.1, 0.1, 1.1, 0.0), [True, False, True, False]),  # a right format is not an answer
        ((1.0, 1.0), [True, True]),
        ((0.0, 0.0), [False, False]),
        ((-1.0, 1.0), [False, True]),
        ((0.999999999, 0.4), [True, False]),  # weights of functions round
        ((float("nan"), 1.0), [False, True]),
        ((float("nan"), 0.0), [False, False]),
    ],
    ids=str,
)
def test_correct_is_the_highest_reward_if_that_is_a_full_one(rewards, correct):
    assert rewarded(*rewards).correct_N.tolist() == correct


@pytest.mark.parametrize(
    ("rewards", "best"),
    [
        ((0.198, 0.1), [True, False]),
        ((-1.0, 0.0), [False, True]),
        ((-1.0, -1.0), [False, False]),
        ((float("nan"), 0.5), [False, True]),
    ],
    ids=str,
)
def test_the_best_of_a_bad_batch_is_not_correct(rewards, best):
    batch = rewarded(*rewards)
    assert batch.correct_N is None
    assert batch.best_N.tolist() == best
    labels_N1, names = groups._correctness(SimpleNamespace(batch=batch))
    assert names == ["lower rewards", "best reward of the batch"]
    assert labels_N1[:, 0].bool().tolist() == best
    labels_N1, names = groups._correctness(SimpleNamespace(batch=rewarded(1.0, 0.2)))
    assert (names, labels_N1[:, 0].tolist()) == (["incorrect", "correct"], [1, 0])
    recorded = Recorded(objective=None, scores=None, batch=batch, lr=0.1)
    with pytest.raises(ValueError, match=r"no reward of the update batch is a full one.*by reward"):
        recorded.column("correct")


def test_without_rewards_nothing_is_correct_or_wrong():
    assert replace(rewarded(1.0), reward_N=None).correct_N is None
