"""The words and tables made of summary.json."""

from __future__ import annotations

import copy
import json
import re

import pytest
import typer
from typer.testing import CliRunner

from entropy_experiments.cli import report as report_verb
from entropy_experiments.report.figures import style
from entropy_experiments.report.influence_tables import in_context, influence_report, printable
from report.test_linearity import with_manifest, write_run

pytestmark = pytest.mark.naive


def estimate(value, stderr=None, interval=None, why_not=()):
    return {"value": value, "stderr": stderr, "interval": interval, "why_not": list(why_not)}


def line(this_step, eventual, stderr):
    return {"this_step": this_step, "eventual": eventual, "stderr": stderr}


def token(place, **changes):
    return {
        "rollout": place,
        "k": 2 * place,
        "value": -1e-4 / place,
        "stderr": 1e-5,
        "probability": 0.5,
        "advantage": 1.25,
        "before": "3 + 4 = ",
        "text": f"t{place}",
        "after": " so the answer is 7",
        **changes,
    }


ENTROPY = {
    "lines": {
        "momentum": line(-0.006, 0.0, 5e-4),
        "decay": line(1e-6, 1e-6, 1e-7),
        "positive": line(-0.005, -0.05, 4e-4),
        "negative": line(0.001, 0.01, 3e-4),
    },
    "predicted": estimate(-0.01, 0.001, [-0.012, -0.008]),
    "curvature": estimate(0.0003, 0.0002, [-0.0001, 0.0007]),
    "measured": estimate(-0.0098, 0.0011, [-0.012, -0.0076]),
    "unexplained": estimate(-0.0001, 0.0002, [-0.0005, 0.0003]),
    "notes": [],
}
REWARD = {
    "lines": {
        "momentum": line(0.011, 0.0, 1e-3),
        "decay": line(0.0, 0.0, 1e-9),
        "positive": line(0.02, 0.2, 2e-3),
        "negative": line(0.003, 0.03, 1e-3),
    },
    "predicted": estimate(0.034, 0.003, [0.028, 0.04]),
    "curvature": None,
    "measured": estimate(0.033, 0.003, [0.027, 0.039]),
    "unexplained": None,
    "notes": ["no curvature here"],
}
SUMMARY = {
    "checkpoint": "step_10",
    "update": {"real": True, "rollouts": 16, "tokens": 348},
    "lr": 0.004,
    "evaluations": [
        {
            "name": "eval_00",
            "kind": "evaluation",
            "estimand": {"unit": "token"},
            "level": estimate(0.2442),
            "ledger": {"entropy": ENTROPY, "reward": REWARD},
            "cancellation": {"ratio": 3.21, "withheld": False},
            "reliability": 0.834,
            "rollout_reliability": None,
            "groups": {
                "correctness": {
                    "incorrect": {"value": 0.001, "stderr": 3e-4, "tokens": 70, "stable": False},
                    "correct": {"value": -0.005, "stderr": 4e-4, "tokens": 130, "stable": True},
                }
            },
            "ranked": {"destroying": [token(place) for place in range(1, 13)], "creating": []},
            "leave_one_out": [
                {
                    "rollout": 3,
                    "influence": -4e-4,
                    "first_order": estimate(-0.0097, 0.001, [-0.0117, -0.0077]),
                    "measured": estimate(-0.0095),
                    "difference": estimate(-3e-4),
                }
            ],
            "what_if": [
                {
                    "name": "drop_rollouts=3,7",
                    "prediction": {
                        "total": -0.008,
                        "recorded": -0.01,
                        "change": 0.002,
                        "change_stderr": 2e-4,
                        "changed_tokens": 41,
                        "notes": ["a note of its own"],
                    },
                    "confirmation": {
                        "frozen": estimate(-0.008),
                        "recomputed": estimate(-0.0082),
                        "curvature": estimate(0.0002),
                        "measured": estimate(-0.0081, 0.001, [-0.01, -0.0061]),
                        "rest": estimate(-0.0001, 1e-4, [-0.0003, 0.0001]),
                        "agrees": True,
                        "accounted": True,
                    },
                }
            ],
            "entropy_budget": {
                "budget": -0.005,
                "linear": 0.002,
                "curved": None,
                "notes": ["it turns"],
            },
            "notes": ["of this batch"],
            "doubts": ["stale rollouts"],
        }
    ],
    "notes": ["training may have had dropout"],
    "assumed": {"beta": 0.0},
    "not_verifiable": ["lora_alpha"],
}


