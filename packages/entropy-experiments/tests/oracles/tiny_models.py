"""Tiny transformers models, a tokenizer of single characters, and real checkpoints made of them.

Weights are drawn larger than transformers' own initialisation, so that laws are far from uniform
and attention is real. Everything is random but reproducible, and no call touches the global RNG.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from entropy_experiments.types import Rollouts

PAD, EOS, UNK = 0, 1, 2
CHARACTERS = "0123456789+-*/()=:,. \n<>answerthikQ"
VOCABULARY = 3 + len(CHARACTERS)

SIZES: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "granite": {"num_key_value_heads": 2, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
    # Mixtures of experts, whose grouped products have no forward mode.
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    # Functions of their own that torch.func cannot transform.
    "bloom": {"n_layer": 2, "n_head": 4},
    "recurrent_gemma": {
        "num_key_value_heads": 1,
        "head_dim": 8,
        "lru_width": 32,
        "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
    },
    # A state space.
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
}
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}


@contextmanager
def own_seed(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; pad 0, eos 1, unk 2; decoding gives the text back."""
    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNK}
    words |= {character: 3 + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def tiny_model(architecture: str = "qwen2", *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A causal LM in fp32 and eval mode, every parameter trainable."""
    sizes = {} if architecture == "gpt2" else COMMON
    config = AutoConfig.for_model(
        architecture,
        **{**sizes, **SIZES[architecture], **changes},
        vocab_size=VOCABULARY,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    with own_seed(seed):
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.25)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
    return model.eval()


def tiny_lora(
    architecture: str = "qwen2", *, seed: int = 0, base: nn.Module | None = None, **changes: Any
) -> Any:
    """A PeftModel over a tiny base, with both halves of every adapter away from zero."""
    from peft import LoraConfig, get_peft_model

    with own_seed(seed + 1):
        config = LoraConfig(**{**LORA, **changes})
        model = get_peft_model(base or tiny_model(architecture, seed=seed), config)  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" in name and "magnitude" not in name:
                nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tiny_rollouts(
    *, seed: int = 0, prompts: tuple[int, ...] = (3, 9, 5), responses: tuple[int, ...] = (4, 7, 2)
) -> Rollouts:
    """Left-padded prompts and right-padded responses side by side, as trainers store them."""
    generator = torch.Generator().manual_seed(seed)
    n, left, right = len(prompts), max(prompts), max(responses)
    tokens_NS = torch.randint(3, VOCABULARY, (n, left + right), generator=generator)
    column_S = torch.arange(left + right)
    start_N, stop_N = left - torch.tensor(prompts), left + torch.tensor(responses)
    attention_NS = (column_S >= start_N[:, None]) & (column_S < stop_N[:, None])
    return Rollouts(
        tokens_NS=torch.where(attention_NS, tokens_NS, PAD),
        attention_NS=attention_NS,
        response_NS=attention_NS & (column_S >= left),
        prompt_N=torch.arange(n),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class TinyCheckpoint:
    """What was saved, still alive, so that what is loaded can be compared with it."""

    path: Path
    base: Path | None
    model: Any
    optimizer: torch.optim.Optimizer
    step: int


def trainer_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """transformers.Trainer's two groups; tests/contract checks that these are still its own."""
    from transformers import Trainer

    decays = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    trainable = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for n, p in trainable if n in decays], "weight_decay": weight_decay},
        {"params": [p for n, p in trainable if n not in decays], "weight_decay": 0.0},
    ]


def train_a_little(
    model: nn.Module, *, grouped: bool, lr: float = 1e-3, weight_decay: float = 0.1, steps: int = 3
) -> torch.optim.Optimizer:
    """A few AdamW steps on the entropy of random rollouts: real moments, for every parameter."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = trainer_groups(model, weight_decay) if grouped else [{"params": trainable}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)
    for step in range(steps):
        part = tiny_rollouts(seed=100 + step)
        logits = model(input_ids=part.tokens_NS, attention_mask=part.attention_NS.long()).logits
        loss = -torch.distributions.Categorical(logits=logits).entropy()[part.response_NS].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def save_tiny_checkpoint(
    folder: Path | str,
    kind: str = "lora",
    layout: str = "hf",
    *,
    architecture: str = "qwen2",
    seed: int = 0,
    step: int = 3,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    lora: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    base_name: str | None = "../base",
) -> TinyCheckpoint:
    """Train a tiny model for a moment and save it as `layout` would: hf, step or accelerate.

    LoRA checkpoints get their base at `folder/base`, which `base_name` points to.
    """
    folder = Path(folder)
    tokenizer = tiny_tokenizer()
    base = None
    if kind == "lora":
        base = folder / "base"
        plain = tiny_model(architecture, seed=seed)
        plain.save_pretrained(base)
        tokenizer.save_pretrained(base)
        model = tiny_lora(architecture, seed=seed, base=plain, **(lora or {}))
    else:
        model = tiny_model(architecture, seed=seed)
    optimizer = train_a_little(
        model, grouped=layout == "hf", lr=lr, weight_decay=weight_decay, steps=3
    )
    path = folder / (f"checkpoint-{step}" if layout == "hf" else f"step_{step}")
    weights = path / "model" if layout == "step" else path
    weights.mkdir(parents=True)
    if base is not None:
        # peft looks into the base while saving, so it is named as it will be found only after.
        model.peft_config["default"].base_model_name_or_path = str(base)
        model.save_pretrained(weights)
        (weights / "README.md").unlink(missing_ok=True)
        written = json.loads((weights / "adapter_config.json").read_text())
        written["base_model_name_or_path"] = base_name
        if base_name == "../base" and layout == "step":
            written["base_model_name_or_path"] = "../../base"
        (weights / "adapter_config.json").write_text(json.dumps(written, indent=1))
    else:
        model.save_pretrained(weights)
    tokenizer.save_pretrained(weights)
    name = "optimizer.bin" if layout == "accelerate" else "optimizer.pt"
    torch.save(optimizer.state_dict(), path / name)
    if layout == "hf":
        torch.save({"last_epoch": step}, path / "scheduler.pt")
        (path / "training_args.bin").write_bytes(b"never read")
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if facts is not None:
        (path / "entropy_probe.json").write_text(json.dumps(dict(facts)))
    return TinyCheckpoint(path=path, base=base, model=model, optimizer=optimizer, step=step)
