"""Batches of an influence study: every kind of request, and every way to ask wrongly."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from typer.testing import CliRunner

from entropy_experiments.checkpoints.runs import default_checkpoint
from entropy_experiments.cli import app
from entropy_experiments.config import ConfigError, parse_config
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.pipelines.influence.batches import check_requests, gather_study
from entropy_experiments.pipelines.influence.rollout_sources import rewards_fit
from entropy_experiments.pipelines.influence.runner import EntropyInfluenceRunner, what_if_from
from entropy_experiments.pipelines.probe_sampling import open_checkpoint, prompts_of
from entropy_experiments.report.influence_tables import influence_report
from entropy_experiments.report.words import made_by_study
from entropy_experiments.sampling.rollout_files import (
    load_update_batch,
    save_rollouts,
    save_update_batch,
)
from entropy_experiments.types import Rollouts, UpdateBatch

pytestmark = pytest.mark.faults

SMALL = {
    "batch_config": {"B_E": 4, "B_U": 2, "G": 4},
    "memory_config": {"microbatch_size": 32},
    "update": {"batch": "drawn"},
    "generation": {"max_new_tokens": 10},
}
PROMPT = "numbers 2 3 4 target 24 :"
FACTS = {"numbers": [2, 3, 4], "target": 24}


def settings(tmp_path, requests=None, workspace=None, **sections):
    asked = {"evaluation_requests": requests or [{"kind": "evaluation"}]}
    if workspace is not None:
        asked["workspace"] = workspace
    rollouts = {"rollouts": {"save": str(tmp_path / "rollouts")}}
    return parse_config({**SMALL, **rollouts, "influence": asked, **sections})


@pytest.fixture(scope="module")
def probed():
    return open_checkpoint(parse_config(SMALL), None)


def gathered(probed, *arguments, **options):
    return gather_study(settings(*arguments, **options), probed)


def test_evaluation_has_rewards_and_other_prompts_than_the_update(probed, tmp_path):
    asked = [{"kind": "evaluation", "params": {"prompts": 3, "group": 2}}, {"kind": "evaluation"}]
    found = gathered(probed, tmp_path, asked)
    first, second = found.evaluations
    assert (len(first.rollouts), len(second.rollouts)) == (6, 8)
    assert first.rollouts.prompt_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert first.reward_N is not None
    assert first.reward_N.shape == (6,)
    sets = [prompts_of(x) for x in (first.rollouts, second.rollouts, found.probe.update.rollouts)]
    assert len(set.union(*sets)) == sum(map(len, sets))  # pairwise disjoint
    assert [e.name for e in found.evaluations] == ["eval_00", "eval_01"]
    assert not found.probe.real


def test_without_rewards_on_request(probed, tmp_path):
    config = settings(tmp_path).replaced({"influence.reward": False})
    assert gather_study(config, probed).evaluations[0].reward_N is None


def test_update_as_evaluation_says_so(probed, tmp_path):
    requests = [{"kind": "update"}, {"kind": "update", "params": {"fresh": True, "group": 1}}]
    found = gathered(probed, tmp_path, requests)
    own, fresh = found.evaluations
    assert own.rollouts.fingerprint == found.probe.update.rollouts.fingerprint
    assert "the very rollouts that made the update" in own.notes[0]
    assert own.reward_N is None  # the update's rewards made the step
    assert prompts_of(fresh.rollouts) == prompts_of(own.rollouts)
    assert len(fresh.rollouts) == 2
    assert "fresh answers" in fresh.notes[0]


def test_prompt_ids_name_problems_by_index(probed, tmp_path):
    ids = {"kind": "prompt_ids", "params": {"ids": [40, 41], "group": 1}}
    one = gathered(probed, tmp_path / "a", [ids]).evaluations[0].rollouts
    ids["params"]["ids"] = [41, 40]
    other = gathered(probed, tmp_path / "b", [ids]).evaluations[0].rollouts
    assert len(one) == 2
    assert prompts_of(one) == prompts_of(other)
    assert one.text == other.text[::-1]  # a rollout's random numbers go with its problem


def test_custom_prompts_are_answered(probed, tmp_path):
    params = {"prompts": [PROMPT, "numbers 1 2 3 target 6 :"], "group": 3}
    found = gathered(probed, tmp_path, [{"kind": "custom_prompts", "params": params}])
    (evaluation,) = found.evaluations
    assert len(evaluation.rollouts) == 6
    assert evaluation.reward_N is None  # nothing says what a right answer is
    params |= {"answers": ["24", "6"], "facts": [FACTS, {"numbers": [1, 2, 3], "target": 6}]}
    found = gathered(probed, tmp_path / "b", [{"kind": "custom_prompts", "params": params}])
    assert found.evaluations[0].reward_N is not None


def test_custom_sequences_are_scored_as_given(probed, tmp_path):
    tokenizer = probed.checkpoint.tokenizer
    ids = tokenizer("2 * 3 = 6 ;", add_special_tokens=False)["input_ids"]
    rows = [
        {"prompt": PROMPT, "completion": "2 * 3 = 6 ;", "reward": 1.0},
        {"prompt_ids": [5, 6], "completion_ids": ids, "reward": 0.5},
    ]
    params = {"sequences": rows, "append_eos": False}
    found = gathered(probed, tmp_path, [{"kind": "custom_sequence", "params": params}])
    (evaluation,) = found.evaluations
    assert evaluation.rollouts.tokens_N.tolist() == [len(ids)] * 2
    assert evaluation.reward_N.tolist() == [1.0, 0.5]
    assert "taken as drawn from the policy that is probed" in evaluation.notes


def test_files_of_every_kind(probed, tmp_path):
    drawn = gathered(probed, tmp_path)
    rollouts = drawn.evaluations[0].rollouts
    saved = tmp_path / "rollouts" / "eval_00"  # written by the study itself

    def read(path, **more):
        params = {"path": str(path), **more}
        return gathered(probed, tmp_path / "again", [{"kind": "from_file", "params": params}])

    assert read(saved).evaluations[0].rollouts.fingerprint == rollouts.fingerprint
    batch = tmp_path / "batch"
    update = drawn.probe.update
    save_update_batch(batch, update)
    other = {"influence.workspace": {"kind": "prompt_ids", "params": {"ids": [90, 91]}}}
    request = [{"kind": "from_file", "params": {"path": str(batch)}}]
    found = gather_study(settings(tmp_path, request).replaced(other), probed).evaluations[0]
    assert found.rollouts.fingerprint == update.rollouts.fingerprint
    assert torch.equal(found.reward_N, update.reward_N)
    records = [
        {"prompt": PROMPT, "completion": "2 * 3 = 6", "reward": 1.0, "step": 3},
        {"prompt": PROMPT, "completion": "2 + 3 = 5", "reward": 0.0, "step": 3},
    ]
    jsonl = tmp_path / "dump.jsonl"
    jsonl.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read(jsonl, step=3).evaluations[0].reward_N.tolist() == [1.0, 0.0]
    parquet = tmp_path / "completions_00003.parquet"
    columns = {name: [record[name] for record in records] for name in ("prompt", "completion")}
    pyarrow.parquet.write_table(pyarrow.table({**columns, "mine": [1.0, 0.0]}), parquet)
    assert read(parquet).evaluations[0].reward_N.tolist() == [1.0, 0.0]
    (tmp_path / "dump.txt").write_text("")
    with pytest.raises(ValueError, match=r"cannot tell what .*dump.txt is; expected a folder"):
        read(tmp_path / "dump.txt")


DUMPS = Path(__file__).parents[1] / "data" / "dumps"


@pytest.fixture(scope="module")
def eleventh():
    """The dumps of step 12 are of the step that is made from checkpoint 11."""
    return open_checkpoint(parse_config(SMALL), default_checkpoint().parent / "checkpoint-11")


@pytest.mark.parametrize("framework", ["prime_rl", "nemo_rl", "miles", "verl"])
def test_dumps_of_frameworks_as_update_and_evaluation_batch(eleventh, tmp_path, framework):
    """Also what the study would say: each dump's notes and the frameworks' names come along."""
    probed = eleventh
    named = {"kind": "from_file", "params": {"path": str(DUMPS / framework), "step": 12}}
    found = gathered(probed, tmp_path, [{"kind": "update"}], workspace=named)
    update = found.probe.update
    assert len(update.rollouts) == 8
    assert update.rollouts.uid is not None
    assert found.probe.real
    assert not found.probe.bound  # nothing in a dump names the weights
    assert any("not in the dump" in note for note in found.probe.notes)
    drawn = {"kind": "prompt_ids", "params": {"ids": [90, 91], "group": 2}}
    again = gathered(probed, tmp_path / "e", [named], workspace=drawn).evaluations[0]
    assert again.rollouts.fingerprint == update.rollouts.fingerprint
    assert (again.rollouts.behaviour_logprob_NS is None) == (framework == "verl")


@pytest.mark.faults
@pytest.mark.parametrize("framework", ["prime_rl", "nemo_rl", "verl"])
def test_the_dump_of_another_step_is_refused(probed, tmp_path, framework):
    """Step N leads from checkpoint N - 1 to checkpoint N: of 13 the next dump is 14."""
    named = {"kind": "from_file", "params": {"path": str(DUMPS / framework), "step": 12}}
    message = r"dump of step 12, which led from checkpoint 11 to checkpoint 12; .*is dump 14\."
    with pytest.raises(ValueError, match=message):
        gathered(probed, tmp_path, [{"kind": "update"}], workspace=named)
    drawn = {"kind": "prompt_ids", "params": {"ids": [90, 91], "group": 2}}
    gathered(probed, tmp_path, [named], workspace=drawn)  # E may be of any policy


def test_a_dump_that_nothing_certifies_is_not_called_training_s(tmp_path):
    """Tokens of nobody, in NeMo-RL's format, at a copy of a checkpoint without its record."""
    run = tmp_path / "run"
    for name in ("base", "checkpoint-13"):
        shutil.copytree(default_checkpoint().parent / name, run / name)
    shutil.copy(default_checkpoint().parent / "entropy_probe.json", run)
    for recorded in ("update_batch", "made_step"):
        shutil.rmtree(run / "checkpoint-13" / recorded, ignore_errors=True)
    dump = DUMPS / "nemo_rl" / "train_data_step12.jsonl"
    shutil.copy(dump, tmp_path / "train_data_step14.jsonl")
    named = {"kind": "from_file", "params": {"path": str(tmp_path / "train_data_step14.jsonl")}}

    def study(name):
        path = {"checkpoint.path": str(run / "checkpoint-13"), "checkpoint.base": str(run / "base")}
        return small_study(tmp_path, name, workspace=named, checkpoint=path)[1]

    summary = study("alone")
    assert not summary["update"]["real"]
    assert "checkpoint one step later is not beside" in summary["update"]["certified"]["unchecked"]
    headline, reason, *rest = influence_report(summary)
    assert headline.startswith("The step from this batch at step_13 (its batch was imported)")
    assert reason.startswith("  not checked against the step that training made: ")
    assert not any(line.endswith("change is trusted.") for line in rest)
    assert made_by_study(summary).startswith("The step from this batch at step_13 (not checked")
    shutil.copytree(default_checkpoint().parent / "checkpoint-14", run / "checkpoint-14")
    summary = study("beside the next")
    assert not summary["update"]["real"]
    assert "is not the step that training made" in summary["update"]["certified"]["another_step"]
    assert influence_report(summary)[0].startswith("A hypothetical update from step_13")


