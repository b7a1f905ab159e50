"""The grid agent: one block, applied T times, from the query towards the answer.

    h_0 = embed(query) + position;   h_{t+1} = h_t + block(h_t; r, tokens);   o_t = head(h_t)

A block is a 3x3 convolution with row and column averages (for what is far away), modulated by the
refined prompt r (FiLM), then attention from every cell to the tokens: r and two per demonstration.
Every mean and convolution is masked to the episode's own canvas, so that neither padding nor the
batch's other episodes reach a cell. Nothing here takes a target but `BackwardAgent`, which exists
for training only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from arc_refine.batch import BatchInputs, BatchTargets
from arc_refine.data import COLOURS, MAX_SIDE, PAD
from arc_refine.size import SizeHeads


@dataclass(frozen=True, kw_only=True, eq=False)
class AgentOutput:
    logits_TBCHW: Tensor
    """Of every step, t = 1..T. Outside an episode's own canvas they mean nothing."""
    size_logits_h_BS: Tensor
    size_logits_w_BS: Tensor
    """Sides 1..30, at index side - 1."""
    pooled_BW: Tensor
    """The last state's mean over the canvas."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BackwardOutput:
    logits_TBCHW: Tensor
    """At t: the state T - t steps after y, which pairs with the forward agent's step t."""
    query_logits_BCHW: Tensor
    """The state T steps after y, which should be x."""
    query_BHW: Tensor
    valid_query_BHW: Tensor


class ChannelNorm(nn.Module):
    """RMS over the channels of [B, C, H, W]: it keeps zero cells zero, and knows no batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.scale * x_BCHW * torch.rsqrt(x_BCHW.square().mean(1, keepdim=True) + 1e-6)


class GridEmbedding(nn.Module):
    """Colour plus row plus column, zero off the mask."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.colour = nn.Embedding(COLOURS + 1, width)
        self.row = nn.Embedding(MAX_SIDE, width)
        self.column = nn.Embedding(MAX_SIDE, width)
        for table, std in ((self.colour, 0.5), (self.row, 0.25), (self.column, 0.25)):
            nn.init.normal_(table.weight, std=std)

    def forward(self, grid_BHW: Tensor, mask_BHW: Tensor) -> Tensor:
        _, height, width = grid_BHW.shape
        where_HWC = self.row.weight[:height, None] + self.column.weight[None, :width]
        x_BHWC = self.colour(grid_BHW) + where_HWC
        return (x_BHWC * mask_BHW[..., None]).permute(0, 3, 1, 2).contiguous()


