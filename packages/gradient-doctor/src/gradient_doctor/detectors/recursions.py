"""Classes 18 and 24: returns and targets of reinforcement learning, read from the source.

A return is the reward of now plus the discounted return of later: it is summed up from the last
step to the first. A loop that runs forward sums up the past; one that runs backward and appends,
and is never turned round, hands each step the return of another (24). A target reward + gamma *
value that never reads `done` goes on past the end of an episode, one that never reads the mask of
the next state's actions takes the best of what cannot be done (18).

Python floats leave no trace in torch, so this is the source's word; it is heeded where a policy
gradient or a difference of values was seen to be trained.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torch import Tensor

from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.slips import tree_of

_GAMMA = re.compile(r"gamma|discount|^gam$", re.IGNORECASE)
_ENDS = re.compile(r"^(is_|b_|batch_)?(dones?|terminals?|terminated|finished)(_batch|_b|s)?$")
_CHOICE = re.compile(r"(next.*(mask|legal|valid|avail))|((mask|legal|valid|avail).*next)", re.I)
_TURNS = re.compile(r"revers|flip|::\s*-1|,\s*-1\s*,\s*-1|appendleft|insert\(\s*0")
_BEST = {"max", "argmax", "amax"}
# another name for the same: `nv[non_final] = ...`
_OTHER_ENDS = re.compile(r"final|terminal|alive|not_?done|non_?term|continu|truncat", re.I)


class Recursions(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._lines: dict[str, set[int]] = {}  # of the user's files, with torch calls of a step
        self._scored = False  # log-probabilities of actions were taken
        self._trained = False
        self._read: set[str] = set()

    def density(self, distribution: object, value: object, result: object, site: object) -> None:
        self._scored |= isinstance(result, Tensor) and result.requires_grad

    def op(self, call: OpCall) -> None:
        if call.site is not None:
            self._lines.setdefault(call.site.file, set()).add(call.site.line)
        self._scored |= call.short == "gather"

    def backward_starts(self, backward: Backward) -> None:
        self._trained |= self._scored and backward.kind == "backward"

    def step_ended(self, record: StepRecord) -> None:
        if self._trained and record.traced and self.session.age + 1 >= self.session.trace_steps:
            self._look()

    def finish(self, error: BaseException | None) -> None:
        if self._trained:
            self._look()

    def _look(self) -> None:
        for file, lines in self._lines.items():
            tree = tree_of(file) if file not in self._read else None
            self._read.add(file)
            if tree is None:
                continue
            for scope in _scopes(tree):
                self._returns(file, scope, tree)
                self._targets(file, scope, lines)

    # returns

    def _returns(self, file: str, scope: ast.AST, tree: ast.Module) -> None:
        for loop in _own(scope):
            if not isinstance(loop, ast.For):
                continue
            total = next((n for n in map(_recursion, loop.body) if n is not None), None)
            stored = None if total is None else _stored(loop, total)
            if total is None or stored is None or _counts_down(loop):
                continue
            how, line = stored
            site = Site(file, loop.lineno, getattr(scope, "name", "<module>"))
            header = ast.unparse(loop.iter)
            around = ast.unparse(scope)
            if not _TURNS.search(header) and not _TURNS.search(_without_inserts(around)):
                self._say_forward(site, total)
            elif how == "append" and _TURNS.search(header):
                rest = ast.unparse(tree).replace(header, "", 1)
                if not _TURNS.search(rest):
                    self._say_turned(Site(file, line, site.function), site, total)

    def _say_forward(self, site: Site, total: str) -> None:
        self.report(
            24,
            Severity.WARNING,
            f"The returns are summed up forward: `{total}` holds rewards of the past.",
            why=f"`{total} = reward + gamma * {total}` in a loop from the first step to the last "
            "discounts what came before. The return of an action is what comes after it.",
            fix="Loop over reversed(rewards), and put each return in front.",
            site=site,
        )

    def _say_turned(self, site: Site, loop: Site, total: str) -> None:
        self.report(
            24,
            Severity.WARNING,
            "The returns stand in the reverse order of their steps.",
            why=f"The loop runs from the last step to the first, and appends `{total}`: the first "
            "action is credited with the return of the last. Nothing turns the list round.",
            fix="returns.insert(0, R), or returns.reverse() after the loop.",
            site=site,
            related=(loop,),
        )

    # targets

    def _targets(self, file: str, scope: ast.AST, lines: set[int]) -> None:
        formula = next((n for n in _own(scope) if _is_bootstrap(n)), None)
        if formula is None or not _spans(formula) & lines:
            return
        bound, read = _names(scope)
        function = getattr(scope, "name", "<module>")
        for name in sorted(bound - read):
            if _CHOICE.search(name):
                best = [n for n in _own(scope) if _is_best(n)]
                line = best[0].lineno if len(best) == 1 else formula.lineno
                why = "The best of all actions is taken, also of those that the next state forbids:"
                why += " their values are never trained, and may be anything."
                fix = "next_values.masked_fill(~mask, float('-inf')) before the maximum."
            elif _ENDS.search(name) and not any(map(_OTHER_ENDS.search, read)):
                line = formula.lineno
                why = "At the end of an episode there is no next state: its value is that of a "
                why += "state of the next episode, or of nothing, and enters the target."
                fix = f"reward + gamma * value * (1 - {name})."
            else:
                continue
            self.report(
                18,
                Severity.WARNING,
                f"The target is computed without `{name}`, which nothing reads.",
                why=why,
                fix=fix,
                site=Site(file, line, function),
                related=(Site(file, formula.lineno, function),),
            )


def _scopes(tree: ast.Module) -> Iterator[ast.AST]:
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def _own(scope: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """All nodes of a scope, without those of the functions inside."""
    stack: list[ast.AST] = list(ast.iter_child_nodes(scope))
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, (ast.expr, ast.stmt)):
            yield node
        stack.extend(ast.iter_child_nodes(node))


def _words(node: ast.AST) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    return [node]


def _is_discount(node: ast.expr) -> bool:
    return any(_GAMMA.search(word) for word in _words(node))


def _recursion(statement: ast.stmt) -> str | None:
    """The R of `R = r + gamma * R`, where r is a plain value."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return None
    name, value = statement.targets[0].id, statement.value
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return None
    for plain, product in ((value.left, value.right), (value.right, value.left)):
        factors = _factors(product)
        own = [f for f in factors if isinstance(f, ast.Name) and f.id == name]
        others = [f for f in factors if f not in own]
        simple = not isinstance(plain, ast.BinOp) and name not in _words(plain)
        if len(own) == 1 and simple and any(map(_is_discount, others)):
            return name
    return None


