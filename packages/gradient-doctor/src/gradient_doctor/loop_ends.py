"""What a region without gradients does after the loop that samples: read from the source.

`return torch.stack(log_probs)` only hands over what the loop has made. Returns and advantages that
are computed there are worth to be looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from types import CodeType

from gradient_doctor.slips import tree_of

# calls that put together, convert or print what there is
_PLAIN = {
    *("stack", "cat", "concat", "concatenate", "tensor", "as_tensor", "from_numpy", "array"),
    *("asarray", "append", "extend", "list", "tuple", "dict", "len", "print", "zip", "range"),
    *("item", "tolist", "to", "float", "long", "int", "bool", "str", "format", "join", "cpu"),
    *("numpy", "detach", "squeeze", "unsqueeze", "view", "reshape", "flatten", "transpose", "sum"),
    *("decode", "batch_decode", "train", "eval", "close", "update", "max", "min", "round"),
}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.While, ast.AsyncFor)


def goes_on_after(frames: Iterable[tuple[CodeType, int]], owner: CodeType, line: int) -> bool:
    """Whether anything is computed between the end of the running loop and that of its region.

    `frames` are the running functions up to the owner of the region, the innermost first; the
    region is the `with` of a line, or the whole function (0). A function without a loop around its
    running line is called by each round.
    """
    inside = False
    for code, at in frames:
        path = _path(code, at, line if code is owner else 0)
        loops = [k for k, (_, node) in enumerate(path) if isinstance(node, _LOOPS)]
        if not inside and not loops:
            continue
        last = len(path) if inside else loops[-1] + 1
        inside = True
        for block, node in path[:last]:
            if any(map(_computes, block[block.index(node) + 1 :])):
                return True
    return False


def _path(code: CodeType, at: int, line: int) -> list[tuple[list[ast.stmt], ast.stmt]]:
    """The statements around a line, each with its block, from the region's own block inwards."""
    tree = tree_of(code.co_filename)
    block: list[ast.stmt] | None = None if tree is None else tree.body
    path: list[tuple[list[ast.stmt], ast.stmt]] = []
    while block:
        node = next((n for n in block if n.lineno <= at <= (n.end_lineno or n.lineno)), None)
        if node is None:
            break
        path.append((block, node))
        begins = isinstance(node, _SCOPES) or (
            isinstance(node, (ast.With, ast.AsyncWith)) and node.lineno <= line < _first(node)
        )
        if begins:
            path.clear()
        block = next((b for b in _blocks(node) if b[0].lineno <= at <= (_end(b))), None)
    return path


def _first(node: ast.With | ast.AsyncWith) -> int:
    return max(node.body[0].lineno, node.lineno + 1)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if block:
            yield block
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def _end(block: list[ast.stmt]) -> int:
    return block[-1].end_lineno or block[-1].lineno


def _computes(statement: ast.stmt) -> bool:
    for node in ast.walk(statement):
        if isinstance(node, (ast.BinOp, ast.AugAssign)):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = name or (node.func.id if isinstance(node.func, ast.Name) else "")
            if name not in _PLAIN:
                return True
    return False
