"""The expected-free-energy loss of the grid agent. Means run over valid target cells, N of them.

    Q_t    = softmax o_t,  Qb_t the backward agent's distribution for the same cells
    CE     = 1/N sum w (-log Q_T[y]),  w = 1 + beta [argmax != y], rescaled to mean 1
    risk   = 1/(T N) sum_t KL(Q_t || C),  C = softmax c(r), learned, one per episode
    Z      = KL(C || C^),  C^ the running frequencies of *training* target colours
    bi     = 1/(T N) sum_t JS(Q_t, Qb_t),  0 <= JS <= log 2
    back   = CE of the backward agent's last state against the query: what ties it to x
    prompt = 1 - cos(P r, pooled agent state)
    size   = CE of the two 30-way size heads

There is no ambiguity term: it needs an observation model, and there is none. There is no reward
term: a reward under no_grad has no gradient to add. `forward` changes nothing; the frequencies
move in `observe`, which training calls once per step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, log_softmax

from arc_refine.agent import AgentOutput, BackwardOutput
from arc_refine.batch import BatchTargets
from arc_refine.data import COLOURS, IGNORE

SMOOTH = 1e-3
"""Added to each running frequency: a colour never seen must not make Z infinite."""


@dataclass(frozen=True, kw_only=True)
class EfeWeights:
    """Coefficients of the terms; a term of weight 0 is neither computed nor given parameters.

    Args:
        ce: Of the cells' cross-entropy.
        risk: Of the risk term.
        z: Of the preference term.
        bi: Of the agreement with the backward agent.
        back: Of the backward agent's own term.
        prompt: Of the prompt term.
        size: Of the two size heads.
        hard: beta: a wrongly predicted cell weighs 1 + beta before the rescaling.

    Raises:
        ValueError: If a weight is negative or not finite.

    Examples:
        >>> EfeWeights(bi=0.0, back=0.0).needs_backward_agent
        False
    """

    ce: float = 1.0
    risk: float = 0.01
    z: float = 0.01
    bi: float = 0.05
    back: float = 0.05
    prompt: float = 0.01
    size: float = 0.1
    hard: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"the weight {field.name} is {value}; expected 0 or more. A term is turned off "
                    "with 0."
                )

    @property
    def needs_backward_agent(self) -> bool:
        return self.bi > 0 or self.back > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
    parts: Mapping[str, Tensor]
    """Each enabled term, unweighted."""
    weighted: Mapping[str, Tensor]
    """The same times their coefficients; they add up to `total`."""
    total: Tensor
    mask_ratio: Tensor
    """Share of target cells predicted wrong."""
    cell_accuracy: Tensor
    uncovered: Tensor
    """Share of target cells beyond the canvas: wrong, and without a loss."""

    def _part(self, name: str) -> Tensor | None:
        return self.parts.get(name)

    @property
    def ce(self) -> Tensor | None:
        return self._part("ce")

    @property
    def risk(self) -> Tensor | None:
        return self._part("risk")

    @property
    def z(self) -> Tensor | None:
        return self._part("z")

    @property
    def bi(self) -> Tensor | None:
        return self._part("bi")

    @property
    def back(self) -> Tensor | None:
        return self._part("back")

    @property
    def prompt(self) -> Tensor | None:
        return self._part("prompt")

    @property
    def size(self) -> Tensor | None:
        return self._part("size")


class EFE(nn.Module):
    """The expected-free-energy loss of the grid agent: `efe(output, backward, targets, prompt)`.

    `forward` changes nothing; the running colour frequencies move in `observe`, which training
    calls once per step.

    Args:
        prompt_width: Width of the prompt embedding.
        pooled_width: Width of the agent's pooled state.
        weights: Coefficients of the terms; None: the defaults.
        momentum: Of the running colour frequencies.

    Examples:
        >>> efe = EFE(prompt_width=8, pooled_width=4)
        >>> efe.weights.size
        0.1
    """

    ema: Tensor
    ema_weight: Tensor

    def __init__(
        self,
        prompt_width: int,
        pooled_width: int,
        *,
        weights: EfeWeights | None = None,
        momentum: float = 0.99,
    ) -> None:
        super().__init__()
        self.weights: EfeWeights = weights or EfeWeights()
        self.momentum: float = momentum
        colour = self.weights.risk > 0 or self.weights.z > 0
        self.preference: nn.Linear | None = nn.Linear(prompt_width, COLOURS) if colour else None
        self.match: nn.Linear | None = (
            nn.Linear(prompt_width, pooled_width, bias=False) if self.weights.prompt > 0 else None
        )
        self.register_buffer("ema", torch.zeros(COLOURS))
        self.register_buffer("ema_weight", torch.zeros(()))

    @torch.no_grad()
    def observe(self, targets: BatchTargets) -> None:
        """Take a training batch's colours into C^. Once per step, before `forward`."""
        if not self.training:
            raise RuntimeError(
                "EFE.observe in eval mode; expected train(). Colours of validation targets must "
                "not enter the running frequencies: call it in training steps only."
            )
        colours = check_targets(targets)[targets.valid_BHW]
        shares = torch.bincount(colours, minlength=COLOURS).to(self.ema) / colours.numel()
        self.ema.mul_(self.momentum).add_((1 - self.momentum) * shares)
        self.ema_weight.mul_(self.momentum).add_(1 - self.momentum)

    @property
    def observed(self) -> bool:
        return bool(self.ema_weight > 0)

    @property
    def frequencies(self) -> Tensor:
        """C^, which needs a batch observed."""
        if not self.observed:
            raise RuntimeError(
                "EFE has seen no training target; expected observe(targets) before. Call it first."
            )
        return (self.ema / self.ema_weight + SMOOTH) / (1 + COLOURS * SMOOTH)

    def forward(
        self,
        output: AgentOutput,
        backward_output: BackwardOutput | None,
        targets: BatchTargets,
        prompt_BE: Tensor,
    ) -> Terms:
        target_BHW, on = check_targets(targets), self.weights
        log_Q_TBCHW = log_softmax(_at_least_fp32(output.logits_TBCHW), dim=2)
        valid_BHW = targets.valid_BHW
        wrong_BHW = (log_Q_TBCHW[-1].argmax(1) != target_BHW) & valid_BHW
        if on.needs_backward_agent and backward_output is None:
            raise ValueError(
                f"the weights bi {on.bi} and back {on.back} need the backward agent's output; got "
                "None. Run BackwardAgent, or set both to 0."
            )
        parts: dict[str, Tensor] = {}
        if on.ce > 0:
            parts["ce"] = hard_cell_ce(log_Q_TBCHW[-1], target_BHW, wrong_BHW, on.hard)
        if self.preference is not None and self.observed:
            log_C_BC = log_softmax(_at_least_fp32(self.preference(prompt_BE)), dim=-1)
            if on.risk > 0:
                kl_TBHW = kl(log_Q_TBCHW, log_C_BC[None, :, :, None, None], dim=2)
                parts["risk"] = _cell_mean(kl_TBHW, valid_BHW)
            if on.z > 0:
                parts["z"] = kl(log_C_BC, self.frequencies.to(log_C_BC).log(), dim=-1).mean()
        if backward_output is not None and on.bi > 0:
            log_Qb_TBCHW = log_softmax(_at_least_fp32(backward_output.logits_TBCHW), dim=2)
            parts["bi"] = _cell_mean(jensen_shannon(log_Q_TBCHW, log_Qb_TBCHW, dim=2), valid_BHW)
        if backward_output is not None and on.back > 0:
            parts["back"] = cross_entropy(
                _at_least_fp32(backward_output.query_logits_BCHW),
                backward_output.query_BHW.masked_fill(~backward_output.valid_query_BHW, IGNORE),
                ignore_index=IGNORE,
            )
        if self.match is not None:
            matched_BW = _at_least_fp32(self.match(prompt_BE))
            pooled_BW = _at_least_fp32(output.pooled_BW)
            parts["prompt"] = (1 - cosine_similarity(matched_BW, pooled_BW, dim=-1)).mean()
        if on.size > 0:
            height_B, width_B = (targets.size_B2 - 1).unbind(-1)
            parts["size"] = cross_entropy(
                _at_least_fp32(output.size_logits_h_BS), height_B
            ) + cross_entropy(_at_least_fp32(output.size_logits_w_BS), width_B)
        weighted = {name: getattr(on, name) * value for name, value in parts.items()}
        if not weighted:
            raise ValueError(
                "every term of the loss is off; expected one weight above 0. Set ce to 1."
            )
        cells = targets.cells_B.sum()
        covered = valid_BHW.sum()
        right = (covered - wrong_BHW.sum()) / cells
        return Terms(
            parts=parts,
            weighted=weighted,
            total=torch.stack(list(weighted.values())).sum(),
            mask_ratio=1 - right,
            cell_accuracy=right,
            uncovered=1 - covered / cells,
        )


