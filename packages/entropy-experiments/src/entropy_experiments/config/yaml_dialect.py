"""YAML 1.2 as people mean it: `8e-7` is a number, a date is text, a key twice is an error.

ruamel.yaml reads it, with its safe constructor: only plain values are built, and a file cannot make
the reader run anything. Two rules are not ruamel's. `yes`, `no`, `on` and `off` are true and false,
since the documents' files, written for YAML 1.1, may say so; and a date is text, since no key is
one. Anchors and merges work; a file that expands to very much through them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver, implicit_resolvers

from entropy_experiments.config.problems import ConfigError
from entropy_experiments.input_errors import words_of

LARGEST = 100_000
"""Values of one file, anchors expanded."""
MOST_LINES = 10_000
"""ruamel.yaml reads some 10,000 a second; every key of the schema, explained, takes 300."""
LONGEST_INTEGER = 40
"""Characters; Python takes seconds for some of thousands, and refuses others."""

_TAG = "tag:yaml.org,2002:"
_BOOL = re.compile(r"^(?:yes|no|on|off|true|false)$", re.IGNORECASE)


def _rules() -> dict[str, list[tuple[str, Any]]]:
    """(tag, pattern) by first character: YAML 1.2's, but for the two rules above."""
    rules: dict[str, list[tuple[str, Any]]] = {}
    for versions, tag, pattern, first in implicit_resolvers:
        if (1, 2) in versions and tag not in (f"{_TAG}bool", f"{_TAG}timestamp"):
            for character in first:
                rules.setdefault(character, []).append((tag, pattern))
    for character in "yYnNtTfFoO":
        rules.setdefault(character, []).append((f"{_TAG}bool", _BOOL))
    return rules


class _Resolver(VersionedResolver):
    _rules = _rules()

    @property
    def versioned_resolver(self) -> Any:
        return self._rules

    @property
    def processing_version(self) -> Any:
        return (1, 2)  # whatever a %YAML line says: one dialect for all files


class _Constructor(SafeConstructor):
    def construct_yaml_int(self, node: ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        if len(text) > LONGEST_INTEGER:
            what = f"an integer of {len(text)} characters"
            raise ConstructorError(None, None, what, node.start_mark)
        return super().construct_yaml_int(node)


_Constructor.add_constructor(f"{_TAG}int", _Constructor.construct_yaml_int)


def parse_text(text: str, *, source: str) -> tuple[dict[Any, Any], dict[str, str]]:
    """The mapping, and the line of each dotted key."""
    value, root = _build(text, source)
    if value is None:
        raise ConfigError(source, ["is empty. `entropy-probe config template` prints an example."])
    if not isinstance(value, Mapping):
        raise ConfigError(
            source, [f"got a {type(value).__name__}, expected sections with keys below them."]
        )
    return dict(value), dict(_lines(root, "", depth=3))


def parse_value(text: str, *, source: str) -> Any:
    return _build(text, source)[0]


def _build(text: str, source: str) -> tuple[Any, Node | None]:
    if (lines := text.count("\n")) > MOST_LINES:
        raise ConfigError(source, [f"has {lines} lines, expected at most {MOST_LINES}."])
    reader = YAML(typ="safe", pure=True)
    reader.Resolver, reader.Constructor = _Resolver, _Constructor
    try:
        root = reader.compose(text)
        if root is None:
            return None, None
        _size(root, {}, source)
        return reader.constructor.construct_document(root), root
    except YAMLError as failure:
        mark = getattr(failure, "problem_mark", None) or getattr(failure, "context_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        what = getattr(failure, "problem", None) or str(failure)
        raise ConfigError(source, [f"{place}not YAML that can be read: {what}."]) from None
    except RecursionError:
        raise ConfigError(source, ["is nested too deeply."]) from None
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as failure:
        # ruamel's own constructors, of a tag such as !!int that does not fit its text.
        what = f"a value does not fit its tag ({words_of(failure)})"
        raise ConfigError(source, [f"not YAML that can be read: {what}."]) from None


def _size(node: Node, known: dict[int, int], source: str) -> int:
    """Values in a node, anchors expanded; each node is counted once, so this is fast."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = LARGEST  # stands until the true size is known: a node that holds itself
    total = 1
    if isinstance(node, MappingNode):
        _refuse_twice(node)
        total += sum(_size(k, known, source) + _size(v, known, source) for k, v in node.value)
    elif isinstance(node, SequenceNode):
        total += sum(_size(inner, known, source) for inner in node.value)
    if total > LARGEST:
        raise ConfigError(source, [f"expands to more than {LARGEST} values. Remove its anchors."])
    known[id(node)] = total
    return total


def _refuse_twice(node: MappingNode) -> None:
    """ruamel.yaml does not look in a mapping that merges another."""
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, ScalarNode) and key.tag != f"{_TAG}merge":
            if key.value in seen:
                what = f"key {key.value!r} is there twice"
                raise ConstructorError(None, None, what, key.start_mark)
            seen.add(key.value)


def _lines(node: Node | None, prefix: str, depth: int) -> list[tuple[str, str]]:
    if depth == 0 or node is None or not isinstance(node, MappingNode):
        return []
    found: list[tuple[str, str]] = []
    for key, value in node.value:
        if isinstance(key, ScalarNode):
            found.append((f"{prefix}{key.value}", f"line {key.start_mark.line + 1}"))
            found += _lines(value, f"{prefix}{key.value}.", depth - 1)
    return found
