"""`entropy-probe explain` on a run that TRL made: sums, replay, resuming, refusals."""

from __future__ import annotations

import gc
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from typer.testing import CliRunner

from entropy_experiments.checkpoints.recorded_run import RecordedRun
from entropy_experiments.cli import app
from entropy_experiments.config import load_config
from entropy_experiments.distributed import Ranks, across
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.pipelines.explain import ExplainOptions, explain
from entropy_experiments.pipelines.influence.store import StageStore
from entropy_experiments.pipelines.run_ledger.folder import bind
from entropy_experiments.pipelines.run_ledger.replay import certify_arrival
from entropy_experiments.pipelines.run_ledger.walk import Walk
from entropy_experiments.results.run_ledger import (
    LAYER_TABLE,
    PROMPT_TABLE,
    TEXT_TABLE,
    TOKEN_TABLE,
    read_ledger_table,
    read_run_ledger,
)
from oracles.processes import on_ranks
from oracles.recorded_run import explain_words, record_run
from oracles.tiny_grpo import grpo

pytestmark = pytest.mark.contract

STEPS = 6
LINES = ("batches", "decay", "momentum_before_record", "uncovered")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run with a checkpoint after every step; run_ledger=True kept its record."""
    folder = tmp_path_factory.mktemp("explain")
    record_run(folder, STEPS)
    assert sorted(p.name for p in (folder / "run" / "entropy_probe_record").glob("step_*")) == [
        f"step_{step}" for step in range(STEPS)
    ]
    return folder


def settings(folder: Path):
    changes = {
        "checkpoint.base": str(folder / "base"),
        "data.evaluation_prompts": 6,
        "memory.microbatch_size": 16,
    }
    return load_config(None).replaced(changes)


def explained(folder: Path, out: Path, **options):
    asked = ExplainOptions(start=2, training_prompts=True, **options)
    return explain(settings(folder), folder / "run", asked, out=out)


def live_tensors() -> tuple[int, int]:
    """How many tensors there are, and the bytes that they hold together."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return len(tensors), sum(storage.nbytes() for storage in storages.values())


@pytest.fixture(scope="module")
def held() -> dict[int, tuple[int, int]]:
    """Live tensors after each visit of `ledger`, by checkpoint."""
    return {}


@pytest.fixture(scope="module")
def ledger(run, tmp_path_factory, held) -> Path:
    visit = Walk._visit

    def measured(self, step):
        facts = visit(self, step)
        held[step] = live_tensors()
        return facts

    out = tmp_path_factory.mktemp("ledger") / "dense"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Walk, "_visit", measured)
        explained(run, out, tangent=True)
    return out


@pytest.mark.invariant
def test_every_visit_leaves_as_much_in_memory(ledger, held):
    """Two neighbouring states between visits, however many there were; one at the end."""
    assert list(held) == [6, 5, 4, 3, 2]
    assert held[5] == held[4] == held[3]
    assert held[2] < held[3]


@pytest.mark.invariant
def test_a_walk_that_keeps_states_would_be_seen(run, tmp_path, monkeypatch):
    kept, seen = [], []
    visit = Walk._visit

    def measured(self, step):
        kept.append(self.states.at(step))
        facts = visit(self, step)
        seen.append(live_tensors())
        return facts

    monkeypatch.setattr(Walk, "_visit", measured)
    explained(run, tmp_path / "kept", tangent=True)
    assert seen[1] < seen[2] < seen[3]