def check_targets(targets: BatchTargets) -> Tensor:
    """Colours are classes: float targets would be read as probabilities, or fail far from here."""
    if targets.target_BHW.dtype != torch.int64:
        raise TypeError(
            f"targets are {targets.target_BHW.dtype}; expected torch.int64 class indices 0 to 9. "
            "Use .long(), as collate does."
        )
    return targets.target_BHW


def hard_cell_ce(log_Q_BCHW: Tensor, target_BHW: Tensor, wrong_BHW: Tensor, beta: float) -> Tensor:
    """Cross-entropy with wrong cells weighing 1 + beta, rescaled so that weights average 1.

    The rescaling keeps the loss's size; what moves is how a batch's cells share the gradient.
    """
    valid_BHW = target_BHW != IGNORE
    weights_BHW = hard_cell_weights(wrong_BHW, valid_BHW, beta, log_Q_BCHW.dtype)
    own_BHW = log_Q_BCHW.gather(1, target_BHW.clamp(min=0)[:, None])[:, 0]
    return -(weights_BHW * own_BHW).sum() / valid_BHW.sum()


def hard_cell_weights(
    wrong_BHW: Tensor, valid_BHW: Tensor, beta: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Mean 1 over valid cells, 0 elsewhere."""
    raw_BHW = (1 + beta * wrong_BHW.to(dtype)) * valid_BHW
    return raw_BHW * valid_BHW.sum() / raw_BHW.sum()


def kl(log_P: Tensor, log_Q: Tensor, *, dim: int) -> Tensor:
    return (log_P.exp() * (log_P - log_Q)).sum(dim)


def jensen_shannon(log_P: Tensor, log_Q: Tensor, *, dim: int) -> Tensor:
    """(KL(P || M) + KL(Q || M)) / 2 with M = (P + Q) / 2, in nats."""
    log_M = torch.logaddexp(log_P, log_Q) - math.log(2)
    return (kl(log_P, log_M, dim=dim) + kl(log_Q, log_M, dim=dim)) / 2


def _cell_mean(values_TBHW: Tensor, valid_BHW: Tensor) -> Tensor:
    """Mean over steps and valid cells. Cells off the canvas are left out, not multiplied by 0."""
    return values_TBHW[:, valid_BHW].mean()


def _at_least_fp32(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