@pytest.fixture
def summary():
    return copy.deepcopy(SUMMARY)


def row(lines, name):
    (found,) = [text for text in lines if text.strip().startswith(name)]
    return found


def test_the_answer_comes_first(summary):
    lines = influence_report(summary)
    assert lines[0] == (
        "The update that training made after step_10, 16 rollouts, 348 tokens, at learning rate "
        "0.004:"
    )
    assert lines[1].startswith("  ASSUMED, not read")
    assert lines[2] == "  entropy now      0.2442 nats per token"
    assert lines[3] == "  predicted change -0.01 nats (95% -0.012 to -0.008)"
    assert lines[4] == "  measured change  -0.0098 nats (95% -0.012 to -0.0076)"


def test_a_hypothetical_update_is_called_so(summary):
    summary["update"]["real"] = False
    assert influence_report(summary)[0].startswith("A hypothetical update from step_10")


def test_entropy_and_reward_stand_side_by_side(summary):
    lines = influence_report(summary)
    positive = row(lines, "tokens with A > 0").split()[5:]
    assert positive == [
        *("-5.00e-03", "-5.00e-02", "4.0e-04", "+50%"),  # the share is the entropy's
        *("+2.00e-02", "+2.00e-01", "2.0e-03"),
    ]
    assert row(lines, "momentum").split()[4] == "+60%"
    assert row(lines, "weight decay").split()[5] == "none"
    assert row(lines, "tokens with A < 0").split()[8] == "-10%"
    assert row(lines, "curvature").split() == ["curvature", "+3.00e-04", "2.0e-04", "-", "-"]
    heads = [text for text in lines if "this step" in text]
    assert len(heads) == 1
    assert heads[0].count("eventual") == 2
    titles = lines[lines.index(heads[0]) - 1]
    share, reward = heads[0].index("share"), heads[0].rindex("this step")
    assert titles.index("entropy, nats") < share < reward < titles.index("expected reward") + 15


def test_the_columns_are_aligned_and_fit_a_terminal(summary):
    lines = influence_report(summary)
    at = next(i for i, text in enumerate(lines) if "this step" in text)
    table = lines[at : at + 9]
    ends = [text.index("this step") + len("this step") for text in table[:1]]
    assert {text[ends[0] - 1] for text in table[1:]} <= set("0123456789-")
    assert {text[ends[0]] for text in table} == {" "}
    assert max(map(len, table)) <= 100


def test_a_distribution_that_training_did_not_sample_from_stands_above(summary):
    note = "training sampled with top_k = 5; entropy here is of the full softmax at temperature 1"
    first, second = influence_report({**summary, "notes": [note]})[:2]
    assert first.startswith("The update")
    assert second == f"  T{note[1:]}."


def test_without_rewards_there_is_one_book(summary):
    summary["evaluations"][0]["ledger"]["reward"] = None
    lines = influence_report(summary)
    assert not any("reward" in text for text in lines)
    assert row(lines, "momentum").split() == [
        *("momentum", "-6.00e-03", "+0.00e+00", "5.0e-04", "+60%")
    ]


def test_what_is_left_is_judged_by_its_interval_and_its_size(summary):
    assert row(influence_report(summary), "unexplained entropy").endswith("+0.0003: nothing")
    ledger = summary["evaluations"][0]["ledger"]["entropy"]
    ledger["unexplained"] = estimate(-0.0000255, 1e-6, [-0.000028, -0.000023])
    told = row(influence_report(summary), "unexplained entropy")
    assert told.endswith("-2.3e-05: 0.3% of the change, so two orders suffice")
    ledger["unexplained"] = estimate(-0.002, 1e-4, [-0.0022, -0.0018])
    assert "outside the range where two orders suffice" in row(
        influence_report(summary), "unexplained entropy"
    )
    ledger["unexplained"]["interval"] = None
    assert "nothing can be said" in row(influence_report(summary), "unexplained entropy")