def test_lines_and_tables_add_up_to_the_path(ledger):
    summary = read_run_ledger(ledger)
    total = sum(summary["lines"][name]["dH"] for name in LINES)
    assert total == pytest.approx(summary["total"]["path"]["value"], abs=2e-6)
    gain = summary["total"]["reward"]
    assert gain is not None
    assert sum(summary["lines"][name]["dR"] for name in LINES) == pytest.approx(
        gain["value"], abs=2e-5
    )
    batches = summary["lines"]["batches"]
    assert abs(batches["dH"]) > 1e-5
    for name in (TOKEN_TABLE, PROMPT_TABLE, TEXT_TABLE):
        assert sum(read_ledger_table(ledger, name).column("dH").to_pylist()) == pytest.approx(
            batches["dH"], abs=1e-12
        )
    layers = read_ledger_table(ledger, LAYER_TABLE).column("dH").to_pylist()
    assert sum(layers) == pytest.approx(batches["dH"], abs=2e-6)
    assert summary["window"] == {"from": 2, "to": STEPS, "steps": STEPS - 2, "every": 1}
    assert sum(step["dH_path"] for step in summary["steps"]) == pytest.approx(total, abs=2e-6)
    tangent = summary["total"]["tangent"]
    assert tangent is not None
    assert sum(step["dH_tangent"] for step in summary["steps"]) == pytest.approx(
        tangent["value"], abs=2e-6
    )
    assert all(step["step_distance"] < 1e-2 for step in summary["steps"])
    distances = [step["gradient_distance"] for step in summary["steps"]]
    assert all(distance is not None and distance < 1e-2 for distance in distances)
    assert summary["unexplained"]["value"] == pytest.approx(
        summary["measured"]["value"] - summary["total"]["path"]["value"], abs=1e-12
    )


def last_step(run: Path, folder: Path) -> Path:
    """Steps 5 and 6 alone; the last checkpoint has no optimizer, as with save_only_model."""
    for name in ("checkpoint-5", f"checkpoint-{STEPS}", "entropy_probe_record"):
        shutil.copytree(run / "run" / name, folder / name)
    (folder / f"checkpoint-{STEPS}" / "optimizer.pt").unlink()
    return folder


def test_the_last_gradient_is_held_against_its_fingerprint(run, tmp_path):
    """And notes about the evaluation prompts, of which the run has fewer, are kept."""
    folder = last_step(run, tmp_path / "run")
    asked = ExplainOptions(start=5, training_prompts=True)
    many = settings(run).replaced({"data.evaluation_prompts": 400})
    summary = explain(many, folder, asked, out=tmp_path / "out")
    (step,) = summary["steps"]
    assert step["gradient_distance"] is not None
    assert step["gradient_distance"] < 1e-2
    assert [note for note in summary["notes"] if "prompts for the evaluation batch" in note]

    batch = change_advantages(folder / "checkpoint-5" / "update_batch")
    assert batch.is_dir()
    summary = explain(settings(run), folder, asked, out=tmp_path / "changed")
    assert summary["steps"][0]["gradient_distance"] > 0.05
    assert any("1 of 1 gradients rebuilt here are not those" in why for why in summary["why_not"])


class LowerRate(TrainerCallback):
    """Each step at a tenth of the rate that the checkpoint before it holds."""

    def on_step_begin(self, args, state, control, optimizer, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] *= 0.1


def test_a_step_is_made_at_the_rate_that_was_recorded_with_it(tmp_path):
    record_run(tmp_path, 4, [LowerRate()])
    summary = explained(tmp_path, tmp_path / "out")
    for step in summary["steps"]:
        stored = torch.load(
            tmp_path / "run" / f"checkpoint-{step['step']}" / "optimizer.pt", weights_only=True
        )
        assert step["lr"] == pytest.approx(0.1 * stored["param_groups"][0]["lr"], rel=1e-12)
        assert step["step_distance"] < 1e-2


def change_advantages(batch: Path) -> Path:
    """Another loss from the same rollouts; its manifest is right again."""
    tensors = load_file(batch / "rollouts.safetensors")
    name = next(n for n in tensors if n.startswith("advantage"))
    tensors[name] = -2 * tensors[name] + 1
    save_file(tensors, batch / "rollouts.safetensors")
    _describe_again(batch)
    return batch


