"""Run a script, with the doctor or without, and write down the bits of what it trained.

The digest covers every parameter that was ever registered in a module or stepped by an optimizer,
in that order, and the state of torch's random number generator at the end. The script itself is
not edited: parameters are kept by torch's own global hooks, so that those of a model which is
local to a function are still there when the script ends.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import resolve_name

# imported by the server that all scripts are forked from: torch's table of names takes a second
resolve_name(torch.add)


class Kept:
    """Parameters in the order in which they were first seen."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}

    def watch(self) -> None:
        nn.modules.module.register_module_parameter_registration_hook(self._registered)
        register_optimizer_step_post_hook(self._stepped)

    def _registered(self, module: nn.Module, name: str, parameter: Any) -> None:
        self._keep(parameter)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._keep(parameter)

    def _keep(self, parameter: Any) -> None:
        if isinstance(parameter, Tensor):
            self._tensors.setdefault(id(parameter), parameter)

    def digest(self) -> str:
        whole = hashlib.sha256()
        for tensor in self._tensors.values():
            whole.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            values = tensor.detach().cpu().contiguous().reshape(-1)
            whole.update(values.view(torch.uint8).numpy().tobytes())
        whole.update(torch.get_rng_state().numpy().tobytes())
        return f"{len(self._tensors)} tensors {whole.hexdigest()}"


def write_digest(script: str, out: str, *, with_doctor: bool) -> None:
    """Run the script in this process, which is its own, and write the digest as JSON."""
    kept = Kept()
    kept.watch()
    error = None
    try:
        if with_doctor:
            from gradient_doctor.command import main as doctor

            doctor(["--quiet", script])
        else:
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
    except Exception as failure:  # a fault may end in an exception: the weights still count
        error = type(failure).__name__
    sys.stdout.flush()
    Path(out).write_text(json.dumps({"digest": kept.digest(), "error": error}))
