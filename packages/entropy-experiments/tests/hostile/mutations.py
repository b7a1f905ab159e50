"""Small damage from a seed: to JSON values, to text, to bytes."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

ESCAPES = "\x1b]0;owned\x07\x1b[31m\u202e\u0085red"
"""What a terminal would obey."""
BACKTRACKING = r"(?:(?:.?.?.?)*)*(?:.*.*.*.*)*Z"
"""A pattern that a backtracking engine never finishes on a name of 30 characters."""
NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    0,
    -1,
    7,
    2**31,
    10**30,
    0.5,
    -1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    [None],
    {"": None},
    "7",
    "none",
    ESCAPES,
    "\ud800",
    "a" * 20_000,
    "../../../../etc/passwd",
    list(range(1000)),
)
DEEP = 100_000


def deep(depth: int = DEEP) -> str:
    """JSON (and YAML) nested further than any reader's stack."""
    return "[" * depth + "]" * depth


def long_integer(digits: int = 5000) -> str:
    """More digits than Python converts."""
    return "9" * digits


def mutated(value: Any, rng: random.Random) -> Any:
    """The same JSON value with one place changed: another value, no key, another key."""
    root = copy.deepcopy(value)
    places = list(_places(root))
    holder, key = rng.choice(places)
    act = rng.choice(("replace", "replace", "replace", "remove", "rename", "wrap"))
    if act == "replace":
        holder[key] = copy.deepcopy(rng.choice(NASTY))
    elif act == "remove":
        del holder[key]
    elif act == "rename" and isinstance(holder, dict):
        holder[f"{key}_{rng.randrange(10)}"] = holder.pop(key)
    else:
        holder[key] = [holder[key]]
    return root


def _places(value: Any):
    if isinstance(value, dict):
        for key in value:
            yield value, key
            yield from _places(value[key])
    elif isinstance(value, list):
        for at in range(len(value)):
            yield value, at
            yield from _places(value[at])


def mutate_json(path: Path, rng: random.Random, times: int = 1) -> None:
    content = json.loads(path.read_text())
    for _ in range(times):
        content = mutated(content, rng)
    path.write_bytes(json.dumps(content).encode())


def mutate_bytes(path: Path, rng: random.Random) -> None:
    """Flip a bit, cut, repeat, blank or insert."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    act = rng.choice(("flip", "flip", "cut", "blank", "insert", "repeat", "head"))
    if act == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif act == "cut":
        del data[at:]
    elif act == "blank":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif act == "insert":
        data[at:at] = rng.randbytes(rng.randrange(1, 40))
    elif act == "repeat":
        data += data[at:]
    else:
        data[rng.randrange(8)] = rng.randrange(256)
    path.write_bytes(bytes(data))


def mutate_text(text: str, rng: random.Random) -> str:
    """A line or a value of a text file, changed."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    act = rng.choice(("drop", "twice", "indent", "value", "junk", "swap"))
    if act == "drop":
        del lines[at]
    elif act == "twice":
        lines.insert(at, lines[at])
    elif act == "indent":
        lines[at] = "  " + lines[at]
    elif act == "value" and ":" in lines[at]:
        junk = ("[", "{a: 1", "*nowhere", "&x [*x]", "!!python/object:os.system {}", "1e400", "~")
        lines[at] = lines[at].split(":")[0] + ": " + rng.choice(junk)
    elif act == "swap":
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines.insert(at, rng.choice(("\t", "%", "- - -", "? x", "\x00", ESCAPES, "a: b: c", "'")))
    return "\n".join(lines)
