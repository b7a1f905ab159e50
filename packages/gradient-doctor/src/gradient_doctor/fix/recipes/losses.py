"""Single operations of the loss: shapes, softmax before cross-entropy, in-place, roots, dtypes."""

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
    keyword,
    last_name,
    loads,
    with_keyword,
)
from gradient_doctor.fix.source import Edit, Source, UnsureError, name_of, own_nodes

_ACTIVATIONS = {"softmax", "sigmoid", "log_softmax", "Softmax", "Sigmoid", "LogSoftmax"}
_AUGMENTED = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.Pow: "**",
}  # fmt: skip
_FLOOR = "1e-8"


def same_shape(finding: Finding, source: Source) -> Iterator[Proposal]:
    """`squeeze(-1)` the column, or `unsqueeze(-1)` the row, at the line where they meet."""
    if finding.site is None:
        return
    statement = source.statement(finding.site.line)
    shapes = [
        [int(n) for n in text.split(",") if n.strip()]
        for text in re.findall(r"\[([\d, ]*)\]", finding.what)
    ]
    if "long" in finding.fix and len(shapes) < 2:
        yield from _whole_numbers(source, statement)
        return
    if len(shapes) < 2:
        raise UnsureError("the finding names no two shapes")
    first, second = shapes[0], shapes[1]
    pairs = list(_pairs(source, statement))
    if not pairs:
        raise UnsureError(f"line {finding.site.line} of {source.path} holds no pair of tensors")
    for left, right in pairs:
        if [*second, 1] == first:  # a column and a row: the target follows the prediction
            yield _called(source, right, "unsqueeze(-1)")
            yield _called(source, left, "squeeze(-1)")
        elif [*first, 1] == second:
            yield _called(source, right, "squeeze(-1)")
            yield _called(source, left, "unsqueeze(-1)")
        elif sorted(first) == sorted(second):
            yield _called(source, right, f"view_as({source.code(left)})")
        else:
            continue
    column = 0 if [*second, 1] == first else 1
    for pair in pairs:
        for operand in (pair[column], pair[1 - column]):
            if isinstance(operand, ast.Name):
                yield from _everywhere(source, statement, operand.id)