@pytest.mark.parametrize("framework", ["prime_rl", "verl/12.jsonl"])
def test_rollouts_to_load_are_those_drawn_here(probed, tmp_path, framework):
    dump = DUMPS / framework
    config = settings(tmp_path).replaced({"sampling.load": str(dump)})
    with pytest.raises(ValueError, match=r"is a dump of another program.*kind: from_file"):
        gather_study(config, probed)


def test_the_command_refuses_a_damaged_dump_in_one_sentence(tmp_path):
    folder = tmp_path / "step_12"
    shutil.copytree(DUMPS / "prime_rl" / "token_exports" / "step_12", folder)
    (folder / "STABLE").unlink()
    named = {"kind": "from_file", "params": {"path": str(folder)}}
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"influence": {"update_batch": named}}))
    options = ["--config", str(config), "--out", str(tmp_path / "run"), "--quiet"]
    refused = CliRunner().invoke(app, ["influence", *options])
    assert refused.exit_code == 2
    assert "step_12 has no STABLE: prime-rl writes it" in refused.output
    assert "Traceback" not in refused.output


def test_a_dump_without_rewards_makes_no_update(probed, tmp_path):
    columns = tmp_path / "dashboard_columns"
    shutil.copytree(DUMPS / "miles" / "dashboard_columns", columns)
    named = {"kind": "from_file", "params": {"path": str(columns)}}
    with pytest.raises(ValueError, match=r"neither rewards nor advantages.*Not in miles dashboard"):
        gathered(probed, tmp_path, [{"kind": "update"}], workspace=named)


