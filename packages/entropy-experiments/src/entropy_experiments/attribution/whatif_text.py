"""Interventions in text, as a command line has them; read by hand, nothing is evaluated.

The forms and what they mean are in `whatif_grammar`. Several are joined by ';' and applied in
order. A selector compares columns of the token table with numbers, joined by &: A is advantage, p
probability, h entropy; k counts a response's tokens from 0, position the columns of the padded
batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import isfinite

from entropy_experiments.attribution.interventions import (
    SIGNS,
    ClipCov,
    Comparison,
    Intervention,
    KLCov,
    LearningRate,
    Objected,
    Place,
    Reweighted,
    Selector,
)
from entropy_experiments.attribution.whatif_grammar import GRAMMAR

ALIASES = {"A": "advantage", "p": "probability", "h": "entropy"}
COLUMNS = (
    "advantage",
    "probability",
    "logprob",
    "entropy",
    "reward",
    "correct",
    "k",
    "position",
    "rollout",
    "prompt",
    "influence",
)
WORDS = {
    "positive": "advantage>0",
    "negative": "advantage<0",
    "correct": "correct==1",
    "wrong": "correct==0",
}
LARGEST = 1e30
"""Of a number in a what-if: its square is a number, too, and in fp32 it is one itself."""
COMPARISON = re.compile(r"(\w+)\s*(<=|>=|==|!=|<|>)\s*(\S+)")


def parse(text: str) -> tuple[Intervention, ...]:
    """Interventions from text, joined by ';'."""
    parts = [part.strip() for part in text.split(";")]
    return tuple(_parse_one(part) for part in parts)


def _parse_one(text: str) -> Intervention:
    key, equals, value = (piece.strip() for piece in text.partition("="))
    if not equals or not value or key not in PARSERS:
        raise ValueError(
            f"Cannot read the what-if {text!r}. Expected one of: {GRAMMAR}. "
            "What they mean: entropy-probe influence --help."
        )
    return PARSERS[key](text, value)


def selector(text: str) -> Selector:
    """Comparisons of columns with numbers, or words for them, joined by '&'."""
    comparisons = []
    for piece in (piece.strip() for piece in text.split("&")):
        match = COMPARISON.fullmatch(WORDS.get(piece, piece))
        if match is None:
            raise ValueError(
                f"Cannot read {piece!r} in the selector {text!r}. Expected COLUMN SIGN NUMBER such "
                f"as p<0.1 (signs {' '.join(SIGNS)}), or one of {sorted(WORDS)}, joined by &."
            )
        name, sign, number = match.groups()
        column = ALIASES.get(name, name)
        if column not in COLUMNS:
            raise ValueError(
                f"Unknown column {name!r} in the selector {text!r}; expected one of "
                f"{', '.join((*COLUMNS, *ALIASES))}."
            )
        comparisons.append(Comparison(column, sign, _number(number, text)))
    return Selector(text=text, comparisons=tuple(comparisons))


def _number(text: str, whole: str, *, low: float | None = None, above: bool = False) -> float:
    """A number of at most LARGEST, at least `low` (or `above` it)."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    small = low is not None and (value <= low if above else value < low)
    if not isfinite(value) or small:
        bound = "" if low is None else f" {'above' if above else 'of at least'} {low:g}"
        raise ValueError(f"Got {text!r} in {whole!r}; expected a finite number{bound}.")
    if abs(value) > LARGEST:
        raise ValueError(f"Got {text!r} in {whole!r}; expected a number up to {LARGEST:g}.")
    return value


def _place(text: str, whole: str, *, token: bool) -> Place:
    if not re.fullmatch(r"\d+\.\d+" if token else r"\d+", text):
        expected = "ROLLOUT.K such as 3.5" if token else "a rollout's number such as 3"
        raise ValueError(f"Got {text!r} in {whole!r}; expected {expected}, counted from 0.")
    return Place(*(int(piece) for piece in text.split(".")))


