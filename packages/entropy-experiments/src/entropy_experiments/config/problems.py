"""What is wrong with a configuration, in words: where, what was got, what was expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from entropy_experiments.config.keys import every_key, look, shown

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails


MOST = 20
"""Problems that are described; finding the key that was meant takes a while for each."""
DEEPEST = 20
"""Dots in a key of --set."""
LONGEST = 600
"""Characters of one of them: a key may be as long as its file."""


class ConfigError(ValueError):
    """A configuration that cannot be used. `problems` has one line for each thing wrong."""

    def __init__(self, source: str, problems: Sequence[str], *, more: int = 0) -> None:
        self.source, self.problems = source, tuple(problems)
        lines = [_cut(problem) for problem in self.problems[:MOST]]
        more += len(self.problems) - len(lines)
        if len(lines) + more == 1:
            text = f"{_cut(source)}: {lines[0]}"
        else:
            lines += [f"and {more} more."] if more else []
            text = f"{_cut(source)}: {len(self.problems) + more} problems.\n" + "\n".join(
                f"  {line}" for line in lines
            )
        super().__init__(text)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{text[-LONGEST // 4 :]}"


EXPECTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys and values",
    "model_type": "a section, that is keys with values below it",
    "greater_than": "a value greater than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "a value less than {lt}",
    "less_than_equal": "{le} or less",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "some text, or null",
}


def described(
    failure: ValidationError,
    fields: Mapping[str, Any],
    origin: Mapping[str, str],
    *,
    listed: Mapping[str, Any] | None = None,
) -> tuple[list[tuple[str, str]], int]:
    """(the first problems by key, how many more there are)."""
    errors = failure.errors()
    some = [describe(error, fields, origin, listed=listed) for error in errors[:MOST]]
    return some, len(errors[MOST:])


def describe(
    error: ErrorDetails,
    fields: Mapping[str, Any],
    origin: Mapping[str, str],
    *,
    listed: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """(dotted key the user wrote, what is wrong with it).

    `origin`: keys that the user wrote otherwise. `listed`: keys to name where none is near.
    """
    key, item = _key(error["loc"])
    if error["type"] == "extra_forbidden":
        return key, f"unknown key. {nearest(key, fields, listed=listed)}"
    key = origin.get(key, key) + item
    got = error["input"]
    if error["type"] == "value_error":
        what = str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
        return key, respelt(what, origin)
    if error["type"] == "literal_error":
        options = [text.strip(" '") for text in _options(error)]
        close = _close(got, options) if isinstance(got, str) else []
        expected = "one of " + ", ".join(options)
        return key, f"got {shown(got)}, expected {expected}." + (
            f" Did you mean {close[0]}?" if close else ""
        )
    if error["type"] not in EXPECTED:
        return key, f"got {shown(got)}: {error['msg']}."
    message = (
        f"got {shown(got)}, expected {EXPECTED[error['type']].format(**error.get('ctx', {}))}."
    )
    if isinstance(got, str) and error["type"] in {"int_type", "float_type", "bool_type"}:
        message += " Remove the quotes." if _number_or_bool(got) else ""
    return key, message


def respelt(text: str, origin: Mapping[str, str]) -> str:
    """A message with each key as the user wrote it."""
    if not origin:
        return text
    keys = "|".join(re.escape(key) for key in sorted(origin, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])({keys})(?!\w|\.\w)", lambda key: origin[key[0]], text)


def nearest(key: str, fields: Mapping[str, Any], *, listed: Mapping[str, Any] | None = None) -> str:
    """A sentence that names the known key closest to an unknown one.

    `listed`: the keys to name where none is near, if not all.
    """
    *parents, leaf = key.split(".")
    section = ".".join(parents)
    dotted = [*every_key(fields)]
    if not section:
        dotted += list(fields)
    siblings = look(fields, section) if section else fields
    siblings = list(siblings) if isinstance(siblings, Mapping) else []
    elsewhere = [one for one in dotted if one.rsplit(".", 1)[-1].lower() == leaf.lower()]
    inside = [one for one in elsewhere if one.rpartition(".")[0] == section]
    if inside or elsewhere:
        return f"Did you mean {(inside or elsewhere)[0]}?"
    prefix = f"{section}." if section else ""
    if close := _close(leaf, siblings):
        return f"Did you mean {prefix}{close[0]}?"
    if close := _close(leaf, [one.rsplit(".", 1)[-1] for one in dotted], cutoff=0.75):
        return f"Did you mean {next(k for k in dotted if k.rsplit('.', 1)[-1] == close[0])}?"
    if not (section and siblings) and (close := _close(key, dotted)):
        return f"Did you mean {close[0]}?"
    what = f"Keys of {section}" if section else "Sections"
    shorter = (look(listed, section) if section else listed) if listed is not None else None
    return f"{what}: {', '.join(shorter if isinstance(shorter, Mapping) else siblings)}."


def _key(loc: tuple[int | str, ...]) -> tuple[str, str]:
    """`("measure", "learning_rates", 2)` is ("measure.learning_rates", "[2]")."""
    names = [part for part in loc if isinstance(part, str)]
    place = next((i for i, part in enumerate(loc) if isinstance(part, int)), len(loc))
    item = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc[place:])
    return ".".join(names[:place]), item


def _options(error: ErrorDetails) -> list[str]:
    return error.get("ctx", {})["expected"].replace(" or ", ", ").split(", ")


def _close(word: str, options: Sequence[str], cutoff: float = 0.6) -> list[str]:
    lower = {option.lower(): option for option in options}
    matches = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=cutoff)
    return [lower[name] for name in matches]


def _number_or_bool(text: str) -> bool:
    if text.lower() in {"true", "false"}:
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True
