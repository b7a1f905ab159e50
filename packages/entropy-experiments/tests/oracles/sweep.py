"""One causal-LM type, fully trained and with LoRA: our numbers against the plain loop's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.measured import measured
from entropy_experiments.estimate.options import SlopeForm
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.trials import UnsupportedModelError, first_line
from entropy_experiments.types import Direction, Rollouts
from oracles.every_causal_lm import VOCABULARY, small_model
from oracles.plain_loop import FORMS, Plain, plain
from oracles.tiny_models import own_seed
from tolerances import SWEEP

ETA = 0.02
PAIRED: dict[str, SlopeForm] = {"snis": "matched", "per_decision": "to_go"}
PROMPTS, RESPONSES = (5, 5, 11, 11, 3, 8), (4, 7, 9, 2, 6, 12)
LORA: dict[str, Any] = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"}
NOT_ADAPTED = ("out_proj", "conv1d", "router", "classifier", "dt_proj", "o_a_proj")
"""peft refuses the first two in Mamba layers, and breaks routers that give a pair; adapters of the
others do nothing: their layer's weight is used without calling it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one type trained in one way."""

    kind: str
    way: str
    """full or LoRA"""
    mode: str | None = None
    shares: bool | None = None
    logits: str | None = None
    refused: str | None = None
    score: float = 0.0
    """Largest gap of a score, in nats."""
    change: float = 0.0
    """Largest gap of a measured change, relative to it."""
    slope: float = 0.0
    reverse: float = 0.0
    """The same of the slope by reverse mode, from which influence comes."""
    crashed: str | None = None
    """How the slope in the default mode ended, if not with a number."""


def sweep_rollouts() -> Rollouts:
    """Two prompts with two rollouts each and two with one, padded on both sides; one has a hole.

    Longer than the models' windows, and one has a token in it that is padding to some models.
    """
    draw = torch.Generator().manual_seed(5)
    n, left, right = len(PROMPTS), max(PROMPTS), max(RESPONSES)
    tokens_NS = torch.randint(3, VOCABULARY, (n, left + right), generator=draw)
    tokens_NS[1, :left], tokens_NS[3, :left] = tokens_NS[0, :left], tokens_NS[2, :left]
    tokens_NS[5, left + 4] = 1
    column_S = torch.arange(left + right)
    start_N, stop_N = left - torch.tensor(PROMPTS), left + torch.tensor(RESPONSES)
    attention_NS = (column_S >= start_N[:, None]) & (column_S < stop_N[:, None])
    response_NS = attention_NS & (column_S >= left)
    response_NS[4, left + 2] = False
    return Rollouts(
        tokens_NS=torch.where(attention_NS, tokens_NS, 0),
        attention_NS=attention_NS,
        response_NS=response_NS,
        prompt_N=torch.tensor([0, 0, 1, 1, 2, 3]),
    )


def direction_of(model: nn.Module) -> dict[str, Tensor]:
    """Random, as large as the parameters, and 0 where ordinary backward gives no gradient."""
    draw = torch.Generator().manual_seed(9)
    v = {
        name: torch.randn(p.shape, generator=draw) * (float(p.detach().std(correction=0)) or 0.1)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    # A tied weight goes by its first name, which need not be the embedding's.
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            name = names.get(id(module.weight))
            if name in v:
                v[name][module.padding_idx] = 0
    return v


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    with own_seed(1):
        linear = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
            and module is not model.get_output_embeddings()
        ]
        targets = [name for name in linear if name.rpartition(".")[2] not in NOT_ADAPTED]
        wrapped = get_peft_model(model, LoraConfig(target_modules=targets, **LORA))
        for name, p in wrapped.named_parameters():
            if p.requires_grad and "lora_" in name:
                nn.init.normal_(p, std=0.2)
    return wrapped.eval()


def sweep(kind: str) -> Iterator[Row]:
    model: Any = small_model(kind)
    yield examined(kind, "full", model)
    yield examined(kind, "LoRA", with_lora(model))


def examined(kind: str, way: str, model: nn.Module) -> Row:
    rollouts = sweep_rollouts()
    try:
        policy = SequenceProcessor(model)
    except UnsupportedModelError as refusal:
        return Row(kind=kind, way=way, refused=str(refusal))
    v = direction_of(model)
    with all_cycles(model):
        expected = plain(model, rollouts, v, ETA)
    return compared(kind, way, policy, rollouts, Direction(parts={"gradient": v}, lr=1.0), expected)


@contextmanager
def all_cycles(model: nn.Module) -> Iterator[None]:
    """Inside, a backward goes through all cycles of an HRM; its own leaves the early ones out."""
    found: list[Any] = [m for m in model.modules() if hasattr(m, "L_bp_cycles_padded")]
    before = [m.L_bp_cycles_padded for m in found]
    for module in found:
        module.L_bp_cycles_padded = [module.config.L_cycles] * module.config.H_cycles
    try:
        yield
    finally:
        for module, own in zip(found, before, strict=True):
            module.L_bp_cycles_padded = own


def compared(
    kind: str,
    way: str,
    policy: SequenceProcessor,
    rollouts: Rollouts,
    direction: Direction,
    expected: Plain,
) -> Row:
    scores = policy.score_all(rollouts, microbatch=4)
    change, slope, reverse, mode, crashed = 0.0, 0.0, 0.0, None, None
    for form in FORMS:
        options: dict[str, Any] = {"microbatch": 4, "repackings": 0}
        found = measured(policy, rollouts, direction, ETA, form=form, **options)
        change = max(change, _relative(found.value, expected.change[form]))
        try:
            predicted = first_order(policy, rollouts, direction, form=PAIRED[form], **options)
        except (NotImplementedError, RuntimeError) as error:
            crashed = first_line(error)
            options["mode"] = "reverse"
            predicted = first_order(policy, rollouts, direction, form=PAIRED[form], **options)
        slope = max(slope, _relative(predicted.value, expected.slope[form]))
        options["mode"] = "reverse"
        backward = first_order(policy, rollouts, direction, form=PAIRED[form], **options)
        reverse = max(reverse, _relative(backward.value, expected.slope[form]))
        mode = predicted.diagnostics.get("mode", "jvp")
    return Row(
        kind=kind,
        way=way,
        mode=mode,
        shares=policy.shares_prompts,
        logits=policy.logits_path,
        score=max(
            float((ours_NS.double() - theirs_NS).abs().max())
            for ours_NS, theirs_NS in zip(
                scores, (expected.logprob_NS, expected.entropy_NS), strict=True
            )
        ),
        change=change,
        slope=slope,
        reverse=reverse,
        crashed=crashed,
    )


def fault(row: Row) -> str | None:
    """What is wrong with a type that is not refused; None: it is equal to the plain loop."""
    if row.refused is not None:
        return None
    if row.crashed is not None:
        return f"{row.kind}, {row.way}: the slope in the default mode crashed: {row.crashed}"
    limits = {**SWEEP, "reverse": SWEEP["slope"]}
    beyond = {name: getattr(row, name) for name, most in limits.items()}
    beyond = {name: gap for name, gap in beyond.items() if not gap <= limits[name]}
    return f"{row.kind}, {row.way}: not equal in {beyond}" if beyond else None


def _relative(got: float, expected: float) -> float:
    """As `tolerances.assert_close` counts it."""
    return abs(got - expected) / max(abs(expected), 1e-2)
