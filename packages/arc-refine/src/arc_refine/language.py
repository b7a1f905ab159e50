"""The language model that embeds a prompt: tiny, SmolLM2, or any local folder.

Only the decoder is kept. Its language-model head would take no part in the embedding, so as a
trainable parameter it would never get a gradient. Every dropout is set to 0: the same text must
give the same embedding in train() mode too. Folders are loaded without remote code and from
safetensors alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

Training = Literal["none", "lora", "full"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION = (("q_proj", "k_proj", "v_proj", "o_proj"), ("c_attn",))
"""Attention projections by family; LoRA goes on the first set that the model has."""
MAX_TOKENS = 512
TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_TOKENS,
    "attention_dropout": 0.0,
    "initializer_range": 0.05,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Language:
    model: nn.Module
    """The decoder: token ids in, last hidden states out."""
    tokenizer: Any
    width: int
    kind: str
    """Which model this is, in words."""
    train: Training
    trainable: tuple[str, ...]
    """Names of the parameters that training moves."""
    fingerprint: str
    """sha256 of all weights as loaded."""


class ByteTokenizer:
    """A text's UTF-8 bytes as ids 0 to 255; the tiny model knows no other tokenizer."""

    pad_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def default_training(name: str) -> Training:
    """Full for the tiny model, LoRA for a real one."""
    return "full" if name == "tiny" else "none" if name == "none" else "lora"


def load_language_model(
    name: str | Path,
    train: Training | None = None,
    dtype: str = "float32",
    seed: int = 0,
    *,
    lora_rank: int = 8,
) -> Language | None:
    """`tiny`, `smollm2` or a folder; None for `none`. The global RNG is left as it was."""
    train = default_training(str(name)) if train is None else train
    if train not in ("none", "lora", "full"):
        raise ValueError(f"lm-train is {train!r}; expected none, lora or full. Choose one.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}. Choose one.")
    if str(name) == "none":
        return None
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        model, tokenizer, kind = _tiny() if str(name) == "tiny" else _stored(name)
        model = model.to(DTYPES[dtype])
        _without_dropout(model)
        model.requires_grad_(train == "full")
        if train == "lora":
            model = _with_lora(model, lora_rank)
    # Checkpoints of weights alone must be complete: what is tied is one parameter here.
    names = tuple(n for n, p in model.named_parameters() if p.requires_grad)
    width = int(_config(model).hidden_size)
    return Language(
        model=model,
        tokenizer=tokenizer,
        width=width,
        kind=kind,
        train=train,
        trainable=names,
        fingerprint=fingerprint(model),
    )


def token_ids(tokenizer: Any, text: str) -> list[int]:
    ids = list(tokenizer(text)["input_ids"])
    if not 0 < len(ids) <= MAX_TOKENS:
        raise ValueError(
            f"the prompt {text[:40]!r}... has {len(ids)} tokens; expected 1 to {MAX_TOKENS}. "
            "Shorten (or fill) the template."
        )
    return ids


def pooled_states(model: nn.Module, rows: Sequence[Sequence[int]]) -> Tensor:
    """Mean of the last hidden states over real tokens, [N, width].

    Padding is on the right, where a causal model cannot look back from, and is masked besides.
    """
    device = next(model.parameters()).device
    longest = max(len(row) for row in rows)
    ids_NL = torch.zeros(len(rows), longest, dtype=torch.long)
    mask_NL = torch.zeros(len(rows), longest, dtype=torch.long)
    for n, row in enumerate(rows):
        ids_NL[n, : len(row)] = torch.tensor(row)
        mask_NL[n, : len(row)] = 1
    ids_NL, mask_NL = ids_NL.to(device), mask_NL.to(device)
    out = model(input_ids=ids_NL, attention_mask=mask_NL, use_cache=False)
    h_NLW = out.last_hidden_state
    weight_NL1 = mask_NL[..., None].to(h_NLW.dtype)
    return (h_NLW * weight_NL1).sum(1) / weight_NL1.sum(1)


def fingerprint(model: nn.Module) -> str:
    """sha256 of the names and bytes of all weights."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _tiny() -> tuple[nn.Module, Any, str]:
    from transformers import Qwen2Config, Qwen2Model

    return Qwen2Model(Qwen2Config(**TINY)), ByteTokenizer(), "tiny Qwen2, random weights"


def _stored(name: str | Path) -> tuple[nn.Module, Any, str]:
    from entropy_experiments import load_base_model

    if str(name) != "smollm2":
        _check_folder(Path(name).expanduser())
    try:
        base = load_base_model(name)
    except ValueError as error:
        raise ValueError(
            f"the language model {str(name)!r} cannot be loaded: {str(error).splitlines()[0]} "
            "Expected a causal language model that transformers knows without remote code."
        ) from error
    return base.model.get_decoder(), base.tokenizer, base.words


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"language model {str(folder)!r} is no folder; expected tiny, smollm2, none or a local "
            "folder with config.json and safetensors. Check the path."
        )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json; expected a folder saved by transformers. Check the path."
        )
    if not any(folder.glob("*.safetensors")):
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.pt*")
        )
        raise ValueError(
            f"{folder} has no .safetensors file (it has {others or 'no weights'}); expected "
            "safetensors, which cannot run code when loaded. Save the model again with "
            "save_pretrained."
        )


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Attention, and some decoders, take their rate from an attribute and not from a module.
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _with_lora(model: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    leaves = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    for names in ATTENTION:
        present = [name for name in names if name in leaves]
        if present:
            config = LoraConfig(
                r=rank,
                lora_alpha=2 * rank,
                lora_dropout=0.0,
                target_modules=present,
                fan_in_fan_out="c_attn" in present,  # GPT-2 stores its matrices transposed
            )
            return get_peft_model(model, config)
    raise ValueError(
        f"LoRA found no attention projections in {type(model).__name__}; expected one of "
        f"{', '.join(name for names in ATTENTION for name in names)}. Use lm-train none or full."
    )


def _config(model: nn.Module) -> Any:
    unwrapped: Any = getattr(model, "get_base_model", lambda: model)()  # peft's
    return unwrapped.config
