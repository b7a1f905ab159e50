"""Class 4: a switch that can only freeze, called to thaw.

    def set_trainable(module, on):
        for p in module.parameters():
            if p.requires_grad:
                p.requires_grad = on

Parameters that are frozen are the very ones that the condition leaves out: with `on=True` nothing
happens. Read from the source, and said only if the program calls it so and something is frozen.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator

from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, Event, Session
from gradient_doctor.sites import is_user_file

_FLAG = "requires_grad"


class FrozenSwitches(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._files: set[str] = set()

    def event(self, event: Event) -> None:
        if event.kind == "step" and event.site is not None:
            self._files.add(event.site.file)

    def finish(self, error: BaseException | None) -> None:
        registry = self.session.registry
        frozen = registry.bits(p for p in registry.everything() if not p.requires_grad)
        for file in self._files if frozen else ():
            for line, call in _vain_switches(file) if is_user_file(file) else ():
                self.report(
                    4,
                    Severity.WARNING,
                    "What is frozen stays frozen: this switch leaves it out.",
                    why="Only parameters that require gradients are switched, so the call at line "
                    f"{call}, which is to thaw, changes nothing: {registry.many(frozen)} are "
                    "frozen at the end.",
                    fix="Switch all parameters: remove the condition.",
                    site=Site(file, line),
                    parameters=frozen,
                    related=(Site(file, call),),
                )


def _vain_switches(file: str) -> Iterator[tuple[int, int]]:
    """Lines of such conditions, each with the line of a call that means to thaw."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return  # a notebook's magic, or a file that has changed since
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for loop in ast.walk(function):
            condition = _condition(loop) if isinstance(loop, ast.For) else None
            switch = _switched_to(loop) if condition is not None else None
            if condition is None or switch is None:
                continue
            call = next((c.lineno for c in calls if _is_thawing(c, function, *switch)), None)
            if call is not None:
                yield condition, call


def _condition(loop: ast.For) -> int | None:
    """The line that lets only those through that require gradients."""
    tests: list[ast.expr] = []
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and not node.orelse:
            tests.append(node.test)
    for node in ast.walk(loop.iter):
        if isinstance(node, ast.comprehension):
            tests += node.ifs
        elif isinstance(node, ast.Lambda) and "filter" in ast.unparse(loop.iter):
            tests.append(node.body)
    return next((test.lineno for test in tests if _asks(test)), None)


def _asks(test: ast.expr) -> bool:
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return any(isinstance(part, ast.Attribute) and part.attr == _FLAG for part in parts)


def _switched_to(loop: ast.AST) -> tuple[str, bool] | None:
    """The argument that `requires_grad` is set to, and what it must be to thaw: `on`, `not off`."""
    for node in ast.walk(loop):
        value = _written(node)
        if isinstance(value, ast.Name):
            return value.id, True
        inner = value.operand if isinstance(value, ast.UnaryOp) else None
        if isinstance(inner, ast.Name) and isinstance(value, ast.UnaryOp):
            return (inner.id, False) if isinstance(value.op, ast.Not) else None
    return None


def _written(node: ast.AST) -> ast.expr | None:
    """What this statement or call writes into `requires_grad`."""
    if isinstance(node, ast.Assign):
        flags = [t for t in node.targets if isinstance(t, ast.Attribute) and t.attr == _FLAG]
        return node.value if flags else None
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and isinstance(node, ast.Call) and node.args:
        return node.args[0] if called.attr == "requires_grad_" else None
    return None


def _is_thawing(call: ast.Call, function: ast.FunctionDef, flag: str, thaws: bool) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    names = [argument.arg for argument in function.args.args]
    if name != function.name or flag not in names:
        return False
    own = names[:1] in (["self"], ["cls"])
    place = names.index(flag) - (own and isinstance(call.func, ast.Attribute))
    value = call.args[place] if place < len(call.args) else None
    value = value or next((k.value for k in call.keywords if k.arg == flag), None)
    if value is None:  # the default
        place = names.index(flag) - len(names)
        defaults = function.args.defaults
        value = defaults[place] if -place <= len(defaults) else None
    return isinstance(value, ast.Constant) and value.value is thaws
