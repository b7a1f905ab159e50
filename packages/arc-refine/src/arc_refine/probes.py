"""Gradient contracts G7 to G13: forwards of their own, which leave the training as it was.

    G7  L_main's gradient agrees with central differences in fp64, 20 coordinates per group
    G8  every enabled term of the loss has a gradient other than zero
    G9  changing the target changes no logit, bit for bit
    G10 changing the query, the demonstrations, the features or the text changes the logits
    G11 the mean of grad log pi under the policy's own samples is zero
    G12 the same input gives the same prompt embedding, without seeding in between
    G13 evaluation runs without gradients

Networks stay in the mode they are in (`train()`); random states are put back; nothing is stepped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from arc_refine.agent import AgentOutput
from arc_refine.batch import Batch, BatchInputs, collate
from arc_refine.contracts import Breach
from arc_refine.data import COLOURS, Episode
from arc_refine.networks import Networks
from arc_refine.step import Training, embed, main_loss, run_agent
from gradient_doctor import score_test

COORDINATES = 20
DIFFERENCE = 1e-5
TOLERANCE = 1e-4
LARGE = 20_000_000
SMALLEST = 1e-5
"""A slope below this is compared with it: central differences of a loss near 5 end at 1e-10."""


def finite_differences(
    training: Training, batch: Batch, *, seed: int = 0, coordinates: int = COORDINATES
) -> list[Breach]:
    """G7, on a copy; `training` is only read."""
    twin = replace(training, networks=in_fp64(training.networks, batch.inputs))
    batch = replace(
        batch, inputs=replace(batch.inputs, features_BF=batch.inputs.features_BF.double())
    )
    loss = _fixed_refinement(twin, batch)
    groups = twin.networks.groups()
    if training.config.refine == "rl":
        groups.pop("policy")  # not of this loss
    total = loss()
    draw = torch.Generator().manual_seed(seed)
    differences = []
    slopes_of = {
        group: torch.autograd.grad(total, list(g.values()), retain_graph=True, allow_unused=True)
        for group, g in groups.items()
    }
    for group, named in sorted(groups.items(), key=lambda item: item[0] != "lm"):
        if group != "lm":
            # the other groups do not move the language model: its states need no more forwards
            _hold_language(twin.networks.encoder, batch.inputs)
        wrong: dict[str, str] = {}
        for name, index, slope in _coordinates(named, slopes_of[group], coordinates, draw):
            measured = _central(loss, named[name], index)
            error = abs(measured - slope) / max(abs(measured), abs(slope), SMALLEST)
            if not error < TOLERANCE:
                wrong[name] = f"{name}[{index}] is {slope:.6e}, measured {measured:.6e}"
        if wrong:
            what = (
                f"the gradient of group {group!r} is not the loss's slope: "
                f"{next(iter(wrong.values()))} ({len(wrong)} of {coordinates} parameters drawn)."
            )
            fix = "Look for a detach, an in-place change or a hand-written backward on the way."
            differences.append(Breach("G7", what, fix, tuple(wrong)))
    return differences


def in_fp64(networks: Networks, inputs: BatchInputs) -> Networks:
    """A copy in fp64. A language model that is frozen or large is held fixed: its pooled states
    for these inputs, computed once, stand for it."""
    lm = networks.encoder.lm
    fixed = lm is not None and not measured_in_fp64(lm)
    memo: dict[int, object] = {id(networks.encoder.tokenizer): networks.encoder.tokenizer}
    if fixed:
        memo[id(lm)] = lm
    copied: dict[str, Any] = {n: copy.deepcopy(m, memo) for n, m in networks.modules().items()}
    if fixed:
        copied["encoder"].lm = lm
        _hold_language(copied["encoder"], inputs)
        copied["encoder"].lm = None
    for module in copied.values():
        module.double()
        module.zero_grad(set_to_none=True)
        for inner in module.modules():
            _true_fp64(inner)
    return Networks(**{"backward": None, "policy": None, **copied})


def _hold_language(encoder: Any, inputs: BatchInputs) -> None:
    """Its pooled states for these inputs, computed once, stand for the language model."""
    if encoder.text is not None:
        with torch.no_grad():
            h_BW = encoder.pooled(inputs.texts)
        encoder.pooled = lambda texts: h_BW


def _true_fp64(module: Any) -> None:
    """Language models normalise in fp32 whatever they are given; rounding there would drown the
    differences. The same formula in the copy's own precision."""
    if not hasattr(module, "variance_epsilon"):
        return

    def forward(x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * (x * scale)

    module.forward = forward


def measured_in_fp64(lm: nn.Module) -> bool:
    """Whether G7 covers the language model: it trains, and two hundred forwards are affordable."""
    trains = any(p.requires_grad for p in lm.parameters())
    return trains and sum(p.numel() for p in lm.parameters()) <= LARGE


def _fixed_refinement(training: Training, batch: Batch) -> Callable[[], Tensor]:
    """L_main as a function of the parameters, with the policy's state and noise held fixed.

    State and refinement are detached on the way to the loss; a difference must not see them move.
    """
    policy, config = training.networks.policy, training.config
    with torch.no_grad():
        prompt_BE = training.networks.encoder(batch.inputs)
        state_BS = None if policy is None else policy.state(prompt_BE, batch.inputs.features_BF)

    def loss() -> Tensor:
        refined_BE = training.networks.encoder(batch.inputs)
        if policy is not None and state_BS is not None:
            draw = torch.Generator().manual_seed(0)
            _, a_BE = policy.rsample(state_BS, draw)
            refined_BE = refined_BE + (a_BE if config.refine == "pathwise" else a_BE.detach())
        networks = training.networks
        output = networks.agent(batch.inputs, refined_BE)
        backward = networks.backward
        behind = None if backward is None else backward(batch.inputs, batch.targets, refined_BE)
        return networks.efe(output, behind, batch.targets, refined_BE).total

    return loss


def _coordinates(
    named: Mapping[str, nn.Parameter],
    slopes: Sequence[Tensor | None],
    count: int,
    draw: torch.Generator,
) -> Iterator[tuple[str, int, float]]:
    """Random coordinates of a group: random parameters, and in each one of its larger slopes.

    Most coordinates of an embedding belong to bytes or positions that a batch does not have:
    their slope is exactly zero on both sides, which tests nothing.
    """
    names = list(named)
    for _ in range(count):
        which = int(torch.randint(len(names), (), generator=draw))
        slope = slopes[which]
        size = named[names[which]].numel()
        flat = torch.zeros(size) if slope is None else slope.detach().flatten()
        live = torch.nonzero(flat.abs() > 1e-3 * flat.abs().max()).flatten()
        pool = live if len(live) else torch.arange(size)
        index = int(pool[int(torch.randint(len(pool), (), generator=draw))])
        yield names[which], index, float(flat[index])


@torch.no_grad()
def _central(loss: Callable[[], Tensor], parameter: Tensor, index: int) -> float:
    flat = parameter.data.view(-1)
    kept = float(flat[index])
    values = []
    for sign in (1, -1):
        flat[index] = kept + sign * DIFFERENCE
        values.append(float(loss()))
    flat[index] = kept
    return (values[0] - values[1]) / (2 * DIFFERENCE)


def term_gradients(training: Training, batch: Batch) -> tuple[dict[str, float], list[Breach]]:
    """G8: (norm of each weighted term's gradient, breaches)."""
    parameters = [
        p for name, g in training.networks.groups().items() if name != "policy" for p in g.values()
    ]
    prompt_BE = embed(training, batch.inputs)
    terms, _ = main_loss(training, batch, prompt_BE)
    norms = {}
    for name, term in terms.weighted.items():
        if not term.requires_grad:
            norms[name] = 0.0
            continue
        slopes = torch.autograd.grad(term, parameters, retain_graph=True, allow_unused=True)
        norms[name] = sum(float(g.double().square().sum()) for g in slopes if g is not None) ** 0.5
    silent = [name for name, norm in norms.items() if norm == 0]
    if not silent:
        return norms, []
    what = f"the enabled terms {', '.join(silent)} of the loss have no gradient."
    fix = "A term that nothing feels is a number to log: set its weight to 0, or let it reach."
    return norms, [Breach("G8", what, fix)]


def leak(
    training: Training,
    episodes: Sequence[Episode],
    make_batch: Callable[[Sequence[Episode]], Batch] = collate,
) -> list[Breach]:
    """G9: other targets, in colour and in size; every logit must keep its bits."""
    recoloured = [Episode(e.inputs, (e.target + 1) % COLOURS) for e in episodes]
    resized = [Episode(e.inputs, np.zeros((1, 1), dtype=np.int8)) for e in episodes]
    own = _forward(training, make_batch(episodes).inputs)
    for other, what in ((recoloured, "colours"), (resized, "size")):
        seen = _forward(training, make_batch(other).inputs)
        if not _same_bits(own, seen):
            message = f"changing the {what} of the target changes the logits: the answer leaks."
            fix = "Only losses and metrics may read the target; look at what builds the inputs."
            return [Breach("G9", message, fix)]
    return []


def sensitivity(training: Training, inputs: BatchInputs) -> list[Breach]:
    """G10: each thing that the networks should read, changed alone."""
    own = _forward(training, inputs)
    query = inputs.query_BHW.clone()
    query[inputs.valid_query_BHW] = (query[inputs.valid_query_BHW] + 1) % COLOURS
    demos = inputs.demo_out_BDHW.clone()
    inside = demos < COLOURS
    demos[inside] = (demos[inside] + 1) % COLOURS
    changes = {
        "query": replace(inputs, query_BHW=query),
        "demonstrations": replace(inputs, demo_out_BDHW=demos),
        "features": replace(inputs, features_BF=inputs.features_BF + 0.5),
    }
    if training.networks.encoder.lm is not None:
        changes["text"] = replace(inputs, texts=tuple(f"{t} other words" for t in inputs.texts))
    deaf = [name for name, other in changes.items() if _same_bits(own, _forward(training, other))]
    if not deaf:
        return []
    what = f"changing the {', the '.join(deaf)} changes no logit: the networks do not read it."
    fix = "Look for a cached or constant embedding, or an input that is never used."
    return [Breach("G10", what, fix)]


def score_is_zero(training: Training, inputs: BatchInputs, *, draws: int = 64) -> list[Breach]:
    """G11, by the doctor's test: is log_prob the density that `sample` draws from?"""
    policy = training.networks.policy
    if policy is None:
        return []
    with torch.no_grad():
        state_BS = policy.state(embed(training, inputs), inputs.features_BF)
    draw = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        value_B = policy.log_prob(state_BS, policy.sample(state_BS, 1, draw)[0][0])
    if not value_B.requires_grad:
        what = "log_prob does not depend on the policy's parameters: its loss is a constant."
        fix = "Remove the detach: the sample and the state are detached, the density is not."
        return [Breach("G11", what, fix)]
    tested = score_test(
        lambda: policy.sample(state_BS, 1, draw)[0][0],
        lambda u_BE: policy.log_prob(state_BS, u_BE),
        list(policy.parameters()),
        draws=draws,
    )
    if tested.passed:
        return []
    what = (
        f"the policy's mean score is {tested.z:.1f} standard errors from zero over {draws} draws: "
        "log_prob is not the density of its samples."
    )
    fix = "Score the raw sample u, with mean and sigma of the same state, and detach it."
    return [Breach("G11", what, fix)]


@torch.no_grad()
def same_embedding(training: Training, inputs: BatchInputs) -> list[Breach]:
    """G12. Not seeded again in between: a layer made in forward would draw the same weights."""
    first, second = embed(training, inputs), embed(training, inputs)
    if torch.equal(first, second):
        return []
    apart = float((first - second).abs().max())
    what = f"the same input gives prompt embeddings that differ by {apart:.1e}."
    fix = "A layer is made inside forward, or dropout is on: make layers in __init__, dropout 0."
    return [Breach("G12", what, fix)]


def evaluation_is_gradless(
    evaluate: Callable[[BatchInputs], tuple[AgentOutput, AgentOutput]], inputs: BatchInputs
) -> list[Breach]:
    """G13: `evaluate` is what validation calls."""
    with torch.enable_grad():
        outputs = evaluate(inputs)
    if not any(o.logits_TBCHW.requires_grad for o in outputs):
        return []
    what = "evaluation gives outputs that require a gradient: it keeps graphs it never uses."
    return [Breach("G13", what, "Put evaluation under torch.no_grad().")]


@torch.no_grad()
def _forward(training: Training, inputs: BatchInputs) -> AgentOutput:
    return run_agent(training, inputs, embed(training, inputs))


def _same_bits(a: AgentOutput, b: AgentOutput) -> bool:
    """A leak into the canvas would change the very shape of the logits."""
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("logits_TBCHW", "size_logits_h_BS", "size_logits_w_BS")
    )
