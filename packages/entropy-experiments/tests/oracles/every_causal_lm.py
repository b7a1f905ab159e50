"""Every causal-LM type of the installed transformers, as tiny as a generic rule makes it.

`small_config` starts from the type's own defaults and shrinks what has a usual name; `OWN` holds
what a few types need besides. Only sizes change, but for what says that a model is a decoder.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oracles.tiny_models import own_seed

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 41
LAYERS = 2
WINDOW = 8

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "hidden_dim"), 32),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "d_inner", "decoder_ffn_dim", "dff"), 48
    ),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_hidden_size", "d_ff", "moe_intermediate_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_kv", "v_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "attention_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "linear_head_dim", "d_state"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads", "index_n_heads"), 2),
    **dict.fromkeys(("index_head_dim", "swa_head_dim", "attention_head_size"), 8),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 48),
    **dict.fromkeys(("swa_num_attention_heads",), 4),
    **dict.fromkeys(("swa_num_key_value_heads",), 2),
    **dict.fromkeys(("mamba_d_ssm",), 64),
    **dict.fromkeys(("vocab_size_per_layer_input",), VOCABULARY),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "o_lora_rank"), 8),
    # Shorter than the rollouts of the sweep: a window that is ignored would be seen.
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "sliding_window_size", "local_attention"), WINDOW),
}
"""By the names that configs use; a name a config lacks is left out."""
LAYERED = ("layer_types", "mlp_layer_types", "layers_block_type", "block_types", "no_rope_layers")
"""Lists with an entry for each layer: the first and the last of the distinct ones stay."""
OFF = ("use_mamba_kernels", "use_cache")
PARTS = ("vision_config", "audio_config", "text_config", "decoder_config")
DECODER = {
    name: {"is_decoder": True}
    for name in (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
        *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
}
MAMBA2 = {"num_heads": 4, "head_dim": 16, "n_groups": 2}
UNIFIED = {"num_kv_shared_layers": 0, "per_layer_config": {}}
INDEXED = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 8,
    "ngram_vocab_size_base": 50,
}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 2},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {"logit_scale": 0.5},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
            for kind in ("full_attention", "sliding_attention")
        },
        "num_key_value_heads": 4,
    },
    "cpmant": {"dim_head": 8, "dim_ff": 48, "position_bias_num_buckets": 16, "prompt_length": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "deepseek_v4": {"num_key_value_heads": 1, "o_groups": 2, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "intermediate_size": 48,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "gemma4_text": UNIFIED,
    "gemma4_unified_text": UNIFIED,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_heads": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jetmoe": {"kv_channels": 8, "num_key_value_heads": 2},
    "inkling_text": {"logits_mup_width_multiplier": 2.0, "rel_extent": 16, "d_rel": 4},
    "kimi_linear": {"num_experts_per_token": 2, "num_key_value_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2, "num_key_value_heads": 4},
    "mamba2": MAMBA2,
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "n_groups": 2,
    },
    "qwen4_exp_text": INDEXED,
    "qwen4_exp": {"text_config": INDEXED},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "feed_forward_size": 48,
        "num_buckets": 4,
        "hash_seed": 0,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "rembert": {"output_embedding_size": 48},
    "roc_bert": {
        "pronunciation_vocab_size": VOCABULARY,
        "shape_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
NOT_BUILT = {
    "blt": "its byte patcher and hash tables have sizes in nested configs: 4.5e9 parameters",
    "gemma3n": "needs timm, which is not installed",
    "gemma4_assistant": "a draft model: it needs the states of another one",
    "gemma4_unified_assistant": "a draft model: it needs the states of another one",
    "got_ocr2": "its vision tower has fixed sizes",
    "musicgen": "its config is that of a text encoder and an audio codec besides",
    "musicgen_melody": "its config is that of a text encoder and an audio codec besides",
    "phi4_multimodal": "its vision and audio towers have fixed sizes",
}
"""Types that the rule above does not make small, and why."""
STD = {"zamba": 0.1, "minicpm3": 0.1}
"""Of the weights, where 0.25 makes a model in which rounding grows to 1e-4."""


def small_config(kind: str) -> Any:
    """A small config of this type, its lists one entry per layer."""
    base = CONFIG_MAPPING[kind]()
    return _shrunk(base, {**DECODER.get(kind, {}), **OWN.get(kind, {})})


def _shrunk(config: Any, own: dict[str, Any]) -> Any:
    known = config.to_dict()
    changes: dict[str, Any] = {k: SIZES[k] for k in SIZES if isinstance(known.get(k), int)}
    changes |= {k: False for k in OFF if k in known}
    if known.get("kv_lora_rank") is not None:  # latent attention gives every head its own keys
        changes["num_key_value_heads"] = SIZES["num_attention_heads"]
    for name in LAYERED:
        if isinstance(known.get(name), list):
            distinct = list(dict.fromkeys(known[name]))
            changes[name] = [distinct[0], distinct[-1]]
    for name in PARTS:
        if hasattr(getattr(config, name, None), "to_dict"):
            changes[name] = _shrunk(getattr(config, name), own.get(name, {})).to_dict()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(known.get(name), int):
            changes[name] = min(known[name], 2)
    changes |= {k: v for k, v in own.items() if k not in PARTS}
    return type(config)(**changes)


def small_model(kind: str, *, seed: int = 0) -> PreTrainedModel:
    """A causal LM of this type in fp32 and eval mode, every parameter trainable.

    The row of a padding token is zero, as in a checkpoint that was trained from scratch.
    """
    with own_seed(seed):
        model = AutoModelForCausalLM.from_config(small_config(kind))
        std = STD.get(kind, 0.25)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
    return model.float().eval()