def _pairs(source: Source, statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Prediction and target of a loss call, or both sides of an operation, the innermost first."""
    nodes = [n for n in own_nodes(statement) if isinstance(n, (ast.Call, ast.BinOp))]
    for node in sorted(nodes, key=lambda n: source.end(n) - source.start(n)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.Mult, ast.Add)):
            if not any(isinstance(s, ast.Constant) for s in (node.left, node.right)):
                yield node.left, node.right
        elif (
            isinstance(node, ast.Call)
            and len(node.args) >= 2
            and not any(isinstance(a, (ast.Constant, ast.Starred)) for a in node.args[:2])
        ):
            yield node.args[0], node.args[1]


def _called(source: Source, node: ast.expr, method: str) -> Proposal:
    code = in_brackets(source, node)
    return Proposal(
        what=f"Give both sides one shape: {source.code(node)}.{method}.",
        edits=(source.replace(node, f"{code}.{method}"),),
    )


def _everywhere(source: Source, statement: ast.stmt, name: str) -> Iterator[Proposal]:
    """The tensor is used in other lines too: every use behind this line, in the same block."""
    body, at = source.block(statement)
    uses = [node for s in body[at:] for node in loads(s, name)]
    for method in ("squeeze(-1)", "unsqueeze(-1)"):
        if len(uses) > 1:
            yield Proposal(
                what=f"Give both sides one shape: {name}.{method} from this line on.",
                edits=tuple(source.replace(n, f"{name}.{method}") for n in uses),
            )


def _whole_numbers(source: Source, statement: ast.stmt) -> Iterator[Proposal]:
    for _, target in _pairs(source, statement):
        yield Proposal(
            what="Class ids as whole numbers.",
            edits=(source.replace(target, f"{in_brackets(source, target)}.long()"),),
        )


def raw_scores(finding: Finding, source: Source) -> Iterator[Proposal]:
    """The activation before a loss that applies it itself goes."""
    if finding.site is None:
        return
    statement = source.statement(finding.site.line)
    caution = (
        "Where the script reads these outputs as probabilities, apply the activation there "
        "(argmax of softmax does not need it; a threshold on sigmoid does)."
    )
    edits = [edit for node in own_nodes(statement) for edit in _activation(source, node)]
    if edits:
        what = f"Remove the activation at line {finding.site.line}: the loss applies it."
        yield Proposal(what=what, edits=(edits[0],), caution=caution)
        return
    layers = [
        (call, node)
        for s in source.statements()
        for call in calls_in(s)
        if last_name(call.func) == "Sequential" and call.args
        for node in call.args[-1:]
        if isinstance(node, ast.Call) and last_name(node.func) in _ACTIVATIONS
    ]
    if len(layers) == 1 and len(layers[0][0].args) > 1:
        call, node = layers[0]
        start, end = source.end(call.args[-2]), source.end(node)
        what = f"Remove {source.code(node)} at line {node.lineno}: the loss applies it."
        yield Proposal(what=what, edits=(Edit(start=start, end=end, text=""),), caution=caution)


def _activation(source: Source, node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    name = last_name(node.func)
    is_layer = name_of(node.func).startswith("self.") and name.lower() in _ACTIVATIONS
    if isinstance(node.func, ast.Call) and last_name(node.func.func) in _ACTIVATIONS:
        is_layer = True  # nn.Softmax(dim=1)(x)
    method = isinstance(node.func, ast.Attribute) and name in _ACTIVATIONS
    module = name_of(node.func).split(".")[0] in ("torch", "F", "nn", "functional")
    if (is_layer or module or isinstance(node.func, ast.Name)) and node.args:
        if is_layer or name in _ACTIVATIONS:
            yield source.replace(node, alone(source, node, node.args[0]))
    elif method and isinstance(node.func, ast.Attribute):
        yield Edit(start=source.end(node.func.value), end=source.end(node), text="")


def out_of_place(finding: Finding, source: Source) -> Iterator[Proposal]:
    """`x += y` becomes `x = x + y`; `inplace=True` becomes False; `x.relu_()` becomes a new x."""
    if finding.site is None:
        return
    statement = source.statement(finding.site.line)
    if isinstance(statement, ast.AugAssign):
        sign = _AUGMENTED.get(type(statement.op))
        if sign is None or not isinstance(statement.target, (ast.Name, ast.Attribute)):
            raise UnsureError(f"line {statement.lineno} of {source.path} changes part of a tensor")
        target = source.code(statement.target)
        value = statement.value
        right = source.code(value)
        if isinstance(value, (ast.BinOp, ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda)):
            right = f"({right})"
        yield Proposal(
            what="Write the result to a new tensor.",
            edits=(source.replace(statement, f"{target} = {target} {sign} {right}"),),
        )
        return
    for call in calls_in(statement):
        flag = keyword(call, "inplace")
        if flag is not None:
            yield Proposal(what="No inplace.", edits=(source.replace(flag.value, "False"),))
        function = call.func
        if isinstance(function, ast.Attribute) and re.fullmatch(r"[a-z]\w*[a-z]_", function.attr):
            new = Edit(start=source.end(function) - 1, end=source.end(function), text="")
            if isinstance(statement, ast.Expr) and statement.value is call:
                target = source.code(function.value)
                at = source.start(statement)
                first = Edit(start=at, end=at, text=f"{target} = ")
                yield Proposal(what="Write the result to a new tensor.", edits=(first, new))
            else:
                yield Proposal(what="Write the result to a new tensor.", edits=(new,))
    flags = [
        keyword(call, "inplace")
        for s in source.statements()
        for call in calls_in(s)
        if keyword(call, "inplace") is not None
    ]
    if flags:
        yield Proposal(
            what="No inplace.",
            edits=tuple(source.replace(f.value, "False") for f in flags if f is not None),
        )


def floor_under_root(finding: Finding, source: Source) -> Iterator[Proposal]:
    """A small number inside of the root, whose slope at zero is infinite."""
    if finding.site is None or "root" not in finding.fix:
        return
    for node in own_nodes(source.statement(finding.site.line)):
        if not isinstance(node, ast.Call) or last_name(node.func) != "sqrt":
            continue
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            continue
        if node.args:
            value = node.args[0]
            edit = source.replace(value, f"{_summand(value, source)} + {_FLOOR}")
        elif isinstance(node.func, ast.Attribute):
            value = node.func.value
            edit = source.replace(value, f"({_summand(value, source)} + {_FLOOR})")
        else:
            continue
        yield Proposal(what=f"Add {_FLOOR} inside of the root.", edits=(edit,))


def _summand(value: ast.expr, source: Source) -> str:
    """Its code, in brackets where it binds more loosely than a plus."""
    loose = isinstance(value, ast.IfExp | ast.Compare | ast.BoolOp | ast.NamedExpr | ast.Lambda)
    if isinstance(value, ast.UnaryOp):
        loose = isinstance(value.op, ast.Not)
    if isinstance(value, ast.BinOp):
        loose = isinstance(value.op, ast.BitAnd | ast.BitOr | ast.BitXor | ast.LShift | ast.RShift)
    return f"({source.code(value)})" if loose else source.code(value)


def full_precision(finding: Finding, source: Source) -> Iterator[Proposal]:
    """fp32 weights under the scaler: the dtype at the line that makes them."""
    if finding.site is None:
        return
    edits = []
    for node in own_nodes(source.statement(finding.site.line)):
        if isinstance(node, ast.Attribute) and node.attr in ("float16", "half", "bfloat16"):
            parent = source.parent(node)
            if isinstance(parent, ast.Call) and parent.func is node:
                edits.append(Edit(start=source.end(node.value), end=source.end(parent), text=""))
            elif isinstance(node.value, ast.Name) and node.value.id == "torch":
                edits.append(source.replace(node, "torch.float32"))
    if edits:
        yield Proposal(what="Make the weights in fp32.", edits=tuple(edits))


def ignore_padding(finding: Finding, source: Source) -> Iterator[Proposal]:
    """`ignore_index` of the cross-entropy at the line; the finding names the padding's id."""
    number = re.search(r"ignore_index=(-?\d+)", finding.fix)
    if finding.site is None or number is None:
        return
    for call in calls_in(source.statement(finding.site.line)):
        if last_name(call.func) in ("cross_entropy", "nll_loss") and len(call.args) >= 2:
            yield Proposal(
                what=f"Leave out padding: ignore_index={number[1]}.",
                edits=(with_keyword(source, call, "ignore_index", number[1]),),
            )
