"""Parameters that are made in the wrong place: in forward, in a plain list, after the optimizer."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator

from gradient_doctor.findings import Finding
from gradient_doctor.fix.recipes.proposal import (
    Proposal,
    calls_in,
    is_method,
    keyword,
    last_name,
    loads,
    owner,
    spelled,
    with_keyword,
)
from gradient_doctor.fix.source import (
    FUNCTIONS,
    LOOPS,
    Edit,
    Source,
    UnsureError,
    inner_statements,
    name_of,
    own_nodes,
)

_OPTIMIZERS = re.compile(
    r"(Adam\w*|SGD|RMSprop|Adagrad|Adadelta|NAdam|RAdam|ASGD|Rprop|Adafactor|Muon|LBFGS|Lion)$"
)


def build_in_init(finding: Finding, source: Source) -> Iterator[Proposal]:
    """`layer = nn.Linear(...)` in forward becomes `self.layer` of __init__."""
    if finding.site is None:
        return
    statement = source.statement(finding.site.line)
    function = source.function(statement)
    if function is None or not function.args.args:
        raise UnsureError(f"line {statement.lineno} of {source.path} is in no method")
    parent = source.parent(function)
    if not isinstance(parent, ast.ClassDef) or function.name == "__init__":
        raise UnsureError(f"line {statement.lineno} of {source.path} is in no method of a module")
    init = next((s for s in parent.body if isinstance(s, FUNCTIONS) and s.name == "__init__"), None)
    if init is None:
        raise UnsureError(f"{parent.name} has no __init__ that could make the layer")
    self_ = function.args.args[0].arg
    node, name = _layer(source, statement)
    attribute = name or last_name(node.func).lower()
    taken = {n.attr for n in ast.walk(parent) if isinstance(n, ast.Attribute)}
    taken |= {s.name for s in parent.body if isinstance(s, FUNCTIONS)}
    if attribute in taken:
        attribute = f"own_{attribute}"
        if attribute in taken:
            raise UnsureError(f"{parent.name} has attributes of that name already")
    made = _moved(source, node, function, init, self_)
    last = init.body[-1]
    edits = [source.insert_after(last, f"{init.args.args[0].arg}.{attribute} = {made}")]
    if name is None:
        edits.append(source.replace(node, f"{self_}.{attribute}"))
    else:
        stores = [
            n
            for n in ast.walk(function)
            if isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load)
        ]
        if len(stores) != 1:
            raise UnsureError(f"{name} is assigned more than once in {function.name}")
        edits.append(source.remove(statement))
        edits += [source.replace(n, f"{self_}.{attribute}") for n in loads(function, name)]
    yield Proposal(what=f"Make {attribute} once, in {parent.name}.__init__.", edits=tuple(edits))


def _layer(source: Source, statement: ast.stmt) -> tuple[ast.Call, str | None]:
    """The call that makes the layer, and the variable that it is assigned to, if to one."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call):
        target, value = statement.targets[0], statement.value
        inner = _unmoved(value)
        if isinstance(target, ast.Name) and len(statement.targets) == 1 and _is_made(inner):
            return inner, target.id
    inline = [n.func for n in calls_in(statement) if isinstance(n.func, ast.Call)]
    inline = [_unmoved(n) for n in inline]
    if len(inline) == 1 and _is_made(inline[0]):
        return inline[0], None
    raise UnsureError(f"line {statement.lineno} of {source.path} makes no layer by itself")


def _unmoved(call: ast.Call) -> ast.Call:
    """Without `.to(device)` and the like: __init__ makes it where the module is moved from."""
    while (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in ("to", "cuda", "cpu")
        and isinstance(call.func.value, ast.Call)
    ):
        call = call.func.value
    return call


def _is_made(call: ast.Call) -> bool:
    """A class by its spelling: `nn.Linear(...)`, `Block(...)`."""
    return last_name(call.func)[:1].isupper()


