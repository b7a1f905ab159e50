"""Whatever goes wrong inside the probe, training ends as it would have, with one message."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from entropy_experiments.online import rows, trl, trl_options, trl_trainer, trl_versions
from entropy_experiments.online.noise_scale import NoiseScale
from entropy_experiments.online.probe import OnlineProbe
from entropy_experiments.online.record import Recorder
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.online.trl_noise import StepNoise
from oracles.tiny_grpo import assert_same_outcome, grpo, outcome

pytestmark = pytest.mark.faults

STEPS = 3


def _trained(folder: Path, *callbacks: Any, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(folder, callbacks=list(callbacks), **({"max_steps": STEPS} | changes))
        trainer.train()
        return outcome(trainer)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Any:
    return _trained(tmp_path_factory.mktemp("plain"))


def _raises(error: Exception) -> Any:
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    return broken


FAULTS: dict[str, tuple[Any, str, Exception]] = {
    "setting up": (trl, "SequenceProcessor", RuntimeError("no such head")),
    "predicting": (OnlineProbe, "before_step", RuntimeError("CUDA out of memory")),
    "measuring": (OnlineProbe, "after_step", ValueError("weights overflow")),
    "full disk": (rows.RowFile, "add", OSError(errno.ENOSPC, "No space left on device")),
    "dead tracker": (trl, "metrics_of", ConnectionError("the tracker is gone")),
    "recording": (Recorder, "record", OSError(errno.EROFS, "Read-only file system")),
    "noise: setting up": (trl, "StepNoise", RuntimeError("no such parameters")),
    "noise: a step begins": (StepNoise, "open", TypeError("no such optimizer")),
    "noise: inside backward": (NoiseScale, "add_piece", RuntimeError("CUDA out of memory")),
    "noise: between passes": (StepNoise, "microbatch", ValueError("no such weight")),
    "noise: shared prompts": (trl, "shared_pairs", KeyError("prompt_ids")),
    "noise: adding up": (NoiseScale, "close_step", FloatingPointError("overflow")),
    "noise: full disk": (rows.RowFile, "add", OSError(errno.ENOSPC, "No space left on device")),
    "noise: dead tracker": (trl, "noise_metrics", ConnectionError("the tracker is gone")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_training_goes_on_and_says_it_once(fault, undisturbed, tmp_path, monkeypatch, caplog):
    place, name, error = FAULTS[fault]
    monkeypatch.setattr(place, name, _raises(error))
    callback = EntropyProbeCallback(
        max_overhead=None,
        prompts=6,
        record=tmp_path / "record",
        noise_scale=fault.startswith("noise"),
    )
    found = _trained(tmp_path / "run", callback)
    assert callback.off is error
    said = [r.getMessage() for r in caplog.records if "entropy probe" in r.getMessage()]
    assert len(said) == 1
    assert str(error) in said[0]
    assert "training continues" in said[0]
    assert_same_outcome(found, undisturbed)


def test_a_trainer_that_cannot_be_read_when_a_step_begins(undisturbed, tmp_path, caplog):
    from transformers import TrainerCallback

    class Without:
        """The trainer as another version might have it."""

        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def __getattr__(self, name: str) -> Any:
            if name == "current_gradient_accumulation_steps":
                raise AttributeError(f"no {name} in this version")
            return getattr(self.trainer, name)

    class Swap(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 1:
                callback.trainer = Without(callback.trainer)

    callback = EntropyProbeCallback(max_overhead=None, prompts=6, noise_scale=True)
    found = _trained(tmp_path, Swap(), callback)
    assert isinstance(callback.off, AttributeError)
    assert [row["step"] for row in callback.rows] == [0]
    said = [r.getMessage() for r in caplog.records if "entropy probe" in r.getMessage()]
    assert len(said) == 1
    assert "failed while listening to step 1" in said[0]
    assert_same_outcome(found, undisturbed)


def test_a_gradient_that_is_not_finite_is_left_to_training(tmp_path, caplog):
    from transformers import TrainerCallback

    class Spoil(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            if state.global_step == 1:
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.fill_(float("nan"))

    class Clean(TrainerCallback):
        """As a scaler would: what is not finite does not step."""

        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.nan_to_num_(0.0)

    callback = EntropyProbeCallback(max_overhead=None, prompts=6)
    _trained(tmp_path, Spoil(), callback, Clean())
    assert callback.off is None
    assert [row["step"] for row in callback.rows] == [0, 2]
    said = [r for r in caplog.records if "gradient that is not finite" in r.getMessage()]
    assert len(said) == 1


def test_a_step_that_the_optimizer_does_not_make_claims_no_match(tmp_path, caplog):
    from transformers import TrainerCallback

    class Hold(TrainerCallback):
        """The optimizer rests in step 1."""

        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **_):
            self.step = optimizer.optimizer.step
            if state.global_step == 1:
                optimizer.optimizer.step = lambda *_: None

        def on_optimizer_step(self, args, state, control, optimizer=None, **_):
            optimizer.optimizer.step = self.step

    callback = EntropyProbeCallback(max_overhead=None, prompts=6)
    _trained(tmp_path, Hold(), callback)
    assert callback.off is None
    before, held, after = callback.rows
    assert (held["skipped"], held["step_mismatch"], held["trusted"]) == (1, None, 0)
    for row in (before, after):
        assert row["skipped"] == 0
        assert row["step_mismatch"] < 1e-3
    said = [r for r in caplog.records if "Step 1 was predicted, and no weight" in r.getMessage()]
    assert len(said) == 1


def test_a_warm_up_that_begins_with_rate_zero_is_waited_for(tmp_path):
    callback = EntropyProbeCallback(max_overhead=None, prompts=6)
    _trained(tmp_path, callback, lr_scheduler_type="constant_with_warmup", warmup_steps=2)
    assert callback.off is None
    assert [row["step"] for row in callback.rows] == [1, 2]


def test_deepspeed_is_refused_by_name(tmp_path, monkeypatch):
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(tmp_path, callbacks=[EntropyProbeCallback()], max_steps=1)
        state = type(trainer.accelerator)
        monkeypatch.setattr(state, "distributed_type", "DistributedType.DEEPSPEED")
        from entropy_experiments.online.trl_trainer import refuse_unsupported

        with pytest.raises(ValueError, match="EntropyProbeCallback under DeepSpeed"):
            refuse_unsupported(trainer)


def test_another_trl_switches_the_probe_off_and_training_goes_on(
    undisturbed, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(trl_versions, "SHARED", (*trl_versions.SHARED, "_not_in_this_trl"))
    callback = EntropyProbeCallback(record=tmp_path / "record", noise_scale=True)
    assert_same_outcome(_trained(tmp_path, callback), undisturbed)
    assert re.search(
        r"of trl [\d.]+ has no _not_in_this_trl; expected a trainer as trl 0\.24\.0 to 1\.16",
        str(callback.off),
    )
    assert sum(record.name.startswith("entropy_experiments") for record in caplog.records) == 1
    assert callback.rows == []


def test_another_kind_of_trainer_is_refused_by_name():
    class OtherTrainer:
        accelerator = None

    with pytest.raises(ValueError, match=r"OtherTrainer: expected TRL's GRPOTrainer or RLOO"):
        trl_trainer.refuse_unsupported(OtherTrainer())


def test_ms_swift_s_trainer_is_refused_by_name():
    kind = type("GRPOTrainer", (), {"__module__": "swift.rlhf_trainers.grpo_trainer"})
    with pytest.raises(ValueError, match=r"in ms-swift's GRPOTrainer: it keeps batches of its own"):
        trl_trainer.refuse_own_batches(kind())


def test_throttling_is_announced_once_with_the_way_to_change_it(tmp_path, caplog):
    callback = EntropyProbeCallback(max_overhead=1e-6, prompts=6)
    _trained(tmp_path, callback, max_steps=4)
    assert [row["step"] for row in callback.rows] == [0]
    said = [r.getMessage() for r in caplog.records if "are not probed" in r.getMessage()]
    assert len(said) == 1
    assert "From step 1 on some steps are not probed: probing takes" in said[0]
    assert "max_overhead is 1e-06. At least every 10 steps one is." in said[0]


@pytest.mark.parametrize("equal", [True, False])
def test_ten_steps_without_any_advantage_are_one_warning(equal, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trl, "IDLE_STEPS", 3)
    callback = EntropyProbeCallback(max_overhead=None, prompts=6, every=100)
    more = {"rewards": lambda completions, **_: [1.0] * len(completions)} if equal else {}
    _trained(tmp_path, callback, max_steps=5, **more)
    said = [r.getMessage() for r in caplog.records if "has an advantage" in r.getMessage()]
    assert len(said) == (1 if equal else 0)
    assert all("In the 3 steps up to step 2 no rollout has an advantage" in text for text in said)


def test_another_optimizer_is_refused_by_name_when_training_begins(tmp_path):
    with torch.random.fork_rng(devices=[]):
        callback = EntropyProbeCallback(max_overhead=None, prompts=6)
        trainer = grpo(tmp_path, callbacks=[callback], max_steps=1, optim="adafactor")
        with pytest.raises(ValueError, match=r"optimizer Adafactor: expected torch's Adam, AdamW"):
            trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("evaluation", ["half", "batch", "fresh"])
def test_rollouts_of_another_distribution_judge_nothing(evaluation, tmp_path, caplog):
    with torch.random.fork_rng(devices=[]):
        callback = EntropyProbeCallback(max_overhead=None, prompts=6, evaluation=evaluation)
        more = {"max_steps": 1, "steps_per_generation": 4, "top_k": 5, "repetition_penalty": 1.2}
        trainer = grpo(tmp_path, callbacks=[callback], **more)
        if evaluation != "fresh":
            with pytest.raises(ValueError, match=r"with top_k = 5, repetition_penalty = 1.2, and"):
                trainer.train()
            assert trainer.state.global_step == 0
            return
        trainer.train()
    (row,) = callback.rows
    assert row["sampling"] == ["top_k = 5", "repetition_penalty = 1.2"]
    said = [r.getMessage() for r in caplog.records if "Training samples with" in r.getMessage()]
    assert len(said) == 1
    assert not any("sampling" in name for name in rows.metrics_of(row))


def test_what_generation_inherits_from_the_model_is_part_of_its_distribution(tmp_path):
    """TRL passes a config of its own; transformers fills what that leaves open from the model's."""
    with torch.random.fork_rng(devices=[]):
        callback = EntropyProbeCallback(max_overhead=None, prompts=6, evaluation="half")
        trainer = grpo(tmp_path, callbacks=[callback], max_steps=1, steps_per_generation=4)
        own = trainer.model.generation_config
        own.top_k, own.repetition_penalty, own.suppress_tokens = 20, 1.1, []  # TRL sets the first
        assert trl_options.sampled_otherwise(trainer) == []
        own.suppress_tokens = [5]
        with pytest.raises(ValueError, match=r"suppress_tokens = \[5\] \(the model's generation_"):
            trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("distinct", [4, 5])