def test_the_best_of_a_bad_batch_is_told_by_reward(summary):
    found = summary["evaluations"][0]["groups"]
    one = {"value": -0.005, "stderr": 4e-4, "tokens": 130, "stable": True}
    found["correctness"] = {"lower rewards": one, "best reward of the batch": one}
    lines = influence_report(summary)
    assert "By reward (this batch's tokens, nats):" in lines
    assert not any("correct" in line for line in lines)


def test_shares_are_withheld_where_parts_cancel(summary):
    summary["evaluations"][0]["cancellation"] = {"ratio": 31.0, "withheld": True}
    lines = influence_report(summary)
    assert not any("%" in text for text in lines if text.strip().startswith("momentum"))
    told = row(lines, "Cancellation")
    assert "sum of |parts| / |total| = 31." in told
    assert "withheld" in told
    assert "withheld" not in row(influence_report(SUMMARY), "Cancellation")
    summary["evaluations"][0]["cancellation"] = {"ratio": None, "withheld": True}
    assert "their sum is 0. Shares" in row(influence_report(summary), "Cancellation")


def test_no_share_of_a_total_lost_in_its_error_bar(summary):
    summary["evaluations"][0]["ledger"]["entropy"]["predicted"]["interval"] = [-0.03, 0.01]
    lines = influence_report(summary)
    assert "%" not in row(lines, "momentum")
    assert not any("share" in text for text in lines if "this step" in text)


def test_reliability_and_distrust_are_told(summary):
    lines = influence_report(summary)
    assert row(lines, "Reliability").endswith("tokens 0.83, rollouts undefined.")
    summary["evaluations"][0]["ledger"]["entropy"]["measured"]["why_not"] = ["ESS 3 of 64"]
    assert "The measured change is NOT trusted: ESS 3 of 64." in influence_report(summary)
    assert "Doubt: stale rollouts." in lines


@pytest.mark.parametrize(("found", "warned"), [(0.49, True), (None, True), (0.51, False)])
def test_unreliable_ranks_are_called_so(summary, found, warned):
    summary["evaluations"][0]["reliability"] = found
    lines = influence_report(summary)
    assert any("would rank other tokens" in text for text in lines) == warned


def test_groups(summary):
    lines = influence_report(summary)
    at = lines.index("By correctness (this batch's tokens, nats):")
    assert lines[at + 1].split() == [
        *("incorrect", "+1.000e-03", "+-", "3e-04", "70", "tokens", "sign", "unsure")
    ]
    assert lines[at + 2].split()[-2:] == ["130", "tokens"]


def test_of_many_groups_the_largest_are_shown_in_their_order(summary):
    groups = {
        str(i): {"value": i * 1e-3, "stderr": None, "tokens": 1, "stable": True} for i in range(20)
    }
    summary["evaluations"][0]["groups"] = {"rollout": groups}
    lines = influence_report(summary)
    at = lines.index("By rollout (this batch's tokens, nats):")
    shown = [text.split()[0] for text in lines[at + 1 : at + 13]]
    assert shown == [str(i) for i in range(8, 20)]
    assert lines[at + 13] == "  and 7 smaller ones, +2.800e-02 together"


def test_ten_tokens_in_their_context(summary):
    lines = influence_report(summary)
    at = lines.index("The 10 most entropy-destroying tokens, >>marked<< in their context:")
    assert lines[at + 1].split()[:2] == ["1.", "-1.00e-04"]
    assert "rollout 1, token 2" in lines[at + 1]
    assert lines[at + 2].strip() == "3 + 4 = >>t1<< so the answer is 7"
    assert "rollout 10, token 20" in lines[at + 19]
    assert not any(">>t11<<" in text for text in lines)


