"""Countdown: reach a target with every given number used once; made here, needs no download.

A problem is three numbers from 1 to 9 and a target, written in words of a small vocabulary:

    numbers 3 7 5 target 26 :
    <think> 7 - 5 = 2 ; 2 * 3 = 6 no ; 3 * 7 = 21 ; 21 + 5 = 26 yes </think>
    <answer> ( 3 * 7 ) + 5 </answer>

The trace is a search: each attempt combines two numbers, then the third. There are several ways
to search and usually several to succeed, so a policy trained on such traces has entropy to lose.
Every intermediate value stays between 0 and 99, so that each number is one word.
"""

from __future__ import annotations

import ast
import operator
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations

LARGEST = 99
"""The largest number that is a word; attempts that leave 0..99 are not made."""

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
WORDS = (
    *("numbers", "target", ":", "<think>", "</think>", "<answer>", "</answer>"),
    *("yes", "no", ";", "=", "(", ")", *_OPERATIONS),
    *(str(number) for number in range(LARGEST + 1)),
)


@dataclass(frozen=True, kw_only=True)
class Countdown:
    """The numbers, each to be used once, and what they should make."""

    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return f"numbers {' '.join(map(str, self.numbers))} target {self.target} :"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Two operations in a row: first on two numbers, then on the result and the third."""

    trace: str
    expression: str
    value: int


@cache  # a stream of problems meets the same three numbers again and again
def attempts(numbers: tuple[int, ...]) -> tuple[Attempt, ...]:
    """Every way to combine three numbers whose values stay between 0 and LARGEST."""
    by_expression: dict[str, Attempt] = {}
    for a, b, c in permutations(numbers):
        for first, combine in _OPERATIONS.items():
            middle = combine(a, b)
            if not 0 <= middle <= LARGEST:
                continue
            for second, finish in _OPERATIONS.items():
                for left, right, expression in (
                    (middle, c, f"( {a} {first} {b} ) {second} {c}"),
                    (c, middle, f"{c} {second} ( {a} {first} {b} )"),
                ):
                    value = finish(left, right)
                    if 0 <= value <= LARGEST:
                        trace = f"{a} {first} {b} = {middle} ; {left} {second} {right} = {value}"
                        by_expression[trace] = Attempt(
                            trace=trace, expression=expression, value=value
                        )
    return tuple(by_expression.values())


def problems(seed: int | str, *, values: tuple[int, int] = (1, 9)) -> Iterator[Countdown]:
    """Solvable problems without end, the same ones for the same seed."""
    rng = random.Random(f"countdown {seed}")
    while True:
        numbers = tuple(rng.randint(*values) for _ in range(3))
        target = rng.choice(attempts(numbers)).value
        if target > max(numbers):
            yield Countdown(numbers=numbers, target=target)


def search_trace(problem: Countdown, rng: random.Random, *, longest: int = 3) -> str:
    """A written search: up to `longest` attempts at random, the last of which succeeds."""
    ways = attempts(problem.numbers)
    right = [way for way in ways if way.value == problem.target]
    wrong = [way for way in ways if way.value != problem.target]
    failed = [rng.choice(wrong) for _ in range(rng.randrange(longest))] if wrong else []
    last = rng.choice(right)
    steps = [*(f"{way.trace} no ;" for way in failed), f"{last.trace} yes"]
    return f"<think> {' '.join(steps)} </think> <answer> {last.expression} </answer>"


def solved(completion: str, problem: Countdown) -> bool:
    """Whether the last answer uses every number once and makes the target."""
    answers = re.findall(r"<answer>(.*?)</answer>", completion, flags=re.DOTALL)
    if not answers:
        return False
    try:
        value, used = _evaluate(answers[-1].strip())
    except ArithmeticError:
        return False
    return value == problem.target and Counter(used) == Counter(problem.numbers)


class NotArithmeticError(ArithmeticError):
    """The text is not an expression of + - * and whole numbers."""


def _evaluate(text: str) -> tuple[int, list[int]]:
    """Value and numbers of an expression; it is parsed, never executed."""
    if len(text) > 200:
        raise NotArithmeticError(f"{len(text)} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # `1 (2)`: refused below
            tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotArithmeticError(text) from error
    used: list[int] = []

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return node.value
        symbol = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}.get(
            type(node.op) if isinstance(node, ast.BinOp) else type(None)
        )
        if symbol is None:
            raise NotArithmeticError(text)
        assert isinstance(node, ast.BinOp)
        return _OPERATIONS[symbol](value(node.left), value(node.right))

    return value(tree.body), used
