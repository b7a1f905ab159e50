"""A real GRPOTrainer run, step by step: checkpoint k and the recorded batch give checkpoint k + 1.

Nothing of the trainer's is read but its files and the batch it learned from. Two accumulation
microbatches, weight decay with its exempt parameters, clipping active: all must be rebuilt.

The first step is not judged: LoRA's B is still (nearly) zero, so A's gradient is rounding noise
that Adam scales up to full steps, in TRL's arithmetic as in ours.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from entropy_experiments import Objective, compute_update_vector_adamw, step_certificate
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.sampling.importers import from_trl_inputs
from oracles.tiny_models import EOS, PAD, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.contract

STEPS, LR, MAX_GRAD_NORM = 4, 5e-3, 0.05


def _train(folder: Path, kind: str, loss: str) -> dict[int, Any]:
    """Train, and return each step's inputs as the trainer had them."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    batches: dict[int, Any] = {}

    class Record(TrainerCallback):
        trainer: Any

        def on_pre_optimizer_step(self, args, state, control, **_):
            batches[state.global_step] = copy.deepcopy(self.trainer._buffered_inputs)

    base, tokenizer = folder / "base", tiny_tokenizer()
    tiny_model().save_pretrained(base)
    tokenizer.save_pretrained(base)
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    record = Record()
    prompts = ["1+2=", "12*3=", "4-1=", "(1+2)*34=", "9=", "8/4="] * 8
    trainer = GRPOTrainer(
        model=str(base),
        reward_funcs=lambda completions, **_: [float(text.count("1")) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder / "run"),
            max_steps=STEPS,
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            max_grad_norm=MAX_GRAD_NORM,
            loss_type=loss,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=12,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="steps",
            save_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        peft_config=lora if kind == "lora" else None,
        callbacks=[record],
    )
    record.trainer = trainer
    trainer.train()
    return batches


@pytest.fixture(scope="module", params=[("lora", "dapo"), ("full", "grpo")], ids=lambda p: p[0])
def run(request, tmp_path_factory) -> tuple[Path, str, str, dict[int, Any]]:
    kind, loss = request.param
    folder = tmp_path_factory.mktemp(kind)
    with torch.random.fork_rng(devices=[]):
        batches = _train(folder, kind, loss)
    return folder, kind, loss, batches


def _certificate(run: Any, k: int, **changes: Any) -> Any:
    folder, kind, loss, batches = run
    base = folder / "base" if kind == "lora" else None
    before = load_checkpoint(folder / "run" / f"checkpoint-{k}", base=base)
    after = load_checkpoint(folder / "run" / f"checkpoint-{k + 1}", base=base)
    assert before.kind == kind
    assert before.optimizer is not None
    policy = SequenceProcessor(before.model)
    optimizer = before.optimizer
    if "weight_decay" in changes:
        groups = tuple(replace(group, weight_decay=0.0) for group in optimizer.groups)
        optimizer = replace(optimizer, groups=groups)
    direction, _, stats = compute_update_vector_adamw(
        policy,
        from_trl_inputs(batches[k], eos=EOS, pad=PAD),
        Objective(loss=changes.get("loss", loss)),
        optimizer,
        max_grad_norm=changes.get("max_grad_norm", MAX_GRAD_NORM),
    )
    assert direction.lr == pytest.approx(LR)
    return step_certificate(direction, policy.params, SequenceProcessor(after.model).params), stats


@pytest.mark.parametrize("k", range(2, STEPS))
def test_the_rebuilt_step_is_the_step_that_trl_made(run, k):
    certificate, stats = _certificate(run, k)
    assert certificate.relative_error <= 1e-5
    assert certificate.cosine >= 1 - 1e-9
    assert certificate.passed
    assert stats.clip_factor < 1  # clipping took part


@pytest.mark.parametrize(
    "wrong", [{"max_grad_norm": None}, {"loss": "bnpo"}, {"weight_decay": 0.0}], ids=str
)
def test_a_wrong_training_fact_is_seen(run, wrong):
    certificate, _ = _certificate(run, 2, **wrong)
    assert not certificate.passed
    distance = certificate.relative_error
    assert distance > 1e-3
    words = "is not the step that training made" if distance > 0.05 else "was made to within 0.0"
    assert words in str(certificate)
