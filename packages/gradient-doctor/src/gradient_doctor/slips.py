"""Statements that do nothing, or something else than they look: read from the source alone.

`optimizer.step` without parentheses, `module.requires_grad = False` (a module has no such switch),
`p.require_grad = False`, `optimizer.lr = 1e-4`. Python accepts them all. A detector that has seen
the effect asks here for the line; nothing is run, and nothing is said on the source's word alone.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator

from gradient_doctor.findings import Site
from gradient_doctor.sites import is_user_file

_COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.FunctionDef)


def bare_attribute(files: Iterable[str], name: str) -> Site | None:
    """The first statement `something.name` that is nothing else: a call without parentheses."""
    for file, node in _statements(files):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Attribute) and value.attr == name:
            return Site(file, node.lineno)
    return None


def assigned_attribute(files: Iterable[str], names: Iterable[str]) -> Site | None:
    """The first statement `something.name = ...` with one of these names."""
    wanted = set(names)
    for file, node in _statements(files):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in wanted:
                return Site(file, node.lineno)
    return None


def assigned_item(files: Iterable[str], key: str) -> Site | None:
    """The statement `something[key] = ...` (or `*=`), if there is only one."""
    lines = [
        Site(file, node.lineno)
        for file, node in _statements(files)
        for target in (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AugAssign)
            else []
        )
        if isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value == key
    ]
    return lines[0] if len(lines) == 1 else None


def assigned_name(file: str, name: str) -> Site | None:
    """The first statement `name = ...` or `something.name = ...`."""
    for _, node in _statements([file]):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                if name == (part.attr if isinstance(part, ast.Attribute) else _id(part)):
                    return Site(file, node.lineno)
    return None


def loaded_state(site: Site) -> Site | None:
    """Where the state was kept that `load_state_dict(name)` at this line loads.

    Only if the program has one plain assignment of a `state_dict()` to that name.
    """
    statement = statement_at(site)
    for call in ast.walk(statement) if statement is not None else ():
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr != "load_state_dict" or not call.args:
            continue
        name = _last(call.args[0])
        kept = [
            node.lineno
            for _, node in _statements([site.file])
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and _last(node.value.func) == "state_dict"
            and any(_last(target) == name for target in node.targets)
        ]
        return Site(site.file, kept[0]) if name and len(kept) == 1 else None
    return None


def _last(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else _id(node)


def statement_at(site: Site) -> ast.stmt | None:
    """The smallest statement that a line is part of."""
    around = [
        (node.end_lineno or node.lineno, node)
        for _, node in _statements([site.file])
        if node.lineno <= site.line <= (node.end_lineno or node.lineno)
    ]
    return min(around, key=lambda one: one[0] - one[1].lineno, default=(0, None))[1]


def _id(node: ast.expr) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def calls_of(files: Iterable[str], owner: str, method: str) -> list[Site]:
    """Lines of `owner.method(...)`, `self.owner.method(...)` and the like."""
    sites = []
    for file in dict.fromkeys(files):
        tree = _tree(file) if is_user_file(file) else None
        for node in ast.walk(tree) if tree is not None else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            value = node.func.value
            name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", None)
            if node.func.attr == method and name == owner:
                sites.append(Site(file, node.lineno))
    return sites


def filled_at(site: Site) -> Site | None:
    """Where the list is filled that the call at this line takes: `torch.tensor(rewards)`.

    Only if one statement of the same function fills it.
    """
    function = function_around(site)
    call = _call_at(function, site.line) if function is not None else None
    if function is None or call is None or not call.args:
        return None
    argument = call.args[0]
    name = argument.id if isinstance(argument, ast.Name) else None
    fills = [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("append", "extend")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == name
    ]
    return Site(site.file, fills[0], site.function) if name and len(fills) == 1 else None


def loop_at(site: Site) -> ast.For | None:
    """The loop whose iterable stands at a line."""
    for _, node in _statements([site.file]):
        over = node.iter if isinstance(node, ast.For) else None
        if over is not None and over.lineno <= site.line <= (over.end_lineno or over.lineno):
            return node if isinstance(node, ast.For) else None
    return None


def is_never_read(site: Site) -> bool:
    """Whether this line gives a value to a name that its function reads nowhere else."""
    made, function = statement_at(site), function_around(site)
    if function is None or not isinstance(made, ast.Assign) or len(made.targets) != 1:
        return False
    name = _id(made.targets[0])
    own = set(ast.walk(made))
    declared = any(isinstance(n, (ast.Global, ast.Nonlocal)) for n in ast.walk(function))
    return (
        name is not None
        and not declared
        and not any(
            isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)
            for n in ast.walk(function)
            if n not in own
        )
    )


def kept_at(site: Site) -> Site | None:
    """Where the variable that this line assigns is put into a list: `queue.append(k)`."""
    made = statement_at(site)
    if not isinstance(made, ast.Assign) or not isinstance(made.targets[0], ast.Name):
        return None
    name = made.targets[0].id
    around = function_around(site)
    for file, node in _statements([site.file]):
        inside = function_around(Site(file, node.lineno)) is around
        value = node.value if isinstance(node, (ast.Expr, ast.Assign)) else None
        if value is None or not inside or node is made:
            continue
        put = isinstance(node, ast.Expr) and isinstance(value, ast.Call)
        if put and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            put = value.func.attr in ("append", "appendleft", "put", "add", "push")
            items: list[ast.expr] = value.args if put else []
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            # queue = [k] + queue: the list goes on under its name
            own = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
            lists = [n for n in ast.walk(value) if isinstance(n, ast.List)]
            items = [e for n in lists for e in n.elts] if node.targets[0].id in own else []
        else:
            continue
        if any(_id(item) == name for item in items):
            return Site(file, node.lineno, site.function)
    return _carried_on(name, made, site)


def _carried_on(name: str, made: ast.stmt, site: Site) -> Site | None:
    """Where another variable, which lasts, takes this one over: `before = h`, `mean += loss`."""
    around = function_around(site)
    here = [
        node
        for file, node in _statements([site.file])
        if function_around(Site(file, node.lineno)) is around and node is not made
    ]
    for node in here:
        if isinstance(node, ast.AugAssign):
            target, value = node.target, node.value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        else:
            continue
        key = ast.unparse(target)
        names = {
            ast.unparse(n) for n in ast.walk(value) if isinstance(n, (ast.Name, ast.Attribute))
        }
        grows = isinstance(node, ast.AugAssign) or key in names
        lasts = isinstance(target, ast.Attribute) or any(
            isinstance(other, ast.Assign)
            and other is not node
            and any(ast.unparse(t) == key for t in other.targets)
            for _, other in _statements([site.file])
        )
        if lasts and key != name and ((grows and name in names) or _id(value) == name):
            return Site(site.file, node.lineno, site.function)
    return None


def carried_through(site: Site) -> Site | None:
    """Where `h = cell(x, h)` hands a value to the function of this line and takes it back.

    Only if the program does so at one place.
    """
    function = function_around(site)
    if function is None:
        return None
    lines = []
    for file, node in _statements([site.file]):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if _last(node.value.func) != function.name:
            continue
        parts = [
            part
            for target in node.targets
            for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
        handed = [*node.value.args, *(word.value for word in node.value.keywords)]
        if {ast.unparse(p) for p in parts} & {ast.unparse(value) for value in handed}:
            lines.append(Site(file, node.lineno))
    return lines[0] if len(lines) == 1 else None


def calls_in(file: str) -> list[ast.Call]:
    """All calls of a file."""
    tree = _tree(file) if is_user_file(file) else None
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree else []


def default_behind(site: Site) -> tuple[str, int] | None:
    """The argument with a default that decides whether, or with what, this line is run.

    And its position in a call: `self` is not counted.
    """
    function = function_around(site)
    statement = statement_at(site)
    if function is None or statement is None:
        return None
    deciding: list[ast.AST] = [statement] if not isinstance(statement, _COMPOUND) else []
    deciding += [
        node.test
        for node in ast.walk(function)
        if isinstance(node, ast.If) and node.lineno <= site.line <= (node.end_lineno or node.lineno)
    ]
    read = {n.id for part in deciding for n in ast.walk(part) if isinstance(n, ast.Name)}
    words = [*function.args.posonlyargs, *function.args.args]
    shift = 1 if words and words[0].arg in ("self", "cls") else 0
    first = len(words) - len(function.args.defaults)
    places = {word.arg: k - shift for k, word in enumerate(words) if k >= first}
    pairs = zip(function.args.kwonlyargs, function.args.kw_defaults)
    places.update({word.arg: len(words) for word, default in pairs if default is not None})
    return next(((name, place) for name, place in places.items() if name in read), None)


def returns_of(head: Site) -> list[ast.Return]:
    """The return statements of the function that begins at a line; decorators count."""
    return [node for node in nodes_in(head) if isinstance(node, ast.Return)]


def nodes_in(head: Site) -> list[ast.AST]:
    """All of the function that begins at a line; decorators count."""
    tree = _tree(head.file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.FunctionDef) and node.name == head.function:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == head.line:
                return [inner for statement in node.body for inner in ast.walk(statement)]
    return []


def is_method(site: Site) -> bool:
    """Whether a line stands in a method."""
    function = function_around(site)
    arguments = [] if function is None else function.args.args
    return bool(arguments) and arguments[0].arg in ("self", "cls")


def source_of_function(site: Site) -> str:
    """The source of the function that a line stands in; empty for the module's own lines."""
    function = function_around(site)
    if function is None or function.end_lineno is None:
        return ""
    lines = range(function.lineno, function.end_lineno + 1)
    return "".join(linecache.getline(site.file, line) for line in lines)


