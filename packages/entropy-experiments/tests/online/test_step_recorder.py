"""A loop written by hand, recorded: nothing of it changes, and its real step is replayed."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.recorded_step import read_recorded_step
from entropy_experiments.config import parse_config
from entropy_experiments.distributed import Ranks
from entropy_experiments.online import record_files, record_sources, step_recorder
from entropy_experiments.online.step_recorder import StepRecorder, counted_steps
from entropy_experiments.online.watch import Guard
from entropy_experiments.pipelines.influence.certified import certificate_of
from entropy_experiments.pipelines.probe_inputs import gather
from entropy_experiments.sampling.rollout_files import load_update_batch
from entropy_experiments.types import UpdateBatch
from oracles.own_loop import FACTS, PROMPTS, Loop
from oracles.tiny_grpo import assert_same_outcome

STEPS, SAVED = 5, 3
"""Step 3 is the second of its batch: its ratio is not 1."""
ROWS = [{"prompt": prompt, "number": i} for i, prompt in enumerate(PROMPTS)]


def _recorder(folder: Path, loop: Loop, **options: Any) -> StepRecorder:
    defaults = {"facts": FACTS, "prompts": ROWS, "tokenizer": loop.tokenizer}
    return StepRecorder(folder / "record", loop.model, loop.optimizer, **(defaults | options))


def _recorded(folder: Path, **options: Any) -> tuple[dict[str, Any], StepRecorder]:
    loop = Loop.begin()
    recorder = _recorder(folder, loop, **options)

    def after(made: int) -> None:
        if made == SAVED:
            loop.save(folder / f"step_{made}")
            recorder.saved(folder / f"step_{made}")

    return loop.run(STEPS, step=lambda batch: recorder.step(**batch), after=after), recorder


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    torch.manual_seed(0)
    return Loop.begin().run(STEPS)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("own_loop")
    torch.manual_seed(0)
    outcome, recorder = _recorded(folder)
    assert recorder.off is None
    assert recorder.steps == STEPS
    return folder, outcome


def test_training_is_the_same_bit_for_bit(run, undisturbed):
    assert_same_outcome(run[1], undisturbed)


def _inputs(folder: Path) -> Any:
    config = parse_config(
        {
            "checkpoint": {"dtype": "float64"},
            "data": {"evaluation_prompts": 3},
            "memory": {"microbatch_size": 16},
        }
    )
    return gather(config, folder / f"step_{SAVED}")


def test_the_step_is_rebuilt_and_called_the_one_that_training_made(run):
    probe = _inputs(run[0])
    assert probe.real
    assert probe.bound  # the batch names these weights
    assert probe.facts.assumed == {}
    assert probe.not_verifiable == ()
    assert probe.reasons == ()
    direction, _ = probe.step()
    certificate, _ = certificate_of(probe, direction)
    assert certificate is not None
    assert certificate.passed
    assert certificate.relative_error < 1e-6


def test_also_from_the_batch_alone(run):
    """Not by the recorded gradient: the loss itself is followed."""
    from entropy_experiments.update.adamw import compute_update_vector_adamw

    probe = _inputs(run[0])
    direction, gradient, _ = compute_update_vector_adamw(
        probe.trained, probe.update, probe.facts.objective, probe.optimizer,
        max_grad_norm=probe.facts["max_grad_norm"], microbatch=16,
    )  # fmt: skip
    del gradient
    certificate, _ = certificate_of(probe, direction)
    assert certificate is not None
    assert certificate.relative_error < 1e-6
    another = {**probe.facts.values, "clip_low": 0.001, "clip_high": 0.001}
    assert another != probe.facts.values


def test_every_step_is_kept(run):
    folder, _ = run
    for step in range(STEPS):
        place = folder / "record" / f"step_{step}"
        batch, meta = load_update_batch(place / "update_batch")
        assert meta == {"step": step}
        assert len(batch.rollouts) == 16
        assert batch.reward_N is not None
        made = read_recorded_step(place / "made_step")
        assert made is not None
        assert made.change is not None
    record = json.loads((folder / f"step_{SAVED}" / "entropy_probe_record.json").read_text())
    assert record["facts"] == FACTS
    assert record["prompts"]["sets"]["train"]["rows"] == len(PROMPTS)
    assert record["rewards"]["functions"][0]["why_not"].startswith("the loop handed over no reward")


def test_the_optimizer_s_order_is_written_beside_it(run):
    folder, _ = run
    loaded = load_checkpoint(folder / f"step_{SAVED}", dtype="float64")
    assert loaded.not_verifiable == ()
    groups = json.loads((folder / f"step_{SAVED}" / "optimizer_param_names.json").read_text())
    assert [len(group) for group in groups] == [
        len(group.names) for group in loaded.optimizer.groups
    ]


FULL = OSError(errno.ENOSPC, "No space left on device")
FAULTS: dict[str, tuple[Any, str, Exception]] = {
    "prompts": (record_sources, "_lines", TypeError("no such row")),
    "base": (step_recorder, "base_fingerprint", RuntimeError("quantised")),
    "settings": (record_files, "write_facts", FULL),
    "batch": (step_recorder, "batch_from_tensors", ValueError("no such shape")),
    "joining": (step_recorder, "concatenate", ValueError("no such batch")),
    "full disk": (record_files, "save_update_batch", FULL),
    "gradient": (step_recorder, "named_gradients", RuntimeError("CUDA out of memory")),
    "parameters": (step_recorder, "trained_parameters", RuntimeError("CUDA out of memory")),
    "fingerprint": (record_files, "sketch", RuntimeError("CUDA out of memory")),
    "its file": (record_files, "_write_step", FULL),
    "kept gradient": (record_files, "gradient_bytes", MemoryError("no memory")),
    "after the step": (record_files.RecordFiles, "after_step", FULL),
    "checkpoint": (record_files, "find_checkpoint", FileNotFoundError("no weights")),
    "hashes": (record_files, "sha256", PermissionError(errno.EACCES, "Permission denied")),
    "names": (step_recorder, "name_parameters", FULL),
}


@pytest.mark.faults
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_fails_training_goes_on_and_says_it_once(
    fault, undisturbed, tmp_path, monkeypatch, caplog
):
    place, name, error = FAULTS[fault]

    def broken(*_: Any, **__: Any) -> Any:
        torch.rand(3)  # random numbers of training's own generators are put back
        random.random()
        raise error

    torch.manual_seed(0)
    monkeypatch.setattr(place, name, broken)
    outcome, recorder = _recorded(tmp_path)
    assert recorder.off is error
    (message,) = [r.getMessage() for r in caplog.records if "entropy probe" in r.getMessage()]
    assert str(error) in message
    assert "training continues" in message
    assert_same_outcome(outcome, undisturbed)


def test_an_error_of_the_loop_s_own_step_reaches_the_loop(tmp_path):
    loop = Loop.begin()
    recorder = _recorder(tmp_path, loop)
    batch = loop.draw()
    with pytest.raises(KeyboardInterrupt), recorder.step(**batch):
        raise KeyboardInterrupt
    assert recorder.off is None


def test_microbatches_are_joined_and_numbered(tmp_path):
    loop = Loop.begin()
    recorder = _recorder(tmp_path, loop)
    batches = [loop.draw(), loop.draw()]
    loop.loss(batches[0]).backward()
    with recorder.step(*batches):
        loop.optimizer.step()
    joined, _ = load_update_batch(tmp_path / "record" / "step_0" / "update_batch")
    assert joined.microbatch_N is not None
    assert joined.microbatch_N.tolist() == [0] * 16 + [1] * 16


def test_a_folder_named_as_of_another_step_costs_that_checkpoint_alone(tmp_path, caplog):
    loop = Loop.begin()
    recorder = _recorder(tmp_path, loop)
    recorder.saved(tmp_path / "step_7")
    assert "step_7 is left out of the record: it is named as of step 7, and 0 steps" in caplog.text
    assert recorder.off is None
    loop.run(1, step=lambda batch: recorder.step(**batch))
    loop.save(tmp_path / "step_1")
    recorder.saved(tmp_path / "step_1")
    assert recorder.off is None
    assert (tmp_path / "step_1" / "entropy_probe_record.json").is_file()


def test_a_skipped_step_ends_nothing(tmp_path):
    """A GradScaler leaves the optimizer's step out, and folders count it."""
    loop = Loop.begin()
    recorder = _recorder(tmp_path, loop)
    skipped = loop.draw()
    with recorder.step(**skipped):
        pass  # the first of all, before Adam has a state
    assert recorder.steps == 0
    entered: list[dict[str, Any]] = []

    def step(batch: dict[str, Any]) -> Any:
        entered.append(batch)
        return recorder.step(**batch)

    loop.run(2, step=step)
    kept = load_update_batch(tmp_path / "record" / "step_0" / "update_batch")[0]
    advantage_N = torch.stack(
        [a[y][0] for a, y in zip(kept.advantage_NS, kept.rollouts.response_NS, strict=True)]
    )
    assert torch.allclose(advantage_N, entered[0]["advantages"].to(advantage_N))
    assert not torch.allclose(advantage_N, skipped["advantages"].to(advantage_N))
    with recorder.step(**loop.draw()):
        pass  # skipped
    assert recorder.steps == 2
    place = tmp_path / "step_3"
    loop.save(place)
    recorder.saved(place)
    loop.run(1, step=lambda batch: recorder.step(**batch))
    assert recorder.off is None
    assert load_update_batch(place / "update_batch")[1]["step"] == 2
    assert load_checkpoint(place, dtype="float64").step == 2
    probe = gather(parse_config({"checkpoint": {"dtype": "float64"},
        "data": {"evaluation_prompts": 3}, "memory": {"microbatch_size": 16}}), place)  # fmt: skip
    certificate, _ = certificate_of(probe, probe.step()[0])
    assert certificate is not None
    assert certificate.relative_error < 1e-6


