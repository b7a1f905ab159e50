"""The models and rollouts that the speed benchmarks share.

smollm2    SmolLM2-135M, LoRA of rank 16 on all linear layers (`make smollm2`)
random     a llama of 30M parameters with random weights, fully trained
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.models.call_conditions import causal_lm
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.types import Rollouts

GSM8K = Path(__file__).parents[2] / "shared" / "data" / "gsm8k" / "train_1000.jsonl"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS, GROUP = 4, 8
PROMPT_TOKENS, RESPONSE_TOKENS = (50, 100), (20, 64)


def smollm2() -> tuple[SequenceProcessor, Any]:
    """The policy and its tokenizer, with adapters on all layers."""
    from entropy_experiments.checkpoints.base import (
        from_gguf,
        load_causal_lm,
        load_tokenizer,
        smollm2_gguf,
    )

    folder = from_gguf(smollm2_gguf())
    model, _ = load_causal_lm(folder, dtype=torch.float32)
    tokenizer = load_tokenizer([folder], model)
    return SequenceProcessor(_adapted(model, 16)), tokenizer


def random_llama(vocabulary: int = 32_768, *, rank: int | None = None) -> SequenceProcessor:
    """Fully trained or, with a rank, by LoRA on all linear layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    return SequenceProcessor(model if rank is None else _adapted(model, rank))


def _adapted(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=LINEAR,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, lora)
    for name, value in adapted.named_parameters():
        if "lora_B" in name:  # zero at first: an adapter that does nothing is no test
            torch.nn.init.normal_(value, std=0.01)
    return adapted


def questions(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of real questions of 50 to 100 tokens; without the file, of sums in words."""
    if GSM8K.is_file():
        lines = GSM8K.read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["question"] for line in lines]
    else:
        texts = [
            f"A shop sells {n} pens on Monday, {n + 3} on Tuesday and twice as many on Friday. "
            * (2 + n % 2)
            for n in range(2, 200)
        ]
    low, high = PROMPT_TOKENS
    found = [tokenizer.encode(text) for text in texts]
    return [ids for ids in found if low <= len(ids) <= high][:count]


def rollouts_of(
    prompts: list[list[int]],
    *,
    group: int,
    vocabulary: int,
    seed: int = 0,
    responses: tuple[int, int] = RESPONSE_TOKENS,
) -> Rollouts:
    """`group` responses of random tokens to every prompt, of evenly spread lengths."""
    draw = torch.Generator().manual_seed(seed)
    shortest, longest = responses
    spread = torch.linspace(shortest, longest, group).round().int().tolist()
    rows: list[tuple[int, Tensor]] = []
    for prompt in prompts:
        for k in torch.randperm(group, generator=draw).tolist():
            said = torch.randint(0, vocabulary, (spread[k],), generator=draw)
            rows.append((len(prompt), torch.cat([torch.tensor(prompt), said])))
    width = max(len(tokens) for _, tokens in rows)
    tokens_NS = torch.zeros(len(rows), width, dtype=torch.int64)
    attention_NS = torch.zeros(len(rows), width, dtype=torch.bool)
    response_NS = attention_NS.clone()
    for i, (asked, tokens) in enumerate(rows):
        tokens_NS[i, : len(tokens)] = tokens
        attention_NS[i, : len(tokens)] = True
        response_NS[i, asked : len(tokens)] = True
    return Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=attention_NS,
        response_NS=response_NS,
        prompt_N=torch.arange(len(prompts)).repeat_interleave(group),
    )


def random_prompts(
    count: int, vocabulary: int, lengths: tuple[int, int] = PROMPT_TOKENS
) -> list[list[int]]:
    low, high = lengths
    draw = torch.Generator().manual_seed(1)
    sizes = torch.linspace(low, high, count).round().int().tolist()
    return [torch.randint(0, vocabulary, (n,), generator=draw).tolist() for n in sizes]


def problem(name: str, prompts: int = PROMPTS) -> tuple[SequenceProcessor, Rollouts]:
    """A policy by its name, and `prompts` x 8 rollouts."""
    if name == "smollm2":
        policy, tokenizer = smollm2()
        asked, size = questions(tokenizer, prompts), len(tokenizer)
    elif name == "random":
        policy = random_llama()
        size = causal_lm(policy.model).config.vocab_size
        asked = random_prompts(prompts, size)
    else:
        raise ValueError(f"No model {name!r}; expected 'smollm2' or 'random'.")
    return policy, rollouts_of(asked, group=GROUP, vocabulary=size)
