"""The verdict's words: real or hypothetical, what was assumed, what is not to be trusted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from entropy_experiments.checkpoints.runs import embedded_trajectory
from entropy_experiments.config import load_config, parse_config
from entropy_experiments.findings import Findings, update_kind
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.pipelines import probe_sampling
from entropy_experiments.pipelines.probe import OfflineEntropyProbe
from entropy_experiments.pipelines.probe_inputs import gather
from entropy_experiments.pipelines.training_facts import ASSUMED, training_facts
from entropy_experiments.report.verdict import verdict
from entropy_experiments.report.words import made_by_training, sampling_points
from entropy_experiments.sampling.rollout_files import (
    load_update_batch,
    save_rollouts,
    save_update_batch,
)

pytestmark = pytest.mark.naive

FACTS = {"batch_config.dataset_name": "countdown", "generation.max_new_tokens": 30}
OFF = {"probe_rework.compute_delta_h1": False, "importance.enabled": False}
"""Where only words are asked for: neither prediction nor measurement."""
EQUAL = {"reward.functions": ["constant_reward:zero"], "batch_config.max_resample_attempts": 1}


def run(tmp_path, changes=None, checkpoint=None):
    changes = {
        "batch_config.B_E": 8,
        "memory_config.microbatch_size": 16,
        "detailed_logging.output_directory": str(tmp_path / "logs"),
        **(changes or {}),
    }
    recorded = checkpoint is None or (checkpoint / "update_batch").exists()
    if not recorded or changes.get("update.batch") == "drawn":
        changes = {"batch_config.B_U": 2, "batch_config.G": 4, **changes}
    config = parse_config({}).replaced(changes)
    return OfflineEntropyProbe(config, quiet=True).run_mixed_probe(checkpoint)


def said(results) -> str:
    return "\n".join(results["verdict"])


def copied(tmp_path: Path, step: int = 13, *, batch: bool = False) -> Path:
    """An embedded checkpoint and its base, without what is known of its training."""
    source = embedded_trajectory()
    shutil.copytree(source / "base", tmp_path / "run" / "base")
    path = tmp_path / "run" / f"checkpoint-{step}"
    ignored = () if batch else ("update_batch",)
    shutil.copytree(source / path.name, path, ignore=shutil.ignore_patterns(*ignored))
    return path


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return run(tmp_path_factory.mktemp("real"), {"approx_delta_h.curvature": False})


def test_a_change_of_next_to_nothing_has_no_signed_zero(probed):
    found, _ = probed
    assert found.predicted is not None
    predicted = replace(found.predicted, total=1e-7 * found.predicted.total)
    nothing = replace(found, predicted=predicted, measured=None)
    assert "  that is          less than 0.01% of the entropy" in verdict(nothing)


def test_a_curvature_that_is_not_trusted_explains_nothing(probed):
    """Not "misses by its curvature", and no range of the straight line: the reason instead."""
    found, _ = probed
    assert found.difference is not None
    assert found.predicted is not None
    sure = 1e-6 * found.predicted.total
    apart = _Apart(**{**vars(found), "bend": sure, "linear_range": 0.25})
    assert "its curvature does not account for that" in "\n".join(verdict(apart))
    assert "up to learning rate 0.25" in "\n".join(verdict(apart))
    doubtful = replace(apart, bend=replace(sure, given_reasons=("the widths disagree",)))
    text = "\n".join(verdict(doubtful))
    assert "off), and its curvature is not trusted to say why" in text
    assert "how far the straight line holds is not known" in text
    assert "0.25" not in text
    assert "The curvature is NOT trusted: the widths disagree." in text


class _Apart(Findings):
    """Prediction and measurement differ beyond doubt."""

    @property
    def difference(self):
        gap = super().difference
        return None if gap is None else replace(gap, value=0.15, interval=(0.1, 0.2))


@pytest.fixture
def constant_reward(tmp_path, monkeypatch):
    (tmp_path / "constant_reward.py").write_text(
        "def zero(completions):\n    return [0.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_recorded_batch_is_the_step_that_training_made(real):
    first = real["verdict"][0]
    assert first == "The update that training made after step_13, at learning rate 0.003:"
    assert "hypothetical" not in said(real)
    assert real["update"] == "recorded"
    assert real["step_certificate"]["passed"]
    assert "Step certificate: the step rebuilt here is the step that was made" in said(real)
    assert "Every training fact was read or given; none is assumed." in real["verdict"]
    assert "Not verifiable from the files: lora_alpha" in said(real)


def test_the_verdict_has_every_number_it_should(real):
    text = said(real)
    for line in (
        "entropy now",
        "predicted change",
        "measured change",
        "difference",
        "direct ",
        "state ",
        "momentum",
        "weight decay",
        "baseline (momentum and decay) share of this step",
        "this batch in the end, through the momentum it leaves",
        "Importance weights: ESS",
    ):
        assert line in text, line
    assert f"{real['deltaH1']:+.4g} nats (95%" in text
    assert f"{real['deltaH_true']:+.4g} nats (95%" in text
    estimates = real["estimates"]
    parts = [estimates[name]["value"] for name in ("momentum", "decay", "gradient")]
    assert sum(parts) == pytest.approx(real["deltaH1"], rel=1e-4)
    terms = [estimates[name]["value"] for name in ("direct", "state")]
    assert sum(terms) == pytest.approx(real["deltaH1"], rel=1e-9)
    eventual = estimates["gradient_eventual"]["value"]
    assert eventual == pytest.approx(10 * estimates["gradient"]["value"])  # b1 = 0.9
    assert real["bars_dot"] * real["learning_rate"] == pytest.approx(real["deltaH1"], rel=1e-12)


def test_a_drawn_batch_is_a_hypothetical_update(tmp_path):
    results = run(tmp_path, {"update.batch": "drawn", **OFF})
    assert results["verdict"][0].startswith(
        "A hypothetical update from step_13 (its batch was drawn for this probe), at learning rate"
    )
    assert results["update"] == "hypothetical"
    assert "step_certificate" not in results
    assert "No step certificate: the update is hypothetical" in said(results)
    assert (results["B_E"], results["B_U"]) == (8, 2)


def test_reverse_mode_says_the_same_without_intervals(tmp_path, real):
    results = run(
        tmp_path,
        {"approx_delta_h.method": "reverse", "importance.enabled": False},
    )
    for name in ("deltaH1", "direct", "state", "gradient"):
        got, expected = (x["estimates"][name]["value"] for x in (results, real))
        assert got == pytest.approx(expected, rel=1e-3), name
        assert results["estimates"][name]["interval"] is None
    assert "The prediction is NOT trusted: reverse mode gives no per-rollout terms" in said(results)


def test_what_was_assumed_is_listed(tmp_path):
    path = copied(tmp_path)
    results = run(tmp_path, {**FACTS, **OFF, "update.loss": "grpo"}, path)
    expected = {k: v for k, v in ASSUMED.items() if k not in ("loss", "dataset_name")}
    assert results["assumed"] == {**expected, "reward_functions": ["countdown"]}
    line = results["verdict"][1]  # beside the headline
    assert line.startswith("  ASSUMED, not read from any file")
    for name, value in results["assumed"].items():
        assert f"{name} = {value}" in line
    assert "loss = " not in line
    assert results["verdict"][0].startswith("A hypothetical update from step_13")


def test_a_recorded_batch_without_its_successor_has_no_certificate(tmp_path):
    results = run(tmp_path, {**FACTS, **OFF}, copied(tmp_path, batch=True))
    first = results["verdict"][0]
    assert first.startswith("The update that the batch recorded after step_13 makes, at learning")
    assert first.endswith("(not checked against the step that training made):")
    assert "No step certificate: the checkpoint one step later is not beside this one, nor" in said(
        results
    )


def test_without_a_recorded_batch_there_is_none_to_be_had(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"expected a folder update_batch/.*data.update_rollouts: drawn"
    ):
        run(tmp_path, {**FACTS, **OFF, "update.batch": "recorded"}, copied(tmp_path))


def test_another_learning_rate_is_checked_at_the_stored_one(tmp_path, real):
    """The same direction: a third of the rate, about a third of the change."""
    results = run(tmp_path, {"update.lr": 1e-3, "probe_rework.compute_delta_h1": False})
    assert results["learning_rate"] == 1e-3
    assert results["deltaH_true"] == pytest.approx(real["deltaH_true"] / 3, rel=0.2)
    first = results["verdict"][0]
    assert first.endswith("after step_13, at learning rate 0.001 instead of 0.003:")
    assert results["step_certificate"]["passed"]
    assert "Step certificate, at the stored rate 0.003: the step rebuilt" in said(results)


def test_a_stored_rate_of_zero_is_refused_until_one_is_given(tmp_path):
    path = copied(tmp_path)
    stored = torch.load(path / "optimizer.pt", weights_only=True)
    for group in stored["param_groups"]:
        group["lr"] = 0.0
    torch.save(stored, path / "optimizer.pt")
    with pytest.raises(ValueError, match=r"stored learning rate is 0 .*set update\.lr"):
        run(tmp_path, {**FACTS, **OFF}, path)
    results = run(tmp_path, {**FACTS, **OFF, "update.lr": 2e-3}, path)
    assert results["learning_rate"] == 2e-3
    assert results["verdict"][0].endswith("at learning rate 0.002:")


def test_equal_rewards_warn_and_the_gradient_part_is_not_trusted(tmp_path, constant_reward):
    results = run(tmp_path, {"update.batch": "drawn", "approx_delta_h.curvature": False, **EQUAL})
    assert results["avg_reward"] == 0
    notes = " | ".join(results["notes"])
    assert "2 of 2 groups have equal rewards throughout and move nothing" in notes
    assert "the update is momentum and decay alone" in notes
    assert "reward_functions = ('constant_reward:zero',) here" in notes
    assert "Note: no group has an advantage" in said(results)
    for name in ("gradient", "gradient_eventual"):
        estimate = results["estimates"][name]
        assert estimate["value"] == 0
        assert not estimate["trusted"]
        assert estimate["why_not"] == ["no group of the update batch has an advantage"]
    # Momentum moves the policy all the same, and that part is as good as ever.
    assert results["estimates"]["momentum"]["value"] == pytest.approx(results["deltaH1"], rel=0.01)
    assert results["deltaH1"] < 0


def test_equal_rewards_with_a_fresh_optimizer(tmp_path, constant_reward):
    """Weight decay is a baseline, though of a fresh adapter (B = 0) it moves nothing."""
    results = run(
        tmp_path,
        {"update.batch": "drawn", "approx_delta_h.curvature": False, **EQUAL},
        embedded_trajectory() / "checkpoint-0",
    )
    assert "no group has an advantage" in said(results)
    assert results["deltaH1"] == 0
    assert results["estimates"]["momentum"]["value"] == 0


def test_equal_rewards_and_nothing_else_is_an_error(tmp_path, constant_reward):
    path = copied(tmp_path, step=0)
    stored = torch.load(path / "optimizer.pt", weights_only=True)
    for group in stored["param_groups"]:
        group["weight_decay"] = 0.0
    torch.save(stored, path / "optimizer.pt")
    with pytest.raises(ValueError, match=r"The update is zero: .*neither momentum nor weight dec"):
        run(tmp_path, {**FACTS, **OFF, **EQUAL}, path)


def test_the_first_checkpoint_of_a_run(tmp_path):
    """A fresh adapter has B = 0: decay of A moves nothing, the gradient all the same does."""
    results = run(
        tmp_path,
        {"update.batch": "drawn", "approx_delta_h.curvature": False},
        embedded_trajectory() / "checkpoint-0",
    )
    assert results["estimates"]["decay"]["value"] == 0
    assert results["deltaH1"] == results["estimates"]["gradient"]["value"] != 0


def facts(given=None, read=None):
    config = parse_config(given or {})
    return training_facts(config, read or {}, dict.fromkeys(read or {}, "entropy_probe.json"))


def test_given_over_read_over_assumed():
    found = facts(
        {"update": {"loss": "grpo", "beta": 0.0}, "generation": {"temperature": 0.7}},
        {"loss": "bnpo", "clip_low": 0.1, "temperature": 0.7},
    )
    assert (found["loss"], found.sources["loss"]) == ("grpo", "the config")
    assert (found["clip_low"], found.sources["clip_low"]) == (0.1, "entropy_probe.json")
    assert (found["clip_high"], found.sources["clip_high"]) == (0.2, "")
    assert found["beta"] == 0.0
    assert "beta" not in found.assumed  # 0 was given, which is not nothing
    assert "clip_high" in found.assumed
    # What differs from training is said; what agrees is not.
    assert found.notes == ("loss = grpo here; training had bnpo (entropy_probe.json)",)


def test_all_is_assumed_when_nobody_says_anything():
    found = facts()
    assert found.assumed == {**ASSUMED, "reward_functions": ["math_verify"]}
    assert facts({"batch_config": {"dataset_name": "countdown"}})["reward_functions"] == [
        "countdown"
    ]


def test_another_nucleus_than_trainings_is_said():
    found = facts({}, {"top_p": 0.9})
    assert found.notes == ("top_p = 1.0 here; training had 0.9 (entropy_probe.json)",)
    assert facts({"generation": {"top_p": 0.9}}, {"top_p": 0.9}).notes == ()


def test_what_training_sampled_with_besides_is_known():
    options = ["top_p = 0.9", "top_k = 5"]
    recorded = {"top_p": 0.9, "sampling": options}
    assert facts({}, {"top_p": 0.9}).sampling == ("top_p = 0.9",)
    assert facts({}, {"top_p": 1.0}).sampling == ()
    assert facts({}, recorded).sampling == ("top_p = 0.9", "top_k = 5")
    followed = facts({"generation": {"top_p": 0.9}}, recorded)
    assert followed.sampling == ("top_k = 5",)
    (note,) = followed.notes
    assert note.startswith("training sampled with top_k = 5; entropy here is of the softmax cut at")
    assert len(facts({}, recorded).notes) == 1
    (point,) = sampling_points([*facts({}, recorded).notes, "another note"])
    assert point.startswith(
        "Training sampled with top_p = 0.9, top_k = 5; entropy here is of the f"
    )


def test_a_distribution_that_training_did_not_sample_from_is_named(probed):
    found, _ = probed
    assert "full softmax" not in "\n".join(verdict(found))
    lines = verdict(replace(found, sampling=("top_k = 5",)))
    (line,) = [line for line in lines if "entropy now" in line]
    assert line.endswith(", of the full softmax (training sampled with top_k = 5)")


def test_facts_become_the_objective():
    found = facts({"update": {"loss": "dr_grpo", "clip_low": 0.0}}, {"max_completion_length": 77})
    objective = found.objective
    assert (objective.loss, objective.clip_low, objective.max_completion_length) == (
        "dr_grpo",
        0.0,
        77,
    )


def test_the_reference_of_an_adapter_is_its_base(tmp_path):
    """beta > 0 and a drawn batch: KL against the base, here a copy that never had an adapter."""
    config = load_config("test_deltaH1.yaml").under(tmp_path)
    config = config.with_overrides(
        ["batch_config.B_E=5", "batch_config.B_U=2", "update.batch=drawn", "update.beta=0.1"]
    )
    inputs = gather(config, embedded_trajectory() / "checkpoint-30")
    base = SequenceProcessor(
        AutoModelForCausalLM.from_pretrained(embedded_trajectory() / "base").eval()
    )
    rollouts = inputs.update.rollouts
    expected_NS = base.score(base.params, rollouts).logprob_NS
    inside = rollouts.response_NS
    torch.testing.assert_close(
        inputs.update.ref_logprob_NS[inside].float(), expected_NS[inside].float()
    )
    own_NS = inputs.policy.score(inputs.policy.params, rollouts).logprob_NS
    assert float((own_NS - expected_NS)[inside].abs().max()) > 0.1  # not the policy itself
    assert inputs.policy.model.peft_config  # and the adapter is back
    again_NS = inputs.policy.score(inputs.policy.params, rollouts).logprob_NS
    assert torch.equal(own_NS, again_NS)


def small(tmp_path, *more: str):
    config = load_config("test_deltaH1.yaml").under(tmp_path)
    drawn = ["batch_config.B_U=6"] if "update.batch=drawn" in more else []
    return config.with_overrides(["batch_config.B_E=16", *drawn, *more])


def test_evaluation_prompts_are_none_that_the_update_used_or_tried(tmp_path, monkeypatch):
    """Groups dropped for equal rewards were selected by their outcome: they may not fill E."""
    tried: set[str] = set()
    draw = probe_sampling.SampleGenerator.generate_update_batch

    def watched(self, problems, **options):
        pool = list(problems)
        found = draw(self, iter(pool), **options)
        tried.update(problem.prompt for problem in pool[: options["prompts"] + found.retries])
        assert found.retries > 0  # at the end of the run many groups are solved throughout
        return found

    monkeypatch.setattr(probe_sampling.SampleGenerator, "generate_update_batch", watched)
    inputs = gather(
        small(tmp_path, "update.batch=drawn", "batch_config.G=3"),
        embedded_trajectory() / "checkpoint-44",
    )
    asked, used = (
        probe_sampling.prompts_of(rollouts)
        for rollouts in (inputs.evaluation, inputs.update.rollouts)
    )
    assert len(asked) == 16
    assert not asked & used
    encode = inputs.checkpoint.tokenizer
    assert not asked & {tuple(encode(prompt)["input_ids"]) for prompt in tried}


def test_saved_evaluation_rollouts_are_kept_apart_from_a_new_update_batch(tmp_path):
    path = embedded_trajectory() / "checkpoint-20"
    gather(small(tmp_path, f"rollouts.save={tmp_path / 'kept'}"), path)
    again = gather(
        small(tmp_path, f"rollouts.load={tmp_path / 'kept'}", "update.batch=drawn"), path
    )
    asked = probe_sampling.prompts_of(again.evaluation)
    assert not asked & probe_sampling.prompts_of(again.update.rollouts)


def test_another_sampling_law_does_not_change_the_step_that_was_made(tmp_path):
    path = embedded_trajectory() / "checkpoint-10"
    here = gather(small(tmp_path), path).step()[0].total
    for law in ("generation.temperature=0.7", "generation.top_p=0.9"):
        there = gather(small(tmp_path, law), path).step()[0].total
        for name, value in here.items():
            torch.testing.assert_close(value, there[name], rtol=0, atol=1e-5)


def test_a_batch_of_another_checkpoint_is_refused(tmp_path):
    for name in ("base", "entropy_probe.json", "checkpoint-10"):
        source = embedded_trajectory() / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    own = tmp_path / "checkpoint-10" / "update_batch"
    shutil.rmtree(own)
    shutil.copytree(embedded_trajectory() / "checkpoint-40" / "update_batch", own)
    with pytest.raises(ValueError, match=r"was recorded at weights .* \(step 40\)"):
        gather(small(tmp_path / "out"), tmp_path / "checkpoint-10")


@pytest.mark.parametrize("kind", ["half-written", "the same"])
def test_a_bad_checkpoint_after_it_costs_only_the_certificate(tmp_path, kind):
    for name in ("base", "entropy_probe.json", "checkpoint-10"):
        source = embedded_trajectory() / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    later = tmp_path / "checkpoint-11"
    shutil.copytree(tmp_path / "checkpoint-10", later)
    if kind == "half-written":
        (later / "trainer_state.json").unlink()
    probe = OfflineEntropyProbe(small(tmp_path / "out"), quiet=True)
    results = probe.run_mixed_probe(tmp_path / "checkpoint-10")
    assert "step_certificate" not in results
    assert "No step certificate: the checkpoint one step later cannot be used" in said(results)


def test_dropout_in_training_is_told(tmp_path):
    for name in ("base", "entropy_probe.json", "checkpoint-10"):
        source = embedded_trajectory() / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    adapter = tmp_path / "checkpoint-10" / "adapter_config.json"
    adapter.write_text(adapter.read_text().replace('"lora_dropout": 0.0', '"lora_dropout": 0.1'))
    inputs = gather(small(tmp_path / "out"), tmp_path / "checkpoint-10")
    assert any("dropout (lora_dropout 0.1)" in note for note in inputs.notes)


def test_the_form_of_least_variance_stands_beside(tmp_path):
    snis = small(tmp_path, "importance.is_mode=snis")
    results = OfflineEntropyProbe(snis, quiet=True).run_mixed_probe()
    estimates = results["estimates"]
    assert estimates["deltaH1_to_go"]["interval"] is not None
    assert estimates["bars_dot"]["value"] == pytest.approx(results["bars_dot"])
    assert estimates["H_upd"]["value"] == pytest.approx(results["H_upd"])
    assert "in the to-go form" in said(results)


def test_the_reference_is_scored_at_the_temperature_of_the_loss(tmp_path):
    """The probe's own temperature measures entropy; training's made the loss and its KL term."""
    changes = {"update.beta": 0.1, "batch_config.B_E": 5}
    cold = parse_config({}).replaced(
        {**changes, "rollouts.save": str(tmp_path / "a"), "generation.temperature": 0.5}
    )
    same = parse_config({}).replaced({**changes, "rollouts.save": str(tmp_path / "b")})
    found, expected = (gather(config, None).update.ref_logprob_NS for config in (cold, same))
    assert found is not None
    torch.testing.assert_close(found, expected)


def test_imported_rollouts_are_not_taken_for_drawn_ones(tmp_path):
    path, kept = embedded_trajectory() / "checkpoint-20", tmp_path / "kept"
    drawn = gather(small(tmp_path, f"rollouts.save={kept}"), path)
    save_rollouts(kept / "evaluation", drawn.evaluation)  # as an import has them: no identity
    with pytest.raises(ValueError, match=r"do not say what drew them.*influence` as kind: from_f"):
        gather(small(tmp_path, f"rollouts.load={kept}"), path)
    drawn_at = {"identity": {"model": "0" * 64}, "dataset": "countdown"}
    save_rollouts(kept / "evaluation", drawn.evaluation, meta=drawn_at)
    with pytest.raises(ValueError, match=r"drawn with another .*model, .*; expected rollouts of"):
        gather(small(tmp_path, f"rollouts.load={kept}"), path)


def test_a_fall_by_more_than_all_the_entropy_is_not_trusted(tmp_path):
    changes = {"update.lr": 3.0, "importance.enabled": False, "approx_delta_h.curvature": False}
    results = run(tmp_path, changes)
    assert results["deltaH1"] < -results["H_orig"] < 0
    assert not results["estimates"]["deltaH1"]["trusted"]
    assert "The prediction is NOT trusted: it is a fall of" in said(results)
    assert "below 0 it cannot be" in said(results)


def test_a_batch_that_nothing_ties_to_the_step_is_not_training_s(tmp_path):
    """As `save_update_batch` of an imported dump leaves it: no weights, no next checkpoint."""
    checkpoint = copied(tmp_path)
    shutil.copy(embedded_trajectory() / "entropy_probe.json", checkpoint.parent)
    batch, _ = load_update_batch(embedded_trajectory() / "checkpoint-13" / "update_batch")
    save_update_batch(checkpoint / "update_batch", batch, meta={"step": 13})
    changes = {"approx_delta_h.curvature": False, "importance.enabled": False}
    alone = run(tmp_path, changes, checkpoint)
    assert alone["update"] == "imported"
    assert alone["verdict"][0] == (
        "The step from this batch at step_13, at learning rate 0.003 (not checked against the step "
        "that training made; nothing says that this is its batch):"
    )
    assert "The prediction is trusted, for the step from this batch." in alone["verdict"]
    assert made_by_training(alone).startswith("The step from this batch at step_13 (not checked")
    source = embedded_trajectory() / "checkpoint-14"
    shutil.copytree(source, checkpoint.with_name(source.name))
    beside = run(tmp_path, changes, checkpoint)
    assert beside["update"] == "recorded"
    assert beside["step_certificate"]["passed"]
    assert beside["verdict"][0].startswith("The update that training made after step_13")
    assert "The prediction is trusted." in beside["verdict"]
    save_update_batch(checkpoint / "update_batch", batch, meta={"step": 12})
    with pytest.raises(ValueError, match=r"is of step 12; expected that of step 13"):
        run(tmp_path, changes, checkpoint)


@pytest.mark.parametrize(
    ("real", "bound", "checked", "kind"),
    [
        (False, False, False, "hypothetical"),
        (True, True, False, "recorded"),
        (True, False, True, "recorded"),
        (True, False, False, "imported"),
    ],
)
def test_what_an_update_is(real, bound, checked, kind):
    assert update_kind(real=real, bound=bound, checked=checked) == kind
