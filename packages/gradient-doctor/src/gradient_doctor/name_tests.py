"""Loops over named parameters that switch requires_grad by name: which names do they mean?

`for name, p in model.named_parameters(): if name.startswith("encoder"): p.requires_grad = False`.
Only tests against texts in the source are understood; of all others nothing is said.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from gradient_doctor.findings import Site
from gradient_doctor.slips import loop_at

Fits = Callable[[str], bool]


@dataclass(frozen=True)
class Choice:
    """An `if` of such a loop, with everything it compares the name with."""

    line: int
    switch: bool  # what requires_grad becomes
    texts: tuple[str, ...]
    fits: Fits  # without the `not` before it
    negated: bool = False


def choices(site: Site) -> list[Choice]:
    """The choices of the loop that a call of named_parameters begins."""
    loop = loop_at(site)
    names = loop.target.elts if loop is not None and isinstance(loop.target, ast.Tuple) else []
    if loop is None or len(names) != 2 or not all(isinstance(n, ast.Name) for n in names):
        return []
    name, parameter = (n.id for n in names if isinstance(n, ast.Name))
    found = []
    for place, statement in enumerate(loop.body):
        if isinstance(statement, ast.If):
            choice = _skip(statement, loop.body[place + 1 :], name, parameter)
            choice = choice or _choice(statement, name, parameter)
            if choice is not None:
                found.append(choice)
        elif isinstance(statement, ast.Assign):
            choice = _assigned(statement, name, parameter)
            if choice is not None:
                found.append(choice)
    return found


def _assigned(statement: ast.Assign, name: str, parameter: str) -> Choice | None:
    """`p.requires_grad = "head" in name`"""
    target = statement.targets[0]
    if not isinstance(target, ast.Attribute) or target.attr != "requires_grad":
        return None
    texts: list[str] = []
    value, negated = _positive(statement.value)
    test = _test(value, name, texts) if _is(target.value, parameter) else None
    if test is None:
        return None
    return Choice(statement.lineno, not negated, tuple(texts), test, negated)


def _positive(test: ast.expr) -> tuple[ast.expr, bool]:
    """A condition without the `not` before it, and whether there was one."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand, True
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        turned = {ast.NotIn: ast.In, ast.NotEq: ast.Eq}.get(type(test.ops[0]))
        if turned is not None:
            return ast.Compare(test.left, [turned()], test.comparators), True
    return test, False


def _choice(head: ast.If, name: str, parameter: str) -> Choice | None:
    """One `if`, with its `elif`s."""
    texts: list[str] = []
    tests: list[Fits] = []
    switches: list[bool] = []
    arm: ast.If | None = head
    condition, negated = _positive(head.test)
    if negated:
        test, switch = _test(condition, name, texts), _switch(head.body, parameter)
        if test is None or switch is None or head.orelse:
            return None
        return Choice(head.lineno, switch, tuple(texts), test, True)
    while arm is not None:
        test = _test(arm.test, name, texts)
        if test is None:
            return None
        tests.append(test)
        switch = _switch(arm.body, parameter)
        if switch is not None:
            switches.append(switch)
        arm = arm.orelse[0] if len(arm.orelse) == 1 and isinstance(arm.orelse[0], ast.If) else None
    if not switches:
        return None
    return Choice(head.lineno, switches[0], tuple(texts), lambda n: any(t(n) for t in tests))


def _skip(head: ast.If, rest: list[ast.stmt], name: str, parameter: str) -> Choice | None:
    """`if "lora" in name: continue`, and the others are switched after it."""
    texts: list[str] = []
    test, switch = _test(head.test, name, texts), _switch(rest, parameter)
    skips = len(head.body) == 1 and isinstance(head.body[0], ast.Continue) and not head.orelse
    if not skips or test is None or switch is None:
        return None
    return Choice(head.lineno, switch, tuple(texts), test, True)


def _switch(body: list[ast.stmt], parameter: str) -> bool | None:
    for statement in body:
        value: ast.expr | None = None
        owner: ast.expr | None = None
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
            if statement.targets[0].attr == "requires_grad":
                owner, value = statement.targets[0].value, statement.value
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            called = statement.value.func
            if isinstance(called, ast.Attribute) and called.attr == "requires_grad_":
                owner = called.value
                value = next(iter(statement.value.args), ast.Constant(True))
        wanted = value.value if isinstance(value, ast.Constant) else None
        if isinstance(wanted, bool) and isinstance(owner, ast.Name) and owner.id == parameter:
            return wanted
    return None


def _test(test: ast.expr, name: str, texts: list[str]) -> Fits | None:
    """What a condition asks of the name; None where that is not written in it."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        parts = [_test(value, name, texts) for value in test.values]
        known = [part for part in parts if part is not None]
        return (lambda n: any(p(n) for p in known)) if len(known) == len(parts) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = test.left, test.comparators[0]
        if isinstance(test.ops[0], ast.In) and _is(right, name):
            return _of(_texts(left), texts, lambda text, n: text in n)
        if isinstance(test.ops[0], ast.In) and _is(left, name):
            many = isinstance(right, (ast.Tuple, ast.List, ast.Set))
            return _of(_texts(right), texts, lambda text, n: text == n) if many else None
        if isinstance(test.ops[0], ast.Eq) and _is(left, name):
            return _of(_texts(right), texts, lambda text, n: text == n)
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and test.args:
        if _is(test.func.value, name) and test.func.attr == "startswith":
            return _of(_texts(test.args[0]), texts, lambda text, n: n.startswith(text))
        if _is(test.func.value, name) and test.func.attr == "endswith":
            return _of(_texts(test.args[0]), texts, lambda text, n: n.endswith(text))
    return None


def _of(wanted: list[str], texts: list[str], fits: Callable[[str, str], bool]) -> Fits | None:
    texts.extend(wanted)
    return (lambda n: any(fits(text, n) for text in wanted)) if wanted else None


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _texts(node: ast.expr) -> list[str]:
    """The texts that are written here; none if something else is among them."""
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    texts = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
    return texts if len(texts) == len(parts) else []
