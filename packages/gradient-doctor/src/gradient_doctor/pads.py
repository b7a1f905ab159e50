"""Which places of a batch of token ids are padding?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_WORDS = 4  # distinct tokens beside the padding


def known_pad(module: nn.Module) -> tuple[int | None, Any]:
    """The padding id and the end-of-text id(s) that the model's configuration names."""
    for part in module.modules():
        config = getattr(part, "config", None)
        pad = getattr(config, "pad_token_id", None)
        if isinstance(pad, int) and pad >= 0:
            return pad, getattr(config, "eos_token_id", None)
    for part in module.modules():
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            return part.padding_idx, None
    return None, None


def padded_places(ids: Tensor, pad: int, eos: Any = None) -> Tensor:
    """Runs of the padding id at either end of the rows of [rows, length].

    Where the padding id also ends texts, the first one after a text is the text's own end.
    """
    is_pad = ids.detach() == pad
    trailing = is_pad.flip(1).long().cumprod(1).bool().flip(1)
    if pad == eos or (isinstance(eos, (list, tuple)) and pad in eos):
        own_end = trailing & ~torch.roll(trailing, 1, 1)
        trailing = trailing & ~own_end
    leading = is_pad.long().cumprod(1).bool()
    whole = is_pad.all(1, keepdim=True)
    return (leading | trailing) & ~whole


def inferred_pad(ids: Tensor) -> int | None:
    """The id that fills the ends of rows of [rows, length] and stands nowhere else, if one does;
    or that fills their beginnings.

    Rows of one length say nothing: a last token that all texts share is no padding.
    """
    rows, length = ids.shape
    if rows < 2 or length < 3:
        return None
    ends = _pad_at_ends(ids)
    return _pad_at_ends(ids.flip(1)) if ends is None else ends


def _pad_at_ends(ids: Tensor) -> int | None:
    rows, length = ids.shape
    pad = int(ids[:, -1].mode().values)
    is_pad = ids == pad
    runs = is_pad.flip(1).long().cumprod(1).sum(1)
    ragged = int(runs.max()) > int(runs.min()) and int(runs.max()) > 1
    only_there = int(is_pad.sum()) == int(runs.sum())
    many = 2 * int((runs > 0).sum()) >= rows
    # two or three tokens are a code, in which the last one has a meaning of its own
    texts = len(ids[~is_pad].unique()) >= _WORDS
    return pad if ragged and only_there and many and texts and int(runs.max()) < length else None