def function_around(site: Site) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function of a line."""
    tree = _tree(site.file) if is_user_file(site.file) else None
    around = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= site.line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _call_at(function: ast.AST, line: int) -> ast.Call | None:
    """The innermost call of a line that makes a tensor of something."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node.lineno == line:
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in ("tensor", "as_tensor", "FloatTensor", "Tensor"):
                return node
    return None


def surroundings(site: Site) -> str:
    """The line itself and the heads of the loops, conditions and `with`s that it stands in."""
    return _surroundings(site.file, site.line)


@functools.lru_cache(maxsize=4096)
def _surroundings(file: str, line: int) -> str:
    tree = _tree(file) if is_user_file(file) else None
    heads = [linecache.getline(file, line)]
    for node in ast.walk(tree) if tree is not None else ():
        compound = isinstance(node, (ast.For, ast.While, ast.If, ast.With))
        if compound and node.lineno < line <= (node.end_lineno or node.lineno):
            heads.append(linecache.getline(file, node.lineno))
    return "".join(heads)


def stands_after_loop(site: Site, inside: Site) -> bool:
    """Whether a line follows the innermost loop around another, in the same function."""
    tree = _tree(inside.file) if is_user_file(inside.file) else None
    ends = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, (ast.For, ast.While))
        and node.lineno <= inside.line <= (node.end_lineno or node.lineno)
    ]
    same = function_around(site) is function_around(inside)
    return same and bool(ends) and site.line > max(ends)[1]


def _statements(files: Iterable[str]) -> Iterator[tuple[str, ast.stmt]]:
    for file in dict.fromkeys(files):
        tree = _tree(file) if is_user_file(file) else None
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.stmt):
                yield file, node


def tree_of(file: str) -> ast.Module | None:
    """The source of a file of the user's."""
    return _tree(file) if is_user_file(file) else None


@functools.lru_cache(maxsize=32)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return None  # a notebook's magic, or a file that has changed since
