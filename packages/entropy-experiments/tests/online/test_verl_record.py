"""verl's fields and settings, without verl: padded and jagged data, losses, the driver's record.

`tests/wild/test_verl_recorder.py` does the same with the installed verl.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.recorded_run import find_run
from entropy_experiments.checkpoints.runs import next_checkpoint
from entropy_experiments.online.verl import record_engine, verl_batch, verl_settings
from entropy_experiments.online.verl_driver import LATEST, DriverRecorder
from entropy_experiments.sampling.rollout_files import load_update_batch
from entropy_experiments.sampling.tensor_batches import concatenate
from oracles.own_loop import LENGTH, Loop

PADDED: dict[str, Any] = {
    "prompts": torch.tensor([[0, 5], [5, 6]]),
    "responses": torch.tensor([[7, 8, 1], [9, 0, 0]]),
    "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0]]),  # a tool's output is a hole
    "advantages": torch.tensor([[2.0, 2.0, 2.0], [-1.0, -1.0, -1.0]]),
    "old_log_probs": torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]),
    "ref_log_prob": torch.tensor([[-1.5, -2.5, -3.5], [-4.5, -5.5, -6.5]]),
    "rollout_is_weights": torch.tensor([[0.5, 1.0, 2.0], [1.0, 1.0, 1.0]]),
    "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0]]),
}


def _jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _unpadded() -> dict[str, Any]:
    """As verl's newer trainer has it: every field jagged, no attention mask."""
    lengths = (3, 1)
    names = [n for n in PADDED if n not in ("prompts", "attention_mask")]
    cut = {n: [row[:k] for row, k in zip(PADDED[n], lengths, strict=True)] for n in names}
    cut["prompts"] = [torch.tensor([5]), torch.tensor([5, 6])]
    cut["token_level_scores"] = list(PADDED["token_level_scores"])
    return {name: _jagged(rows) for name, rows in cut.items()}


@pytest.mark.parametrize("data", [PADDED, _unpadded()], ids=["padded", "jagged"])
def test_fields_become_the_update_batch(data):
    batch = verl_batch(data, eos=1)
    assert batch.rollouts.tokens_NS[batch.rollouts.attention_NS].tolist() == [5, 7, 8, 1, 5, 6, 9]
    inside_NS = batch.rollouts.response_NS
    assert batch.rollouts.tokens_NS[inside_NS].tolist() == [7, 1, 9]
    assert batch.advantage_NS[inside_NS].tolist() == [1.0, 4.0, -1.0]  # times the weights
    assert batch.old_logprob_NS is not None
    assert batch.old_logprob_NS[inside_NS].tolist() == [-1.0, -3.0, -4.0]
    assert batch.ref_logprob_NS is not None
    assert batch.ref_logprob_NS[inside_NS].tolist() == [-1.5, -3.5, -4.5]
    assert batch.reward_N is not None
    assert batch.reward_N.tolist() == [1.0, 0.5]
    assert batch.rollouts.truncated_N.tolist() == [False, True]


def test_a_rejected_rollout_was_drawn_and_is_not_counted():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    batch = verl_batch(PADDED | {"response_mask": mask})
    assert batch.rollouts.tokens_N.tolist() == [2, 1]
    assert batch.counted_NS.sum(1).tolist() == [2, 0]


def test_uid_says_which_responses_belong_together():
    proto = SimpleNamespace(batch=PADDED, non_tensor_batch={"uid": ["x", "x"]})
    batch = verl_batch(proto)
    assert batch.rollouts.prompt_N.tolist() == [0, 0]
    assert batch.rollouts.uid == ("x", "x")  # as verl's own tables call them
    joined = concatenate([batch, verl_batch(PADDED)])
    assert joined.rollouts.uid == ("x", "x", None, None)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("advantages", r"verl's batch lacks \['advantages'\]; got"),
        ("attention_mask", r"verl's padded batch lacks attention_mask; got"),
    ],
)
def test_what_is_missing_is_named(drop, message):
    with pytest.raises(ValueError, match=message):
        verl_batch({name: value for name, value in PADDED.items() if name != drop})


@pytest.mark.faults
def test_a_field_that_is_too_short_is_named():
    with pytest.raises(ValueError, match=r"advantages of rollout 0 has 2 entries; expected one"):
        verl_batch(PADDED | {"advantages": PADDED["advantages"][:, :2]})


