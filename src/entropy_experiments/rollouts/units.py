"""A unit of rollouts, decoded together, as a `RolloutStore` keeps it: its key and its tensors.

    key = sha256([seed, prompt] of every row)

The store's identity holds what all units share (model, law, lengths); the key holds the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor

from entropy_experiments.rollouts.decode import Draw, Drawn


def unit_key(unit: Sequence[Draw]) -> str:
    """Everything that determines the unit's tokens besides the store's identity."""
    said = json.dumps([[draw.seed, draw.prompt] for draw in unit]).encode()
    return hashlib.sha256(said).hexdigest()


def packed(drawn: Sequence[Drawn]) -> dict[str, Tensor]:
    """Of all rows one after another: lengths, tokens, log-probs; fp64, so that bits come back."""
    return {
        "length_N": torch.tensor([len(rollout.tokens) for rollout in drawn]),
        "tokens_T": torch.tensor([t for x in drawn for t in x.tokens], dtype=torch.int32),
        "logprob_T": torch.tensor([p for x in drawn for p in x.logprobs], dtype=torch.float64),
        "truncated_N": torch.tensor([rollout.truncated for rollout in drawn]),
    }


def unpacked(unit: dict[str, Tensor], rows: int) -> list[Drawn]:
    """What `packed` was given."""
    lengths = unit["length_N"].tolist()
    assert len(lengths) == rows  # the key holds every row, the hash every bit
    return [
        Drawn(tokens=tokens_T.tolist(), logprobs=logprob_T.tolist(), truncated=truncated)
        for tokens_T, logprob_T, truncated in zip(
            unit["tokens_T"].split(lengths),
            unit["logprob_T"].split(lengths),
            unit["truncated_N"].tolist(),
            strict=True,
        )
    ]