def test_workspaces_of_every_kind(probed, tmp_path):
    rows = [
        {"prompt": PROMPT, "completion": "2 * 3 = 6", "reward": 1.0},
        {"prompt": PROMPT, "completion": "2 + 3 = 5", "reward": 0.0},
    ]
    dump = tmp_path / "dump.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = {"prompts": [PROMPT], "answers": ["24"], "facts": [FACTS], "group": 3}
    kinds = {
        "update": ({"prompts": 3, "group": 2}, 6),
        "evaluation": ({"prompts": 1, "group": 3}, 3),
        "prompt_ids": ({"ids": [50, 60], "group": 2}, 4),
        "custom_prompts": (prompts, 3),
        "custom_sequence": ({"sequences": rows}, 2),
        "from_file": ({"path": str(dump)}, 2),
    }
    for kind, (params, count) in kinds.items():
        found = gathered(probed, tmp_path / kind, workspace={"kind": kind, "params": params})
        assert len(found.probe.update.rollouts) == count, kind
        assert found.probe.update.reward_N is not None, kind
        shared = prompts_of(found.probe.update.rollouts) & prompts_of(found.probe.evaluation)
        assert not shared, kind


def test_the_recorded_batch_is_the_default(probed, tmp_path):
    config = settings(tmp_path).replaced({"update.batch": "auto"})
    found = gather_study(config, probed)
    assert found.probe.real
    assert found.probe.bound
    assert len(found.probe.update.rollouts) == 384