def _config(folder: Any = "run", **actor: Any) -> dict[str, Any]:
    return {
        "data": {
            "train_batch_size": 4,
            "max_response_length": LENGTH,
            "entropy_record": str(Path(folder) / "record"),
        },
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": 4, "clip_ratio": 0.2, **actor},
            "rollout": {"temperature": 0.9, "n": 4},
        },
        "trainer": {"default_local_dir": str(folder)},
    }


@pytest.mark.parametrize(
    ("actor", "facts", "unfollowed"),
    [
        ({}, {"loss": "dapo", "delta": 3.0, "beta": 0.0, "clip_low": 0.2}, ()),
        ({"loss_agg_mode": "seq-mean-token-mean"}, {"loss": "grpo"}, ()),
        ({"loss_agg_mode": "seq-mean-token-sum"}, {"loss": "luspo"}, ()),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, {"loss": "dr_grpo"}, ()),
        ({"use_kl_loss": True, "kl_loss_coef": 0.01}, {"beta": 0.01, "kl_ratio": False}, ()),
        ({"optim": {"clip_grad": 0.5}}, {"max_grad_norm": 0.5}, ()),
        ({"loss_agg_mode": "token-sum"}, {}, ("loss_agg_mode = token-sum",)),
        ({"policy_loss": {"loss_mode": "gspo"}}, {}, ("policy_loss.loss_mode = gspo",)),
        (
            {"use_kl_loss": True, "kl_loss_type": "k1"},
            {"beta": 0.001},
            ("kl_loss_type = k1",),
        ),
        (
            {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 7},
            {},
            ("loss_scale_factor = 7",),
        ),
        ({"entropy_coeff": 0.1}, {"entropy_coef": 0.1, "loss": "dapo"}, ()),
        (
            {"entropy_coeff": 0.1, "loss_agg_mode": "seq-mean-token-mean"},
            {"entropy_coef": 0.1},
            ("entropy_coeff = 0.1 with loss_agg_mode = seq-mean-token-mean",),
        ),
    ],
)
def test_settings_are_the_training_facts(actor, facts, unfollowed):
    settings = verl_settings(_config(**actor))
    assert {name: settings.facts[name] for name in facts} == facts
    assert settings.unfollowed == unfollowed
    assert settings.facts["temperature"] == 0.9
    assert settings.facts["max_completion_length"] == LENGTH


