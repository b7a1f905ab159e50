"""The recipe of the embedded default: a small policy whose entropy collapses under GRPO.

    python recipes/embedded_default.py sft build/embedded     # a small LM learns to search
    python recipes/embedded_default.py grpo build/embedded    # TRL, LoRA: entropy collapses
    python recipes/embedded_default.py ship build/embedded    # what goes into the package

Supervised on Countdown with written searches (`sampling/countdown.py`), then GRPO by TRL on the
same task (`entropy-probe train --preset tiny` is the same with other problems), every step
recorded: a checkpoint with its AdamW state before the step, and the batch that made it. Dropout is
0 and everything is fp32, so that each step can be rebuilt to rounding.
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
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from entropy_experiments.checkpoints.training_facts import FACTS_FILE
from entropy_experiments.config import load_preset
from entropy_experiments.config.training_reading import replaced
from entropy_experiments.online.record_files import UPDATE
from entropy_experiments.online.train.run import RECORD, train
from entropy_experiments.online.train.trainer import Task
from entropy_experiments.sampling import countdown
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.rollout_files import load_update_batch, save_update_batch
from entropy_experiments.types import UpdateBatch

PACKAGE = (
    Path(__file__).parents[1] / "packages" / "entropy-experiments" / "src" / "entropy_experiments"
)
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


def as_llama(model: Qwen2ForCausalLM) -> LlamaForCausalLM:
    """The same function of the tokens, saved under another name.

    For model type qwen2 transformers' AutoTokenizer takes Qwen2's own tokenizer, whatever
    tokenizer_config.json names: other tokens from the same file, and no warning. Llama's is taken
    only where it is named. With `attention_bias` a Llama has Qwen2's biases and one more, of
    `o_proj`, which is 0 here.
    """
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    shared += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    shared += ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    shared += ("rms_norm_eps", "rope_parameters")
    facts = {name: getattr(model.config, name) for name in shared}
    out = LlamaForCausalLM(LlamaConfig(**facts, attention_bias=True))
    missing, unexpected = out.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected, unexpected
    for name in missing:
        assert name.endswith("o_proj.bias"), name
        torch.nn.init.zeros_(out.get_parameter(name))
    return out.eval()


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
    as_llama(model).save_pretrained(folder / "base")
    tok.save_pretrained(folder / "base")


# GRPO --------------------------------------------------------------------------------------------


def grpo(folder: Path, *, steps: int, lr: float, prompts: int, group: int, rank: int) -> None:
    """The preset `tiny` of `entropy-probe train`, on problems drawn for this run alone."""
    config = replaced(
        load_preset("tiny"),
        {
            "model": str(folder / "base"),
            "output_dir": str(folder / "grpo"),
            "max_steps": steps,
            "learning_rate": lr,
            "buffer_size": prompts,
            "microbatch_size": prompts,
            "num_generations": group,
            "max_completion_length": RESPONSE,
            "eval_prompts": 0,
            "lora.r": rank,
            "lora.alpha": 4 * rank,
            "probe.every": steps,  # what matters here is its record of every step
        },
    )
    drawn = islice(countdown.problems("grpo"), prompts * steps)
    problems = tuple(
        Problem(
            id=f"grpo/{number}",
            prompt=made.prompt,
            answer=str(made.target),
            facts={"style": "tag", "numbers": made.numbers, "target": made.target},
        )
        for number, made in enumerate(drawn)
    )
    train(
        config,
        task=Task(
            training=problems, held_out=(), functions=("countdown",), weights=None, seed=config.seed
        ),
    )


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
    facts = json.loads((folder / "grpo" / FACTS_FILE).read_text())
    # A batch drawn from this policy need not be as large as those of its training.
    _write_json(target / FACTS_FILE, {k: v for k, v in facts.items() if k not in ("B_U", "G")})
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{steps + 1} checkpoints, {size / 1e6:.2f} MB in {target}")


def recorded(folder: Path, step: int) -> UpdateBatch:
    """The batch that TRL learned from in this step, with its rewards.

    TRL keeps none, and shuffles what it keeps: the responses are judged again.
    """
    batch, _ = load_update_batch(folder / "grpo" / RECORD / f"step_{step}" / UPDATE)
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