def test_a_workspace_is_saved_and_loaded(probed, tmp_path):
    folder = tmp_path / "workspace"
    saved = gathered(probed, tmp_path, workspace={"save_path": str(folder)})
    written = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    gathered(probed, tmp_path, workspace={"save_path": str(folder)})
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == written
    found = gathered(probed, tmp_path, workspace={"load_path": str(folder)})
    assert found.probe.update.rollouts.fingerprint == saved.probe.update.rollouts.fingerprint
    assert any("reused from" in note for note in found.probe.notes)
    assert not found.probe.real
    batch, meta = load_update_batch(folder)
    identity = {"identity": {"model": "0" * 64}}  # as the probe's own rollouts.save has it
    for other in ({**meta, "model": "0" * 64}, identity):
        save_update_batch(folder, batch, meta=other)
        with pytest.raises(ValueError, match=r"load_path: .* was saved for other weights"):
            gathered(probed, tmp_path, workspace={"load_path": str(folder)})
        named = {"kind": "from_file", "params": {"path": str(folder)}}
        with pytest.raises(ValueError, match=r"params.path: .* was saved for other weights"):
            gathered(probed, tmp_path, workspace=named)
    missing = {"load_path": str(tmp_path / "nowhere")}
    with pytest.raises(FileNotFoundError, match=r"No manifest.json in .*nowhere"):
        gathered(probed, tmp_path, workspace=missing)


def test_a_saved_workspace_is_never_another_batch(probed, tmp_path):
    folder = tmp_path / "workspace"
    asked = {"save_path": str(folder)}
    gathered(probed, tmp_path, workspace=asked)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    others = (
        {"probe_rework": {"master_seed": 1}},
        {"batch_config": {"B_E": 4, "B_U": 3, "G": 4}},
        {"batch_config": {"B_E": 4, "B_U": 2, "G": 5}},
        {"generation": {"max_new_tokens": 7}},
    )
    for i, sections in enumerate(others):
        with pytest.raises(ValueError, match=r"save_path: .*holds another update batch"):
            gathered(probed, tmp_path / str(i), workspace=asked, **sections)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    dump, saved = tmp_path / "dump.jsonl", tmp_path / "from_dump"
    named = {"kind": "from_file", "params": {"path": str(dump)}, "save_path": str(saved)}

    def dumped(*rewards):
        rows = [
            {"prompt": PROMPT, "completion": f"2 * {i} = 6", "reward": reward}
            for i, reward in enumerate(rewards)
        ]
        dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return gathered(probed, tmp_path, workspace=named)

    dumped(1.0, 0.0)
    dumped(1.0, 0.0)
    with pytest.raises(ValueError, match=r"save_path: .*holds another update batch"):
        dumped(0.0, 1.0)  # the same rollouts