def test_replay_between_sparse_checkpoints_gives_the_same_numbers(run, ledger, tmp_path):
    """Only the first and the last checkpoint are read; the record has the batches between."""
    sparse = tmp_path / "sparse"
    for name in ("checkpoint-2", f"checkpoint-{STEPS}", "entropy_probe_record"):
        shutil.copytree(run / "run" / name, sparse / name)
    asked = ExplainOptions(start=2, training_prompts=True)
    summary = explain(settings(run), sparse, asked, out=tmp_path / "out")
    dense = read_run_ledger(ledger)
    (arrival,) = summary["replays"]
    assert (arrival["start"], arrival["end"]) == (2, STEPS)
    assert arrival["distance"] < 1e-3
    assert [step["replayed"] for step in summary["steps"]] == [False, True, True, True]
    for name in LINES[:3]:
        assert summary["lines"][name]["dH"] == pytest.approx(dense["lines"][name]["dH"], abs=1e-5)
    for mine, theirs in zip(summary["steps"], dense["steps"], strict=True):
        assert mine["lr"] == pytest.approx(theirs["lr"], rel=1e-12)
        assert mine["dH_batches"] == pytest.approx(theirs["dH_batches"], abs=1e-5)
    assert not list((tmp_path / "out" / "stages").glob("state_*"))[1:]  # one segment's last


@pytest.mark.slow
def test_every_reads_so_many_checkpoints(run, ledger, tmp_path):
    summary = explained(run, tmp_path / "every", every=2)
    assert [(one["start"], one["end"]) for one in summary["replays"]] == [(2, 4), (4, 6)]
    dense = read_run_ledger(ledger)
    assert summary["lines"]["batches"]["dH"] == pytest.approx(
        dense["lines"]["batches"]["dH"], abs=1e-5
    )


