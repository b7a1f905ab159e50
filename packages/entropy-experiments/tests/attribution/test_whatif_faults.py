"""What-ifs that cannot be read, or that the batch cannot answer, say what to write instead."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from typer.testing import CliRunner

from checkout import DOCS
from entropy_experiments import Objective, UpdateBatch
from entropy_experiments.attribution.counterfactual import Recorded
from entropy_experiments.attribution.interventions import applied
from entropy_experiments.attribution.token_table import NEEDED, TokenTable
from entropy_experiments.attribution.whatif import entropy_budget, parse, recomputed_direction
from entropy_experiments.attribution.whatif_grammar import FORMS, SELECTORS
from entropy_experiments.attribution.whatif_text import COLUMNS, PARSERS
from entropy_experiments.attribution.whatif_text import WORDS as SELECTOR_WORDS
from entropy_experiments.cli import app
from entropy_experiments.types import Direction, Rollouts, Scores

pytestmark = pytest.mark.faults

DOCS = DOCS


def recorded(**changes) -> Recorded:
    """Two rollouts of three response tokens."""
    tokens_NS = torch.arange(10).reshape(2, 5)
    inside_NS = torch.ones(2, 5, dtype=torch.bool)
    response_NS = inside_NS.clone()
    response_NS[:, :2] = False
    rollouts = Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=inside_NS,
        response_NS=response_NS,
        prompt_N=torch.tensor([0, 1]),
    )
    scores = Scores(-torch.ones(2, 5, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64))
    advantage_NS = torch.tensor([[1.0], [-1.0]]).expand(2, 5)
    return Recorded(
        objective=Objective(),
        scores=scores,
        batch=UpdateBatch(rollouts=rollouts, advantage_NS=advantage_NS, **changes),
        lr=1e-3,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"Cannot read the what-if ''. Expected one of: drop=SELECTOR; "),
        ("drop", r"Cannot read the what-if 'drop'"),
        ("drop=", r"Cannot read the what-if 'drop='"),
        ("dropp=negative", r"Cannot read the what-if 'dropp=negative'.*kl_cov=RATIO"),
        ("lr=1e-3;", r"Cannot read the what-if ''"),
        ("drop_rollouts=3,x", r"Got 'x' in 'drop_rollouts=3,x'; expected a rollout's number"),
        ("drop_rollouts=-1", r"Got '-1' in .*; expected a rollout's number such as 3, counted"),
        ("drop_rollouts=3:0.5", r"Got '3:0.5' in 'drop_rollouts=3:0.5'; expected no factor"),
        ("drop_rollouts=3,3", r"3 is twice in 'drop_rollouts=3,3'; expected each place once"),
        ("reweight_rollouts=3", r"Got '3' in 'reweight_rollouts=3'; expected PLACE:FACTOR"),
        ("reweight_rollouts=3:-1", r"Got '-1' in .*; expected a finite number of at least 0"),
        ("drop_tokens=3", r"Got '3' in 'drop_tokens=3'; expected ROLLOUT.K such as 3.5"),
        ("drop=p<0.1:2", r"Got 'p<0.1:2' in 'drop=p<0.1:2'; expected a selector alone"),
        ("reweight=p<0.1", r"Got 'p<0.1' in 'reweight=p<0.1'; expected SELECTOR:FACTOR"),
        ("reweight=k>=0:1e308", r"Got '1e308' in .*; expected a number up to 1e\+30"),
        ("clip_high=much", r"Got 'much' in 'clip_high=much'; expected a finite number of at least"),
        ("beta=-1", r"Got '-1' in 'beta=-1'; expected a finite number of at least 0"),
        ("entropy_coef=nan", r"Got 'nan' in 'entropy_coef=nan'; expected a finite number\."),
        ("lr=0", r"Got '0' in 'lr=0'; expected a finite number above 0"),
        ("clip_cov=0", r"Got '0' in 'clip_cov=0'; expected a finite number above 0"),
        ("clip_cov=2", r"Got ratio '2' in 'clip_cov=2'; expected a share of tokens, up to 1"),
        ("clip_cov=0.1:1", r"Cannot read the what-if 'clip_cov=0.1:1'"),
        ("clip_cov=0.1:5:1", r"Got bounds 5 and 1 in .*; expected LOW < HIGH"),
        ("clip_cov=0.1:1:5:0.5", r"Got seed '0.5' in .*; expected a whole number"),
        ("kl_cov=0.1:1:2", r"Cannot read the what-if 'kl_cov=0.1:1:2'"),
        ("kl_cov=0.1:-1", r"Got '-1' in .*; expected a finite number of at least 0"),
    ],
)
def test_text_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("p", r"Cannot read 'p' in the selector 'p'. Expected COLUMN SIGN NUMBER such as p<0.1"),
        ("p<", r"Cannot read 'p<' in the selector"),
        ("p<0.1&", r"Cannot read '' in the selector 'p<0.1&'"),
        ("p=0.1", r"Cannot read 'p=0.1' in the selector.*signs <= >= == != < >"),
        ("0.1<p", r"Cannot read '0.1<p' in the selector"),
        ("0<p<1", r"Unknown column '0' in the selector '0<p<1'"),
        ("surprise<1", r"Unknown column 'surprise' in the selector 'surprise<1'; expected one of"),
        ("P<0.1", r"Unknown column 'P'.*advantage, probability, .*influence, A, p, h"),
        ("p<small", r"Got 'small' in 'p<small'; expected a finite number"),
        ("p<inf", r"Got 'inf' in 'p<inf'; expected a finite number"),
        ("p<0.1|A<0", r"Got '0.1\|A<0' in 'p<0.1\|A<0'; expected a finite number"),
        ("(p<0.1)", r"Cannot read '\(p<0.1\)'"),
        ("p<__import__('os')", r"Got \"__import__\('os'\)\" in .*; expected a finite number"),
    ],
)
def test_selectors_that_cannot_be_read(selector, message):
    with pytest.raises(ValueError, match=message):
        parse(f"drop={selector}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop_rollouts=2", r"Rollout 2 is not in the update batch; expected 0 to 1"),
        ("reweight_tokens=5.0:2", r"Rollout 5 is not in the update batch; expected 0 to 1"),
        ("drop_tokens=1.3", r"Rollout 1 has no response token 3; expected 0 to 2"),
        ("drop=reward>0", r"reads 'reward', and the update batch has no reward_N"),
        ("drop=influence<0", r"reads 'influence', which is not known here. Give the token table"),
        ("beta=0.04", r"beta=0.04 needs the reference policy's log-probs.*has no ref_logprob_NS"),
        ("lr=1; lr=2", r"lr is given twice; expected one value for it"),
        ("clip_high=1; clip_high=2", r"clip_high is given twice"),
    ],
)
def test_what_the_batch_cannot_answer(text, message):
    with pytest.raises(ValueError, match=message):
        applied(parse(text), recorded())


def test_what_needs_nothing_more():
    """Its neighbours of the errors above are fine."""
    applied(parse("beta=0; drop_tokens=1.2; drop=p<1; drop=h>0"), recorded())
    made = applied(parse("drop=correct"), recorded(reward_N=torch.tensor([1.0, 0.0])))
    assert made.weight_NS.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    reinforce = replace(recorded(), objective=Objective(loss="reinforce"))
    made = applied(parse("clip_high=0.28"), reinforce)
    assert made.notes == ("reinforce has no ratio: a clip range changes nothing",)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((1.0, 0.0, 0.0), r"The entropy budget is 0; expected a change in nats"),
        ((0.0, 1.0, 1.0), r"The slope is 0: to first order no learning rate"),
        ((nan, 0.0, 1.0), r"slope is nan; expected a finite number"),
        ((1.0, inf, 1.0), r"curvature is inf; expected a finite number"),
        (
            (-2.0, 1.0, 0.1),
            r"budget is \+0.1 nats, but this update lowers entropy \(slope -2 .*other sign \(-0.1",
        ),
        ((2.0, 1.0, -0.1), r"budget is -0.1 nats, but this update raises entropy"),
    ],
)
def test_budgets_that_make_no_sense(numbers, message):
    with pytest.raises(ValueError, match=message):
        entropy_budget(*numbers)


def test_an_observed_step_has_no_frozen_counterpart():
    params = {"a": torch.ones(2)}
    direction = Direction(parts={"observed": params}, lr=1.0)
    with pytest.raises(ValueError, match=r"no preconditioner.*compute_update_vector_adamw"):
        recomputed_direction(params, params, direction, lr=1.0)


def rows() -> tuple[dict[str, list], dict]:
    """A table of one rollout with two tokens, by hand."""
    columns = {name: [0.0, 0.0] for name in NEEDED}
    columns |= {name: [0, 0] for name in ("rollout", "prompt", "microbatch", "token_id")}
    columns |= {"position": [1, 2], "counted": [True, True], "advantage": [1.0, 1.0]}
    columns |= {"logprob": [-1.0, -2.0], "entropy": [1.0, 1.0], "weight": [1.0, 1.0]}
    columns |= {"old_logprob": [None, None], "ref_logprob": [nan, nan]}
    columns |= {"coefficient_logprob": [-0.5, -0.5], "slope_logprob": [1.0, 2.0]}
    facts = {
        "objective": {"loss": "dapo"},
        "lr": 0.1,
        "clip_factor": 1.0,
        "baseline": {},
        "tokens": 2,
        "share_K": [0.5, 0.5],
    }
    return columns, facts


def test_tables_that_are_not_whole():
    columns, facts = rows()
    table = TokenTable.from_rows(columns, facts)
    assert table.batch.old_logprob_NS is None
    assert table.batch.ref_logprob_NS is None
    assert table.share_K is None  # no slopes by fold were saved
    with pytest.raises(ValueError, match=r"lacks the columns \['slope_entropy', 'weight'\]"):
        TokenTable.from_rows(
            {k: v for k, v in columns.items() if k not in ("weight", "slope_entropy")}, facts
        )
    with pytest.raises(ValueError, match=r"has 1 rows; expected 2, one per response token"):
        TokenTable.from_rows({k: v[:1] for k, v in columns.items()}, facts)
    with pytest.raises(ValueError, match=r"coefficients differ by .*facts belong to another table"):
        TokenTable.from_rows(columns, {**facts, "objective": {"loss": "reinforce"}})


def test_help_and_tutorial_have_every_form_that_is_read():
    """The table, `--help` and the reader are three texts; this holds them together."""
    assert {form.key for form in FORMS} == set(PARSERS)
    table = (DOCS / "tutorial_influence.md").read_text(encoding="utf-8")
    shown = CliRunner().invoke(app, ["influence", "--help"]).stdout
    for form in FORMS:
        assert f"| `{form.text}` |" in table
        assert f"{form.text} " in shown
    for name in (*COLUMNS, *SELECTOR_WORDS):
        assert name in "".join(SELECTORS)
    for text, full in (
        ("clip_cov=0.002", "clip_cov=0.002:1:5:0"),
        ("kl_cov=0.002", "kl_cov=0.002:1"),
    ):
        assert [one.name for one in parse(text)] == [full]
        assert full in shown
        assert full in table


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.key)
def test_examples_of_the_help_are_read(form):
    examples = re.findall(rf"{form.key}=[^\s,]+(?:,\d[^\s,]*)*", form.meaning)
    assert examples
    for text in examples:
        assert parse(text)
