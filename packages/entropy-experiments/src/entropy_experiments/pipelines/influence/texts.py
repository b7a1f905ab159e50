"""The update rollouts as text: what a report shows without a tokenizer.

    pieces of rollout i, joined        = its response, decoded as a whole
    update_rollouts.json               prompt, gaps and facts of every rollout

A piece is what a token adds to the text before it. `decode` of a token alone is something else: a
word without the space before it, half of a character. Such a half has an empty piece; the token
that completes the character has all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from entropy_experiments.types import UpdateBatch

Decode = Callable[[list[int]], str]
BROKEN = "\ufffd"
"""How decoders write a character that is not complete yet."""


def update_texts(batch: UpdateBatch, decode: Decode) -> tuple[list[dict[str, Any]], list[str]]:
    """(a row per rollout, a piece per response token in order of rollout and position).

    `gaps` of a rollout: text between response tokens that the policy did not write (tool output),
    by the index of the response token that follows.
    """
    rollouts, decode = batch.rollouts, _remembering(decode)
    rows, pieces = [], []
    for i in range(len(rollouts)):
        inside_S = rollouts.attention_NS[i]
        ids = rollouts.tokens_NS[i][inside_S].tolist()
        written = rollouts.response_NS[i][inside_S].tolist()
        first = written.index(True) if any(written) else len(ids)
        own: list[str] = []
        gaps: dict[str, str] = {}
        for piece, mine in zip(pieces_of(ids, first, decode), written[first:]):
            if mine:
                own.append(piece)
            else:
                gaps[str(len(own))] = gaps.get(str(len(own)), "") + piece
        rows.append(
            {
                "rollout": i,
                "prompt": int(rollouts.prompt_N[i]),
                "prompt_text": decode(ids[:first]),
                "reward": None if batch.reward_N is None else float(batch.reward_N[i]),
                "truncated": bool(rollouts.truncated_N[i]),
                "gaps": gaps,
            }
        )
        pieces += own
    return rows, pieces


def pieces_of(ids: list[int], first: int, decode: Decode) -> list[str]:
    """What each of ids[first:] adds to the text of those before it."""
    out: list[str] = []
    start, told = max(first - 1, 0), first  # ids[start:told] is context whose text is out already
    for at in range(first, len(ids)):
        before, text = decode(ids[start:told]), decode(ids[start : at + 1])
        if text.endswith(BROKEN) and at + 1 < len(ids):
            out.append("")
            continue
        # Some decoders rewrite what came before (a space before a comma); then the token alone.
        out.append(text[len(before) :] if text.startswith(before) else decode(ids[told : at + 1]))
        start, told = told, at + 1
    return out


def _remembering(decode: Decode) -> Decode:
    """Short runs of tokens come back again and again."""
    seen: dict[tuple[int, ...], str] = {}

    def remembered(ids: list[int]) -> str:
        key = tuple(ids)
        if len(key) > 4:
            return decode(ids)
        if key not in seen:
            seen[key] = decode(ids)
        return seen[key]

    return remembered
