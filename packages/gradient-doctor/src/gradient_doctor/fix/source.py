"""A source file, its syntax tree, and edits of its text at places that the tree gives.

The tree says where; the text is cut and pasted there, so that formatting and comments stay as the
author wrote them. An edit that would not be certain raises `UnsureError`: nothing is offered then.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_NEWLINE = re.compile(r"\r\n|\r|\n")
_BLOCKS = ("body", "orelse", "finalbody")


class UnsureError(Exception):
    """The place or the text of an edit is not certain; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Characters `start` to `end` of the text become `text`."""

    start: int
    end: int
    text: str


class Source:
    """One file as it was read; offsets count characters."""

    def __init__(self, path: str, content: bytes) -> None:
        self.path = path
        self.content = content
        try:
            self.encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
            self.text = content.decode(self.encoding)
            self.tree = ast.parse(self.text)
        except (SyntaxError, UnicodeDecodeError, ValueError) as wrong:
            raise UnsureError(f"{path} cannot be parsed: {wrong}") from None
        self._starts = [0, *(match.end() for match in _NEWLINE.finditer(self.text))]
        self._parents = {
            child: parent
            for parent in ast.walk(self.tree)
            for child in ast.iter_child_nodes(parent)
        }

    @classmethod
    def read(cls, path: str) -> Source:
        return cls(path, Path(path).read_bytes())

    @cached_property
    def newline(self) -> str:
        match = _NEWLINE.search(self.text)
        return "\n" if match is None else match.group()

    @cached_property
    def lines(self) -> list[str]:
        """Without their ends; the first line is number 1."""
        return _NEWLINE.split(self.text)

    # places

    def line_start(self, line: int) -> int:
        return self._starts[line - 1] if line <= len(self._starts) else len(self.text)

    def offset(self, line: int, column: int) -> int:
        """Of a place in the tree, whose columns count bytes of UTF-8."""
        head = self.lines[line - 1].encode()[:column].decode()
        return self.line_start(line) + len(head)

    def start(self, node: ast.AST) -> int:
        return self.offset(node.lineno, node.col_offset)  # pyright: ignore[reportAttributeAccessIssue]

    def end(self, node: ast.AST) -> int:
        return self.offset(node.end_lineno, node.end_col_offset)  # pyright: ignore[reportAttributeAccessIssue]

    def code(self, node: ast.AST) -> str:
        return self.text[self.start(node) : self.end(node)]

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around it, the innermost first."""
        parent = self._parents.get(node)
        while parent is not None:
            yield parent
            parent = self._parents.get(parent)

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        return next((up for up in self.above(node) if isinstance(up, FUNCTIONS)), None)

    def statements(self) -> Iterator[ast.stmt]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.stmt))

    def statement(self, line: int) -> ast.stmt:
        """The statement at a line; of a compound one its head, of a function its decorators too."""
        around = [s for s in self.statements() if line in head_lines(s)]
        if not around:
            raise UnsureError(f"no statement at line {line} of {self.path}")
        return min(around, key=lambda s: (len(head_lines(s)), -s.col_offset))

    def block(self, statement: ast.stmt) -> tuple[list[ast.stmt], int]:
        """The statements among which it stands, and its place there."""
        parent = self._parents[statement]
        for name in (*_BLOCKS, "handlers"):
            body = getattr(parent, name, None)
            if isinstance(body, list) and statement in body:
                return body, body.index(statement)
        raise UnsureError(f"line {statement.lineno} of {self.path} stands in no block of its own")

    # edits

    def replace(self, node: ast.AST, text: str) -> Edit:
        return Edit(start=self.start(node), end=self.end(node), text=text)

    def indentation(self, statement: ast.stmt) -> str:
        line = self.lines[statement.lineno - 1]
        indent = line[: len(line) - len(line.lstrip())]
        if self.line_start(statement.lineno) + len(indent) != self._first(statement):
            raise UnsureError(
                f"line {statement.lineno} of {self.path} holds more than one statement"
            )
        return indent

    def _first(self, statement: ast.stmt) -> int:
        return self.start(statement)

    def whole_lines(self, statement: ast.stmt) -> tuple[int, int]:
        """From the start of its first line to the end of its last, with decorators."""
        self.indentation(statement)
        last = statement.end_lineno or statement.lineno
        after = self.text[self.end(statement) : self.line_start(last + 1)].strip()
        if after and not after.startswith("#"):
            raise UnsureError(f"line {last} of {self.path} holds more than one statement")
        first = min(
            [statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))]
        )
        return self.line_start(first), self.line_start(last + 1)

    def remove(self, statement: ast.stmt) -> Edit:
        """Its lines go; a block that would be empty keeps a `pass`."""
        start, end = self.whole_lines(statement)
        body, _ = self.block(statement)
        text = f"{self.indentation(statement)}pass{self.newline}" if len(body) == 1 else ""
        return Edit(start=start, end=end, text=text)

    def insert_before(
        self, statement: ast.stmt, code: str, *, like: ast.stmt | None = None
    ) -> Edit:
        start, _ = self.whole_lines(statement)
        line = f"{self.indentation(like or statement)}{code}{self.newline}"
        return Edit(start=start, end=start, text=line)

    def insert_after(self, statement: ast.stmt, code: str, *, like: ast.stmt | None = None) -> Edit:
        _, end = self.whole_lines(statement)
        line = f"{self.indentation(like or statement)}{code}{self.newline}"
        if end == len(self.text) and not self.text.endswith(("\n", "\r")):
            line = self.newline + line.removesuffix(self.newline)
        return Edit(start=end, end=end, text=line)

    def moved_text(self, statement: ast.stmt, like: ast.stmt) -> str:
        """The lines of a statement, indented as another one is."""
        start, end = self.whole_lines(statement)
        text = self.text[start:end]
        if not text.endswith(("\n", "\r")):
            text += self.newline
        return self._indented(
            text, statement.lineno, self.indentation(statement), self.indentation(like)
        )

    def unwrap(self, statement: ast.With | ast.AsyncWith) -> Edit:
        """A `with` block without its head: the body moves to the left."""
        indent = self.indentation(statement)
        first = statement.body[0]
        if first.lineno == statement.lineno:
            raise UnsureError(f"line {statement.lineno} of {self.path} holds block and body")
        body_indent = self.indentation(first)
        start, end = self.whole_lines(statement)
        head_end = max(item.context_expr.end_lineno or 0 for item in statement.items)
        colon = next(
            (n for n in range(head_end, first.lineno) if _ends_head(self.lines[n - 1])), None
        )
        if colon is None:
            raise UnsureError(
                f"the head of the block at line {statement.lineno} cannot be told apart"
            )
        body = self.text[self.line_start(colon + 1) : end]
        return Edit(start=start, end=end, text=self._indented(body, colon + 1, body_indent, indent))

    def _indented(self, text: str, first_line: int, old: str, new: str) -> str:
        """Other indentation; lines inside of a string are text, and stay."""
        inside = self._inside_strings
        parts = [0, *(match.end() for match in _NEWLINE.finditer(text)), len(text)]
        out = []
        for number, (a, b) in enumerate(pairwise(parts), start=first_line):
            line = text[a:b]
            if number in inside or not line.strip():
                out.append(line)
            elif line.startswith(old):
                out.append(new + line[len(old) :])
            elif line.lstrip().startswith("#") or number != first_line:
                out.append(line)  # a comment, or a continuation, that stands further left
            else:
                raise UnsureError(f"line {number} of {self.path} is indented in its own way")
        return "".join(out)

    @cached_property
    def _inside_strings(self) -> set[int]:
        lines: set[int] = set()
        for node in ast.walk(self.tree):
            text = isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
            )
            if text:
                first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None)
                lines.update(range(first + 1, (last or first) + 1))
        return lines

    def edited(self, edits: Iterable[Edit]) -> str:
        """The text after these edits; `UnsureError` if they overlap or give no valid program."""
        ordered = sorted(set(edits), key=lambda e: (e.start, e.end))
        for one, following in pairwise(ordered):
            if following.start < one.end:
                raise UnsureError(f"two edits of {self.path} overlap")
        text, at = [], 0
        for edit in ordered:
            text += [self.text[at : edit.start], edit.text]
            at = edit.end
        result = "".join([*text, self.text[at:]])
        try:
            ast.parse(result)
        except SyntaxError as wrong:
            raise UnsureError(f"the edit of {self.path} is no Python: {wrong}") from None
        return result

    def encoded(self, text: str) -> bytes:
        return text.encode(self.encoding)


def head_lines(statement: ast.stmt) -> range:
    """The lines of a simple statement; of a compound one, those before its body."""
    body = getattr(statement, "body", None)
    last = statement.end_lineno or statement.lineno
    if isinstance(body, list) and body:
        last = max(statement.lineno, body[0].lineno - 1)
    first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
    return range(first, last + 1)


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement; of a compound one those of its head."""
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.stmt, ast.ExceptHandler)):
                todo.append(child)


def inner_statements(statement: ast.AST) -> Iterator[ast.stmt]:
    """All statements inside of it, not itself, in the order of the text."""
    inside = [n for n in ast.walk(statement) if isinstance(n, ast.stmt) and n is not statement]
    return iter(sorted(inside, key=lambda n: (n.lineno, n.col_offset)))


def name_of(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute; the last parts of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = name_of(node.value)
        return f"{head}.{node.attr}" if head else node.attr
    return ""


def last_name(node: ast.AST) -> str:
    return name_of(node).rpartition(".")[2]


def _ends_head(line: str) -> bool:
    return line.split("#")[0].rstrip().endswith(":")