class _Engine:
    """The two methods of verl's engines that are relied upon."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.module, self.optimizer = loop, loop.model, loop.optimizer

    def train_batch(self, data: Any, loss_function: Any) -> str:
        self.optimizer.zero_grad()
        sum(p.sum() for p in self.module.parameters()).backward()
        self.optimizer.step()
        return "metrics"


def test_an_engine_s_steps_are_recorded_with_their_rollouts(tmp_path):
    engine = _Engine(Loop.begin())
    recorder = record_engine(engine, str(tmp_path / "record"), _config())
    assert engine.train_batch(PADDED, loss_function=None) == "metrics"
    engine.optimizer.step()  # of no batch
    assert (recorder.off, recorder.steps) == (None, 1)
    batch, _ = load_update_batch(tmp_path / "record" / "step_0" / "update_batch")
    assert batch.advantage_NS[batch.rollouts.response_NS].tolist() == [1.0, 4.0, -1.0]


@pytest.mark.faults
def test_an_engine_goes_on_when_its_batch_cannot_be_recorded(tmp_path):
    engine = _Engine(Loop.begin())
    recorder = record_engine(engine, str(tmp_path / "record"), _config())
    before = [p.detach().clone() for p in engine.module.parameters()]
    assert engine.train_batch({"prompts": 3}, loss_function=None) == "metrics"
    assert isinstance(recorder.off, ValueError)
    after = list(engine.module.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _saved(folder: Any, step: int) -> None:
    """As verl does: the checkpoint first, then its number; before it hands the batch over."""
    Loop.begin().save(folder / f"global_step_{step}")
    (folder / LATEST).write_text(str(step))


def test_the_driver_keeps_batches_and_follows_checkpoints(tmp_path):
    recorder = DriverRecorder(_config(tmp_path))
    recorder.add(PADDED)  # step 0, of no checkpoint
    _saved(tmp_path, 2)
    recorder.add(SimpleNamespace(batch=PADDED, meta_info={"global_steps": 2}))
    recorder.add(PADDED)
    assert recorder.off is None
    for step in (0, 1, 2):
        assert (tmp_path / "record" / f"step_{step}" / "update_batch").is_dir()
    _, meta = load_update_batch(tmp_path / "global_step_2" / "update_batch")
    assert meta["step"] == 2
    assert len(meta["weights"]) == 64


@pytest.mark.parametrize("mode", [None, "auto", "resume_path", "disable"])
def test_a_resumed_driver_goes_on_where_verl_does(mode, tmp_path):
    _saved(tmp_path, 4)
    before = tmp_path / "global_step_4"
    config = _config(tmp_path)
    if mode == "resume_path":  # of an earlier step than the latest
        before = tmp_path / "global_step_3"
        Loop.begin().save(before)
        config["trainer"]["resume_from_path"] = str(before)
    if mode is not None:
        config["trainer"]["resume_mode"] = mode
    first = {"disable": 0, "resume_path": 3}.get(str(mode), 4)
    recorder = DriverRecorder(config)
    recorder.add(PADDED)  # global_step_4 may be there: this training did not save it
    _saved(tmp_path, first + 2)
    recorder.add(PADDED)
    recorder.add(PADDED)
    assert recorder.off is None
    kept = sorted(path.name for path in (tmp_path / "record").glob("step_*"))
    assert kept == [f"step_{first + made}" for made in range(3)]
    assert (before / "update_batch").is_dir() == (mode != "disable")
    for step in (first + 2, *([] if mode == "disable" else [first])):
        _, meta = load_update_batch(tmp_path / f"global_step_{step}" / "update_batch")
        assert meta["step"] == step


def test_a_latest_checkpoint_that_was_deleted_begins_anew_as_verl_does(tmp_path):
    (tmp_path / LATEST).write_text("7")
    recorder = DriverRecorder(_config(tmp_path))
    recorder.add(PADDED)
    assert recorder.off is None
    assert (tmp_path / "record" / "step_0").is_dir()


def test_steps_of_the_critic_alone_are_left_out(tmp_path):
    config = _config(tmp_path)
    config["trainer"]["critic_warmup"] = 3  # verl updates the actor from its step 3 on
    recorder = DriverRecorder(config)
    for _ in range(3):
        recorder.add(PADDED)
    assert recorder.off is None
    assert [path.name for path in (tmp_path / "record").glob("step_*")] == ["step_2"]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("batch", "saved", "message"),
    [
        ({"global_steps": 5}, 1, r"verl's batch is of its step 5; expected step 1"),
        ({}, 3, r"verl has saved its step 3, and 1 batches were handed over"),
    ],
)
def test_a_step_that_cannot_be_placed_is_not_recorded_elsewhere(batch, saved, message, tmp_path):
    recorder = DriverRecorder(_config(tmp_path))
    _saved(tmp_path, saved)
    recorder.add(SimpleNamespace(batch=PADDED, meta_info=batch))
    with pytest.raises(ValueError, match=message):
        raise recorder.off  # type: ignore[misc]
    assert not (tmp_path / f"global_step_{saved}" / "update_batch").exists()


@pytest.mark.faults
def test_a_damaged_file_of_verl_s_does_not_stop_it(tmp_path):
    (tmp_path / LATEST).write_text("four")
    recorder = DriverRecorder(_config(tmp_path))
    recorder.add(PADDED)
    assert isinstance(recorder.off, ValueError)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("record", "actor", "message"),
    [
        (None, {}, r"data\.entropy_record is not set; expected the folder of the record"),
        ("record", {"ppo_mini_batch_size": 2}, r"verl makes 2 optimizer steps of a batch"),
        ("record", {"ppo_epochs": 3}, r"verl makes 3 optimizer steps of a batch"),
    ],
)
def test_what_the_driver_cannot_record_is_said_once(record, actor, message, tmp_path, caplog):
    config = _config(tmp_path, **actor)
    if record is None:
        del config["data"]["entropy_record"]
    recorder = DriverRecorder(config)
    recorder.add(PADDED)
    recorder.add({"nonsense": 1})
    with pytest.raises(ValueError, match=message):
        raise recorder.off  # type: ignore[misc]
    assert sum("training continues" in r.getMessage() for r in caplog.records) == 1


# Several optimizer steps of a batch: mini-batches, passes.


def _made(tmp_path: Any, *, steps: int, **options: Any) -> tuple[_Engine, Any]:
    engine = _Engine(Loop.begin())
    recorder = record_engine(engine, str(tmp_path / "record"), _config(), **options)
    for _ in range(steps):
        engine.train_batch(PADDED, loss_function=None)
    return engine, recorder


def test_a_checkpoint_belongs_to_the_optimizer_step_whatever_its_number(tmp_path):
    engine, recorder = _made(tmp_path, steps=3)
    engine.loop.save(tmp_path / "global_step_1")
    recorder.saved(tmp_path / "global_step_1")
    engine.train_batch(PADDED, loss_function=None)
    assert recorder.off is None
    _, meta = load_update_batch(tmp_path / "global_step_1" / "update_batch")
    assert meta["step"] == 3
    loaded = load_checkpoint(tmp_path / "global_step_1", dtype="float64")
    assert (loaded.step, loaded.name) == (3, "global_step_1")
    assert loaded.optimizer_count == 3


def test_a_resumed_engine_counts_as_its_optimizer_does(tmp_path):
    engine, _ = _made(tmp_path / "first", steps=5)
    engine.loop.save(tmp_path / "global_step_2")
    again = _Engine(Loop.begin())
    recorder = record_engine(again, str(tmp_path / "record"), _config())  # before it is loaded
    again.optimizer.load_state_dict(engine.optimizer.state_dict())
    recorder.resumed(tmp_path / "global_step_2")
    again.train_batch(PADDED, loss_function=None)
    assert (recorder.off, recorder.steps) == (None, 6)
    _, meta = load_update_batch(tmp_path / "global_step_2" / "update_batch")
    assert meta["step"] == 5


def test_a_step_that_was_skipped_has_no_number(tmp_path):
    """verl leaves one out where the gradient is not finite, and torch where there is none."""
    engine, recorder = _made(tmp_path, steps=1)
    engine.optimizer.zero_grad(set_to_none=True)
    with recorder.step(verl_batch(PADDED)):
        engine.optimizer.step.__func__.__wrapped__()
    engine.train_batch(PADDED, loss_function=None)
    assert (recorder.off, recorder.steps) == (None, 2)


def test_a_run_s_checkpoints_are_ordered_by_optimizer_steps(tmp_path):
    engine, recorder = _made(tmp_path, steps=2)
    for number in (1, 2, 3):
        engine.loop.save(tmp_path / f"global_step_{number}")
        if number < 3:  # the last one was not recorded: its place is not known
            recorder.saved(tmp_path / f"global_step_{number}")
        for _ in range(2):
            engine.train_batch(PADDED, loss_function=None)
    run = find_run(tmp_path)
    assert {step: path.name for step, path in run.checkpoints.items()} == {
        2: "global_step_1",
        4: "global_step_2",
    }
    assert run.batch(3) == tmp_path / "record" / "step_3" / "update_batch"
    assert next_checkpoint(tmp_path / "global_step_1") is None  # two steps lie between


def test_one_response_to_a_prompt_is_no_group(tmp_path):
    """REINFORCE++: recording must not refuse what training does."""
    config = _config()
    config["actor_rollout_ref"]["rollout"]["n"] = 1
    assert "G" not in verl_settings(config).facts
    recorder = record_engine(_Engine(Loop.begin()), str(tmp_path / "record"), config)
    assert recorder.off is None


def test_unpadded_responses_have_a_divisor_of_their_own():
    """verl's newer trainer divides each microbatch by its longest response, unless it is set."""
    config = _config(loss_agg_mode="seq-mean-token-sum-norm")
    config["trainer"]["use_v1"] = True
    assert verl_settings(config).unfollowed == ("loss_scale_factor = null with trainer.use_v1",)
    config["actor_rollout_ref"]["actor"]["loss_scale_factor"] = LENGTH
    assert verl_settings(config).unfollowed == ()


def test_a_record_in_the_run_s_own_folder_hides_no_checkpoint(tmp_path):
    """step_2 of the record and global_step_2 of verl are of one number."""
    engine = _Engine(Loop.begin())
    recorder = record_engine(engine, str(tmp_path), _config())
    for made in (1, 2, 3):
        engine.train_batch(PADDED, loss_function=None)
        if made < 3:
            engine.loop.save(tmp_path / f"global_step_{made}")
            recorder.saved(tmp_path / f"global_step_{made}")
    assert recorder.off is None
    run = find_run(tmp_path)
    assert [path.name for path in run.checkpoints.values()] == ["global_step_1", "global_step_2"]
    assert (tmp_path / "step_2" / "update_batch").is_dir()
    assert run.batch(2) == tmp_path / "global_step_2" / "update_batch"
