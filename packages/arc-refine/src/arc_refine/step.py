"""One training step: the main loss, then the policy, two backwards that share no graph.

    e = encoder(x)                      r = e + sg(a),  a = c tanh(u),  u ~ pi(. | sg[e, f])
    L_main(agent(x, r))                 backward, clip, step, zero
    R_k = S(x, e + a_k) - S(x, e)       no gradient, K refinements, before any step
    A_k = R_k - mean_{j != k} R_j
    L_pi = -(1/K) sum sg(A_k) log pi(sg u_k | sg s) - c_H H(s)     new forward, backward, clip, step

`refine=pathwise`: a is not detached and the policy learns from L_main. `refine=off`: r = e.
Rewards are taken before the main step: the world in which the refinements were drawn.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from arc_refine.agent import AgentOutput
from arc_refine.batch import Batch, BatchInputs
from arc_refine.config import TrainConfig
from arc_refine.efe import Terms
from arc_refine.entropy import before_step
from arc_refine.networks import Networks
from arc_refine.reward import advantages, cell_accuracy, score


class NonFiniteGradientError(RuntimeError):
    """The update would have been made of infinities; the run stops before it."""


class Precision:
    """fp32; or autocast over fp32 weights, in fp16 (CUDA) with a gradient scaler.

    The order with a scaler: scale, backward, unscale_, clip, step, update. The policy's own update
    runs in fp32 outside autocast and needs none.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.device = torch.device(config.device)
        self.dtype = getattr(torch, config.dtype)
        fp16 = self.dtype is torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type) if fp16 else None

    def autocast(self) -> AbstractContextManager[Any]:
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """With a scaler, a step whose gradients are not finite is left out."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()


@dataclass(kw_only=True)
class Training:
    """What a step reads and changes."""

    config: TrainConfig
    networks: Networks
    optimizers: dict[str, torch.optim.AdamW]
    precision: Precision
    step: int = 0


class Observer(Protocol):
    """Sees a step from inside; the contracts do. It must not change anything."""

    def main_backward(self, training: Training) -> None: ...
    def main_step(self, training: Training, before: dict[str, list[Tensor]]) -> None: ...
    def policy_backward(self, training: Training, reward_KB: Tensor) -> None: ...
    def policy_step(self, training: Training, before: dict[str, list[Tensor]]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Refinements:
    """Stored for the policy's update: no tensor of these has a graph."""

    state_BS: Tensor
    u_KBE: Tensor
    a_KBE: Tensor


def embed(training: Training, inputs: BatchInputs) -> Tensor:
    with training.precision.autocast():
        return training.networks.encoder(inputs).float()


def run_agent(
    training: Training,
    inputs: BatchInputs,
    prompt_BE: Tensor,
    demo_tokens: tuple[Tensor, Tensor] | None = None,
) -> AgentOutput:
    """The agent under autocast, its output in fp32 for losses and densities."""
    with training.precision.autocast():
        return in_fp32(training.networks.agent(inputs, prompt_BE, demo_tokens=demo_tokens))


def in_fp32(output: Any) -> Any:
    half = {
        f.name: value.float()
        for f in fields(output)
        if isinstance(value := getattr(output, f.name), Tensor)
        and value.dtype in (torch.float16, torch.bfloat16)
    }
    return replace(output, **half) if half else output


def refine(
    training: Training, prompt_BE: Tensor, inputs: BatchInputs, generator: torch.Generator
) -> tuple[Tensor, Refinements | None, Tensor | None]:
    """(r, what the RL update needs, the policy's state)."""
    policy, config = training.networks.policy, training.config
    if policy is None:
        return prompt_BE, None, None
    state_BS = policy.state(prompt_BE, inputs.features_BF)
    if config.refine == "pathwise":
        _, a_BE = policy.rsample(state_BS, generator)
        return prompt_BE + a_BE, None, state_BS
    u_KBE, a_KBE = policy.sample(state_BS, config.refinements, generator)
    drawn = Refinements(state_BS=state_BS, u_KBE=u_KBE.detach(), a_KBE=a_KBE.detach())
    return prompt_BE + drawn.a_KBE[0], drawn, state_BS


