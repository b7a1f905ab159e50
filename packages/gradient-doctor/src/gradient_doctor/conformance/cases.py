"""The golden cases: which scenes show which mistake, and which functions can be asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from gradient_doctor.conformance import mistakes
from gradient_doctor.conformance.golden import (
    WIDE,
    Scene,
    batch,
    far_apart,
    flat_tail,
    table,
    top_k,
    uneven,
    wide_range,
)
from gradient_doctor.conformance.mistakes import Mistake, View
from gradient_doctor.conformance.outputs import Layout
from gradient_doctor.conformance.signatures import Form

STRICT = 1e-4
"""Nats. fp32 on 128 tokens errs 1e-6; on logits of 40, 1e-5."""
ROUNDING_AT_MOST = 0.05
"""A function that computes in bf16 is judged for its bf16 once, not in every case."""


@dataclass(frozen=True)
class Golden:
    name: str
    exposes: str
    scenes: Callable[[Form, Layout], list[Scene]]
    mistakes: Callable[[View], Iterator[Mistake]]
    reason: Callable[[Form, Layout], str] = lambda form, layout: ""
    """Why it does not apply; empty if it does."""
    tolerance: float | None = None
    """None: STRICT, widened by the function's own rounding."""


def plain() -> Scene:
    return batch("three sequences of one length", table())


def varying() -> Scene:
    return batch("every row another distribution", table(varying=True))


def _padding_scenes(form: Form, layout: Layout) -> list[Scene]:
    left = batch("left padding", table(), prompts="own")
    if form.has("logits_to_keep"):
        if layout.kind != "token":
            return [left]
        return [left, replace(uneven(), label="completions padded on the right")]
    return [left, batch("right padding", table(), side="right", prompts="own")]


def _padding_reason(form: Form, layout: Layout) -> str:
    if form.masked or form.has("attention_mask", "model"):
        return ""
    if layout.kind == "token":
        return "no mask is passed and every position is returned: the caller masks"
    return "no mask is passed, so the function cannot know padding: pass it real positions only"


def _shift_reason(form: Form, layout: Layout) -> str:
    return "" if form.sequence else "row t is taken to be about token t already: the caller shifts"


def _attention_scenes(form: Form, layout: Layout) -> list[Scene]:
    return [batch("left padding, positions matter", table(varying=True), prompts="own")]


def _attention_reason(form: Form, layout: Layout) -> str:
    if not form.has("model"):
        return "the function is given logits, not a model"
    return "" if form.has("attention_mask", "batch") else "the function is given no attention mask"


def _token_mean_reason(form: Form, layout: Layout) -> str:
    if layout.kind != "scalar":
        return f"one value per {layout.kind} is returned: the caller averages"
    if layout.reduction != "mean":
        return f"a {layout.reduction} is returned: sums may be added"
    return "" if form.masked or form.has("attention_mask") else "no mask is passed"


def _uneven_scene(form: Form, layout: Layout) -> Scene:
    """Without padding where a mask of the response makes that possible."""
    if not form.masked or form.has("logits_to_keep"):
        return uneven()
    lengths = (4, 2, 1)
    return batch("responses of 4, 2 and 1 tokens", table(), lengths=lengths, prompts="filling")


def _order_scenes(form: Form, layout: Layout) -> list[Scene]:
    # Shortest first: a function that sorts by length for packing must undo it.
    alone = layout.kind == "scalar" or _padding_reason(form, layout)
    start = plain() if alone else _padding_scenes(form, layout)[0]
    return [replace(start.pick(o), label=f"rows in the order {o}") for o in ((2, 0, 1), (2, 1, 0))]


def _bf16_scenes(form: Form, layout: Layout) -> list[Scene]:
    return [
        batch("logits given in bf16", wide_range().bfloat16()),
        batch(f"{WIDE} logits given in bf16", flat_tail(WIDE).bfloat16()),
    ]


def _chunk_scenes(form: Form, layout: Layout) -> list[Scene]:
    scenes = [batch(f"{WIDE} tokens", far_apart(WIDE))]
    if form.has("chunk_size"):
        scenes.append(batch("chunk_size=5, 128 tokens", far_apart(128), chunk_size=5))
    return scenes


def _top_k_scenes(form: Form, layout: Layout) -> list[Scene]:
    kept = 4
    if form.has("top_k"):
        return [batch(f"top_k={kept}", table(), top_k=kept)]
    filtered_RV = top_k(table(), kept)
    filtered_RV[0:3] = 0.0  # rows of the padding token
    return [batch(f"logits filtered to the top {kept}, -inf elsewhere", filtered_RV)]


def _top_k_reason(form: Form, layout: Layout) -> str:
    if form.has("model") and not form.has("top_k"):
        return "no top_k is passed and the model makes its own logits"
    return ""


def _none(view: View) -> Iterator[Mistake]:
    return iter(())


CASES = (
    Golden("formula", "base of the logarithm, sign, axis", lambda f, o: [plain()], _none),
    Golden(
        "fp32",
        "logits cast to half precision",
        lambda f, o: [batch("fp32 logits of 20 to 40", wide_range())],
        mistakes.of_half,
        tolerance=STRICT,
    ),
    # In fp32 -sum(p log p) over a wide vocabulary errs 1e-4.
    Golden("bf16", "log_softmax in bf16", _bf16_scenes, mistakes.of_half, tolerance=1e-3),
    Golden(
        "padding side", "padding or prompt counted", _padding_scenes, mistakes.of_padding,
        _padding_reason,
    ),
    Golden(
        "shift by one", "row t used for token t", lambda f, o: [varying()], _none, _shift_reason
    ),
    Golden(
        "attention mask", "model called without it", _attention_scenes, mistakes.of_attention,
        _attention_reason,
    ),
    Golden(
        "temperature",
        "ignored, inverted, applied twice",
        lambda f, o: [replace(plain(), label=f"T={t}", temperature=t) for t in (2.0, 0.5)],
        mistakes.of_temperature,
        lambda f, o: "" if f.has("temperature") else "no temperature is passed: the caller divides",
    ),
    Golden(
        "token mean", "mean of per-sequence means", lambda f, o: [_uneven_scene(f, o)],
        mistakes.of_token_mean, _token_mean_reason,
    ),
    Golden("batch reorder", "rows not in the caller's order", _order_scenes, mistakes.of_order),
    Golden(
        "chunk axis", "softmax over a chunk of the vocabulary", _chunk_scenes, mistakes.of_chunks,
    ),
    Golden(
        "whole vocabulary",
        "a hidden top-k",
        lambda f, o: [batch("a flat tail of 120 tokens", flat_tail(128))],
        mistakes.of_truncation,
    ),
    Golden("top-k", "top-k not renormalised", _top_k_scenes, mistakes.of_top_k, _top_k_reason),
)  # fmt: skip
RANKS = "mean over ranks"


def known(view: View, golden: Golden) -> list[Mistake]:
    """The case's own mistakes first: among equally close ones, the first is named."""
    general = [*mistakes.of_shift(view), *mistakes.of_formula(view)]
    own = [*golden.mistakes(view)]
    masked = view.form.masked or view.form.has("attention_mask")
    if masked and golden.mistakes is not mistakes.of_padding:
        general += mistakes.of_padding(view)
    return [m for m in own + general if not torch.isnan(m.value).any()]
