"""The formulas that people write by mistake, in fp64, so that a wrong number can be named.

A mistake is what *its* formula gives on a scene. Values equal to the truth there are no mistake
(a function that shifts wrongly is right where all rows are equal) and are dropped by the checker.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradient_doctor.conformance.golden import Scene, entropy, log_softmax, rows_of, top_k
from gradient_doctor.conformance.outputs import Layout
from gradient_doctor.conformance.signatures import Form


@dataclass(frozen=True)
class Mistake:
    name: str
    meaning: str
    fix: str
    value: Tensor
    """As the function would have returned it."""


@dataclass(frozen=True)
class View:
    """One scene, seen as one function reports it."""

    scene: Scene
    form: Form
    layout: Layout

    @property
    def truth(self) -> Tensor:
        return self.of(self.scene.values(self.layout.quantity))

    def of(self, value_NS: Tensor, counted_NS: Tensor | None = None) -> Tensor:
        counted_NS = self.form.counted(self.scene) if counted_NS is None else counted_NS
        return self.layout.project(value_NS, counted_NS, self.scene)

    def at(self, temperature: float) -> Tensor:
        return self.of(self.scene.values(self.layout.quantity, temperature=temperature))

    def distribution(self, logprob_NSV: Tensor) -> Tensor:
        return self.of(self.scene.by_token(self.layout.quantity, logprob_NSV))


def of_formula(view: View) -> Iterator[Mistake]:
    scene, quantity = view.scene, view.layout.quantity
    value_NS = scene.values(quantity)
    vocabulary = scene.table_RV.shape[1]
    yield Mistake(
        "bits",
        "logarithms are to base 2: numbers are 1/ln 2 = 1.44 times too large for nats",
        "use torch.log / log_softmax, or multiply by ln 2",
        view.of(value_NS / math.log(2)),
    )
    yield Mistake(
        "wrong sign",
        "the result is minus what its name says",
        "entropy is -sum p log p; a log-prob is never above 0",
        view.of(-value_NS),
    )
    if quantity == "entropy":
        yield Mistake(
            "surprisal of the drawn token",
            "-log p(token) is returned. Its mean is the entropy only over tokens drawn from this "
            "very policy at this temperature, and noisy; for other tokens it is a cross-entropy",
            "sum over the vocabulary, -(p * log p).sum(-1), or call the result -log-prob",
            view.of(scene.values("surprisal")),
        )
        yield Mistake(
            "divided by log V",
            "the entropy is normalised to [0, 1]: not in nats",
            "multiply by log(vocabulary size)",
            view.of(value_NS / math.log(vocabulary)),
        )
    for final in (view.of(value_NS).exp(), view.of(value_NS.exp())):
        yield Mistake(
            "exponential of it",
            "a perplexity or a probability is returned, not nats",
            "drop the exp",
            final,
        )
    z_NSV = scene.logits_NSV.double() / scene.temperature
    for axis, name in ((1, "positions"), (0, "the batch")):
        yield Mistake(
            "softmax over the wrong axis",
            f"probabilities sum to one over {name}, not over the vocabulary",
            "softmax(dim=-1)",
            view.distribution(_softmax_over(z_NSV, axis)),
        )


def _softmax_over(z_NSV: Tensor, axis: int) -> Tensor:
    return log_softmax(z_NSV.movedim(axis, -1)).movedim(-1, axis)


def of_shift(view: View) -> Iterator[Mistake]:
    """In the sequence convention only: elsewhere the caller shifts."""
    if not view.form.sequence:
        return
    scene, quantity = view.scene, view.layout.quantity
    counted_NS = view.form.counted(scene)
    shift = "row t of the logits is the distribution of token t + 1"
    fix = "logits[:, :-1] with input_ids[:, 1:] and mask[:, 1:]"
    for lag, name, meaning in (
        (0, "shift by one", "token t is scored with row t, which has already seen it"),
        (2, "shifted twice", "token t is scored with row t - 2"),
    ):
        yield Mistake(
            name, f"{meaning}: {shift}", fix, view.of(scene.values(quantity, lag=lag), counted_NS)
        )
    rows_NS = scene.values(quantity)
    for name, lost in (("first", 1), ("last", -1)):
        moved_NS = counted_NS & counted_NS.roll(lost, 1)
        yield Mistake(
            f"{name} token lost",
            f"the {name} token of every response is not counted",
            f"count as many rows as response tokens; {fix}",
            view.of(rows_NS, moved_NS),
        )
    if not view.form.masked:
        every_NS = torch.ones_like(counted_NS)
        if view.form.has("attention_mask"):
            every_NS = scene.attention_NS
        yield Mistake(
            "shift by one",
            "all rows are counted, also the last, which is about a token that is not there",
            "logits[:, :-1]",
            view.of(scene.values(quantity, lag=0), every_NS),
        )


def of_padding(view: View) -> Iterator[Mistake]:
    scene, form, layout = view.scene, view.form, view.layout
    value_NS = scene.values(layout.quantity)
    counted_NS = form.counted(scene)
    predicted_NS = torch.ones_like(counted_NS)
    predicted_NS[:, 0] = False
    fix = "sum(where(mask, h, 0)) / sum(mask), with the mask of the tokens that were drawn"
    if form.masked:
        real_NS = scene.attention_NS & predicted_NS
        for also_first in (real_NS, real_NS & scene.attention_NS.roll(1, 1)):
            yield Mistake(
                "prompt counted",
                "tokens of the prompt are in the mean, which nobody drew",
                fix,
                view.of(value_NS, also_first),
            )
    else:
        yield Mistake(
            "first token counted",
            "the first real token is scored with a row of the padding",
            "count a token if it and the one before it are real: mask[:, 1:] & mask[:, :-1]",
            view.of(value_NS, scene.attention_NS & predicted_NS),
        )
    yield from of_first_row(view)
    padded_NS = predicted_NS & ~scene.attention_NS
    for everything_NS in (predicted_NS, counted_NS | padded_NS):
        yield Mistake("padding counted", "positions of the padding are in the mean", fix,
                      view.of(value_NS, everything_NS))  # fmt: skip
    unshifted_NS = scene.values(layout.quantity, lag=0)
    yield Mistake("padding counted", "positions of the padding are in the mean", fix,
                  view.of(unshifted_NS, torch.ones_like(counted_NS)))  # fmt: skip
    if layout.reduction == "mean" and layout.kind != "token":
        total = replace(layout, reduction="sum").project(value_NS, counted_NS, scene)
        rows, width = counted_NS.shape
        for columns in (width, width - 1, scene.keep or width):
            cells = columns * (rows if layout.kind == "scalar" else 1)
            yield Mistake(
                "padding in the denominator",
                "the sum is masked, but it is divided by the number of columns",
                fix,
                total / cells,
            )


def of_attention(view: View) -> Iterator[Mistake]:
    scene = view.scene
    yield Mistake(
        "attention mask not passed",
        "the model ran without attention_mask: it attends to padding, and positions count it",
        "model(input_ids, attention_mask=attention_mask)",
        view.of(
            scene.values(
                view.layout.quantity, logits_NSV=scene.table_RV[rows_of(scene.ids_NS, None)]
            )
        ),
    )


def of_temperature(view: View) -> Iterator[Mistake]:
    t = view.scene.temperature
    for other, name, meaning in (
        (1.0, "temperature ignored", "the result is that of temperature 1"),
        (1 / t, "temperature inverted", "logits are multiplied by the temperature"),
        (t * t, "temperature applied twice", "logits are divided by it two times"),
    ):
        yield Mistake(
            name, meaning, "logits / temperature, once, before log_softmax", view.at(other)
        )


def of_token_mean(view: View) -> Iterator[Mistake]:
    scene = view.scene
    counted_NS = view.form.counted(scene)
    zeroed_NS = torch.where(counted_NS, scene.values(view.layout.quantity), 0.0)
    yield Mistake(
        "mean of means",
        "each sequence is averaged first: tokens of short responses weigh more. That is another "
        "quantity than the entropy per token",
        "sum over all tokens, then divide once by their number",
        (zeroed_NS.sum(1) / counted_NS.sum(1)).mean().reshape(1),
    )
    yield from of_first_row(view)


def of_first_row(view: View) -> Iterator[Mistake]:
    scene = view.scene
    counted_NS = view.form.counted(scene)
    yield Mistake(
        "first row's mask",
        "the mask, or the prompt length, of the first row is used for all rows",
        "slice and mask each row by its own",
        view.of(scene.values(view.layout.quantity), counted_NS[:1].expand_as(counted_NS)),
    )


def of_order(view: View) -> Iterator[Mistake]:
    if view.layout.kind == "scalar":
        return
    scene = view.scene
    for order in itertools.permutations(range(len(scene.ids_NS))):
        other = scene.pick(order)
        yield Mistake(
            "batch order lost",
            f"rows came back in the order {order} of those given: each row has another's values",
            "undo the sort (argsort of the order) or drop the cache",
            replace(view, scene=other).truth,
        )


def of_half(view: View) -> Iterator[Mistake]:
    """Logits rounded first; then all of it in half precision, as three people write it."""
    scene = view.scene
    for dtype in (torch.bfloat16, torch.float16):
        short = str(dtype).removeprefix("torch.")
        rounded_NSV = (scene.logits_NSV.to(dtype).double()).to(dtype)
        yield Mistake(
            f"logits cast to {short}",
            f"fp32 logits are rounded to {short} before the softmax",
            "keep logits in fp32 (no autocast around the softmax)",
            view.of(scene.values(view.layout.quantity, logits_NSV=rounded_NSV)),
        )
        logprob_NSV = rounded_NSV.log_softmax(-1)
        p_NSV = logprob_NSV.exp()
        fix = "logits.float() before log_softmax; return fp32"
        meaning = f"log_softmax and the sums are in {short}: log-probs are rounded to 1 in 256"
        if view.layout.quantity == "entropy":
            lse_NS = rounded_NSV.logsumexp(-1)
            for h_NS in (
                -(p_NSV * logprob_NSV).sum(-1),
                lse_NS - (rounded_NSV.softmax(-1) * rounded_NSV).sum(-1),
                entropy(logprob_NSV.double()),
            ):
                by_token_NS = torch.nn.functional.pad(h_NS.double()[:, :-1], (1, 0), value=math.nan)
                yield Mistake(f"computed in {short}", meaning, fix, view.of(by_token_NS))
        else:
            yield Mistake(
                f"computed in {short}", meaning, fix, view.distribution(logprob_NSV.double())
            )  # fmt: skip


def of_chunks(view: View) -> Iterator[Mistake]:
    scene = view.scene
    z_NSV = scene.logits_NSV.double() / scene.temperature
    vocabulary = z_NSV.shape[-1]
    sizes = {2**n for n in range(8, 16)} | {1000, 10_000, 20_000, 32_000}
    sizes |= {-(-vocabulary // n) for n in (2, 3, 4, 8, 16)}
    for size in sorted({scene.chunk_size} if scene.chunk_size else sizes):
        if size >= vocabulary:
            continue
        parts = [log_softmax(part) for part in z_NSV.split(size, -1)]
        meaning = f"the softmax is over a part of the vocabulary ({size} of {vocabulary} would fit)"
        fix = "carry max, sum exp and sum z exp over the chunks; or chunk rows, not the vocabulary"
        if view.layout.quantity != "entropy":
            yield Mistake(
                "softmax per chunk", meaning, fix, view.distribution(torch.cat(parts, -1))
            )
            continue
        h_NS = torch.stack([entropy(part) for part in parts])
        for total_NS in (h_NS.sum(0), h_NS.mean(0), h_NS[0], h_NS[-1]):
            by_token_NS = torch.nn.functional.pad(total_NS[:, :-1], (1, 0), value=math.nan)
            yield Mistake("softmax per chunk", meaning, fix, view.of(by_token_NS))


def of_truncation(view: View) -> Iterator[Mistake]:
    """A hidden top-k: the distribution that a top-k list of log-probs from an engine gives."""
    scene = view.scene
    z_NSV = scene.logits_NSV.double() / scene.temperature
    whole_NSV = log_softmax(z_NSV)
    fix = "sum over the whole vocabulary; a top-k list cannot give its entropy"
    for k in range(1, z_NSV.shape[-1]):
        kept_NSV = top_k(z_NSV, k)
        yield Mistake(
            "top-k renormalised", f"the distribution is that of the {k} likeliest tokens", fix,
            view.distribution(log_softmax(kept_NSV)))  # fmt: skip
        yield Mistake(
            "top-k not renormalised", f"the sum stops after the {k} likeliest tokens", fix,
            view.distribution(torch.where(kept_NSV.isfinite(), whole_NSV, -math.inf)))  # fmt: skip


def of_top_k(view: View) -> Iterator[Mistake]:
    scene = view.scene
    if scene.top_k is None:
        return
    z_NSV = scene.logits_NSV.double() / scene.temperature
    whole_NSV = log_softmax(z_NSV)
    kept_NSV = top_k(z_NSV, scene.top_k)
    fix = "set the other logits to -inf, then log_softmax: the sampler's distribution sums to one"
    yield Mistake("top-k ignored", "the entropy is that of the whole vocabulary", fix,
                  view.distribution(whole_NSV))  # fmt: skip
    yield Mistake(
        "top-k not renormalised", "probabilities of the kept tokens do not sum to one", fix,
        view.distribution(torch.where(kept_NSV.isfinite(), whole_NSV, -math.inf)))  # fmt: skip