def test_prompts_that_a_tokenizer_makes_one_are_said_once(distinct, caplog):
    trainer = SimpleNamespace(
        eval_dataset=[{"prompt": str(n)} for n in range(40)],
        _tokenize_prompts=lambda texts: ([[int(texts[0]) % distinct]],),
        is_world_process_zero=lambda: True,
    )
    prompts = trl_trainer.EvaluationPrompts(trainer, 16, 0)
    assert len(prompts(0)) == len(prompts(1)) == distinct
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (1 if distinct == 4 else 0)
    assert all("40 rows" in text and "have 4 different prompts" in text for text in said)


@pytest.mark.parametrize("longest", [7, 0, None])
def test_prompts_beyond_the_context_are_left_out_and_said_once(longest, caplog):
    trainer = SimpleNamespace(
        eval_dataset=[{"prompt": str(n)} for n in range(1, 21)],
        _tokenize_prompts=lambda texts: ([[3] * int(texts[0])],),
        is_world_process_zero=lambda: True,
        args=SimpleNamespace(max_completion_length=10),
    )
    prompts = trl_trainer.EvaluationPrompts(trainer, 16, 0, longest)
    if longest == 0:
        with pytest.raises(ValueError, match=r"short enough.*Lower max_completion_length") as got:
            prompts(0)
        assert "generation." not in str(got.value)
        return
    for step in (0, 1):
        lengths = sorted(map(len, prompts(step)))
        assert lengths == list(range(1, 8)) if longest else len(lengths) == 16
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (longest is not None)
    for text in said:
        assert "20 tokens with max_completion_length = 10 exceeds the model's 17 positions" in text