def test_an_optimizer_whose_state_is_reset_ends_the_recording(tmp_path):
    """Its count begins anew: batches of these steps are recorded already, and are not replaced."""
    loop = Loop.begin()
    recorder = _recorder(tmp_path, loop)
    loop.run(2, step=lambda batch: recorder.step(**batch))
    before = (tmp_path / "record" / "step_0" / "update_batch" / "rollouts.safetensors").read_bytes()
    loop.optimizer.state.clear()
    loop.run(1, step=lambda batch: recorder.step(**batch))
    assert "the optimizer counts 0 steps after 2" in str(recorder.off)
    after = tmp_path / "record" / "step_0" / "update_batch" / "rollouts.safetensors"
    assert after.read_bytes() == before


@pytest.mark.parametrize("state", [{"step": None}, {"step": "two"}, {"calls": 3}, {}])
def test_a_state_without_a_count_counts_nothing(state):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = state
    assert counted_steps(optimizer) is None


def _with(loop: Loop, optimizer: torch.optim.Optimizer) -> Loop:
    loop.optimizer = optimizer
    return loop


UNLIKE = {
    "value head": (
        lambda p: torch.optim.AdamW([*p, torch.nn.Parameter(torch.zeros(4))]),
        "the optimizer has 1 parameters that the model does not have, such as one of shape (4,)",
    ),
    "frozen": (lambda p: torch.optim.AdamW(p[2:]), "does not have 2 of the model's parameters"),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), "the optimizer is SGD; expected Adam or AdamW"),
    "RAdam": (torch.optim.RAdam, "cannot be rebuilt: RAdam without"),
    "NAdam": (torch.optim.NAdam, "cannot be rebuilt: NAdam without"),
    "Adamax": (torch.optim.Adamax, "cannot be rebuilt: Adamax without"),
    "RMSprop": (torch.optim.RMSprop, "cannot be rebuilt"),
    "beta1": (
        lambda p: torch.optim.AdamW([{"params": p[:2], "betas": (0.5, 0.9)}, {"params": p[2:]}]),
        "its groups have the beta1 [0.5, 0.9]; expected one for all",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_no_offline_command_can_rebuild_is_said_before_training(name, tmp_path, caplog):
    make, words = UNLIKE[name]
    loop = Loop.begin()
    recorder = _recorder(tmp_path, _with(loop, make(list(loop.model.parameters()))))
    assert words in caplog.text
    assert "offline commands cannot rebuild them" in caplog.text
    loop.run(1, step=lambda batch: recorder.step(**batch))
    loop.save(tmp_path / "step_1")
    recorder.saved(tmp_path / "step_1")
    assert recorder.off is None
    assert (tmp_path / "step_1" / "entropy_probe_record.json").is_file()


def test_an_optimizer_that_can_be_rebuilt_gets_no_warning(tmp_path, caplog):
    _recorder(tmp_path, Loop.begin())
    assert "cannot rebuild" not in caplog.text


def test_saving_exchanges_nothing_and_a_failure_is_told_in_the_next_exchange():
    """`if rank == 0: saved()` must not wait for ranks that never come."""
    exchanges: list[bool] = []

    class Two(Ranks):
        def agree(self, *, failed: bool = False, **_: Any) -> int:
            exchanges.append(failed)
            return 0

    guard = Guard(Two())

    def full() -> None:
        raise FULL

    guard.run_alone(lambda: None, doing="saving")
    guard.run_alone(full, doing="saving")
    assert exchanges == []
    assert guard.error is FULL
    assert guard.run(lambda: 1, doing="a step") is None
    assert guard.run(lambda: 1, doing="a step") is None
    assert exchanges == [True]


def test_what_is_no_batch_is_named(tmp_path):
    loop = Loop.begin()
    recorder = _recorder(tmp_path, loop)
    with recorder.step([1, 2]):  # type: ignore[arg-type]
        pass
    assert "step got a list; expected the tensors of its batch by name" in str(recorder.off)


def test_a_resumed_run_goes_on_beside_its_checkpoint(tmp_path):
    loop = Loop.begin()
    loop.run(2)
    loop.save(tmp_path / "step_2")
    recorder = _recorder(tmp_path, loop, first_step=2)
    recorder.resumed(tmp_path / "step_2")
    loop.run(1, step=lambda batch: recorder.step(**batch))
    assert recorder.off is None
    _, meta = load_update_batch(tmp_path / "step_2" / "update_batch")
    assert meta["step"] == 2
    assert len(meta["weights"]) == 64


def test_ready_batches_and_functions_that_make_one_are_taken(run, tmp_path):
    batch, _ = load_update_batch(run[0] / "record" / "step_0" / "update_batch")
    loop = Loop.begin()
    recorder = _recorder(tmp_path, loop, first_step=0)  # steps are counted as entered
    for part in (batch, lambda: batch):
        with recorder.step(part):
            pass
    assert recorder.off is None
    for step in (0, 1):
        again, _ = load_update_batch(tmp_path / "record" / f"step_{step}" / "update_batch")
        assert isinstance(again, UpdateBatch)
        assert torch.equal(again.advantage_NS, batch.advantage_NS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"facts": {"los": "grpo"}}, r"facts has 'los'\. Did you mean 'loss'\?"),
        ({"facts": {"clip_low": "much"}}, r"facts: clip_low is 'much'; expected"),
        ({"prompts": "1+2="}, r"prompts is the text '1\+2='; expected a list"),
        ({"tokenizer": None}, r"prompts without a tokenizer; expected one"),
        ({"first_step": -1}, r"first_step is -1; expected a whole number, at least 0"),
    ],
)
def test_bad_arguments_are_refused_before_training(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        _recorder(tmp_path, Loop.begin(), **options)


def test_an_optimizer_s_wrapper_is_refused(tmp_path):
    loop = Loop.begin()
    with pytest.raises(ValueError, match=r"optimizer is a object; expected a torch optimizer"):
        StepRecorder(tmp_path, loop.model, object())  # type: ignore[arg-type]
