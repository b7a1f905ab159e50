"""How a user's function is called, read from the names of its parameters.

There are two conventions, and most mistakes are a mixture of them:

    sequence    `input_ids`, `labels`, `model`: everything is as wide as the sequence, row t of
                the logits is about token t + 1, and *the function* must shift
    aligned     `index`, or no token ids: row t is already about token t; the caller shifts

Where a name says too little (`labels` is both in the wild; a mask without ids), both readings are
tried on the plainest case and the one under which the function is right is kept and printed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradient_doctor.conformance.golden import GoldenModel, Scene

ROLES: dict[str, tuple[str, ...]] = {
    "logits": ("logits", "lm_logits", "token_logits", "logits_nsv", "logits_tv"),
    "input_ids": ("input_ids", "ids", "tokens", "token_ids", "sequences", "sequence_ids"),
    "index": (
        *("index", "indices", "target", "targets", "target_ids", "next_tokens", "actions"),
        *("shift_labels", "shifted_labels"),
    ),
    "labels": ("labels",),
    "attention_mask": ("attention_mask", "attn_mask"),
    "response_mask": (
        *("response_mask", "completion_mask", "loss_mask", "action_mask", "assistant_mask"),
        *("mask", "masks", "token_mask", "row_mask"),
    ),
    "temperature": ("temperature", "temp", "tau"),
    "top_k": ("top_k", "topk", "k"),
    "chunk_size": ("chunk_size", "chunk", "vocab_chunk", "vocab_chunk_size"),
    "logits_to_keep": ("logits_to_keep", "num_logits_to_keep", "completion_length"),
    "model": ("model", "policy", "lm"),
    "batch": ("batch", "inputs"),
    "shards": ("shards", "ranks", "microbatches"),
    "entropy_wanted": ("compute_entropy", "return_entropy", "calculate_entropy", "with_entropy"),
}
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
QUANTITIES = ("entropy", "logprob", "surprisal")
ADAPTER = (
    "Write an adapter with names the doctor knows, e.g.\n"
    "    def mine(logits, input_ids, mask, temperature):\n"
    "        return ...  # entropies per token, or their mean\n"
    "and name it as module:mine (or file.py:mine)."
)


class TargetError(ValueError):
    """The function cannot be found or cannot be called; nothing was measured."""


def load_target(target: str) -> Callable[..., Any]:
    """`package.module:function`, `module:Class.method` or `file.py:function`."""
    place, colon, path = target.partition(":")
    if not (colon and place and path):
        raise TargetError(
            f"The entropy function is named {target!r}, expected module:function or "
            "file.py:function. For TRL's, say trl.trainer.utils:entropy_from_logits."
        )
    # A console script does not have the working directory on its path; `python -m` does.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    target_object: Any = _module(place, target)
    for name in path.split("."):
        if not hasattr(target_object, name):
            near = [
                n
                for n in dir(target_object)
                if not n.startswith("__") and callable(getattr(target_object, n))
            ]
            raise TargetError(
                f"{place} has no {path!r}. It has {', '.join(near[:8]) or 'nothing callable'}."
            )
        target_object = getattr(target_object, name)
    if not callable(target_object):
        raise TargetError(f"{target} is a {type(target_object).__name__}, expected a function.")
    return target_object


def _module(place: str, target: str) -> Any:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ImportError as error:
            raise TargetError(
                f"{place} of {target!r} cannot be imported ({error}). Run from the folder that "
                "holds it, install it, or name the file: path/to/file.py:function."
            ) from error
    if not Path(place).is_file():
        raise TargetError(
            f"No file {place} (named by {target!r}; working directory {os.getcwd()})."
        )
    spec = importlib.util.spec_from_file_location(f"_checked_{Path(place).stem}", place)
    if spec is None or spec.loader is None:
        raise TargetError(f"{place} cannot be read as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file: anything may come out of it
        raise TargetError(
            f"{place} of {target!r} cannot be imported ({type(error).__name__}: {error}). Make "
            f"`python {place}` run first."
        ) from error
    return module


@dataclass(frozen=True)
class Form:
    """One way to call the function: the role of each parameter, and the convention."""

    roles: Mapping[str, str]
    required: frozenset[str]
    positional: tuple[str, ...]
    sequence: bool
    mask_dtype: torch.dtype = torch.long

    def has(self, *roles: str) -> bool:
        return any(role in self.roles.values() for role in roles)

    @property
    def masked(self) -> bool:
        """Is the function told which tokens are of the response?"""
        return self.has("response_mask", "batch", "shards") or self.labels_mask

    @property
    def labels_mask(self) -> bool:
        return self.has("labels") and self.sequence

    def counted(self, scene: Scene) -> Tensor:
        """Tokens that a mean or a sum is about, given what the function is told."""
        if self.masked:
            return scene.response_NS
        real_NS = torch.zeros_like(scene.attention_NS)
        real_NS[:, 1:] = True
        if self.has("attention_mask"):
            real_NS[:, 1:] = scene.attention_NS[:, 1:] & scene.attention_NS[:, :-1]
        if self.has("logits_to_keep"):
            real_NS[:, : -(scene.keep or 1)] = False
        return real_NS

    def arguments(self, scene: Scene) -> tuple[list[Any], dict[str, Any]]:
        values = {}
        for name, role in self.roles.items():
            value = self._value(role, scene)
            if value is not None or name in self.required:
                values[name] = value
        return [values.pop(name) for name in self.positional if name in values], values

    def _value(self, role: str, scene: Scene) -> Any:
        """What is passed; None leaves an optional parameter at its default."""
        vocabulary = scene.table_RV.shape[1]
        match role:
            case "temperature":
                return scene.temperature if scene.temperature != 1 or self._must(role) else None
            case "top_k":
                return scene.top_k or (vocabulary if self._must(role) else None)
            case "chunk_size":
                return scene.chunk_size or (vocabulary if self._must(role) else None)
            case "logits_to_keep":
                return scene.keep
            case "entropy_wanted":
                return True
            case "model":
                return GoldenModel(scene)
            case "batch":
                return self._tensors(scene)
            case "shards":
                return [self._tensors(part) for part in scene.shards or (scene,)]
            case _:
                return self._tensors(scene)[role]

    def _must(self, role: str) -> bool:
        return any(self.roles[name] == role for name in self.required)

    def _tensors(self, scene: Scene) -> dict[str, Any]:
        """Fresh tensors: a function may write into what it is given."""
        ids_NS, mask_NS = scene.ids_NS, scene.response_NS.to(self.mask_dtype)
        rows = slice(None) if self.sequence else slice(0, -1)
        tokens = slice(None) if self.sequence else slice(1, None)
        labels_NS = ids_NS.masked_fill(~scene.response_NS, -100) if self.sequence else ids_NS
        tensors = {
            "logits": scene.logits_NSV[:, rows].clone(),
            "input_ids": ids_NS[:, tokens].clone(),
            "index": ids_NS[:, 1:].clone(),
            "labels": labels_NS[:, tokens].clone(),
            "attention_mask": scene.attention_NS[:, tokens].to(self.mask_dtype),
            "response_mask": mask_NS[:, tokens].clone(),
        }
        return tensors | {"completion_mask": tensors["response_mask"]}

    def __str__(self) -> str:
        """The call, for the reader of a report."""
        rows, tokens = ("", "") if self.sequence else ("[:, :-1]", "[:, 1:]")
        width = {
            "logits": f"logits{rows}",
            "input_ids": f"input_ids{tokens}",
            "index": "input_ids[:, 1:]",
            "labels": "input_ids, -100 outside the response" if self.sequence else f"ids{tokens}",
            "attention_mask": f"attention_mask{tokens}",
            "response_mask": f"response_mask{tokens}",
            "model": "a golden model",
            "batch": "a dict of input_ids, attention_mask, response_mask, labels, logits",
            "shards": "a list of such dicts, one per rank",
        }
        return ", ".join(f"{name}={width[r]}" for name, r in self.roles.items() if r in width)


def forms_of(function: Callable[..., Any], roles: Mapping[str, str] | None = None) -> list[Form]:
    """The readings of a signature, the likeliest first."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise TargetError(f"{name} has no readable signature ({error}). {ADAPTER}") from error
    named = dict(roles or {})
    for parameter, role in named.items():
        if role not in ROLES:
            raise TargetError(
                f"Role {role!r} of {parameter!r}: expected one of {', '.join(ROLES)}."
            )
    fixed = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p for p in fixed if p.default is p.empty]
    roles_found: dict[str, str] = {}
    for p in fixed:
        role = named.get(p.name, _ROLE_OF.get(p.name.lower()))
        if role is None and missing == [p] and len(fixed) == 1:
            role = "logits"  # f(x): there is nothing else it could be
        if role is not None and role not in roles_found.values():
            roles_found[p.name] = role
    unknown = [p.name for p in missing if p.name not in roles_found]
    if unknown or not {"logits", "model", "batch", "shards"} & set(roles_found.values()):
        role_names = ", ".join(names[0] for names in ROLES.values())
        what = f"the required {unknown}" if unknown else "nothing to take logits from"
        raise TargetError(
            f"{name}{inspect.signature(function)} has {what}; parameters that are understood: "
            f"{role_names}. {ADAPTER}"
        )
    required = frozenset(p.name for p in missing)
    positional = tuple(p.name for p in fixed if p.kind is p.POSITIONAL_ONLY)
    values = set(roles_found.values())
    if values & {"model", "input_ids", "batch", "shards", "logits_to_keep"}:
        conventions = [True]
    elif "index" in values:
        conventions = [False]
    elif "labels" in values:
        conventions = [True, False]
    elif values & {"attention_mask", "response_mask"}:
        conventions = [False, True]
    else:
        conventions = [False]
    masked = values & {"attention_mask", "response_mask", "batch", "shards"}
    dtypes = [torch.long, torch.bool] if masked else [torch.long]
    return [
        Form(roles_found, required, positional, sequence, dtype)
        for sequence, dtype in itertools.product(conventions, dtypes)
    ]
