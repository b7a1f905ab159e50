"""prime-rl's checkpoint, written by torch's DCP from one process.

As its `CheckpointManager` saves it (src/prime_rl/trainer/ckpt.py of the public repository, read
2026-08): `checkpoints/step_N/trainer` holds one Stateful, "app", with the state dicts of
`get_state_dict`, the scheduler and the progress; the orchestrator has a folder of its own beside.
prime-rl itself needs CUDA and is not run here. Its LoRA counts adapters and has no peft.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from oracles.dcp_pieces import save_dcp


class AppState(Stateful):
    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def save_prime_rl(run: Path, model: nn.Module, optimizer: Any, *, step: int = 3) -> Path:
    """The folder step_N; names of a PeftModel become prime-rl's own."""
    states: tuple[Any, Any] = get_state_dict(model, [optimizer])
    weights, moments = states
    state = {own_name(name): entry for name, entry in moments["state"].items()}
    groups = [
        {**group, "params": [own_name(name) for name in group["params"]]}
        for group in moments["param_groups"]
    ]
    app = {
        "model": {own_name(name): value for name, value in weights.items()},
        "optimizers": {"state": state, "param_groups": groups},
        "scheduler": {"last_epoch": step, "_last_lr": [1e-3]},
        "progress": {"step": step, "total_tokens": 4096, "total_samples": 32},
    }
    folder = run / "checkpoints" / f"step_{step}"
    save_dcp({"app": AppState(app)}, folder / "trainer")
    (folder / "orchestrator").mkdir()
    torch.save({"step": step}, folder / "orchestrator" / "progress.pt")
    return folder


def own_name(name: str) -> str:
    """peft's base_model.model.q_proj.lora_A.default.weight as prime-rl has it: q_proj.lora_A.0."""
    name = name.removeprefix("base_model.model.")
    return name.replace(".default.weight", ".0") if "lora_" in name else name
