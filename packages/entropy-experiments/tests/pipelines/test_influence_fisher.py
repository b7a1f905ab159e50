"""The Fisher kernel of a study: its files, what it predicts, and how it is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from entropy_experiments import EntropyInfluenceRunner
from entropy_experiments.attribution.fisher import fisher_kernel
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.numerics.derivatives import pushforward, shifted
from entropy_experiments.report.html.page import write_report
from entropy_experiments.report.influence_tables import influence_report
from oracles.small_study import ETAS, EVERYTHING, array, plan, settings_in

pytestmark = pytest.mark.contract

PARTS = ("kernel", "cosine", "contribution", "measured")


def parts(folder, name="eval_00"):
    return {part: array(folder, f"{name}_fisher/{part}.npy") for part in PARTS}


def close(got, expected, share=1e-4):
    np.testing.assert_allclose(got, expected, rtol=0, atol=share * np.abs(expected).max())


def sums(scores, rollouts):
    return torch.where(rollouts.response_NS, scores.logprob_NS.double(), 0.0).sum(1).numpy()


def test_the_kernel_is_that_of_the_step(study):
    folder, _, inputs = study
    for batch in inputs.evaluations:
        probe, found = inputs.of(batch), parts(folder, batch.name)
        direction, _ = probe.step()
        given = (probe.policy, probe.evaluation, probe.update.rollouts, direction.preconditioner)
        close(found["kernel"], fisher_kernel(*given).numpy())
        close(found["cosine"], fisher_kernel(*given, cosine=True).numpy())
        assert np.abs(found["cosine"]).max() <= 1 + 1e-6


def test_contributions_add_up_to_the_slope_of_the_gradient_part(study):
    """By another way: one derivative of the log-probs along the whole of it."""
    folder, _, inputs = study
    probe, found = inputs.of(inputs.evaluations[0]), parts(folder)
    direction, _ = probe.step()
    policy, rollouts, eta = probe.policy, probe.evaluation, ETAS[0]

    def slope(v):
        _, slopes = pushforward(lambda p: policy.score(p, rollouts), policy.params, v)
        return eta * sums(slopes, rollouts)

    close(found["contribution"].sum(1), slope(direction.gradient))
    gap = np.abs(found["contribution"].sum(1) - slope(direction.total))
    assert gap.max() > 0.1 * np.abs(slope(direction.total)).max()  # teeth
    base, moved = (
        sums(score_all(policy, at, rollouts, microbatch=32), rollouts)
        for at in (policy.params, shifted(policy.params, direction.gradient, eta))
    )
    np.testing.assert_allclose(found["measured"], moved - base, atol=1e-4)


def test_the_summary_tells_who_moved_what(study):
    folder, summary, _ = study
    evaluation, found = summary["evaluations"][0], parts(folder)
    told = evaluation["fisher"]
    assert (told["eta"], told["centred"]) == (ETAS[0], False)
    predicted, measured = found["contribution"].sum(1), found["measured"]
    gap = np.linalg.norm(predicted - measured) / np.linalg.norm(measured)
    assert told["relative_gap"] == pytest.approx(gap)
    assert told["correlation"] == pytest.approx(np.corrcoef(predicted, measured)[0, 1])
    assert told["correlation"] > 0.9
    rows = json.loads((folder / "eval_00_fisher" / "changes.json").read_text())
    assert [row["rollout"] for row in rows] == list(range(evaluation["rollouts"]))
    for row in rows:
        mine = found["contribution"][row["rollout"]]
        assert row["predicted"] == pytest.approx(mine.sum())
        assert row["measured"] == measured[row["rollout"]]
        first = row["contributors"][0]
        assert abs(first["value"]) == np.abs(mine).max() == abs(mine[first["rollout"]])
    assert told["moved"][0]["rollout"] == int(np.abs(measured).argmax())
    text = "\n".join(influence_report(summary))
    most = told["moved"][0]
    assert f"evaluation rollout {most['rollout']}: predicted {most['predicted']:+.3g}" in text


def test_asked_later_centred_it_changes_the_kernel_alone(study, tmp_path):
    folder, _, _ = study
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    stages = {p.name for p in (copy / "stages").iterdir()}
    asked = plan(copy, **EVERYTHING, fisher_centred=True)
    summary = EntropyInfluenceRunner(settings_in(copy), quiet=True).run(asked)
    new = {p.name.split(".")[0] for p in (copy / "stages").iterdir() if p.name not in stages}
    assert new == {"eval_00_fisher", "eval_01_fisher"}
    assert summary["evaluations"][0]["fisher"]["centred"]
    plain, centred = parts(folder), parts(copy)
    np.testing.assert_array_equal(plain["measured"], centred["measured"])
    # Made by another way, with the token coefficients inside.
    close(centred["contribution"], plain["contribution"])
    size = np.abs(plain["kernel"]).max()
    assert np.abs(centred["kernel"].mean(0)).max() < 1e-6 * size
    assert np.abs(plain["kernel"].mean(0)).max() > 1e-2 * size  # teeth


def test_without_being_asked_there_is_none(study, tmp_path):
    folder, _, _ = study
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    summary = EntropyInfluenceRunner(settings_in(copy), quiet=True).run(plan(copy))
    assert summary["evaluations"][0]["fisher"] is None
    assert not list(copy.glob("*_fisher"))
    assert "Fisher" not in "\n".join(influence_report(summary))


def test_what_a_later_command_removes_is_told(study, tmp_path, capsys):
    folder, _, _ = study
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    write_report(copy)
    runner = EntropyInfluenceRunner(settings_in(copy))
    runner.run(plan(copy, what_if=["drop=negative"], confirm=False, plots=False))
    told = capsys.readouterr().err
    assert "the optimizer step: kept from before" in told
    assert "eval_00, influence of every token: kept from before" in told
    (removed,) = [line for line in told.splitlines() if "not asked for again" in line]
    assert "were removed (--what-if 'lr=0.001', --confirm, --fisher)" in removed
    assert "report.html showed the earlier answers and was removed" in told
    assert not (copy / "report.html").exists()
    # The same once more: nothing is removed, nothing is said to be, a new report stays.
    write_report(copy)
    runner.run(plan(copy, what_if=["drop=negative"], confirm=False, plots=False))
    told = capsys.readouterr().err
    assert "removed" not in told
    assert (copy / "report.html").exists()
    # One question more: no answer is lost, but the page does not show it.
    runner.run(plan(copy, what_if=["drop=negative", "lr=0.002"], confirm=False, plots=False))
    told = capsys.readouterr().err
    assert "not asked for again" not in told
    assert f"Write it again: entropy-probe report {copy}" in told
    assert not (copy / "report.html").exists()


def test_an_optimizer_that_maximizes_has_no_kernel(study, tmp_path, monkeypatch):
    """The rest of the study is there."""
    from entropy_experiments.pipelines.influence import results as answers

    folder, _, _ = study
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in (copy / "stages").glob("*_fisher.*"):
        path.unlink()

    def negative(p):
        return check({name: -value for name, value in p.items()})

    check = answers.check_cosine
    monkeypatch.setattr(answers, "check_cosine", negative)
    asked = plan(copy, fisher=True)
    summary = EntropyInfluenceRunner(settings_in(copy), quiet=True).run(asked)
    told = summary["evaluations"][0]["fisher"]
    assert "has negative entries, as an optimizer that maximizes has" in told["error"]
    assert summary["evaluations"][0]["ledger"]["entropy"]["lines"]
    assert not list(copy.glob("*_fisher"))
    assert any(
        line.startswith("Fisher kernel: no answer. The preconditioner of")
        for line in influence_report(summary)
    )
