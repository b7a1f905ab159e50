"""A unit of rollouts, decoded together, as a `RolloutStore` keeps it: its key and its tensors.

    key = sha256([seed, prompt] of every row)

The store's identity holds what all units share (model, distribution, lengths), the key the rest.

Units that nobody has yet are dealt out to the current ranks. Each rank stores what it has drawn
at once, so a lost rank costs the unit that it was drawing (the others may finish theirs: see
`finishing`); in the end all ranks have all units.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.distributed import current
from entropy_experiments.sampling.decode import Draw, Drawn
from entropy_experiments.sampling.finishing import current_unit
from entropy_experiments.sampling.progress import Meter
from entropy_experiments.sampling.rollout_files import RolloutStore

Unit = Sequence[Draw]


def dealt_units(
    units: Sequence[Unit],
    decode: Callable[[Unit, Meter], list[Drawn]],
    store: RolloutStore | None,
    identity: Mapping[str, Any] | None,
    meter: Meter,
    *,
    together: bool = False,
) -> list[dict[int, list[Drawn]]]:
    """By rank: the units that it found in its store or drew, each under its number.

    `together`: no rank can decode alone (a sharded model). All decode every unit with the tokens
    that rank 0 draws, and rank 0 keeps them.
    """
    ranks, keys = current(), [unit_key(unit) for unit in units]

    def held() -> set[int]:
        if store is None:
            return set()
        store.bind(identity or {})  # a machine with a disk of its own has a folder of its own
        return {at for at, key in enumerate(keys) if store.holds(key)}

    if store is not None:
        ranks.broadcast_from_zero(
            lambda: store.bind(identity or {})
        )  # rank 0 first: it makes the folder
    everyones = ranks.all_gather(held)
    # A file that several ranks see is read by one of them.
    reader = {at: rank for rank in reversed(range(ranks.size)) for at in everyones[rank]}
    missing = [at for at in range(len(units)) if at not in reader]

    def local() -> dict[int, list[Drawn]]:
        out: dict[int, list[Drawn]] = {}
        for at, rank in reader.items():
            if rank == ranks.rank and store is not None:
                found = store.get(keys[at])
                assert found is not None  # it was there a moment ago
                out[at] = unpacked(found, len(units[at]))
                meter.finished(len(units[at]))
        for at in missing if together else ranks.shard(missing):
            # Nothing to finish without a store, nor where all ranks are needed and one is gone.
            with nullcontext() if store is None or together else current_unit():
                drawn = decode(units[at], meter)
                if together and not ranks.first:
                    continue
                out[at] = drawn
                if store is not None:
                    store.put(keys[at], packed(out[at]))
            meter.finished(len(units[at]))
        return out

    found = ranks.all_gather(local)
    others = [part for rank, part in enumerate(found) if rank != ranks.rank]
    if others:
        meter.finished(sum(len(drawn) for part in others for drawn in part.values()))
    return found


def unit_key(unit: Sequence[Draw]) -> str:
    """Everything that determines the unit's tokens besides the store's identity."""
    text = json.dumps([[draw.seed, draw.prompt] for draw in unit]).encode()
    return hashlib.sha256(text).hexdigest()


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