def test_no_stable_token_is_said(summary):
    summary["evaluations"][0]["ranked"]["destroying"] = []
    assert (
        "No token is destroying entropy with a sign that all of E agrees on."
        in influence_report(summary)
    )


def test_context_is_cut_and_made_printable():
    long = token(1, before="b" * 100, after="\n\x1b[31m" + "a" * 100, text="\t")
    shown = in_context(long)
    assert shown.startswith("..." + "b" * 28 + ">>\\t<<\\n\\x1b[31m")
    assert shown.endswith("a...")
    assert printable("⏎ é 数\r") == "⏎ é 数\\r"


def test_what_if_confirmed(summary):
    lines = influence_report(summary)
    told = row(lines, "drop_rollouts=3,7")
    assert "predicted -0.008 nats instead of -0.01, a difference of +0.002 +- 2e-04" in told
    assert "41 tokens changed" in told
    assert "    a note of its own" in lines
    assert "    the whole step, made and measured: -0.0081 nats (95% -0.01 to -0.0061)" in lines
    assert "    its prediction is inside the measured interval: confirmed, as a whole" in lines


def test_an_effect_that_did_not_come_is_not_confirmed_as_a_whole(summary):
    confirmation = summary["evaluations"][0]["what_if"][0]["confirmation"]
    confirmation["change"] = estimate(0.0001, 1e-4, [-0.0001, 0.0003])
    confirmation["effect"] = "not as predicted (the steps bend)"
    lines = influence_report(summary)
    assert any("effect NOT as predicted (the steps bend)" in text for text in lines)
    assert not any("confirmed, as a whole" in text for text in lines)
    assert (
        "    its prediction is inside the measured interval, but its effect is not confirmed (see "
        "above)" in lines
    )


def test_trust_and_the_step_certificate_are_printed(summary):
    for name in ("predicted", "measured"):
        summary["evaluations"][0]["ledger"]["entropy"][name]["trusted"] = True
    summary["update"]["certified"] = {"step_distance": 1e-6, "certificate": "to rounding"}
    lines = influence_report(summary)
    assert "The predicted change is trusted." in lines
    assert "The measured change is trusted." in lines
    assert "Step certificate: to rounding." in lines
    del summary["update"]["certified"]["certificate"]  # as an earlier version wrote it
    assert any(
        text.startswith("Step certificate: the step rebuilt here is 1e-06 of its size away")
        for text in influence_report(summary)
    )


@pytest.mark.parametrize(
    ("accounted", "words"), [(True, ", explained by"), (False, "NOT explained by")]
)
def test_what_if_that_was_not_confirmed_says_why(summary, accounted, words):
    summary["evaluations"][0]["what_if"][0]["confirmation"] |= {
        "agrees": False,
        "accounted": accounted,
    }
    lines = influence_report(summary)
    assert row(lines, "its prediction is outside").endswith(words)
    told = row(lines, "measured - predicted")
    assert told.endswith("denominator and clip -0.0002, curvature +0.0002, rest -0.0001")
    assert not any(": confirmed" in text for text in lines)


@pytest.mark.parametrize(
    ("beyond", "accounted", "words"),
    [
        (True, True, "inside the measured interval, but not confirmed"),
        (False, False, "inside the measured interval, but NOT explained by"),
        (True, False, "inside the measured interval, but NOT explained by"),
    ],
)
def test_inside_a_wide_interval_is_not_enough(summary, beyond, accounted, words):
    summary["evaluations"][0]["what_if"][0]["confirmation"] |= {
        "beyond_linear": beyond,
        "accounted": accounted,
    }
    lines = influence_report(summary)
    assert row(lines, "its prediction is").endswith(words)
    assert not any(": confirmed" in text for text in lines)
    assert any("beyond the linear range: curvature or rest" in text for text in lines) == beyond