def test_a_prompt_beyond_the_context_does_not_switch_the_probe_off(tmp_path, caplog):
    """The model has 256 positions; training's own prompts are short."""
    with torch.random.fork_rng(devices=[]):
        callback = EntropyProbeCallback(max_overhead=None, prompts=6)
        trainer = grpo(tmp_path, callbacks=[callback], max_steps=1)
        texts = [row["prompt"] for row in trainer.train_dataset]
        trainer.eval_dataset = [{"prompt": text} for text in (*texts, 300 * texts[0])]
        callback.prompts = len(trainer.eval_dataset)  # all of them are looked at
        trainer.train()
    assert callback.off is None
    assert len(callback.rows) == 1
    assert any("too long are left out" in r.getMessage() for r in caplog.records)


def test_a_loss_of_one_s_own_is_refused_only_where_it_would_be_rebuilt(tmp_path):
    from trl import GRPOTrainer

    class Mine(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    with torch.random.fork_rng(devices=[]):
        for options, kept in (
            ({"ledger_every": 1}, "ledger_every"),
            ({"evaluation": "batch"}, "e"),
        ):
            callback = EntropyProbeCallback(max_overhead=None, prompts=6, **options)
            trainer = grpo(tmp_path, callbacks=[callback], max_steps=1, kind=Mine)
            with pytest.raises(ValueError, match=rf"{kept}.*Mine has a _compute_loss of its own"):
                trainer.train()


def test_bad_options_are_refused_before_training():
    with pytest.raises(ValueError, match="every is 0"):
        EntropyProbeCallback(every=0)
    with pytest.raises(ValueError, match=r"max_overhead is -0\.1"):
        EntropyProbeCallback(max_overhead=-0.1)
    with pytest.raises(ValueError, match="evaluation is 'other'"):
        EntropyProbeCallback(evaluation="other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prompts is 3; expected a whole number, at least 5"):
        EntropyProbeCallback(prompts=3)