def _stored(loop: ast.For, name: str) -> tuple[str, int] | None:
    """How each value of the loop is kept: append, insert or by its place; and the line."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            holds = any(isinstance(a, ast.AST) and name in _words(a) for a in node.args)
            if node.func.attr in ("append", "insert", "appendleft") and holds:
                return node.func.attr, node.lineno
        placed = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
        if placed and isinstance(node, ast.Assign) and name in _words(node.value):
            return "place", node.lineno
    return None


def _counts_down(loop: ast.For) -> bool:
    """`rewards[n - 1 - t]`: the loop runs forward, and what it reads backward."""
    names = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    for node in ast.walk(loop):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            taken = node.right
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert)):
            taken = node.operand
        else:
            continue
        if names & _words(taken):
            return True
    return False


def _without_inserts(source: str) -> str:
    """A forward loop that inserts at the front is as wrong."""
    return re.sub(r"insert\(\s*0", "", source)


def _is_bootstrap(node: ast.AST) -> bool:
    """`reward + gamma * something`."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    factors = _factors(node.right)
    if len(factors) < 2 or not any(map(_is_discount, factors)):
        return False
    words = " ".join(_words(node.left)).lower()
    return bool(re.search(r"\br\b|rew|\brs\b|\brs?_|delta", words))


def _is_best(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _BEST
    )


def _spans(node: ast.expr | ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _names(scope: ast.AST) -> tuple[set[str], set[str]]:
    """Names that a scope binds, and all that it reads."""
    bound: set[str] = set()
    read: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return bound, read
