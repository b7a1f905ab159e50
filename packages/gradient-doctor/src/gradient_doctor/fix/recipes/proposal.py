"""What a recipe hands out, and how it finds calls in a source."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gradient_doctor.findings import Finding
from gradient_doctor.fix.source import Edit, Source, last_name, own_nodes


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One way to change the source; a trial decides whether it helps."""

    what: str  # "Remove the no_grad block."
    edits: tuple[Edit, ...]
    caution: str = ""  # what the reader must check himself


Recipe = Callable[[Finding, Source], Iterator[Proposal]]


def calls_in(statement: ast.stmt) -> Iterator[ast.Call]:
    return (node for node in own_nodes(statement) if isinstance(node, ast.Call))


def method_calls(source: Source, method: str) -> Iterator[tuple[ast.stmt, ast.Call]]:
    """Statements that are nothing but `something.method(...)`, in the order of the text."""
    for statement in sorted(source.statements(), key=lambda s: (s.lineno, s.col_offset)):
        if is_method(statement, method):
            yield statement, statement.value  # pyright: ignore[reportAttributeAccessIssue]


def is_method(statement: ast.stmt, method: str) -> bool:
    value = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr == method
    )


def owner(call: ast.Call) -> ast.expr:
    """`x` of `x.method()`."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.value


def optimizer_steps(source: Source) -> list[tuple[ast.stmt, str]]:
    """Every `opt.step()` and `scaler.step(opt)`, with the code of `opt`."""
    steps = []
    for statement, call in method_calls(source, "step"):
        if call.args:
            steps.append((statement, source.code(call.args[0])))
        elif not is_scheduler(source, owner(call)):
            steps.append((statement, source.code(owner(call))))
    return steps


def is_scheduler(source: Source, node: ast.expr) -> bool:
    """By its name, or by what was assigned to it."""
    name = last_name(node)
    if "sched" in name.lower() or name.lower() in ("lr_decay", "warmup"):
        return True
    for statement in source.statements():
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
            made = last_name(statement.value.func)
            if any(last_name(t) == name for t in statement.targets) and (
                made.endswith(("LR", "Scheduler")) or "schedule" in made.lower()
            ):
                return True
    return False


def keyword(call: ast.Call, name: str) -> ast.keyword | None:
    return next((k for k in call.keywords if k.arg == name), None)


def with_keyword(source: Source, call: ast.Call, name: str, value: str) -> Edit:
    """`name=value` in the call, in the place of another value if there is one."""
    present = keyword(call, name)
    if present is not None:
        return source.replace(present.value, value)
    values: list[ast.AST] = [*call.args, *(k.value for k in call.keywords)]
    if values:
        at = max(source.end(node) for node in values)
        return Edit(start=at, end=at, text=f", {name}={value}")
    at = source.end(call) - 1
    return Edit(start=at, end=at, text=f"{name}={value}")


def in_brackets(source: Source, node: ast.expr) -> str:
    """Code that a method can be called on."""
    simple = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
    code = source.code(node)
    return code if isinstance(node, simple) else f"({code})"


def alone(source: Source, node: ast.expr, value: ast.expr) -> str:
    """Code of `value` where `node` stood: in brackets if what is around could bind closer."""
    simple = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
    around = source.parent(node)
    binds = isinstance(around, (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript, ast.Compare))
    code = source.code(value)
    bracketed = source.text[: source.start(value)].rstrip().endswith("(") and source.text[
        source.end(value) :
    ].lstrip().startswith(")")
    if isinstance(value, simple) or not (binds or (bracketed and "\n" in code)):
        return code
    return f"({code})"


def spelled(source: Source, name: str) -> str | None:
    """How the file spells `torch.nn.<name>`, by its imports."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.nn":
            for alias in node.names:
                if alias.name == name:
                    return alias.asname or name
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for alias in node.names:
                if alias.name == "nn":
                    return f"{alias.asname or 'nn'}.{name}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch.nn" and alias.asname:
                    return f"{alias.asname}.{name}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import) and any(
            alias.name == "torch" and alias.asname is None for alias in node.names
        ):
            return f"torch.nn.{name}"
    return None


def loads(tree: ast.AST, name: str) -> Iterator[ast.Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node