def test_a_recorded_batch_is_known_at_every_door(probed, tmp_path):
    recorded = probed.checkpoint.recorded
    batch, meta = load_update_batch(recorded)
    doors = (
        lambda path: {"load_path": str(path)},
        lambda path: {"kind": "from_file", "params": {"path": str(path)}},
    )
    foreign = tmp_path / "foreign"
    save_update_batch(foreign, batch, meta={**meta, "weights": "1" * 64})
    for door in doors:
        probe = gathered(probed, tmp_path, workspace=door(recorded)).probe
        assert (probe.real, probe.bound) == (True, True)
        with pytest.raises(ValueError, match=r"foreign.*recorded at weights 111111111111"):
            gathered(probed, tmp_path, workspace=door(foreign))
    saved = tmp_path / "saved"
    gathered(probed, tmp_path, workspace={"save_path": str(saved), "params": {"batch": "recorded"}})
    for door in doors:  # saved by a study, it is still training's own
        probe = gathered(probed, tmp_path, workspace=door(saved)).probe
        assert (probe.real, probe.bound) == (True, True)


def small_study(tmp_path, name, requests=None, checkpoint=None, **asked):
    folder = tmp_path / name
    config = settings(tmp_path, requests or [{"kind": "evaluation", "params": {"group": 1}}])
    small = {"measured_rollouts": [0], "reward": False, "plots": False, **asked}
    small["run_directory"] = str(folder)
    changes = {f"influence.{key}": value for key, value in small.items()}
    changes |= checkpoint or {}
    changes["generation.max_new_tokens"] = None  # long enough to be right sometimes
    summary = EntropyInfluenceRunner(config.replaced(changes), quiet=True).run()
    assert summary["update"]["norms"]["gradient"] > 0
    return folder, summary


def test_an_imported_batch_that_training_did_not_use_is_a_hypothetical_step(tmp_path):
    rows = [
        {"prompt": PROMPT, "completion": f"2 * {i} = 6", "reward": float(i == 3)} for i in (2, 3)
    ]
    dump = tmp_path / "dump.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in rows))
    imported = {"kind": "from_file", "params": {"path": str(dump)}}
    _, summary = small_study(tmp_path, "run", workspace=imported)
    assert not summary["update"]["real"]
    assert summary["update"]["certified"]["step_distance"] > 0.05
    headline, reason, *_ = influence_report(summary)
    assert headline.startswith("A hypothetical update from step_13 (its batch was imported)")
    assert reason.startswith("  not the step that training made: the step rebuilt here is")


def test_a_what_if_with_a_kl_term_scores_the_reference(probed, tmp_path):
    """The embedded default was trained without one."""
    assert probed.facts["beta"] == 0
    folder, _ = small_study(tmp_path, "without", what_if=["beta=0"])
    with pytest.raises(ValueError, match=r"Run the study with --what-if beta=0.04 once"):
        what_if_from(folder, ["beta=0.04"])
    folder, summary = small_study(tmp_path, "with", what_if=["lr=0.001; beta=0.04"])
    (asked,) = summary["evaluations"][0]["what_if"]
    assert "error" not in asked
    found = what_if_from(folder, ["beta=0.04", "beta=0.08", "lr=0.001; beta=0.04"])
    once, twice, again = (p["prediction"]["change"] for p in found["evaluations"][0]["what_if"])
    assert once != 0
    assert twice == pytest.approx(2 * once, rel=1e-6)
    assert again == pytest.approx(asked["prediction"]["change"], rel=1e-9)
    config = settings(tmp_path).replaced({"influence.what_if": ["beta=0.04"]})
    update = gather_study(config, probed).probe.update
    with probed.checkpoint.model.disable_adapter():
        base = score_all(probed.policy, probed.policy.params, update.rollouts, microbatch=8)
    assert torch.allclose(update.ref_logprob_NS, base.logprob_NS, atol=1e-5)
    full = replace(probed, checkpoint=replace(probed.checkpoint, kind="full"))
    with pytest.raises(ValueError, match=r"what_if has 'beta=0.04' .* leave that what-if out"):
        gather_study(config, full)


