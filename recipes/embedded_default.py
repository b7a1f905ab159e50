"""The recipe of the embedded default: a small policy whose entropy collapses under GRPO.

    python recipes/embedded_default.py sft build/embedded     # a Qwen2 learns to search
    python recipes/embedded_default.py grpo build/embedded    # TRL, LoRA: entropy collapses
    python recipes/embedded_default.py ship build/embedded    # what goes into the package

Supervised on Countdown with written searches (`tasks/countdown.py`), then GRPO by TRL on the same
task, every step recorded: a checkpoint with its AdamW state before the step, and the batch that
made it. Dropout is 0 and everything is fp32, so that each step can be rebuilt to rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from entropy_experiments.rollouts.importers import from_trl_inputs
from entropy_experiments.rollouts.store import save_update_batch
from entropy_experiments.tasks import countdown
from entropy_experiments.types import UpdateBatch
from gradient_doctor.hf import DoctorCallback

PACKAGE = Path(__file__).parents[1] / "src" / "entropy_experiments"
STEPS = 56
SPECIAL = ("<pad>", "<eos>")
PAD, EOS = 0, 1
RESPONSE = 30
"""Most tokens a response may have. A demonstration has 24 to 50: GRPO must learn to search less."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token."""
    words = {word: i for i, word in enumerate((*SPECIAL, *countdown.WORDS))}
    words["<unk>"] = len(words)
    core = Tokenizer(models.WordLevel(vocab=words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def fresh_model(words: int) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=words,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


# Supervised --------------------------------------------------------------------------------------


def demonstrations(tok: PreTrainedTokenizerFast, seed: int, batch: int):
    """Batches of [tokens, labels] without end; labels only on the response."""
    rng = random.Random(seed)
    stream = countdown.problems(f"sft {seed}")
    while True:
        rows, labels = [], []
        for problem in islice(stream, batch):
            asked = tok(problem.prompt)["input_ids"]
            told = [*tok(countdown.search_trace(problem, rng))["input_ids"], tok.eos_token_id]
            rows.append(asked + told)
            labels.append([-100] * len(asked) + told)
        width = max(map(len, rows))
        yield (
            torch.tensor([r + [0] * (width - len(r)) for r in rows]),
            torch.tensor([r + [-100] * (width - len(r)) for r in labels]),
        )


def sft(folder: Path, *, steps: int, batch: int, lr: float) -> None:
    torch.manual_seed(0)
    tok = tokenizer()
    model = fresh_model(len(tok))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.05)
    started = time.time()
    for step, (tokens, labels) in enumerate(islice(demonstrations(tok, 0, batch), steps)):
        loss = model(tokens, attention_mask=tokens != 0, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(
                f"step {step:5d}  loss {loss.item():.4f}  {time.time() - started:.0f} s", flush=True
            )
    model.eval()
    model.save_pretrained(folder / "base")
    tok.save_pretrained(folder / "base")


# GRPO --------------------------------------------------------------------------------------------


def grpo(folder: Path, *, steps: int, lr: float, prompts: int, group: int, rank: int) -> None:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    tok = tokenizer()
    model = Qwen2ForCausalLM.from_pretrained(folder / "base")
    drawn = list(islice(countdown.problems("grpo"), prompts * steps))
    data = Dataset.from_list(
        [{"prompt": p.prompt, "numbers": list(p.numbers), "target": p.target} for p in drawn]
    )

    def reward(completions: list[str], numbers: list, target: list, **_: Any) -> list[float]:
        return [
            float(countdown.solved(text, countdown.Countdown(numbers=tuple(n), target=t)))
            for text, n, t in zip(completions, numbers, target)
        ]

    class Record(TrainerCallback):
        """The batch of each step, and the checkpoint before the first."""

        trainer: Any = None

        def on_train_begin(self, args, state, control, **_):
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            state.save_to_json(str(folder / "grpo" / "checkpoint-0" / "trainer_state.json"))

        def on_pre_optimizer_step(self, args, state, control, **_):
            inputs = [
                {k: v for k, v in part.items() if v is not None}
                for part in self.trainer._buffered_inputs
            ]
            torch.save(inputs, folder / "grpo" / f"batch-{state.global_step}.pt")

    settings = GRPOConfig(
        output_dir=str(folder / "grpo"),
        max_steps=steps,
        learning_rate=lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.01,
        per_device_train_batch_size=prompts * group,
        gradient_accumulation_steps=1,
        num_generations=group,
        max_completion_length=RESPONSE,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="steps",
        save_steps=1,
        logging_steps=1,
        report_to=[],
        seed=0,
        shuffle_dataset=False,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    lora = LoraConfig(
        r=rank,
        lora_alpha=4 * rank,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    facts = {
        "loss": settings.loss_type,
        "advantage": settings.scale_rewards,
        "clip_low": settings.epsilon,
        "clip_high": settings.epsilon_high or settings.epsilon,
        "ratio": settings.importance_sampling_level,
        "beta": settings.beta,
        "entropy_coef": 0.0,
        "max_grad_norm": settings.max_grad_norm,
        "max_completion_length": RESPONSE,
        "num_iterations": settings.num_iterations,
        "amp_dtype": "float32",
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "dataset_name": "countdown",
        "reward_functions": ["countdown"],
    }
    (folder / "grpo").mkdir(parents=True, exist_ok=True)
    _write_json(folder / "grpo" / "facts.json", facts)
    record = Record()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,  # pyright: ignore[reportArgumentType]
        args=settings,
        train_dataset=data,
        processing_class=tok,
        peft_config=lora,
        # the adapters must learn from the first steps on, or there is nothing to ship
        callbacks=[record, DoctorCallback(contract={"trainable": ["*lora_*"]}, raise_on="error")],
    )
    record.trainer = trainer
    trainer.train()
    shown = ("step", "reward", "entropy", "grad_norm", "completions/mean_length")
    for row in trainer.state.log_history:
        if "reward" in row:
            print("  ".join(f"{name.split('/')[-1]} {row[name]:.4g}" for name in shown))


# Shipping ----------------------------------------------------------------------------------------


def ship(folder: Path, target: Path, *, steps: int) -> None:
    """Checkpoints 0 to `steps`, each with the batch of the step after it, without duplicates."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder / "base", target / "base")
    for step in range(steps + 1):
        source, place = folder / "grpo" / f"checkpoint-{step}", target / f"checkpoint-{step}"
        place.mkdir(parents=True)
        for name in ("adapter_model.safetensors", "optimizer.pt"):
            shutil.copy(source / name, place / name)
        adapter = json.loads((source / "adapter_config.json").read_text())
        adapter["base_model_name_or_path"] = "../base"
        _write_json(place / "adapter_config.json", adapter)
        state = json.loads((source / "trainer_state.json").read_text())
        state["log_history"] = state["log_history"][-1:]
        _write_json(place / "trainer_state.json", state)
        if step < steps:
            weights = hashlib.sha256((place / "adapter_model.safetensors").read_bytes()).hexdigest()
            meta = {"step": step, "weights": weights}
            save_update_batch(place / "update_batch", recorded(folder, step), meta=meta)
    settings = json.loads((folder / "grpo" / "facts.json").read_text())
    _write_json(target / "entropy_probe.json", settings)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{steps + 1} checkpoints, {size / 1e6:.2f} MB in {target}")


def recorded(folder: Path, step: int) -> UpdateBatch:
    """The batch that TRL learned from in this step, with its rewards.

    TRL keeps none, and shuffles what it keeps: the responses are judged again.
    """
    inputs = torch.load(folder / "grpo" / f"batch-{step}.pt", weights_only=True)
    batch = from_trl_inputs(inputs, eos=EOS, pad=PAD)
    tok, rollouts = tokenizer(), batch.rollouts
    reward = []
    for tokens_S, response_S, attention_S in zip(
        rollouts.tokens_NS, rollouts.response_NS, rollouts.attention_NS
    ):
        asked = str(tok.decode(tokens_S[attention_S & ~response_S]))
        told = str(tok.decode(tokens_S[response_S], skip_special_tokens=True))
        reward.append(float(countdown.solved(told, _problem(asked))))
    return replace(batch, reward_N=torch.tensor(reward))


def _problem(prompt: str) -> countdown.Countdown:
    """The inverse of `Countdown.prompt`."""
    _, *numbers, _, target, _ = prompt.split()
    return countdown.Countdown(numbers=tuple(map(int, numbers)), target=int(target))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("stage", choices=("sft", "grpo", "ship"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--rank", type=int, default=2)
    given = parser.parse_args()
    if given.stage == "sft":
        sft(given.folder, steps=given.steps or 2600, batch=64, lr=given.lr or 4e-3)
    elif given.stage == "grpo":
        grpo(
            given.folder,
            steps=given.steps or STEPS,
            lr=given.lr or 3e-3,
            prompts=given.prompts,
            group=8,
            rank=given.rank,
        )
    else:
        ship(given.folder, PACKAGE / "embedded", steps=given.steps or STEPS)


if __name__ == "__main__":
    main()