@pytest.mark.parametrize(
    "effect",
    [
        "as predicted",
        "not as predicted (Adam divides by the new gradient's size)",
        "too noisy to tell",
        None,
    ],
)
def test_the_measured_effect_is_told_where_there_is_one(summary, effect):
    summary["evaluations"][0]["what_if"][0]["confirmation"] |= {
        "change": estimate(0.0017, 2e-4, [0.0013, 0.0021]),
        "effect_agrees": None,
        "effect": effect,
    }
    lines = influence_report(summary)
    told = row(lines, "effect ")
    said = (effect or "unknown (no interval)").replace("not as", "NOT as")
    assert told.strip().startswith(f"effect {said}: predicted +0.002, measured +0.0017 nats")
    # What was asked for comes before the whole step, which is mostly the step as it was.
    assert lines.index(told) < lines.index(row(lines, "the whole step, made and measured"))


@pytest.mark.parametrize(("agrees", "words"), [(True, "as"), (False, "NOT as")])
def test_the_effect_in_a_summary_without_words(summary, agrees, words):
    summary["evaluations"][0]["what_if"][0]["confirmation"] |= {
        "change": estimate(0.0017, 2e-4, [0.0013, 0.0021]),
        "effect_agrees": agrees,
    }
    told = row(influence_report(summary), "effect ")
    assert told.strip().startswith(f"effect {words} predicted: ")


def test_where_error_bars_come_from_is_said_once(summary):
    assert not any("E's prompts" in text and "+-" in text for text in influence_report(summary))
    (evaluation,) = summary["evaluations"]
    for share_K, words in (
        ([0.4, 0.6], "+- below is a standard error from 2 halves of E's prompts"),
        ([0.25] * 4, "+- below is a standard error from 4 parts of E's prompts."),
        ([1.0], "No +- below: E's prompts are in one fold."),
    ):
        evaluation["table"] = {"share_K": share_K}
        lines = influence_report(summary)
        (at,) = [i for i, text in enumerate(lines) if text.startswith(words)]
        assert lines[at + 1].startswith("By correctness")
    alone = influence_report(summary, sections=("tokens",))
    assert sum("E's prompts" in text for text in alone) == 1


def test_a_budget_without_curvature_claims_none(summary):
    summary["evaluations"][0]["entropy_budget"] |= {"curvature_known": False}
    told = row(influence_report(summary), "To change the entropy")
    assert told.endswith("learning rate 0.002 by the slope alone")


def test_what_if_without_an_interval_or_a_confirmation(summary):
    summary["evaluations"][0]["what_if"][0]["confirmation"]["agrees"] = None
    assert "    no interval, so nothing is confirmed" in influence_report(summary)
    summary["evaluations"][0]["what_if"][0]["confirmation"] = None
    assert not any("measured:" in text for text in influence_report(summary))


def test_budget_notes_and_assumptions(summary):
    lines = influence_report(summary)
    assert (
        "To change the entropy by -0.005 nats: learning rate 0.002 by the slope alone, none with "
        "curvature" in lines
    )
    assert "  it turns" in lines
    assert "Note: training may have had dropout." in lines
    assert "Note: of this batch." in lines
    assert lines[1].startswith("  ASSUMED, not read from any file")
    assert lines[1].endswith("beta = 0.0")
    assert lines[-1] == "Not verifiable from the files: lora_alpha."


KERNEL = {
    "eta": 0.004,
    "centred": False,
    "correlation": 0.98764,
    "relative_gap": 0.123,
    "moved": [
        {
            "rollout": 7,
            "predicted": -0.428,
            "measured": -0.473,
            "contributors": [{"rollout": i, "value": -0.07 + 0.01 * i} for i in range(5)],
        }
    ],
}


def test_the_kernel_is_told(summary):
    summary["evaluations"][0]["fisher"] = KERNEL
    lines = influence_report(summary)
    at = next(i for i, text in enumerate(lines) if text.startswith("Fisher kernel"))
    assert lines[at].endswith("the gradient part of the step at eta 0.004:")
    assert lines[at + 1] == (
        "  predicted against measured: correlation 0.9876, they differ by 12% of the measured"
    )
    assert lines[at + 2] == (
        "  evaluation rollout 7: predicted -0.428, measured -0.473; most by update rollouts "
        "0 (-0.07), 1 (-0.06), 2 (-0.05)"
    )
    assert not any("Fisher" in text for text in influence_report(SUMMARY))