def main_loss(training: Training, batch: Batch, refined_BE: Tensor) -> tuple[Terms, AgentOutput]:
    output = run_agent(training, batch.inputs, refined_BE)
    backward = training.networks.backward
    behind = None
    if backward is not None:
        with training.precision.autocast():
            behind = in_fp32(backward(batch.inputs, batch.targets, refined_BE))
    return training.networks.efe(output, behind, batch.targets, refined_BE), output


@torch.no_grad()
def rewards(
    training: Training, batch: Batch, prompt_BE: Tensor, drawn: Refinements, first: AgentOutput
) -> tuple[Tensor, Tensor, Tensor]:
    """(reward [K, B], cell accuracy without refinement [B], with refinement [K, B]).

    `first` is the agent's output for the first refinement, known from the main loss.
    """
    prompt_BE = prompt_BE.detach()
    with training.precision.autocast():
        tokens = training.networks.agent.demos(batch.inputs)
    plain = run_agent(training, batch.inputs, prompt_BE, tokens)
    rest = [prompt_BE + a_BE for a_BE in drawn.a_KBE[1:]]
    outputs = [first, *(run_agent(training, batch.inputs, r_BE, tokens) for r_BE in rest)]
    gain_KB = torch.stack([score(o, batch.targets) for o in outputs]) - score(plain, batch.targets)
    after_KB = torch.stack([cell_accuracy(o, batch.targets) for o in outputs])
    reward_KB = training.config.reward_scale * gain_KB
    return reward_KB, cell_accuracy(plain, batch.targets), after_KB


def policy_loss(training: Training, drawn: Refinements, reward_KB: Tensor) -> tuple[Tensor, Tensor]:
    """(L_pi, advantages [K, B]); a forward of its own from the stored state and u."""
    policy = training.networks.policy
    assert policy is not None
    advantage_KB = advantages(reward_KB)
    log_prob_KB = policy.log_prob(drawn.state_BS, drawn.u_KBE)
    entropy = policy.entropy(drawn.state_BS).mean()
    loss = -(advantage_KB.detach() * log_prob_KB).mean()
    return loss - training.config.entropy_weight * entropy, advantage_KB


