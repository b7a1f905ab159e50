"""Each classic mistake is made on purpose, and must be caught by the tests beside this file.

A mutation replaces one function inside the package; the very checks of test_enumerated and
test_arbitrary_weights are then run and must fail.
"""

import pytest
import torch

from entropy_experiments.estimate import curvature as curvature_module
from entropy_experiments.estimate import first_order as first_order_module
from entropy_experiments.estimate import ratio as ratio_module
from entropy_experiments.numerics import entropy as entropy_module
from estimate.test_arbitrary_weights import (
    test_slope_is_the_derivative_of_its_paired_measurement as check_weighted,
)
from estimate.test_enumerated import test_curvature as check_curvature
from estimate.test_enumerated import test_level as check_level
from estimate.test_enumerated import test_measured_change as check_measured
from estimate.test_enumerated import test_slope as check_slope
from oracles.cases import arbitrary_weights, case

pytestmark = pytest.mark.exact


@pytest.fixture
def oracle():
    return case("transformer", 0, 0.7)


@pytest.fixture
def weighted(oracle):
    return oracle.policy, arbitrary_weights(oracle.rollouts, 0), oracle.direction


def caught(check, *args):
    """The check fails by its own assertion, not by a crash."""
    with pytest.raises(AssertionError, match="tolerance"):
        check(*args)


def test_unmutated_code_passes(oracle, weighted):
    for form, paired in (("matched", "snis"), ("to_go", "per_decision")):
        check_slope(oracle, form, "token")
        check_measured(oracle, paired, "token")
        check_curvature(oracle, form, "token")
        check_weighted(weighted, form)


@pytest.mark.parametrize("form", ["matched", "to_go"])
def test_dropped_state_term(monkeypatch, oracle, form):
    monkeypatch.setattr(first_order_module, "_slope", lambda d, s, n, a, b: d / b)
    caught(check_slope, oracle, form, "token")


@pytest.mark.parametrize("form", ["matched", "to_go"])
def test_forgotten_denominator(monkeypatch, oracle, form):
    monkeypatch.setattr(first_order_module, "_slope", lambda d, s, n, a, b: (d + s) / b)
    caught(check_slope, oracle, form, "token")


def test_forgotten_denominator_of_the_curvature(monkeypatch, oracle):
    monkeypatch.setattr(
        curvature_module,
        "curvature_of_ratio",
        lambda a, b, da, db, dda, ddb: dda / b - a * ddb / b**2,
    )
    caught(check_curvature, oracle, "to_go", "token")


@pytest.mark.parametrize("form", ["matched", "to_go"])
def test_flipped_sign(monkeypatch, oracle, form):
    monkeypatch.setattr(first_order_module, "_slope", lambda d, s, n, a, b: (d - s + a / b * n) / b)
    caught(check_slope, oracle, form, "token")


def test_flipped_sign_of_the_weights(monkeypatch, oracle):
    monkeypatch.setattr(ratio_module, "snis_logweights", lambda r_NS: -r_NS.sum(1))
    caught(check_measured, oracle, "snis", "token")


def test_off_by_one_shift(monkeypatch, oracle):
    """The state *at* a token instead of the one before it."""
    true_scores = entropy_module.response_scores

    def late(hidden_NSD, head_VD, rollouts, **options):
        return true_scores(hidden_NSD.roll(-1, 1), head_VD, rollouts, **options)

    monkeypatch.setattr("oracles.transformer.response_scores", late)
    caught(check_level, oracle, "token")
    caught(check_slope, oracle, "to_go", "token")


def test_current_token_included(monkeypatch, weighted):
    """Prefix weights that already contain the token: right in expectation, wrong in fact."""
    monkeypatch.setattr(ratio_module, "per_decision_logweights", lambda r_NS: r_NS.cumsum(1))
    caught(check_weighted, weighted, "to_go")


def test_whole_rollout_weights(monkeypatch, weighted):
    """Weighing every token by the whole response: again only arbitrary weights tell."""
    monkeypatch.setattr(
        ratio_module,
        "per_decision_logweights",
        lambda r_NS: r_NS.sum(1, keepdim=True).expand_as(r_NS),
    )
    caught(check_weighted, weighted, "to_go")


def test_enumeration_alone_would_have_missed_the_last_two(monkeypatch, oracle):
    """Why test_arbitrary_weights exists."""
    monkeypatch.setattr(ratio_module, "per_decision_logweights", lambda r_NS: r_NS.cumsum(1))
    check_slope(oracle, "to_go", "token")


def test_wrong_entropy_derivative(monkeypatch, oracle):
    """Our own head: forgetting that in h = -sum p log p the p moves, too."""

    def forgetful(hidden_TD, head_VD, bias_V, token_T):
        logp_TV = torch.nn.functional.linear(hidden_TD, head_VD, bias_V).log_softmax(-1)
        drawn_T = logp_TV.gather(1, token_T[:, None])[:, 0]
        return drawn_T, -(logp_TV.detach().exp() * logp_TV).sum(-1)

    monkeypatch.setattr(entropy_module, "head_scores", forgetful)
    check_level(oracle, "token")
    caught(check_slope, oracle, "to_go", "token")


def test_forgotten_temperature(monkeypatch, oracle):
    """Right values, and slopes of logits before their temperature."""
    true_scores = entropy_module.head_scores

    def hot(hidden_TD, *others):
        still_TD = hidden_TD.detach()
        return true_scores(still_TD + 0.7 * (hidden_TD - still_TD), *others)

    monkeypatch.setattr(entropy_module, "head_scores", hot)
    check_level(oracle, "token")
    caught(check_slope, oracle, "to_go", "token")
