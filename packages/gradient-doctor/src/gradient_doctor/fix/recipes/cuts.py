"""Where the path was cut by the script itself: no_grad, detach, .data, .item(), torch.tensor(x)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gradient_doctor.findings import Finding
from gradient_doctor.fix.recipes.proposal import (
    Proposal,
    alone,
    calls_in,
    in_brackets,
    is_method,
    keyword,
    last_name,
    method_calls,
    owner,
    with_keyword,
)
from gradient_doctor.fix.source import FUNCTIONS, Edit, Source, own_nodes

_OFF = ("no_grad", "inference_mode")
_TENSORS = ("tensor", "as_tensor", "FloatTensor", "Tensor")
_LISTS = (ast.List, ast.ListComp, ast.GeneratorExp)


def _switches_off(node: ast.AST) -> bool:
    target = node.func if isinstance(node, ast.Call) else node
    if last_name(target) in _OFF:
        return True
    if isinstance(node, ast.Call) and last_name(target) == "set_grad_enabled":
        return any(isinstance(a, ast.Constant) and a.value is False for a in node.args)
    return False


def _without_no_grad(source: Source, line: int) -> Proposal | None:
    statement = source.statement(line)
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        off = [d for d in statement.decorator_list if _switches_off(d)]
        if not off:
            return None
        edits = [
            Edit(start=source.line_start(d.lineno), end=source.line_start(_last(d) + 1), text="")
            for d in off
        ]
        return Proposal(what=f"Remove the decorator @{source.code(off[0])}.", edits=tuple(edits))
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        off = [item for item in statement.items if _switches_off(item.context_expr)]
        if not off:
            return None
        what = f"Remove the block `with {source.code(off[0].context_expr)}`; its body stays."
        if len(off) == len(statement.items):
            return Proposal(what=what, edits=(source.unwrap(statement),))
        at = statement.items.index(off[0])
        expression = off[0].context_expr
        if at:
            start, end = source.end(_item_end(statement.items[at - 1])), source.end(expression)
        else:
            start, end = source.start(expression), source.start(statement.items[1].context_expr)
        return Proposal(what=what, edits=(Edit(start=start, end=end, text=""),))
    if isinstance(statement, ast.Expr) and _switches_off(statement.value):
        return Proposal(
            what=f"Remove {source.code(statement.value)}.", edits=(source.remove(statement),)
        )
    return None


def _item_end(item: ast.withitem) -> ast.AST:
    return item.optional_vars or item.context_expr


def _last(node: ast.expr) -> int:
    return node.end_lineno or node.lineno


def remove_no_grad(finding: Finding, source: Source) -> Iterator[Proposal]:
    """The block, decorator or statement at the finding's line, or at a line it refers to."""
    for line in _lines(finding, source):
        proposal = _without_no_grad(source, line)
        if proposal is not None:
            yield proposal


def remove_cut(finding: Finding, source: Source) -> Iterator[Proposal]:
    """`x.detach()` becomes `x`, a list of numbers made a tensor is stacked instead."""
    words = set(re.findall(r"`\.?(\w+)", finding.why + finding.what))
    for line in _lines(finding, source):
        cuts = list(_cuts(source, source.statement(line)))
        named = [cut for cut in cuts if cut[0] in words] or cuts
        if not named:
            continue
        edits = tuple(edit for _, edit in named)
        what = f"Remove the cut at line {line}: {', '.join(dict.fromkeys(n for n, _ in named))}."
        rooted = _new_roots(finding, source)
        if rooted:
            yield Proposal(
                what=f"{what} Backward starts from the loss itself again.", edits=(*edits, *rooted)
            )
        yield Proposal(what=what, edits=edits)


def _lines(finding: Finding, source: Source) -> Iterator[int]:
    sites = [site for site in (finding.site, *finding.related) if site is not None]
    yield from dict.fromkeys(site.line for site in sites if site.file == source.path)


def _cuts(source: Source, statement: ast.stmt) -> Iterator[tuple[str, Edit]]:
    """Cuts of the statement with their names, none inside of another one."""
    taken: list[tuple[int, int]] = []
    nodes = sorted(own_nodes(statement), key=lambda n: -_length(source, n))
    for node in nodes:
        cut = _cut(source, node)
        if cut is None:
            continue
        edit = cut[1]
        if not any(a <= edit.start and edit.end <= b for a, b in taken):
            taken.append((edit.start, edit.end))
            yield cut


def _length(source: Source, node: ast.AST) -> int:
    return source.end(node) - source.start(node) if hasattr(node, "end_lineno") else 0


