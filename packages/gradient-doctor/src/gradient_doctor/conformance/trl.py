"""TRL's own trainers, as the doctor can call them. TRL is imported only if a user names it.

`GRPOTrainer._get_per_token_logps_and_entropies` is a method that reads one attribute of its
trainer and a model with TRL's fused LM head. Both are made here, so that
`trl.trainer.grpo_trainer:GRPOTrainer._get_per_token_logps_and_entropies` can be named as it is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

_METHOD = "_get_per_token_logps_and_entropies"


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, unless it is that method of a TRL trainer."""
    module = getattr(function, "__module__", "") or ""
    if not (module.startswith("trl.") and getattr(function, "__name__", "") == _METHOD):
        return function
    method = inspect.unwrap(function)  # without its profiling
    add_fused_lm_head = importlib.import_module("trl.trainer.utils").add_fused_lm_head

    def per_token_logps_and_entropies(
        model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, temperature: float
    ) -> dict[str, Any]:
        add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
        trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext))
        logps, entropies, _ = method(
            trainer, model, input_ids, attention_mask, logits_to_keep, compute_entropy=True
        )
        return {"logprob": logps, "entropy": entropies}

    return per_token_logps_and_entropies