@pytest.fixture(scope="module")
def replayed(run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("ledger") / "replayed"
    explained(run, out, every=4)
    return out


@pytest.mark.parametrize(
    ("every", "stop"), [(1, f"step_{STEPS}"), (1, "step_3"), (4, "state_4"), (4, "costate_4")]
)
def test_killed_at_any_step_it_goes_on_to_the_same_bytes(
    run, ledger, replayed, tmp_path, monkeypatch, every, stop
):
    """step_N: between the two stages of a visit; state_N: in the middle of a replay."""
    whole = ledger if every == 1 else replayed
    options = {"every": every, "tangent": every == 1}
    put = StageStore.put

    class KilledError(BaseException):
        pass

    def killed(self, name, key, stage, seconds):
        put(self, name, key, stage, seconds)
        if name == stop:
            raise KilledError

    torn = tmp_path / "torn"
    with monkeypatch.context() as patch:
        patch.setattr(StageStore, "put", killed)
        with pytest.raises(KilledError):
            explained(run, torn, **options)
    assert not (torn / "manifest.json").exists()
    explained(run, torn, **options)
    for path in whole.iterdir():
        if path.is_file():
            assert (torn / path.name).read_bytes() == path.read_bytes(), path.name
    assert not list((torn / "stages").glob("costate_*"))[1:]


def _on_this_rank(folder: Path, out: Path) -> float:
    with across(Ranks.all()):
        return explained(folder, out, tangent=True)["lines"]["batches"]["dH"]


@pytest.mark.slow
def test_ranks_change_no_number(run, ledger, tmp_path):
    """Under torchrun rollouts are dealt out, and rank 0 alone writes."""
    results = on_ranks(2, _on_this_rank, run, tmp_path / "shared")
    alone, shared = read_run_ledger(ledger), read_run_ledger(tmp_path / "shared")
    assert results[0] == results[1] == shared["lines"]["batches"]["dH"]
    for name in LINES:
        mine, theirs = shared["lines"][name], alone["lines"][name]
        assert mine["dH"] == pytest.approx(theirs["dH"], abs=1e-8)
        assert mine["dR"] == pytest.approx(theirs["dR"], abs=1e-7)
    assert shared["measured"] == alone["measured"]


def test_a_finished_ledger_is_not_computed_again(run, ledger, monkeypatch):
    monkeypatch.setattr(Walk, "go", lambda self: pytest.fail("computed"))
    lines: list[str] = []
    asked = ExplainOptions(start=2, training_prompts=True, tangent=True)
    explain(settings(run), run / "run", asked, out=ledger, say=lines.append)
    assert lines == [f"{ledger}: finished already, nothing was computed"]


def test_another_ledger_in_the_folder_is_refused(run, ledger, tmp_path):
    with pytest.raises(ValueError, match=r"holds another ledger: .* --overwrite"):
        explained(run, ledger)
    refused = tmp_path / "refused"  # before its first stage: it holds a name and nothing to lose
    (refused / "stages").mkdir(parents=True)
    shutil.copy(ledger / "explain.json", refused)
    bind(refused, "another key", overwrite=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match=r"has files that are no ledger's \(mine\.txt\)"):
        explained(run, tmp_path / "mine")


def test_a_replay_that_does_not_arrive_is_refused_and_names_the_step(run, tmp_path):
    """Step 3's batch is changed: its gradient is no longer the one with the recorded sketch."""
    sparse = tmp_path / "sparse"
    for name in ("checkpoint-2", f"checkpoint-{STEPS}", "entropy_probe_record"):
        shutil.copytree(run / "run" / name, sparse / name)
    change_advantages(sparse / "entropy_probe_record" / "step_3" / "update_batch")
    asked = ExplainOptions(start=2, training_prompts=True)
    with pytest.raises(
        ValueError,
        match=r"does not arrive at checkpoint 6 .* The gradient of step 3 is the first that is not"
        r".* recorded or given",
    ):
        explain(settings(run), sparse, asked, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "assumed", "words"),
    [
        (
            ["top_entropy_quantile = 0.2"],
            {},
            r"Not followed: top_entropy_quantile = 0\.2\. Or choose",
        ),
        (
            [],
            {"loss": "dapo", "beta": 0.0},
            r"says: loss = dapo, beta = 0\.0\. If training had others",
        ),
        (
            [],
            {},
            r"Every option of the step is recorded or given, .* may be recorded wrongly\. Or ch",
        ),
    ],
)
def test_a_replay_that_does_not_arrive_names_what_was_assumed(options, assumed, words):
    run = RecordedRun(folder=Path("run"), checkpoints={}, record=None)
    zero, one = ({"w": torch.full((2,), value)} for value in (0.0, 1.0))
    with pytest.raises(ValueError, match=words):
        certify_arrival(run, 2, 6, zero, zero, one, [], reasons=lambda: options, assumed=assumed)
    assert certify_arrival(run, 2, 6, zero, one, one, [], assumed=assumed) == 0


def _describe_again(batch: Path) -> None:
    """The manifest of a batch whose tensors were changed on purpose."""
    from entropy_experiments.artifacts import described

    manifest = json.loads((batch / "manifest.json").read_bytes())
    data = (batch / "rollouts.safetensors").read_bytes()
    manifest["files"]["rollouts.safetensors"] = described(data)
    (batch / "manifest.json").write_text(json.dumps(manifest))