def _cut(source: Source, node: ast.AST) -> tuple[str, Edit] | None:
    if isinstance(node, ast.Attribute) and node.attr == "data" and isinstance(node.ctx, ast.Load):
        return "data", _from(source, node.value, node)
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    if (
        isinstance(function, ast.Attribute)
        and function.attr in ("detach", "item")
        and not node.args
        and not node.keywords
    ):
        return function.attr, _from(source, function.value, node)
    if last_name(function) in _TENSORS and len(node.args) == 1:
        argument = node.args[0]
        if isinstance(argument, _LISTS):
            code = source.code(argument)
            inner = code if not isinstance(argument, ast.GeneratorExp) else f"[{code[1:-1]}]"
            torch_ = source.code(function).rpartition(".")[0] or "torch"
            return "tensor", source.replace(node, f"{torch_}.stack({inner})")
        if isinstance(argument, (ast.Name, ast.Attribute, ast.Call, ast.BinOp, ast.Subscript)):
            return "tensor", source.replace(node, alone(source, node, argument))
    if isinstance(function, ast.Name) and function.id == "float" and len(node.args) == 1:
        return "float", source.replace(node, alone(source, node, node.args[0]))
    return None


def _from(source: Source, value: ast.AST, node: ast.AST) -> Edit:
    """What stands behind `value` in `node` goes."""
    return Edit(start=source.end(value), end=source.end(node), text="")


def _new_roots(finding: Finding, source: Source) -> list[Edit]:
    """Statements that make a fresh leaf of the loss that backward is called on."""
    edits = []
    names = {
        owner(call).id  # pyright: ignore[reportAttributeAccessIssue]
        for _, call in method_calls(source, "backward")
        if isinstance(owner(call), ast.Name)
    }
    for statement in source.statements():
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
                if last_name(target.value) in names and _is_true(value):
                    edits.append(source.remove(statement))
            elif (
                isinstance(target, ast.Name)
                and target.id in names
                and isinstance(value, ast.Call)
                and _makes_leaf(value, target.id)
            ):
                edits.append(source.remove(statement))
        elif is_method(statement, "requires_grad_") and isinstance(statement, ast.Expr):
            call = statement.value
            if isinstance(call, ast.Call) and last_name(owner(call)) in names:
                edits.append(source.remove(statement))
    return edits


def _is_true(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _makes_leaf(call: ast.Call, name: str) -> bool:
    """`Variable(loss, requires_grad=True)`, `torch.tensor(loss, requires_grad=True)`."""
    flag = keyword(call, "requires_grad")
    if last_name(call.func) in ("Variable", "tensor", "as_tensor") and flag is not None:
        return _is_true(flag.value) and bool(call.args) and last_name(call.args[0]) == name
    if last_name(call.func) == "requires_grad_" and isinstance(call.func, ast.Attribute):
        inner = call.func.value
        while isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            inner = inner.func.value
        return isinstance(inner, ast.Name) and inner.id == name
    return False


def not_reentrant(finding: Finding, source: Source) -> Iterator[Proposal]:
    """`use_reentrant=False` in the checkpoint at the line, or where checkpointing is enabled."""
    edits = []
    for line in _lines(finding, source):
        for call in calls_in(source.statement(line)):
            if last_name(call.func) in ("checkpoint", "checkpoint_sequential"):
                edits.append(with_keyword(source, call, "use_reentrant", "False"))
    if not edits:
        for statement in source.statements():
            for call in calls_in(statement):
                if last_name(call.func) == "gradient_checkpointing_enable":
                    edits.append(
                        with_keyword(
                            source,
                            call,
                            "gradient_checkpointing_kwargs",
                            '{"use_reentrant": False}',
                        )
                    )
    if edits:
        yield Proposal(what="Pass use_reentrant=False to the checkpoint.", edits=tuple(edits))


def ask_for_the_leaf(finding: Finding, source: Source) -> Iterator[Proposal]:
    """`autograd.grad(loss, w.clone())` asks for a tensor that the loss never saw."""
    if finding.site is None:
        return
    edits, function = [], source.function(source.statement(finding.site.line))
    for statement in source.statements():
        if source.function(statement) is not function:
            continue
        for call in calls_in(statement):
            if last_name(call.func) != "grad" or len(call.args) < 2:
                continue
            for node in ast.walk(call.args[1]):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in ("clone", "detach")
                    and not node.args
                ):
                    edits.append(_from(source, node.func.value, node))
    if edits:
        yield Proposal(
            what="Ask for the gradient of the parameter itself, not of a copy.", edits=tuple(edits)
        )


def detach_here(finding: Finding, source: Source) -> Iterator[Proposal]:
    """A value that a later step uses again is cut off from the step that made it."""
    for line in _lines(finding, source):
        statement = source.statement(line)
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            continue
        target = statement.targets[0]
        states = [target]
        if isinstance(target, ast.Tuple):
            states = [t for t in target.elts if isinstance(t, ast.Attribute)]
        if len(states) != 1 or not isinstance(states[0], (ast.Attribute, ast.Name)):
            continue
        name = in_brackets(source, states[0])
        for code in (f"{name} = {name}.detach()", f"{name} = tuple(h.detach() for h in {name})"):
            yield Proposal(
                what=f"Detach {name} from the step that made it.",
                edits=(source.insert_after(statement, code),),
                caution=f"No gradient flows through {name} any more; compute it anew if it should.",
            )
