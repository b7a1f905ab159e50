"""Episodes of different sizes as one batch, inputs and targets apart.

The canvas, the cells for which logits exist, is decided by the inputs of each episode alone
(`data.canvas_size`): were it as large as the target, the shape of the logits would tell the answer.
A target larger than its canvas is cut: cells beyond it carry no loss and count as wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from arc_refine.data import IGNORE, PAD, Episode, EpisodeInputs, canvas_size
from arc_refine.features import TEMPLATE, describe, features


class _OnDevice:
    def to(self, device: torch.device | str) -> Self:
        on_device: dict[str, Any] = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Tensor | _OnDevice):
                on_device[field.name] = value.to(device)
        return replace(self, **on_device)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchInputs(_OnDevice):
    """All that the models read. H W is the largest canvas; the demonstrations have their own."""

    query_BHW: Tensor
    """long, PAD where there is no query."""
    valid_query_BHW: Tensor
    canvas_BHW: Tensor
    """Cells that belong to the episode's own canvas."""
    query_size_B2: Tensor
    demo_in_BDHW: Tensor
    demo_out_BDHW: Tensor
    demo_valid_BD: Tensor
    demo_in_size_BD2: Tensor
    demo_out_size_BD2: Tensor
    """Sizes of absent demonstrations are 0."""
    features_BF: Tensor
    texts: tuple[str, ...]
    episodes: tuple[EpisodeInputs, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchTargets(_OnDevice):
    """For losses and metrics only."""

    target_BHW: Tensor
    """long, IGNORE where there is no target."""
    valid_BHW: Tensor
    """Target cells on the canvas."""
    size_B2: Tensor
    cells_B: Tensor
    """All cells of the target, those beyond the canvas too."""
    grids: tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch(_OnDevice):
    inputs: BatchInputs
    targets: BatchTargets


def collate(episodes: Sequence[Episode], *, template: str = TEMPLATE) -> Batch:
    """Episodes as padded tensors; what models read and what losses read are apart.

    Args:
        episodes: At least one.
        template: The sentence that describes a task; its fields are filled in.

    Returns:
        The batch, with `inputs` and `targets`.

    Raises:
        ValueError: If there is no episode.

    Examples:
        >>> swap = Pair([[1, 2]], [[2, 1]])
        >>> batch = collate(leave_one_out(Task("swap", demos=(swap, swap), tests=(swap,))))
        >>> batch.inputs.query_BHW.shape, batch.inputs.texts[0][:16]
        (torch.Size([2, 1, 2]), '1 demonstrations')
    """
    if not episodes:
        raise ValueError("a batch of 0 episodes; expected at least 1. Check the sampler.")
    inputs = collate_inputs([episode.inputs for episode in episodes], template=template)
    targets = _targets([episode.target for episode in episodes], inputs)
    return Batch(inputs=inputs, targets=targets)


def collate_inputs(episodes: Sequence[EpisodeInputs], *, template: str = TEMPLATE) -> BatchInputs:
    """The half of `collate` that has never seen a target."""
    canvases = [canvas_size(inputs) for inputs in episodes]
    height, width = (max(sizes) for sizes in zip(*canvases))
    count = max(len(inputs.demos) for inputs in episodes)
    pairs = [pair for inputs in episodes for pair in inputs.demos]
    demo_height, demo_width = (
        max(max(p.input.shape[axis], p.output.shape[axis]) for p in pairs) for axis in (0, 1)
    )
    B = len(episodes)
    query_BHW = np.full((B, height, width), PAD)
    canvas_BHW = np.zeros((B, height, width), dtype=bool)
    demos_2BDHW = np.full((2, B, count, demo_height, demo_width), PAD)
    sizes_2BD2 = np.zeros((2, B, count, 2), dtype=np.int64)
    for b, inputs in enumerate(episodes):
        _place(query_BHW[b], inputs.query)
        canvas_BHW[b, : canvases[b][0], : canvases[b][1]] = True
        for d, pair in enumerate(inputs.demos):
            for side, grid in enumerate((pair.input, pair.output)):
                _place(demos_2BDHW[side, b, d], grid)
                sizes_2BD2[side, b, d] = grid.shape
    numbers = [features(inputs.demos) for inputs in episodes]
    return BatchInputs(
        query_BHW=torch.from_numpy(query_BHW),
        valid_query_BHW=torch.from_numpy(query_BHW != PAD),
        canvas_BHW=torch.from_numpy(canvas_BHW),
        query_size_B2=torch.tensor([inputs.query.shape for inputs in episodes]),
        demo_in_BDHW=torch.from_numpy(demos_2BDHW[0]),
        demo_out_BDHW=torch.from_numpy(demos_2BDHW[1]),
        demo_valid_BD=torch.from_numpy(sizes_2BD2[0, :, :, 0] > 0),
        demo_in_size_BD2=torch.from_numpy(sizes_2BD2[0]),
        demo_out_size_BD2=torch.from_numpy(sizes_2BD2[1]),
        features_BF=torch.from_numpy(np.stack(numbers)),
        texts=tuple(
            describe(values, inputs.demos, template=template)
            for values, inputs in zip(numbers, episodes)
        ),
        episodes=tuple(episodes),
    )


def _targets(grids: Sequence[np.ndarray], inputs: BatchInputs) -> BatchTargets:
    target_BHW = np.full(tuple(inputs.query_BHW.shape), IGNORE)
    for b, grid in enumerate(grids):
        _place(target_BHW[b], grid)
    # The batch's canvas may be larger than the episode's, where there are no logits of its own.
    target_BHW[~inputs.canvas_BHW.numpy()] = IGNORE
    return BatchTargets(
        target_BHW=torch.from_numpy(target_BHW),
        valid_BHW=torch.from_numpy(target_BHW != IGNORE),
        size_B2=torch.tensor([grid.shape for grid in grids]),
        cells_B=torch.tensor([grid.size for grid in grids]),
        grids=tuple(grids),
    )


def _place(canvas_HW: np.ndarray, grid: np.ndarray) -> None:
    height, width = canvas_HW.shape
    part = grid[:height, :width]
    canvas_HW[: part.shape[0], : part.shape[1]] = part