def test_a_rate_between_checkpoints_that_nobody_recorded_is_refused(run, tmp_path):
    sparse = tmp_path / "sparse"
    for name in ("checkpoint-2", f"checkpoint-{STEPS}", "entropy_probe_record"):
        shutil.copytree(run / "run" / name, sparse / name)
    for step in range(STEPS):
        shutil.rmtree(sparse / "entropy_probe_record" / f"step_{step}" / "made_step")
    shutil.rmtree(sparse / "checkpoint-2" / "made_step")
    asked = ExplainOptions(start=2, training_prompts=True)
    with pytest.raises(ValueError, match="The learning rate of step 3 is not recorded"):
        explain(settings(run), sparse, asked, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 40}, r"--from is 40, and .* no checkpoint of that step; expected one of 1, 2"),
        ({"start": 1, "end": 77}, r"--to is 77, and .* The nearest is 6"),
        ({"start": 6}, r"from checkpoint 6 to 6; expected two checkpoints or more"),
    ],
)
def test_a_window_without_checkpoints_is_refused(run, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        explain(settings(run), run / "run", ExplainOptions(**options), out=tmp_path / "out")


def test_a_window_without_batches_is_refused(run, tmp_path):
    bare = tmp_path / "bare"
    for step in (2, 3, 4):
        shutil.copytree(run / "run" / f"checkpoint-{step}", bare / f"checkpoint-{step}")
    shutil.rmtree(bare / "checkpoint-3" / "update_batch")
    with pytest.raises(ValueError, match=r"1 of 2 steps of .*\(the first is step 3\).*\(--to 3\)"):
        explain(settings(run), bare, ExplainOptions(), out=tmp_path / "out")


def test_prompts_that_the_run_has_used_are_not_evaluated_on_unasked(run, tmp_path):
    with pytest.raises(ValueError, match=r"--training-prompts evaluates on them"):
        explain(settings(run), run / "run", ExplainOptions(start=2), out=tmp_path / "out")


def test_options_are_checked():
    with pytest.raises(ValueError, match="every is 0; expected at least 1"):
        ExplainOptions(every=0)
    with pytest.raises(ValueError, match="from checkpoint 5 to 5; expected its end after its st"):
        ExplainOptions(start=5, end=5)


def test_the_command_says_what_is_wrong(tmp_path):
    result = CliRunner().invoke(app, ["explain", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "Run not found" in result.output
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["explain", str(tmp_path / "empty")])
    assert result.exit_code == 2
    assert "No checkpoint in" in result.output


def test_the_command_prints_the_ledger(run, ledger):
    result = CliRunner().invoke(app, explain_words(run, ledger, "--tangent"))
    assert result.exit_code == 0, result.output
    for words in ("the recorded batches", "along the path", "unexplained", "Attribution is not"):
        assert words in result.output


@pytest.mark.parametrize(
    "changes", [{"save_strategy": "no"}, {"save_strategy": "steps", "save_only_model": True}]
)
def test_a_run_ledger_without_checkpoints_is_refused(tmp_path, changes):
    callback = EntropyProbeCallback(every=100, prompts=6, run_ledger=True)
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(tmp_path, callbacks=[callback], **changes)
        with pytest.raises(ValueError, match=r"run_ledger=True with save_.*; expected checkpoints"):
            trainer.train()


def studied(
    run: Path,
    folder: Path,
    checkpoint: Path,
    *,
    dataset: str | None = "countdown",
    prompts: int = 12,
    update_rollouts: str | None = None,
    rate: float | None = None,
    **options,
):
    """A study of a step of the run, drawn with few rollouts."""
    from entropy_experiments import EntropyInfluencePlan, EntropyInfluenceRunner

    config = {
        "checkpoint": {"base": str(run / "base")},
        "data": {"evaluation_prompts": prompts, "dataset": dataset},
        "memory": {"microbatch_size": 16},
        "update": {"lr": rate},
        "sampling": {"save": str(folder / "rollouts"), "max_new_tokens": 4},
    }
    if update_rollouts is not None:
        config["data"]["update_rollouts"] = update_rollouts
    plan = EntropyInfluencePlan(measured_rollouts=1, plots=False, run_directory=folder / "study")
    runner = EntropyInfluenceRunner(config, quiet=True)
    return runner.run(plan, checkpoint_path=checkpoint, **options)


def test_the_newest_checkpoint_has_no_step_yet(run, tmp_path):
    """What is wrong is that no step was recorded after it, not how many prompts there are."""
    newest = run / "run" / f"checkpoint-{STEPS}"
    words = (
        rf"No step is recorded after .*checkpoint-{STEPS}: .*prompts are too few \(.* problems "
        r"left for the (evaluation|update) batch.*give a checkpoint with a record, such as "
        rf".*-{STEPS - 1}"
    )
    asked = {"dataset": None, "prompts": 400, "rate": 1e-3}  # the schedule ended at 0
    with pytest.raises(ValueError, match=words):
        studied(run, tmp_path, newest, **asked)
    with pytest.raises(ValueError, match=r"problems left .* Lower data\.evaluation_prompts or"):
        studied(run, tmp_path, newest, **asked, update_rollouts="drawn")


@pytest.fixture(scope="module")
def influence(run, tmp_path_factory):
    """A study of step 5, as it is by default."""
    folder = tmp_path_factory.mktemp("influence")
    return studied(run, folder, run / "run" / "checkpoint-5")


def the_lines(momentum):
    return math.fsum(
        [
            *(one["dH"] for one in momentum["batches"]),
            *(momentum["before_record"]["dH"], momentum["decay"], momentum["uncovered"]),
        ]
    )


@pytest.mark.slow
def test_influence_splits_momentum_among_earlier_batches(influence):
    """Checkpoint 0 is not stored: the batches are those from the first checkpoint on."""
    import pyarrow.parquet

    from entropy_experiments.report.influence_tables import influence_report
    from entropy_experiments.report.momentum import momentum_lines

    momentum = influence["evaluations"][0]["momentum"]
    assert [one["step"] for one in momentum["batches"]] == [4, 3, 2, 1]
    line = influence["ledger"]["lines"]["momentum"]["this_step"]
    assert momentum["total"] == line
    assert the_lines(momentum) == pytest.approx(line, abs=1e-15)
    shown = momentum_lines(momentum)
    assert list(shown) == ["batches 3 to 4", "batches 1 to 2", "batches before 1", "not covered"]
    assert math.fsum(one["this_step"] for one in shown.values()) == pytest.approx(line, abs=1e-15)
    assert abs(line) > 1e-5
    assert abs(momentum["uncovered"]) < 1e-3 * abs(line)
    for one in (*momentum["batches"], *momentum["parts"], momentum["before_record"]):
        low, high = one["interval"]  # of the same slope over E, by prompt
        assert (low + high) / 2 == pytest.approx(one["dH"], rel=1e-3, abs=1e-9)
    assert not any(one["other_gradient"] for one in momentum["batches"])
    folder = Path(influence["run_directory"])
    rows = pyarrow.parquet.read_table(folder / "momentum.parquet").to_pylist()
    for one in momentum["batches"]:
        own = math.fsum(row["dH"] for row in rows if row["step"] == one["step"])
        assert own == pytest.approx(one["dH"], abs=1e-12)
    text = "\n".join(influence_report(influence))
    assert "batches 3 to 4" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  momentum ")]
    assert row.split()[1:4] == ["-", "-", "-"]  # the reward's alone: the entropy's is replaced


@pytest.mark.slow
def test_the_split_of_momentum_is_the_same_by_replay(run, influence, tmp_path):
    """From checkpoint 1 alone: the states before batches 2, 3 and 4 are made again, and removed."""
    sparse = tmp_path / "sparse"
    for name in ("checkpoint-1", "checkpoint-5", "entropy_probe_record"):
        shutil.copytree(run / "run" / name, sparse / name)
    replayed = studied(run, tmp_path, sparse / "checkpoint-5")
    mine, theirs = (one["evaluations"][0]["momentum"] for one in (replayed, influence))
    assert [one["step"] for one in mine["batches"]] == [4, 3, 2, 1]
    for one, other in zip(mine["batches"], theirs["batches"], strict=True):
        assert one["dH"] == pytest.approx(other["dH"], abs=1e-5)
    stages = tmp_path / "study" / "stages"
    assert not [*stages.glob("state_*"), *stages.glob("replay_*")]


@pytest.mark.slow
def test_the_reach_of_the_split_and_no_split_at_all(run, tmp_path):
    checkpoint = run / "run" / "checkpoint-5"
    two = studied(run, tmp_path, checkpoint, momentum_batches=2)["evaluations"][0]["momentum"]
    assert [one["step"] for one in two["batches"]] == [4, 3]
    assert abs(two["before_record"]["dH"]) > 1e-6
    none = studied(run, tmp_path, checkpoint, momentum_batches=0)
    assert none["evaluations"][0]["momentum"] is None
    assert not (tmp_path / "study" / "momentum.parquet").exists()