def _moved(source: Source, node: ast.Call, function: ast.AST, init: ast.AST, self_: str) -> str:
    """Its code, if every name in it means the same in __init__."""
    own = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {self_}
    bound = {
        n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    bound |= {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
    local = sorted(own & bound)
    if local:
        raise UnsureError(
            f"{', '.join(local)} exists in forward only, and __init__ does not know it"
        )
    assigned = {
        n.attr
        for n in ast.walk(init)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    }
    for used in ast.walk(node):
        if (
            isinstance(used, ast.Attribute)
            and name_of(used.value) == self_
            and used.attr not in assigned
        ):
            raise UnsureError(f"self.{used.attr} is not set in __init__")
    shadowed = {a.arg for a in ast.walk(init) if isinstance(a, ast.arg)} & own
    if shadowed - set(dir(builtins)):
        raise UnsureError(f"{', '.join(sorted(shadowed))} means something else in __init__")
    return source.code(node)


def register(finding: Finding, source: Source) -> Iterator[Proposal]:
    """A plain list of layers becomes a ModuleList, a plain tensor a Parameter."""
    if finding.site is None:
        return
    statement = source.statement(finding.site.line)
    if isinstance(statement, ast.Expr):
        statement = _list_that_grows(source, statement)
    while not _assigns_attribute(statement):
        up = source.parent(statement)
        if not isinstance(up, ast.stmt) or isinstance(up, (*FUNCTIONS, ast.ClassDef)):
            raise UnsureError(f"line {finding.site.line} of {source.path} assigns no attribute")
        statement = up
    assert isinstance(statement, ast.Assign)
    value = statement.value
    if isinstance(value, (ast.List, ast.ListComp)):
        kind = "ParameterList" if "Parameter(" in source.code(value) else "ModuleList"
    elif isinstance(value, (ast.Dict, ast.DictComp)):
        kind = "ParameterDict" if "Parameter(" in source.code(value) else "ModuleDict"
    elif isinstance(value, ast.Call) and keyword(value, "requires_grad") is not None:
        kind = "Parameter"
    else:
        raise UnsureError(f"line {statement.lineno} of {source.path} makes no list, dict or tensor")
    name = spelled(source, kind)
    if name is None:
        raise UnsureError(f"{source.path} does not import torch.nn")
    code = source.code(value)
    text = f"{name}()" if code in ("[]", "{}") else f"{name}({code})"
    target = source.code(statement.targets[0])
    yield Proposal(what=f"Make {target} a {name}.", edits=(source.replace(value, text),))


def _assigns_attribute(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Attribute)
    )


def _list_that_grows(source: Source, statement: ast.Expr) -> ast.stmt:
    """The `self.layers = []` of a `self.layers.append(...)`."""
    call = statement.value
    if is_method(statement, "append") and isinstance(call, ast.Call):
        name, function = name_of(owner(call)), source.function(statement)
        for other in inner_statements(function or source.tree):
            if (
                isinstance(other, ast.Assign)
                and _assigns_attribute(other)
                and name_of(other.targets[0]) == name
            ):
                return other
    return statement


# the optimizer was made too early


def optimizer_later(finding: Finding, source: Source) -> Iterator[Proposal]:
    """The optimizer's constructor moves behind the line that makes or replaces the parameters."""
    lines = [s.line for s in (finding.site, *finding.related) if s and s.file == source.path]
    made = [s for s in source.statements() if _makes_optimizer(source, s)]
    for optimizer in made:
        assert isinstance(optimizer, ast.Assign)
        body, at = source.block(optimizer)
        for last in _changes(source, optimizer, body[at + 1 :], lines):
            try:
                yield _after(source, optimizer, body[at + 1 : body.index(last) + 1], last)
            except UnsureError:
                continue


def _makes_optimizer(source: Source, statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    if not isinstance(statement.value, ast.Call):
        return False
    return "optim" in source.code(statement.value.func).lower() or bool(
        _OPTIMIZERS.match(last_name(statement.value.func))
    )


def _changes(
    source: Source, optimizer: ast.Assign, later: list[ast.stmt], lines: list[int]
) -> Iterator[ast.stmt]:
    """Statements behind the optimizer that may have made or replaced parameters, best first."""
    models = {
        n.id
        for n in ast.walk(optimizer.value)
        if isinstance(n, ast.Name) and n.id not in ("torch", "optim", "nn")
    }
    first_use = next(
        (k for k, s in enumerate(later) if isinstance(s, LOOPS) or _trains(s)), len(later)
    )
    before = later[:first_use]
    spoken = [s for s in before if any(_holds(s, line) for line in lines)]
    touching = [
        s for s in before if models & {n.id for n in ast.walk(s) if isinstance(n, ast.Name)}
    ]
    changes = [s for s in touching if not _only_reads(s)]
    yield from dict.fromkeys([*spoken[-1:], *changes[-1:], *changes])


def _holds(statement: ast.stmt, line: int) -> bool:
    return statement.lineno <= line <= (statement.end_lineno or statement.lineno)


def _trains(statement: ast.stmt) -> bool:
    return any(last_name(n) == "backward" for n in ast.walk(statement))


def _only_reads(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and any(
        last_name(call.func) == "print" for call in calls_in(statement)
    )


def _after(
    source: Source, optimizer: ast.Assign, between: list[ast.stmt], last: ast.stmt
) -> Proposal:
    name = name_of(optimizer.targets[0])
    if not name:
        raise UnsureError("the optimizer has no name")
    # what is made from the optimizer (a scheduler) moves with it
    along: list[ast.stmt] = [optimizer]
    names = {name}
    for statement in between:
        uses = {name_of(n) for n in ast.walk(statement) if isinstance(n, (ast.Name, ast.Attribute))}
        if not uses & names:
            continue
        if not isinstance(statement, ast.Assign) or statement is last:
            return _again(source, optimizer, last, name)
        along.append(statement)
        names |= {name_of(t) for t in statement.targets} - {""}
    text = "".join(source.moved_text(s, optimizer) for s in along)
    _, end = source.whole_lines(last)
    return Proposal(
        what=f"Make {name} after line {last.lineno}, which changes the model's parameters.",
        edits=(*(_gone(source, s) for s in along), Edit(start=end, end=end, text=text)),
    )


def _gone(source: Source, statement: ast.stmt) -> Edit:
    start, end = source.whole_lines(statement)
    return Edit(start=start, end=end, text="")


def _again(source: Source, optimizer: ast.Assign, last: ast.stmt, name: str) -> Proposal:
    """It is used in between: make another one behind the change."""
    _, end = source.whole_lines(last)
    return Proposal(
        what=f"Make {name} again after line {last.lineno}, which changes the model's parameters.",
        edits=(Edit(start=end, end=end, text=source.moved_text(optimizer, optimizer)),),
    )


def trainable_adapter(finding: Finding, source: Source) -> Iterator[Proposal]:
    """PEFT loads adapters for inference unless `is_trainable=True`."""
    if finding.site is None:
        return
    for node in own_nodes(source.statement(finding.site.line)):
        called = name_of(node.func) if isinstance(node, ast.Call) else ""
        is_adapter = "Peft" in called or "Adapter" in called
        if isinstance(node, ast.Call) and is_adapter and called.endswith("from_pretrained"):
            yield Proposal(
                what="Load the adapter with is_trainable=True.",
                edits=(with_keyword(source, node, "is_trainable", "True"),),
            )