class CellBlock(nn.Module):
    """Convolution, row and column averages, FiLM by r; then attention to the tokens."""

    def __init__(self, width: int, prompt_width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = ChannelNorm(width)
        self.film = nn.Linear(prompt_width, 2 * width)
        self.near = nn.Conv2d(width, width, 3, padding=1)
        self.rows = nn.Conv2d(width, width, 1, bias=False)
        self.columns = nn.Conv2d(width, width, 1, bias=False)
        self.mix = nn.Conv2d(width, width, 1)
        self.attention_norm = ChannelNorm(width)
        self.ask = nn.Conv2d(width, width, 1, bias=False)
        # No bias for keys: softmax does not feel it, so it would never get a gradient.
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.answer = nn.Conv2d(width, width, 1)
        with torch.no_grad():
            self.film.weight.mul_(0.5)

    def forward(
        self, h_BCHW: Tensor, mask_B1HW: Tensor, r_BE: Tensor, tokens: tuple[Tensor, Tensor]
    ) -> Tensor:
        gain_BC, shift_BC = self.film(r_BE).chunk(2, dim=-1)
        x_BCHW = (1 + gain_BC[:, :, None, None]) * self.norm(h_BCHW) + shift_BC[:, :, None, None]
        x_BCHW = x_BCHW * mask_B1HW
        far_BCHW = self.rows(_mean(x_BCHW, mask_B1HW, 3)) + self.columns(
            _mean(x_BCHW, mask_B1HW, 2)
        )
        h_BCHW = h_BCHW + self.mix(gelu(self.near(x_BCHW) + far_BCHW)) * mask_B1HW
        return h_BCHW + self._attend(h_BCHW, *tokens) * mask_B1HW

    def _attend(self, h_BCHW: Tensor, tokens_BNC: Tensor, present_BN: Tensor) -> Tensor:
        B, C, H, W = h_BCHW.shape

        def split(x_BLC: Tensor) -> Tensor:
            return x_BLC.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q_BLC = self.ask(self.attention_norm(h_BCHW)).flatten(2).transpose(1, 2)
        mixed = scaled_dot_product_attention(
            split(q_BLC),
            split(self.key(tokens_BNC)),
            split(self.value(tokens_BNC)),
            attn_mask=present_BN[:, None, None, :],
        )
        return self.answer(mixed.transpose(1, 2).reshape(B, H, W, C).permute(0, 3, 1, 2))


class DemoEncoder(nn.Module):
    """Two tokens per demonstration, of its input and its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # A batch has about eight demonstration grids for each query: half the width is plenty.
        half = width // 2
        self.embed = GridEmbedding(half)
        self.near = nn.Conv2d(half, half, 3, padding=1)
        self.norm = ChannelNorm(half)
        self.deep = nn.Conv2d(half, half, 3, padding=1)
        self.role = nn.Parameter(0.5 * torch.randn(2, width))
        self.out = nn.Linear(2 * half, width)

    def forward(self, inputs: BatchInputs) -> tuple[Tensor, Tensor]:
        """tokens [B, 2D, C] and which of them are real."""
        grids_PHW = torch.cat([inputs.demo_in_BDHW, inputs.demo_out_BDHW], dim=1).flatten(0, 1)
        present_BN = torch.cat([inputs.demo_valid_BD, inputs.demo_valid_BD], dim=1)
        mask_PHW = grids_PHW != PAD
        mask_P1HW = mask_PHW[:, None].to(self.role.dtype)
        x_PCHW = self.embed(grids_PHW, mask_PHW)
        x_PCHW = x_PCHW + gelu(self.near(x_PCHW)) * mask_P1HW
        x_PCHW = gelu(self.deep(self.norm(x_PCHW))) * mask_P1HW
        both_PC = torch.cat(
            [_canvas_mean(x_PCHW, mask_P1HW), _smooth_maximum(x_PCHW, mask_P1HW)], dim=-1
        )
        tokens_BNC = self.out(both_PC).unflatten(0, present_BN.shape)
        role_NC = self.role.repeat_interleave(inputs.demo_valid_BD.shape[1], dim=0)
        return tokens_BNC + role_NC, present_BN


class GridAgent(nn.Module):
    """Prompt and demonstrations in, logits of every step and the output's size out."""

    def __init__(
        self, prompt_width: int, width: int = 64, steps: int = 4, *, heads: int = 4
    ) -> None:
        super().__init__()
        _check_shape(width, steps, heads)
        self.prompt_width, self.width, self.steps = prompt_width, width, steps
        self.embed = GridEmbedding(width)
        self.demos = DemoEncoder(width)
        self.prompt_token = nn.Linear(prompt_width, width)
        self.block = CellBlock(width, prompt_width, heads)
        self.head_norm = ChannelNorm(width)
        self.head = nn.Conv2d(width, COLOURS, 1)
        self.size = SizeHeads(width, prompt_width)
        _small_head(self.head)

    def forward(
        self,
        inputs: BatchInputs,
        prompt_BE: Tensor,
        demo_tokens: tuple[Tensor, Tensor] | None = None,
    ) -> AgentOutput:
        """`demo_tokens`: `demos(inputs)`, for those who try several prompts on the same inputs."""
        _check_prompt(prompt_BE, inputs, self.prompt_width)
        mask_B1HW = inputs.canvas_BHW[:, None].to(self.head.weight.dtype)
        tokens_BNC, present_BN = self.demos(inputs) if demo_tokens is None else demo_tokens
        tokens_BNC = torch.cat([self.prompt_token(prompt_BE)[:, None], tokens_BNC], dim=1)
        present_BN = torch.cat([torch.ones_like(present_BN[:, :1]), present_BN], dim=1)
        h_BCHW = self.embed(inputs.query_BHW, inputs.canvas_BHW)
        logits = []
        for _ in range(self.steps):
            h_BCHW = self.block(h_BCHW, mask_B1HW, prompt_BE, (tokens_BNC, present_BN))
            logits.append(self.head(self.head_norm(h_BCHW)))
        pooled_BW = _canvas_mean(self.head_norm(h_BCHW), mask_B1HW)
        size_h, size_w = self.size(inputs, pooled_BW, prompt_BE)
        return AgentOutput(
            logits_TBCHW=torch.stack(logits),
            size_logits_h_BS=size_h,
            size_logits_w_BS=size_w,
            pooled_BW=pooled_BW,
        )


class BackwardAgent(nn.Module):
    """From the target towards the query; training only, with parameters of its own.

    b_0 = embed(y), b_{s+1} = b_s + block(b_s; r). After s steps it stands where the forward agent
    stands T - s steps in: both are distributions over the colours of the *target's canvas*, so the
    two can be compared cell by cell. After T steps it has to be the query.
    """

    def __init__(
        self, prompt_width: int, width: int = 32, steps: int = 4, *, heads: int = 4
    ) -> None:
        super().__init__()
        _check_shape(width, steps, heads)
        self.prompt_width, self.steps = prompt_width, steps
        self.embed = GridEmbedding(width)
        self.block = CellBlock(width, prompt_width, heads)
        self.prompt_token = nn.Linear(prompt_width, width)
        self.still_token = nn.Parameter(0.5 * torch.randn(width))
        self.head_norm = ChannelNorm(width)
        self.head = nn.Conv2d(width, COLOURS, 1)
        _small_head(self.head)

    def forward(
        self, inputs: BatchInputs, targets: BatchTargets, prompt_BE: Tensor
    ) -> BackwardOutput:
        _check_prompt(prompt_BE, inputs, self.prompt_width)
        mask_B1HW = inputs.canvas_BHW[:, None].to(self.head.weight.dtype)
        grid_BHW = targets.target_BHW.masked_fill(~targets.valid_BHW, PAD)
        # Two tokens: attention over a single one is a constant, and its query gets no gradient.
        still_BC = self.still_token.expand(prompt_BE.shape[0], -1)
        tokens_BNC = torch.stack([self.prompt_token(prompt_BE), still_BC], dim=1)
        present_BN = torch.ones(tokens_BNC.shape[:2], dtype=torch.bool, device=tokens_BNC.device)
        h_BCHW = self.embed(grid_BHW, inputs.canvas_BHW)
        logits = [self.head(self.head_norm(h_BCHW))]
        for _ in range(self.steps):
            h_BCHW = self.block(h_BCHW, mask_B1HW, prompt_BE, (tokens_BNC, present_BN))
            logits.append(self.head(self.head_norm(h_BCHW)))
        *paired, last = logits
        return BackwardOutput(
            logits_TBCHW=torch.stack(paired[::-1]),
            query_logits_BCHW=last,
            query_BHW=inputs.query_BHW,
            valid_query_BHW=inputs.valid_query_BHW,
        )


@torch.no_grad()
def predictions(output: AgentOutput, inputs: BatchInputs) -> list[np.ndarray]:
    """A grid per episode: the last step's colours, cut to the predicted size.

    A size beyond the episode's canvas is cut there: no cell exists that could be shown.
    """
    colours_BHW = output.logits_TBCHW[-1].argmax(1).cpu()
    sides_B2 = torch.stack(
        [1 + output.size_logits_h_BS.argmax(-1), 1 + output.size_logits_w_BS.argmax(-1)], dim=-1
    )
    grids = []
    for b, (height, width) in enumerate(sides_B2.tolist()):
        rows, columns = inputs.canvas_BHW[b].any(1).sum(), inputs.canvas_BHW[b].any(0).sum()
        cut_HW = colours_BHW[b, : min(height, int(rows)), : min(width, int(columns))]
        grids.append(cut_HW.numpy().astype(np.int8))
    return grids


def _mean(x_BCHW: Tensor, mask_B1HW: Tensor, dim: int) -> Tensor:
    """Mean along a row (3) or a column (2) over the canvas; 0 where there is none."""
    return (x_BCHW * mask_B1HW).sum(dim, keepdim=True) / mask_B1HW.sum(dim, keepdim=True).clamp(1)


def _canvas_mean(x_BCHW: Tensor, mask_B1HW: Tensor) -> Tensor:
    return (x_BCHW * mask_B1HW).sum((2, 3)) / mask_B1HW.sum((2, 3)).clamp(1)


def _smooth_maximum(x_BCHW: Tensor, mask_B1HW: Tensor, sharpness: float = 4.0) -> Tensor:
    """log mean exp over the canvas: a maximum without its kinks, which finite differences feel.

    0 where there is no canvas (an absent demonstration, whose token is not read).
    """
    peak_BC11 = (x_BCHW * mask_B1HW).detach().amax((2, 3), keepdim=True)
    mean_BC = _canvas_mean(torch.exp(sharpness * (x_BCHW - peak_BC11)) * mask_B1HW, mask_B1HW)
    absent_B1 = mask_B1HW.sum((2, 3)) == 0
    return peak_BC11[:, :, 0, 0] + mean_BC.masked_fill(absent_B1, 1.0).log() / sharpness


def _small_head(head: nn.Conv2d) -> None:
    """Near-uniform colours at first; not zero, or nothing below would get a gradient."""
    nn.init.normal_(head.weight, std=0.1 / math.sqrt(head.in_channels))
    nn.init.zeros_(head.bias)  # type: ignore[arg-type]


def _check_shape(width: int, steps: int, heads: int) -> None:
    if steps < 1 or width < 1 or width % heads:
        raise ValueError(
            f"got width {width}, steps {steps}, heads {heads}; expected steps >= 1 and a width "
            "that the heads divide. Use width 64, steps 4, heads 4."
        )


def _check_prompt(prompt_BE: Tensor, inputs: BatchInputs, width: int) -> None:
    wanted = (inputs.query_BHW.shape[0], width)
    if tuple(prompt_BE.shape) != wanted:
        raise ValueError(
            f"the prompt has shape {tuple(prompt_BE.shape)}; expected {wanted} (episodes, prompt "
            "width). Make it with PromptEncoder of the same width."
        )
