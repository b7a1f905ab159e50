"""Document 001's entropy gradients between two training steps: any lengths, any number of ranks.

    grads = simple_entropy_probe.compute_entropy_gradients_only(
        entropy_rollouts=rollouts, trainable_params=params, policy_model=model, cfg=cfg,
        step_number=step, microbatch_size=4)

The gradient of the policy's entropy in nats per token (`estimate.gradient`), one tensor for each of
`trainable_params`. What stood in the way in the document:

- rollouts of different lengths: `Rollouts` mark their response tokens, on either side of padding;
- autograd.grad on a DDP module gives None: the bare module inside is called, as a function of its
  parameters, and the ranks exchange sums of their own;
- values near 1e6: sums over a batch. This is a mean over tokens, whatever the size of the batch.

Under DDP every rank calls it at once, with rollouts of its own, and gets the gradient of all of
them. Predicted and measured steps without any code: `EntropyProbeCallback`, `online.loop`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from entropy_experiments.distributed import Ranks, across
from entropy_experiments.estimate.gradient import entropy_gradient
from entropy_experiments.estimate.ratio import estimand_of
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import full_precision
from entropy_experiments.types import Rollouts, UpdateBatch


def compute_entropy_gradients_only(
    *,
    entropy_rollouts: Rollouts | UpdateBatch,
    trainable_params: Iterable[nn.Parameter],
    policy_model: nn.Module,
    cfg: Mapping[str, Any] | None = None,
    step_number: int | None = None,
    microbatch_size: int = 4,
) -> list[Tensor]:
    """dH/dtheta for each of `trainable_params`, in order and in float32 or more.

    `cfg`: its temperature (or generation.temperature) is the policy's; 1 without it. `step_number`
    changes nothing; it names the step in an error. Neither the model nor its .grad is touched.
    """
    model = _bare(policy_model)
    wanted = list(trainable_params)
    names = _names(model, wanted)
    rollouts = (
        entropy_rollouts.rollouts if isinstance(entropy_rollouts, UpdateBatch) else entropy_rollouts
    )
    if not isinstance(rollouts, Rollouts):
        at = "" if step_number is None else f" at step {step_number}"
        raise TypeError(
            f"entropy_rollouts{at} is a {type(rollouts).__name__}; expected Rollouts (tokens, "
            "attention and response masks, prompt numbers) or an UpdateBatch. See "
            "docs/howto_online.md for making them of a trainer's tensors."
        )
    ranks = _ranks()
    everyones = joined(ranks.all_gather(lambda: _on_cpu(rollouts)))
    policy = SequenceProcessor(model, temperature=_temperature(cfg))
    estimand = estimand_of(
        policy,
        prompts="population",
        unit="token",
        form="per_decision",
        entropy="rao_blackwell",
        horizon=None,
    )
    with across(ranks), full_precision():
        gradient = entropy_gradient(
            policy, everyones, estimand=estimand, microbatch=microbatch_size
        )
    return [
        gradient[name].to(p.device, torch.promote_types(p.dtype, torch.float32))
        for name, p in zip(names, wanted, strict=True)
    ]


class SimpleEntropyProbe:
    """The document's object: keeps the last gradients and predicts what a step does with them."""

    def __init__(self) -> None:
        self.step_count = 0
        self._metrics: dict[str, float] = {}

    def compute_entropy_gradients_only(self, **options: Any) -> list[Tensor]:
        """As the function of this name."""
        gradients = compute_entropy_gradients_only(**options)
        self.step_count += 1
        return gradients

    def delta_h_predicted(
        self, entropy_grads: Iterable[Tensor], parameter_changes: Iterable[Tensor]
    ) -> float:
        """First order: the gradient times what the optimizer did to each parameter."""
        pairs = [
            (g.double(), change.detach().to(g.device).double())
            for g, change in zip(entropy_grads, parameter_changes, strict=True)
        ]
        predicted = float(sum((g * change).sum() for g, change in pairs))
        self._metrics = {
            "simple_entropy_delta_h_predicted": predicted,
            "simple_entropy_grad_norm": float(sum(g.square().sum() for g, _ in pairs)) ** 0.5,
            "simple_entropy_param_norm": float(sum(c.square().sum() for _, c in pairs)) ** 0.5,
            "simple_entropy_step_count": float(self.step_count),
        }
        return predicted

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last prediction, under the names that trackers know."""
        return dict(self._metrics)


def joined(parts: list[Rollouts]) -> Rollouts:
    """The ranks' rollouts as one batch, a rollout of each weighing the same, prompts kept apart."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.tokens_NS.shape[1] for part in parts)
    before, prompts = 0, []
    for part in parts:
        _, index_N = torch.unique(part.prompt_N, return_inverse=True)
        prompts.append(index_N + before)
        before += int(index_N.max()) + 1

    def wide(name: str) -> Tensor:
        values = [getattr(part, name) for part in parts]
        return torch.cat([pad(x_NS, (0, width - x_NS.shape[1])) for x_NS in values])

    return Rollouts(
        tokens_NS=wide("tokens_NS"),
        attention_NS=wide("attention_NS"),
        response_NS=wide("response_NS"),
        prompt_N=torch.cat(prompts),
        weight_N=torch.cat([part.weight_N * len(part) for part in parts]) / sum(map(len, parts)),
        truncated_N=torch.cat([part.truncated_N for part in parts]),
    )


_job: tuple[Any, Ranks] | None = None


def _ranks() -> Ranks:
    """The processes of this job. Their group is made once: a training asks at every step."""
    global _job
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if _job is None or _job[0] is not world:
        _job = (world, Ranks.all())
    return _job[1]


def _on_cpu(rollouts: Rollouts) -> Rollouts:
    return replace(
        rollouts,
        tokens_NS=rollouts.tokens_NS.cpu(),
        attention_NS=rollouts.attention_NS.cpu(),
        response_NS=rollouts.response_NS.cpu(),
        prompt_N=rollouts.prompt_N.cpu(),
        weight_N=rollouts.weight_N.cpu(),
        truncated_N=rollouts.truncated_N.cpu(),
        behaviour_logprob_NS=None,
        text=None,
    )


def _bare(model: nn.Module) -> nn.Module:
    """The module inside DDP or DataParallel: its parameters are the same tensors."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    return model.module if isinstance(model, wrappers) else model


def _names(model: nn.Module, wanted: list[nn.Parameter]) -> list[str]:
    known = {id(p): name for name, p in model.named_parameters()}
    missing = sum(id(p) not in known for p in wanted)
    frozen = sum(not p.requires_grad for p in wanted)
    if missing or frozen or not wanted:
        raise ValueError(
            f"trainable_params has {len(wanted)} tensors: {missing} are not parameters of "
            f"policy_model, {frozen} do not require a gradient; expected the model's trainable "
            "parameters. Pass [p for p in policy_model.parameters() if p.requires_grad]."
        )
    return [known[id(p)] for p in wanted]


def _temperature(cfg: Mapping[str, Any] | None) -> float:
    cfg = cfg or {}
    inner = cfg.get("generation")
    nested = inner.get("temperature") if isinstance(inner, Mapping) else None
    temperature = cfg.get("temperature", nested)
    return 1.0 if temperature is None else float(temperature)