def test_a_kernel_that_moves_nothing(summary):
    nothing = {**KERNEL, "correlation": None, "relative_gap": None, "moved": []}
    summary["evaluations"][0]["fisher"] = nothing
    assert "  predicted against measured: nothing moved" in influence_report(summary)


def test_questions_without_an_answer_are_told_with_the_reason(summary):
    (evaluation,) = summary["evaluations"]
    evaluation["fisher"] = {"error": "No P."}
    evaluation["what_if"] = [{"name": "beta=0.1", "error": "No reference."}]
    evaluation["leave_one_out"] = [{"rollout": 3, "error": "A group of one."}]
    evaluation["entropy_budget"] = {"budget": 0.01, "error": "The other sign."}
    lines = influence_report(summary)
    for told in (
        "Fisher kernel: no answer. No P.",
        "  beta=0.1: no answer. No reference.",
        "  without rollout 3: no answer. A group of one.",
        "To change the entropy by +0.01 nats: no answer. The other sign.",
    ):
        assert told in lines
    answered = copy.deepcopy(SUMMARY)
    answered["evaluations"][0]["what_if"][0]["confirmation"] = {"error": "No such step."}
    assert "    not made: No such step." in influence_report(answered)


def test_several_batches_are_told_apart(summary):
    second = copy.deepcopy(summary["evaluations"][0]) | {"name": "eval_01", "kind": "update"}
    summary["evaluations"].append(second)
    lines = influence_report(summary)
    assert "On eval_00 (evaluation):" in lines
    assert "On eval_01 (update):" in lines
    assert sum(text.strip().startswith("momentum") for text in lines) == 2


def test_absent_sections_are_left_out():
    assert influence_report({}) == []
    assert influence_report({"evaluations": [{"name": "eval_00"}]}) == []


def test_a_what_if_asked_later_is_told_alone(summary):
    """`what_if_from` has neither a ledger nor a confirmation."""
    (asked,) = summary["evaluations"][0]["what_if"]
    del asked["confirmation"]
    lines = influence_report({"evaluations": [{"name": "eval_00", "what_if": [asked]}]})
    assert lines[0].startswith("What if")
    assert len(lines) == 3


def test_leave_one_out_stands_beside_the_share(summary):
    told = row(influence_report(summary), "without rollout 3")
    assert "predicted -0.0097 nats (95% -0.0117 to -0.0077), measured -0.0095" in told
    assert "its removal adds +3.00e-04, its share was -4.00e-04" in told


# `entropy-probe report`


def reported(*arguments):
    app = typer.Typer()
    app.command()(report_verb.report)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_verb_tells_a_finished_study(tmp_path, summary):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    found = reported(with_manifest(tmp_path), "--no-html")
    assert found.exit_code == 0
    assert found.stdout.splitlines() == influence_report(summary)


def test_the_verb_fits_and_draws(tmp_path):
    run = write_run(tmp_path / "run")
    picture = tmp_path / "two.png"
    found = reported(
        run, "--linearity", "--samples", "--rollout", 0, "--rollout", 2, "--out", picture
    )
    assert found.exit_code == 0
    assert found.stdout.startswith("eval_00, grad, etas")
    assert found.stdout.splitlines()[-1] == str(picture)
    assert picture.is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"Error: No run in .*, which is empty; expected the folder of a study"),
        (["--out", "x.png"], "--rollout and --out are about the drawing: add --samples"),
        (["--linearity"], "no folder eval_XX_per_sequence"),
    ],
)
def test_the_verb_says_what_is_wrong(tmp_path, options, message):
    found = reported(tmp_path, *options)
    assert found.exit_code == 2
    assert re.search(message, found.stderr)


def test_the_verb_names_the_extra_that_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    found = reported(write_run(tmp_path), "--samples")
    assert found.exit_code == 2
    assert "pip install 'entropy-experiments[plot]'" in found.stderr
