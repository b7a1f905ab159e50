"""Class 31: stages of a learning rate by hand that can never be reached.

    if epoch >= 30: lr = 0.01
    elif epoch >= 60: lr = 0.001

Whatever passes the second condition has passed the first. This is read from the source, and only
from functions that write a rate into param_groups, whose result is written there, or that LambdaLR
is given; only conditions on one and the same expression against numbers count, where one includes
the other for certain.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator

from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, Event, Session
from gradient_doctor.sites import is_user_file

_FLIPPED = {ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Lt: ast.Gt, ast.LtE: ast.GtE}
_UP, _DOWN = (ast.Gt, ast.GtE), (ast.Lt, ast.LtE)


class Branches(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._looked: set[str] = set()

    def event(self, event: Event) -> None:
        file = event.site.file if event.kind == "step" and event.site is not None else None
        if file is None or file in self._looked:
            return
        self._looked.add(file)
        for first, dead in _unreachable(file) if is_user_file(file) else ():
            self._say(Site(file, first.lineno), Site(file, dead.lineno), first, dead)

    def _say(self, first: Site, dead: Site, earlier: ast.If, later: ast.If) -> None:
        self.report(
            31,
            Severity.WARNING,
            f"A stage of the learning rate is never reached: `{ast.unparse(later.test)}`.",
            why=f"Whenever it holds, `{ast.unparse(earlier.test)}` (line {first.line}) holds as "
            "well and is tested first.",
            fix="Test the narrower condition first: the last stage at the top.",
            site=dead,
            related=(first,),
        )


def _unreachable(file: str) -> Iterator[tuple[ast.If, ast.If]]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return  # a notebook's magic, or a file that has changed since
    given = _given_to_schedulers(tree) | _written_to_groups(tree)
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    functions = [
        n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    for function in functions:
        rate = function.name in called and _writes_a_rate(function)
        if rate or function.name in given:
            yield from _in_chains(function)
    if not functions and _writes_a_rate(tree):
        yield from _in_chains(tree)


def _in_chains(tree: ast.AST) -> Iterator[tuple[ast.If, ast.If]]:
    for node in ast.walk(tree):
        for chain in _chains(node):
            pairs = ((a, b) for k, b in enumerate(chain) for a in chain[:k])
            dead = next((pair for pair in pairs if _includes(pair[0].test, pair[1].test)), None)
            if dead is not None:
                yield dead
                return


def _chains(node: ast.AST) -> Iterator[list[ast.If]]:
    """Conditions of which at most one is chosen: if and elif, or ifs that return."""
    if isinstance(node, ast.If):
        chain = [node]
        while len(chain[-1].orelse) == 1 and isinstance(chain[-1].orelse[0], ast.If):
            chain.append(chain[-1].orelse[0])
        yield chain
    chain = []
    body = getattr(node, "body", None)
    for statement in body if isinstance(body, list) else ():  # of `a if b else c` it is one value
        returns = isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return)
        if not returns or statement.orelse:
            yield chain
            chain = []
        else:
            chain.append(statement)
    yield chain


def _includes(wide: ast.expr, narrow: ast.expr) -> bool:
    """Whether the first of two conditions holds whenever the second does."""
    one, other = _bound(wide), _bound(narrow)
    if one is None or other is None or one[0] != other[0] or one[2] != other[2]:
        return False
    up = one[1] in _UP
    if up != (other[1] in _UP):
        return False
    if one[3] == other[3]:
        return one[1] is other[1] or one[1] in (ast.GtE, ast.LtE)
    return (one[3] < other[3]) if up else (one[3] > other[3])


def _bound(test: ast.expr) -> tuple[str, type[ast.cmpop], str, float] | None:
    """`epoch >= 0.5 * epochs` as what is compared, how, with the multiple of what, and how many."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return None
    left, right, kind = test.left, test.comparators[0], type(test.ops[0])
    if kind not in _FLIPPED:
        return None
    if _amount(left) is not None and _amount(right) is None:
        left, right, kind = right, left, _FLIPPED[kind]
    amount = _amount(right)
    if amount is None or _has_calls(left):
        return None
    return ast.dump(left), kind, amount[0], amount[1]


def _amount(value: ast.expr) -> tuple[str, float] | None:
    number = value.value if isinstance(value, ast.Constant) else None
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        return "", float(number)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):  # 0.5 * epochs
        for share, whole in ((value.left, value.right), (value.right, value.left)):
            amount = _amount(share)
            if amount is not None and not amount[0] and not _has_calls(whole):
                return ast.dump(whole), amount[1]
    return None


def _has_calls(value: ast.expr) -> bool:
    return any(isinstance(node, (ast.Call, ast.NamedExpr, ast.Await)) for node in ast.walk(value))


def _writes_a_rate(tree: ast.AST) -> bool:
    return any(map(_is_rate, ast.walk(tree)))


def _is_rate(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value == "lr"
    )


def _written_to_groups(tree: ast.AST) -> set[str]:
    """Functions whose result becomes a rate: `group["lr"] = rate(epoch)`, also by a name."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(map(_is_rate, node.targets)):
            names |= _called_in(node.value)
            names |= _called_for(tree, node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "update":
            for rate in (k.value for k in node.keywords if k.arg == "lr"):
                names |= _called_in(rate) | _called_for(tree, rate)
    return names


def _called_for(tree: ast.AST, value: ast.expr) -> set[str]:
    """Functions whose result this name was given to."""
    if not isinstance(value, ast.Name):
        return set()
    calls: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == value.id for t in node.targets
        ):
            calls |= _called_in(node.value)
    return calls


def _called_in(value: ast.expr) -> set[str]:
    calls = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in calls}


def _given_to_schedulers(tree: ast.AST) -> set[str]:
    """Functions that LambdaLR or MultiplicativeLR is made with."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("LambdaLR", "tiveLR")):
            for value in (*node.args, *(k.value for k in node.keywords)):
                names |= {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
                names |= {n.attr for n in ast.walk(value) if isinstance(n, ast.Attribute)}
    return names
