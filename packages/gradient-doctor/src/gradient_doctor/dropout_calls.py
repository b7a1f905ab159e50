"""Does a call of functional dropout know the module's mode? Read from the source.

torch hands on the same arguments for `F.dropout(x, training=True)` and for `F.dropout(x)`, which
drops in eval() as well. The mode may also come by another way: a condition around the call, an
early return, a rate that was chosen before. Only the arguments of another call of dropout in the
same function say nothing about this one.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from gradient_doctor.findings import Site
from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import source_of_function, statement_at

_DROPS = re.compile(r"(^|_)(dropout[123]?d?|dropout)_?$", re.IGNORECASE)
_ATTENTION = "scaled_dot_product_attention"
# a condition that chooses between learning, evaluating and sampling
_MODE = re.compile(
    r"(^|_)(is_?)?(train|training|eval|evaluating|infer|inference|deterministic|stochastic|mc|"
    r"sample|sampling)(_|$)",
    re.IGNORECASE,
)


def passes_mode(site: Site) -> bool:
    """Whether the dropout at this line is meant as it is; True where the source does not tell."""
    if not is_user_file(site.file):
        return True
    statement = statement_at(site)
    if statement is None or all(map(_says, _dropouts(statement))):
        return True  # also where dropout goes by a name of the program's own
    function = source_of_function(site)
    scope = ast.parse(textwrap.dedent(function)) if function else statement
    # of such a call only itself is told
    told = {id(node) for call in _calls(scope) if _is_told(call) for node in _arguments(call)}
    return any(
        _MODE.search(name)
        for node in ast.walk(scope)
        if id(node) not in told
        for name in _names(node)
    )


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _is_dropout(call: ast.Call) -> bool:
    called = call.func.func if isinstance(call.func, ast.Call) else call.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name == _ATTENTION or _DROPS.search(name) is not None


def _is_told(call: ast.Call) -> bool:
    return _is_dropout(call) or any(k.arg == "training" for k in call.keywords)


def _dropouts(tree: ast.AST) -> Iterator[ast.Call]:
    return filter(_is_dropout, _calls(tree))


def _says(call: ast.Call) -> bool:
    """Whether a mode is among the arguments: by name, as the third of dropout, or in the rate."""
    if any(k.arg in (None, "training", "is_training", "train") for k in call.keywords):
        return True
    name = ast.unparse(call.func)
    if not name.endswith(_ATTENTION) and len(call.args) > 2:
        return True
    return any(_MODE.search(name) for node in _arguments(call) for name in _names(node))


def _arguments(call: ast.Call) -> Iterator[ast.AST]:
    for argument in (*call.args[1:], *call.keywords):
        yield from ast.walk(argument)


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, (ast.arg, ast.keyword)) and node.arg is not None:
        yield node.arg
