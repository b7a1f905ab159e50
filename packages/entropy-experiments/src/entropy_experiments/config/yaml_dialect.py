"""YAML as people mean it: `8e-7` is a number, a date is text, a key twice is an error.

Only plain values are built (PyYAML's safe loader): a file cannot make the reader run anything.
Anchors and merges work; a file that expands to very much through them is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from entropy_experiments.config.problems import ConfigError
from entropy_experiments.input_errors import words_of

LARGEST = 100_000
"""Values of one file, anchors expanded."""
MOST_LINES = 10_000
"""PyYAML reads some 5,000 a second; every key of the schema, explained, takes 300."""
LONGEST_INTEGER = 40
"""Characters; Python takes seconds for some of thousands, and refuses others."""

_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        if len(text) > LONGEST_INTEGER:
            raise yaml.constructor.ConstructorError(
                None, None, f"an integer of {len(text)} characters", node.start_mark
            )
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _is(kind: str, tag: str) -> bool:
    return tag == f"tag:yaml.org,2002:{kind}"


# Own copy: the resolvers of the base class are shared by every user of PyYAML in the process.
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, regexp)
        for tag, regexp in rules
        if not any(_is(kind, tag) for kind in ("float", "int", "timestamp"))
    ]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))


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


def _build(text: str, source: str) -> tuple[Any, yaml.Node | None]:
    if (lines := text.count("\n")) > MOST_LINES:
        raise ConfigError(source, [f"has {lines} lines, expected at most {MOST_LINES}."])
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is not None:
                _size(root, {}, source)
            return (None if root is None else loader.construct_document(root)), root
        finally:
            loader.dispose()
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None) or getattr(failure, "context_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        what = getattr(failure, "problem", None) or str(failure)
        raise ConfigError(source, [f"{place}not YAML that can be read: {what}."]) from None
    except RecursionError:
        raise ConfigError(source, ["is nested too deeply."]) from None
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as failure:
        # PyYAML's own constructors, of a tag such as !!int that does not fit its text.
        what = f"a value does not fit its tag ({words_of(failure)})"
        raise ConfigError(source, [f"not YAML that can be read: {what}."]) from None


def _size(node: yaml.Node, known: dict[int, int], source: str) -> int:
    """Values in a node, anchors expanded; each node is counted once, so this is fast."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = LARGEST  # stands until the true size is known: a node that holds itself
    total = 1
    if isinstance(node, yaml.MappingNode):
        total += sum(_size(k, known, source) + _size(v, known, source) for k, v in node.value)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_size(inner, known, source) for inner in node.value)
    if total > LARGEST:
        raise ConfigError(source, [f"expands to more than {LARGEST} values. Remove its anchors."])
    known[id(node)] = total
    return total


def _lines(node: yaml.Node | None, prefix: str, depth: int) -> list[tuple[str, str]]:
    if depth == 0 or not isinstance(node, yaml.MappingNode):
        return []
    found: list[tuple[str, str]] = []
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode):
            found.append((f"{prefix}{key.value}", f"line {key.start_mark.line + 1}"))
            found += _lines(value, f"{prefix}{key.value}.", depth - 1)
    return found