def test_folds_are_at_most_the_prompts(probed, tmp_path):
    one = {"kind": "evaluation", "params": {"prompts": 1, "group": 3}}
    config = settings(tmp_path, [one, {"kind": "evaluation"}]).replaced({"influence.folds": 3})
    first, second = gather_study(config, probed).evaluations
    assert (first.folds, second.folds) == (1, 3)
    assert "no token is ranked" in first.notes[-1]
    assert second.notes == ()
    config = config.replaced({"influence.folds": 9})
    _, second = gather_study(config, probed).evaluations
    assert second.folds == 4
    assert second.notes == ("4 evaluation prompts: influence.folds is 4 here instead of 9",)


def test_one_evaluation_prompt_is_a_study(tmp_path):
    one = {"kind": "evaluation", "params": {"prompts": 1, "group": 3}}
    _, summary = small_study(tmp_path, "one", [one])
    (evaluation,) = summary["evaluations"]
    assert any(group["value"] for group in evaluation["groups"]["rollout"].values())
    assert evaluation["ranked"]["destroying"] == evaluation["ranked"]["creating"] == []
    assert "no token is ranked" in evaluation["notes"][-1]


def test_damaged_files_of_a_study_are_named(tmp_path):
    folder, _ = small_study(tmp_path, "run")
    for name in ("eval_00_tokens.parquet", "summary.json"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])
        with pytest.raises(ValueError, match=rf"{name} is damaged or was changed.*again"):
            what_if_from(folder, ["drop=negative"])
        (folder / name).write_bytes(data)
    assert what_if_from(folder, ["drop=negative"])["evaluations"]
    (folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"No manifest.json in .* not finished"):
        what_if_from(folder, ["drop=negative"])


def test_a_workspace_is_saved_by_a_finished_study_too(tmp_path):
    small_study(tmp_path, "run")
    saved = tmp_path / "workspace"
    small_study(tmp_path, "run", workspace={"save_path": str(saved)})
    batch, _ = load_update_batch(saved)
    assert len(batch.rollouts) == 8


def test_step_sizes_that_would_share_a_file():
    asked = {"etas": [0.001], "per_sequence_etas": [0.002, 0.00100000001]}
    both = r"influence\.learning_rates with influence\.rollout_learning_rates is"
    with pytest.raises(ValueError, match=rf"{both} \[0.001, 0.002, 0.0010+1"):
        EntropyInfluenceRunner({"influence": asked}, quiet=True).run()
    lr = open_checkpoint(parse_config(SMALL), None).optimizer.lr
    asked = {"per_sequence_etas": [lr * (1 + 1e-9)]}  # the reference eta is the learning rate
    with pytest.raises(ValueError, match=both):
        EntropyInfluenceRunner({"influence": asked}, quiet=True).run()


def test_confirm_needs_a_what_if():
    result = CliRunner().invoke(app, ["influence", "--confirm"])
    assert result.exit_code == 2
    assert "--confirm has nothing to confirm" in result.stderr
    assert "Add --what-if" in result.stderr