def train_step(
    training: Training,
    batch: Batch,
    generator: torch.Generator,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """One step; its row for metrics.jsonl."""
    began = time.perf_counter()
    networks, main = training.networks, training.optimizers["main"]
    groups = networks.groups()
    networks.efe.observe(batch.targets)
    prompt_BE = embed(training, batch.inputs)
    refined_BE, drawn, state_BS = refine(training, prompt_BE, batch.inputs, generator)
    terms, output = main_loss(training, batch, refined_BE)

    training.precision.backward(terms.total)
    training.precision.unscale(main)
    if observer is not None:
        observer.main_backward(training)
    row: dict[str, Any] = {"step": training.step, **_loss_row(terms)}
    mine = {k: v for k, v in groups.items() if k != "policy" or training.config.refine != "rl"}
    row |= {f"grad_norm/{k}": _norm(_grads(v)) for k, v in mine.items()}
    row["qwen_grad"] = row.get("grad_norm/lm")
    if row["qwen_grad"] is None:
        row["reasons"] = {"qwen_grad": "no language model is trained"}
    row["skipped"] = _clip(training, "main", mine)
    rl: dict[str, Any] = {}
    if drawn is not None:
        reward_KB, before_B, after_KB = rewards(training, batch, prompt_BE, drawn, detached(output))
        rl = {
            "reward_mean": float(reward_KB.mean()),
            "reward_std": float(reward_KB.std()),
            "accuracy_before": float(before_B.mean()),
            "accuracy_after": float(after_KB.mean()),
        }
    else:
        rl = _accuracy_row(training, batch, prompt_BE, output)
    pathwise = None
    if state_BS is not None and drawn is None:
        assert networks.policy is not None
        pathwise = before_step(networks.policy, state_BS, main)
    before = {k: [p.detach().clone() for p in v.values()] for k, v in mine.items()}
    training.precision.step(main)
    if pathwise is not None:
        rl |= _entropy_row(pathwise, networks.policy)
    if observer is not None:
        observer.main_step(training, before)
    row |= _size_row(mine, before)
    main.zero_grad(set_to_none=True)

    if drawn is not None:
        rl |= _policy_step(training, drawn, reward_KB, groups["policy"], observer)  # pyright: ignore[reportPossiblyUnboundVariable]
    training.step += 1
    return {**row, **rl, "seconds": time.perf_counter() - began}


def _policy_step(
    training: Training,
    drawn: Refinements,
    reward_KB: Tensor,
    members: dict[str, nn.Parameter],
    observer: Observer | None,
) -> dict[str, Any]:
    policy, optimizer = training.networks.policy, training.optimizers["policy"]
    assert policy is not None
    loss, advantage_KB = policy_loss(training, drawn, reward_KB)
    loss.backward()
    if observer is not None:
        observer.policy_backward(training, reward_KB)
    group = {"policy": members}
    row = {"policy_loss": float(loss.detach()), "advantage_std": float(advantage_KB.std())}
    row["grad_norm/policy"] = _norm(_grads(members))
    _clip(training, "policy", group)
    prediction = before_step(policy, drawn.state_BS, optimizer)
    before = {"policy": [p.detach().clone() for p in members.values()]}
    optimizer.step()
    row |= _entropy_row(prediction, policy)
    if observer is not None:
        observer.policy_step(training, before)
    row |= _size_row(group, before)
    optimizer.zero_grad(set_to_none=True)
    return row


def detached(output: AgentOutput) -> AgentOutput:
    """Values only: what rewards may see of the main forward."""
    return replace(
        output,
        **{
            f.name: value.detach()
            for f in fields(output)
            if isinstance(value := getattr(output, f.name), Tensor)
        },
    )


@torch.no_grad()
def _accuracy_row(
    training: Training, batch: Batch, prompt_BE: Tensor, output: AgentOutput
) -> dict[str, Any]:
    """Without RL there is no reward; before and after differ with `pathwise` only."""
    after = float(cell_accuracy(output, batch.targets).mean())
    if training.networks.policy is None:
        return {"accuracy_before": after, "accuracy_after": after}
    plain = run_agent(training, batch.inputs, prompt_BE.detach())
    before = float(cell_accuracy(plain, batch.targets).mean())
    return {"accuracy_before": before, "accuracy_after": after}


def _loss_row(terms: Terms) -> dict[str, Any]:
    parts = {name: float(value.detach()) for name, value in terms.parts.items()}
    return {
        "loss": float(terms.total.detach()),
        **parts,
        "mask_ratio": float(terms.mask_ratio),
    }


def _entropy_row(prediction: Any, policy: Any) -> dict[str, Any]:
    return {
        "policy_entropy": prediction.entropy,
        "policy_entropy_predicted_change": prediction.predicted_change,
        "policy_entropy_actual_change": prediction.actual_change(policy),
    }


def _size_row(
    groups: dict[str, dict[str, nn.Parameter]], before: dict[str, list[Tensor]]
) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, members in groups.items():
        size = _norm(before[name])
        changes = [p.detach() - old for p, old in zip(members.values(), before[name])]
        row[f"param_norm/{name}"] = size
        row[f"update_ratio/{name}"] = _norm(changes) / max(size, 1e-30)
    return row


def _clip(training: Training, which: str, groups: dict[str, dict[str, nn.Parameter]]) -> bool:
    """Clip to the configured norm; True when a scaler will leave this step out."""
    named = {name: p for members in groups.values() for name, p in members.items()}
    grads = [p.grad for p in named.values() if p.grad is not None]
    norm = nn.utils.get_total_norm(grads)
    # looked at before clipping, which would spread one NaN over all parameters
    if bool(torch.isfinite(norm)):
        nn.utils.clip_grads_with_norm_(named.values(), training.config.clip, norm)
        return False
    if training.precision.scaler is not None and which == "main":
        return True
    bad = [n for n, p in named.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
    raise NonFiniteGradientError(
        f"Step {training.step}: the gradient of the {which} loss is {float(norm)} in "
        f"{len(bad)} parameters, expected finite numbers: {', '.join(bad[:5])}. Lower the "
        "learning rate of their group; if it happens in the first steps, run "
        "`entropy-probe doctor`, which names the operation."
    )


def _grads(members: dict[str, nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in members.values() if p.grad is not None]


def _norm(tensors: list[Tensor]) -> float:
    if not tensors:
        return 0.0
    return float(torch.stack([t.detach().double().norm() for t in tensors]).norm())


__all__ = [
    "NonFiniteGradientError",
    "Observer",
    "Precision",
    "Refinements",
    "Training",
    "embed",
    "main_loss",
    "policy_loss",
    "refine",
    "rewards",
    "run_agent",
    "train_step",
]