def _reweighting(*, token: bool, drop: bool) -> Callable[[str, str], Intervention]:
    def read(text: str, value: str) -> Intervention:
        factors: dict[Place, float] = {}
        for piece in (piece.strip() for piece in value.split(",")):
            where, colon, factor = piece.partition(":")
            if drop == bool(colon):
                form = "no factor" if drop else "PLACE:FACTOR"
                raise ValueError(f"Got {piece!r} in {text!r}; expected {form}.")
            place = _place(where, text, token=token)
            if place in factors:
                raise ValueError(f"{place} is twice in {text!r}; expected each place once.")
            factors[place] = 0.0 if drop else _number(factor, text, low=0)
        return Reweighted(name=text, factors=tuple(factors.items()))

    return read


def _selecting(*, drop: bool) -> Callable[[str, str], Intervention]:
    def read(text: str, value: str) -> Intervention:
        where, colon, factor = value.rpartition(":")
        if drop == bool(colon):
            form = "a selector alone" if drop else "SELECTOR:FACTOR"
            raise ValueError(f"Got {value!r} in {text!r}; expected {form}.")
        weight = 0.0 if drop else _number(factor, text, low=0)
        return Reweighted(name=text, factors=((selector(where if colon else value), weight),))

    return read


def _objected(field: str) -> Callable[[str, str], Intervention]:
    def read(text: str, value: str) -> Intervention:
        if field.startswith("clip") and value.lower() == "none":
            return Objected(field=field, value=None)
        low = None if field == "entropy_coef" else 0.0
        return Objected(field=field, value=_number(value, text, low=low))

    return read


def _clip_cov(text: str, value: str) -> Intervention:
    pieces = _pieces(text, value, (1, 3, 4))
    numbers = [_share(pieces[0], text), *(_number(piece, text) for piece in pieces[1:3])]
    seed = "0" if len(pieces) < 4 else pieces[3]
    if not seed.isdecimal():
        raise ValueError(f"Got seed {seed!r} in {text!r}; expected a whole number.")
    intervention = ClipCov(**dict(zip(("ratio", "low", "high"), numbers)), seed=int(seed))
    if intervention.low >= intervention.high:
        raise ValueError(
            f"Got bounds {intervention.low:g} and {intervention.high:g} in {text!r}; expected "
            "LOW < HIGH."
        )
    return intervention


def _kl_cov(text: str, value: str) -> Intervention:
    pieces = _pieces(text, value, (1, 2))
    numbers = [_share(pieces[0], text), *(_number(piece, text, low=0) for piece in pieces[1:])]
    return KLCov(**dict(zip(("ratio", "coef"), numbers)))


def _pieces(text: str, value: str, counts: Sequence[int]) -> list[str]:
    pieces = value.split(":")
    if len(pieces) not in counts:
        raise ValueError(
            f"Cannot read the what-if {text!r}. Expected one of: {GRAMMAR}. "
            "What they mean: entropy-probe influence --help."
        )
    return pieces


def _share(text: str, whole: str) -> float:
    value = _number(text, whole, low=0, above=True)
    if value > 1:
        raise ValueError(f"Got ratio {text!r} in {whole!r}; expected a share of tokens, up to 1.")
    return value


PARSERS: dict[str, Callable[[str, str], Intervention]] = {
    "drop_rollouts": _reweighting(token=False, drop=True),
    "reweight_rollouts": _reweighting(token=False, drop=False),
    "drop_tokens": _reweighting(token=True, drop=True),
    "reweight_tokens": _reweighting(token=True, drop=False),
    "drop": _selecting(drop=True),
    "reweight": _selecting(drop=False),
    **{field: _objected(field) for field in ("clip_low", "clip_high", "beta", "entropy_coef")},
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "lr": lambda text, value: LearningRate(lr=_number(value, text, low=0, above=True)),
}
