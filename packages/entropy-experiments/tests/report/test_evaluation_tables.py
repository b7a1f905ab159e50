"""The printed tables of `entropy-probe evaluate`."""

from __future__ import annotations

import pytest

from entropy_experiments.pipelines.evaluation_measures import differences, measures
from entropy_experiments.report.evaluation_tables import evaluation_report
from entropy_experiments.results import numbers
from entropy_experiments.types import Estimand

pytestmark = pytest.mark.naive

SAMPLES, PROMPTS = 2, 8
SAMPLED = Estimand(temperature=1.0, top_p=1.0, horizon=8)


def rows(rewards):
    n = SAMPLES * PROMPTS
    assert len(rewards) == n
    return {
        "passed": [reward >= 1 for reward in rewards],
        "reward:closeness": list(rewards),
        "well_formed": [True] * n,
        "answered": [True] * n,
        "tokens": [4 + i % 3 for i in range(n)],
        "truncated": [False] * n,
        "entropy_sum": [1.0 + i % 2 for i in range(n)],
        "surprisal_sum": [1.1 + i % 2 for i in range(n)],
        "above_threshold": [1] * n,
    }


def report(*by_checkpoint):
    found = [
        measures(rows(rewards), samples=SAMPLES, ks=[1], sampled=SAMPLED)
        for rewards in by_checkpoint
    ]
    checkpoints = [
        {
            "label": f"step {i}",
            "measures": {name: numbers(one) for name, one in each.items()},
            "length_quantiles": {"0.05": 4.0, "0.5": 5.0, "0.95": 6.0},
            "high_entropy_tokens": [],
        }
        for i, each in enumerate(found)
    ]
    changes = [
        {
            "label": f"step {i}",
            "from": "step 0",
            "measures": {name: numbers(one) for name, one in differences(each, found[0]).items()},
        }
        for i, each in enumerate(found)
        if i
    ]
    settings = {
        "dataset": "mine",
        "split": None,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "temperature": 1.0,
        "top_p": 1.0,
        "max_new_tokens": 8,
        "seed": 0,
        "rewards": ["closeness"],
        "threshold": 0.69,
    }
    result = {"settings": settings, "k": [1], "checkpoints": checkpoints, "differences": changes}
    return evaluation_report(result)


GRADED = [0.25, 0.5] * PROMPTS
BINARY = [0.0, 1.0] * PROMPTS
BETTER = [0.5, 0.75] * PROMPTS


def table(lines, title):
    at = next(i for i, line in enumerate(lines) if line.startswith(title))
    return lines[at + 1 : lines.index("", at)]


def test_the_mean_of_a_graded_reward_is_printed():
    lines = report(GRADED, BETTER)
    assert "passes with closeness at least 1." in lines[1]
    head, first, second = table(lines, "Task")
    assert head.endswith("mean closeness")
    assert "0.375" in first
    assert "0.625" in second
    head, changed = table(lines, "Change from step 0")
    assert "mean closeness" in head
    assert "+0.250" in changed


def test_a_missing_interval_is_named():
    lines = report(GRADED, BETTER)
    (missing,) = (line for line in lines if line.startswith("No interval"))
    assert "mean closeness of step 0" in missing
    assert "every prompt gave the same" in missing


def test_pass_or_fail_has_no_mean_beside_its_rate():
    assert not any("mean closeness" in line for line in report(BINARY, BINARY))


def test_graded_in_one_checkpoint_and_pass_or_fail_in_another():
    lines = report(BINARY, GRADED)
    head, first, second = table(lines, "Task")
    assert head.endswith("mean closeness")
    assert first.endswith("0s and 1s alone")
    assert "0.375" in second
    assert "0s and 1s alone" in table(lines, "Change from step 0")[1]