WRONG = {
    "unknown key": (
        {"kind": "evaluation", "params": {"B_E": 4}},
        r"batches\[0\]\.params: B_E: unknown key. Kind 'evaluation' takes prompts, group, split",
    ),
    "missing key": ({"kind": "prompt_ids"}, r"params: ids: is missing; kind 'prompt_ids' needs"),
    "wrong type": (
        {"kind": "prompt_ids", "params": {"ids": "3"}},
        r"params: ids: got '3', expected a list",
    ),
    "below zero": (
        {"kind": "prompt_ids", "params": {"ids": [-1]}},
        r"params: ids\[0\]: got -1, expected 0 or more",
    ),
    "twice": (
        {"kind": "prompt_ids", "params": {"ids": [3, 3]}},
        r"params: ids: one is given twice; group says how many",
    ),
    "no prompt": (
        {"kind": "evaluation", "params": {"prompts": 0}},
        r"params: prompts: got 0, expected 1 or more",
    ),
    "no answer for a prompt": (
        {"kind": "custom_prompts", "params": {"prompts": ["a", "b"], "answers": ["c"]}},
        r"params: answers: got 1 for 2 prompts, expected one each",
    ),
    "facts alone": (
        {"kind": "custom_prompts", "params": {"prompts": ["a"], "facts": [{}]}},
        r"params: facts: given without answers",
    ),
    "nothing to score": (
        {"kind": "custom_sequence", "params": {"sequences": []}},
        r"params: sequences: got .*, expected a list of at least 1",
    ),
    "no file": ({"kind": "from_file", "params": {}}, r"params: path: is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_parameters_name_their_key(name):
    request, message = WRONG[name]
    config = parse_config({"influence": {"evaluation_requests": [request]}})
    with pytest.raises(ConfigError, match=message):
        check_requests(config)


def test_bad_workspaces_name_their_key():
    for workspace, message in (
        (
            {"params": {"group": 1}},
            r"influence.update_batch.params: group: got 1, expected 2 or more",
        ),
        ({"params": {"batch": "new"}}, r"batch: got 'new', expected one of auto, recorded, drawn"),
        ({"kind": "custom_prompts", "params": {"prompts": ["a"]}}, r"answers: is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_requests(parse_config({"influence": {"workspace": workspace}}))
    with pytest.raises(
        ValueError, match=r"influence.evaluation_batches is empty; expected at least one"
    ):
        check_requests(parse_config({"influence": {"evaluation_requests": []}}))


def test_what_only_the_model_can_refuse(probed, tmp_path):
    def refused(message, requests=None, workspace=None):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            gathered(probed, tmp_path, requests, workspace)

    same = {"kind": "custom_prompts", "params": {"prompts": [PROMPT]}}
    workspace = {
        "kind": "custom_sequence",
        "params": {"sequences": [{"prompt": PROMPT, "completion": "2", "advantage": 1.0}]},
    }
    refused(r"batches\[0\].params: 1 prompts are also prompts of the update", [same], workspace)
    given = {"kind": "custom_sequence", "params": workspace["params"]}
    refused(r"batches\[0\].params: 1 prompts are also", [given], workspace)
    unrewarded = {"sequences": [{"prompt": PROMPT, "completion": "2"}]}
    refused(
        r"params.sequences has neither rewards nor advantages",
        workspace={"kind": "custom_sequence", "params": unrewarded},
    )
    strange = {"sequences": [{"prompt_ids": [1], "completion_ids": [99_999]}]}
    refused(
        r"token id 99999; the model has \d+ tokens",
        [{"kind": "custom_sequence", "params": strange}],
    )
    nothing = {"sequences": [{"prompt": PROMPT}]}
    refused(
        r"params.sequences\[0\]: no response",
        [{"kind": "custom_sequence", "params": nothing}],
    )
    missing = {"path": str(tmp_path / "none.jsonl")}
    refused(r"none.jsonl", [{"kind": "from_file", "params": missing}])


def test_rollouts_of_other_weights_are_refused(probed, tmp_path):
    rollouts = gathered(probed, tmp_path).evaluations[0].rollouts
    folder = tmp_path / "others"
    save_rollouts(folder, rollouts, meta={"identity": {"model": "0" * 64}})
    request = [{"kind": "from_file", "params": {"path": str(folder)}}]
    with pytest.raises(ValueError, match=r"drawn from other weights \(000000000000"):
        gathered(probed, tmp_path / "b", request)
    batch = gathered(probed, tmp_path).probe.update
    save_update_batch(folder, batch, meta={"weights": "1" * 64})
    workspace = {"kind": "from_file", "params": {"path": str(folder)}}
    with pytest.raises(ValueError, match=r"recorded at weights 111111111111"):
        gathered(probed, tmp_path / "b", workspace=workspace)


def test_rewards_that_contradict_advantages_are_not_believed():
    n, s = 4, 3
    response_NS = torch.tensor([[False, True, True]]).expand(n, s)
    rollouts = Rollouts(
        tokens_NS=torch.ones(n, s, dtype=torch.int64),
        attention_NS=torch.ones(n, s, dtype=torch.bool),
        response_NS=response_NS,
        prompt_N=torch.tensor([0, 0, 1, 1]),
    )
    advantage_N = torch.tensor([1.0, -1.0, -1.0, 1.0])
    batch = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=torch.where(response_NS, advantage_N[:, None], 0.0),
        reward_N=torch.tensor([1.0, 0.0, 0.0, 1.0]),
    )
    assert rewards_fit(batch)
    wrong = UpdateBatch(
        rollouts=rollouts, advantage_NS=batch.advantage_NS, reward_N=batch.reward_N.flip(0) * 0.5
    )
    assert rewards_fit(wrong)  # flipped, and the same order again
    wrong = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=batch.advantage_NS,
        reward_N=torch.tensor([1.0, 0.0, 1.0, 0.0]),
    )
    assert not rewards_fit(wrong)
