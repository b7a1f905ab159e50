"""What a reader sees names today's keys: those of the earlier documents are for their own files.

A message, a docstring or a page that says `batch_config.B_E` sends a new user to a key that no
template and no reference has. The list is derived from `config.documents`, so a key renamed there
is looked for here.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from entropy_experiments.config import DOCUMENTS_TEMPLATES, every_key, known_fields
from entropy_experiments.config.documents import BARE_NAMES, RETIRED, SECTIONS, document_keys

ROOT = Path(__file__).parents[2]
PACKAGE = "packages/entropy-experiments/src/entropy_experiments"

ALLOWED = {
    f"{PACKAGE}/config/documents.py": None,  # the translator
    f"{PACKAGE}/delta_entropy_true.py": None,  # document 004's function, in its words
    f"{PACKAGE}/simple_entropy_probe.py": None,  # document 001's function, in its words
    f"{PACKAGE}/output_folder.py": "rollouts.save",  # run.json has the documents' keys
    "docs/migration.md": None,
    "docs/config.md": None,  # "Files of the earlier scripts", and the table of both names
    "docs/howto_train.md": None,  # the table of both names
}
"""Where the documents' keys may stand: all of them (None), or this string literal alone."""

SOURCES = ("packages/*/src/**/*.py", "examples/**/*.py", "recipes/**/*.py", "benchmarks/**/*.py")
PAGES = ("README.md", "packages/*/README.md", "docs/**/*.md", "packages/*/src/**/*.j2")
TEMPLATES = (f"{PACKAGE}/configs/*.yaml",)


@cache
def earlier_keys() -> re.Pattern[str]:
    """Any key of the documents, whole or as the beginning of one (`batch_config.{name}`)."""
    today = set(every_key(known_fields()))
    keys = {key for key in (*document_keys(), *BARE_NAMES, *RETIRED) if "." in key} - today
    sections = [section for section in SECTIONS if section not in known_fields()]
    private = [section for section in sections if "_" in section]  # the others are English, too
    either = [
        rf"(?:{_any(keys)})(?![\w(])",
        rf"(?:{_any(private)})\.",
        rf"(?:{_any(sections)})\.\{{",
        rf"""(?<=["'])(?:{_any(sections)})(?=["']: *\{{)""",
    ]
    return re.compile(rf"(?<![\w./])(?:{'|'.join(either)})")


@cache
def earlier_yaml() -> re.Pattern[str]:
    """A section of the documents as it begins in a file."""
    sections = [section for section in SECTIONS if section not in known_fields()]
    return re.compile(rf"^(?:{_any(sections)}): *(?:\{{|#|$)", re.MULTILINE)


def _any(words):
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


def literals(source: str):
    """(line, text) of every string literal, docstrings included; `{}` is where a value goes in."""
    tree = ast.parse(source)
    pieces = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node and isinstance(part, ast.Constant | ast.JoinedStr)
    }
    for node in ast.walk(tree):
        if id(node) in pieces:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, _text(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _text(node: ast.JoinedStr) -> str:
    inner = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return "".join(map(str, inner))


def stale(source: str, *, allowed: str = "") -> list[str]:
    """`line: key` of every key of the documents in the string literals of a module."""
    return [
        f"{line + text.count(chr(10), 0, found.start())}: {found[0]}"
        for line, text in literals(source)
        if text != allowed
        for found in earlier_keys().finditer(text)
    ]


def files(*patterns: str) -> list[str]:
    paths = (path for pattern in patterns for path in ROOT.glob(pattern))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def test_source_names_no_key_of_the_documents():
    found = []
    for name in files(*SOURCES):
        allowed = ALLOWED.get(name, "")
        if allowed is not None:
            text = (ROOT / name).read_text(encoding="utf-8")
            found += [f"{name}:{place}" for place in stale(text, allowed=allowed)]
    assert not found, "\n".join(["keys of the documents; write today's:", *found])


@pytest.mark.parametrize("patterns", [PAGES, TEMPLATES])
def test_pages_and_templates_name_none(patterns):
    found = []
    for name in files(*patterns):
        if name in ALLOWED or Path(name).name in DOCUMENTS_TEMPLATES:
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        for key in (*earlier_keys().finditer(text), *earlier_yaml().finditer(text)):
            found.append(f"{name}:{1 + text.count(chr(10), 0, key.start())}: {key[0]}")
    assert not found, "\n".join(["keys of the documents; write today's:", *found])


def test_every_exception_is_one():
    for name in ALLOWED:
        assert earlier_keys().search((ROOT / name).read_text(encoding="utf-8")), name


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('raise ValueError("Lower batch_config.B_E.")', ["1: batch_config.B_E"]),
        ('x = 1\nnote = f"(batch_config.{name} is {least})"', ["2: batch_config."]),
        ('note = f"generation.{name}"', ["1: generation.{"]),
        ('"""What is\n\nskipped by importance.enabled: false."""', ["3: importance.enabled"]),
        ('"""\n    >>> parse({"estimator": {"eta_list": [1]}})\n"""', ["2: estimator"]),
        ('advice = "set " "update.batch: drawn"', ["1: update.batch"]),
        ('where = "influence.workspace.params"', ["1: influence.workspace.params"]),
        ('note = f"{rollouts.load}; see numerics/importance.enabled"', []),
        ('"""Of each rollout: update.batch_size, memory.microbatch_size, sampling.load."""', []),
        ("config.update.batch  # data.update_rollouts", []),
    ],
)
def test_the_search_has_teeth(source, expected):
    assert stale(source) == expected
