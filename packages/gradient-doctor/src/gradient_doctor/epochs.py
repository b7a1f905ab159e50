"""How long a program says that its loops are, and a schedule: read from source and scheduler.

`for epoch in range(20)` around a loop over batches, and MultiStepLR with milestones 10 and 15: such
a schedule counts epochs, wherever it is stepped.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from gradient_doctor.findings import Site
from gradient_doctor.slips import tree_of

_EPOCH = re.compile(r"^(e|ep|epoch|epochs|_?epoch_?\w*|cur_epoch|current_epoch)$", re.IGNORECASE)


def horizon(scheduler: Any) -> int:
    """The number of its steps after which a schedule has done what it is for; 0 if it has none."""
    kinds = torch.optim.lr_scheduler
    if type(scheduler) is kinds.StepLR:
        return int(scheduler.step_size)
    if type(scheduler) is kinds.MultiStepLR:
        return max(map(int, scheduler.milestones), default=0)
    if type(scheduler) is kinds.CosineAnnealingLR:
        return int(scheduler.T_max)
    if type(scheduler) is kinds.PolynomialLR:
        return int(scheduler.total_iters)
    return 0


def epochs_around(site: Site) -> int:
    """How often the loop over epochs runs that stands around the loop of a line; 0 if unknown."""
    tree = tree_of(site.file)
    loops = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, (ast.For, ast.While))
        and node.lineno < site.line <= (node.end_lineno or node.lineno)
    ]
    loops.sort(key=lambda node: node.lineno)
    for outer in loops[:-1]:
        target = outer.target if isinstance(outer, ast.For) else None
        if isinstance(target, ast.Name) and _EPOCH.match(target.id) and tree is not None:
            return _length(tree, outer.iter) if isinstance(outer, ast.For) else 0
    return 0


def _length(tree: ast.Module, over: ast.expr) -> int:
    """Of `range(n)` and `range(1, n + 1)`, also within tqdm and the like."""
    while isinstance(over, ast.Call) and getattr(over.func, "id", "") != "range" and over.args:
        over = over.args[0]
    if not isinstance(over, ast.Call) or not over.args:
        return 0
    ends = [_number(tree, argument) for argument in over.args[:2]]
    if len(ends) == 1:
        return ends[0] or 0
    return max(0, (ends[1] or 0) - (ends[0] or 0))


def _number(tree: ast.Module, node: ast.expr) -> int | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _number(tree, node.left), _number(tree, node.right)
        return None if left is None or right is None else left + right
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    values = _values_of(tree, name) if name is not None else set()
    return next(iter(values)) if len(values) == 1 else None


def _values_of(tree: ast.Module, name: str) -> set[int]:
    """The whole numbers that the program gives to a name: constants, defaults, arguments."""
    values: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts))
                for one, value in pairs:
                    own = one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", None)
                    values += [value] if own == name else []
        elif isinstance(node, ast.keyword) and node.arg == name:
            values.append(node.value)
        elif isinstance(node, ast.FunctionDef):
            words = [*node.args.posonlyargs, *node.args.args][-len(node.args.defaults) or None :]
            pairs_of = zip(words, node.args.defaults)
            values += [default for word, default in pairs_of if word.arg == name]
    numbers = {v.value for v in values if isinstance(v, ast.Constant)}
    return {number for number in numbers if type(number) is int}
