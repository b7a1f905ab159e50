"""Calls in the wrong place of the loop: zero_grad, step, unscale_ and clip, schedulers, train()."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from gradient_doctor.findings import Finding
from gradient_doctor.fix.recipes.proposal import (
    Proposal,
    calls_in,
    is_method,
    is_scheduler,
    last_name,
    method_calls,
    optimizer_steps,
    owner,
)
from gradient_doctor.fix.source import LOOPS, Edit, Source, UnsureError, inner_statements

_CLIP = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_")


def _same_function(source: Source, a: ast.stmt, b: ast.stmt) -> bool:
    return source.function(a) is source.function(b)


def _holds_call(statement: ast.stmt, method: str) -> bool:
    return any(is_method(s, method) for s in [statement, *inner_statements(statement)])


def move_zero_grad(finding: Finding, source: Source) -> Iterator[Proposal]:
    """To the step behind the condition if gradients are accumulated; else before the backward."""
    if finding.site is None:
        return
    statement = source.statement(finding.site.line)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or last_name(call.func) != "zero_grad":
        raise UnsureError(f"line {finding.site.line} of {source.path} is no zero_grad() of its own")
    body, at = source.block(statement)
    code = source.code(call)
    for step, _ in optimizer_steps(source):
        inside = any(up is not None and up in body for up in [step, *source.above(step)])
        if inside and step not in body and _same_function(source, step, statement):
            yield Proposal(
                what=f"Move {code} behind the step, where the accumulated gradient was used.",
                edits=(source.remove(statement), source.insert_after(step, code)),
            )
    before = [s for s in body[:at] if _holds_call(s, "backward")]
    if before:
        yield Proposal(
            what=f"Move {code} before the first backward.",
            edits=(source.remove(statement), source.insert_before(before[0], code)),
        )


def clear_gradients(finding: Finding, source: Source) -> Iterator[Proposal]:
    """`zero_grad()` before the backward that meets old gradients; or behind the step."""
    if finding.site is None:
        return
    statement = source.statement(finding.site.line)
    line, steps = _clearing(finding, source, statement)
    if is_method(statement, "backward"):
        yield Proposal(
            what=f"Call {line} before this backward.",
            edits=(source.insert_before(statement, line),),
        )
    for step in steps:
        yield Proposal(
            what=f"Call {line} after the step.", edits=(source.insert_after(step, line),)
        )


def clear_before_own_backward(finding: Finding, source: Source) -> Iterator[Proposal]:
    """Another loss has left gradients: `zero_grad()` before the backward that the step is for."""
    for site in finding.related:
        statement = source.statement(site.line) if site.file == source.path else None
        if statement is not None and is_method(statement, "backward"):
            line, _ = _clearing(finding, source, statement)
            yield Proposal(
                what=f"Call {line} before its own backward.",
                edits=(source.insert_before(statement, line),),
            )
            return


def _clearing(finding: Finding, source: Source, statement: ast.stmt) -> tuple[str, list[ast.stmt]]:
    """`opt.zero_grad()`, spelled as the script spells the optimizer, and the steps of it."""
    steps = optimizer_steps(source)
    words = set(re.findall(r"(\w+)\.zero_grad\(\)", finding.fix))
    named = [s for s in steps if s[1].rpartition(".")[2] in words]
    chosen = named or [s for s in steps if _same_function(source, s[0], statement)]
    codes = list(dict.fromkeys(code for _, code in chosen))
    if len(codes) != 1:
        raise UnsureError(f"the optimizer of line {statement.lineno} is not certain")
    return f"{codes[0]}.zero_grad()", [s for s, code in chosen if code == codes[0]]


def take_the_step(finding: Finding, source: Source) -> Iterator[Proposal]:
    """`optimizer.step()` after the one backward of a loop that never calls it."""
    if finding.site is None or optimizer_steps(source):
        return
    statement = source.statement(finding.site.line)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        raise UnsureError(f"line {finding.site.line} of {source.path} does not make the optimizer")
    name = source.code(statement.targets[0])
    backwards = [s for s, _ in method_calls(source, "backward")]
    if len(backwards) != 1:
        raise UnsureError(f"{len(backwards)} backwards: where to step is not certain")
    last = backwards[0]
    made_in = source.function(statement)
    is_local = isinstance(statement.targets[0], ast.Name) and made_in is not None
    if is_local and source.function(last) is not made_in:
        raise UnsureError(f"{name} is not known where backward is called")
    body, at = source.block(last)
    for following in body[at + 1 :]:
        if not any(last_name(c.func) in _CLIP for c in calls_in(following)):
            break
        last = following
    yield Proposal(
        what=f"Call {name}.step() after backward.",
        edits=(source.insert_after(last, f"{name}.step()"),),
    )


def unscale_before_clip(finding: Finding, source: Source) -> Iterator[Proposal]:
    """Scaled gradients are unscaled before they are clipped."""
    if finding.site is None:
        return
    lines = [s.line for s in (finding.site, *finding.related) if s.file == source.path]
    clips = [
        s
        for s in (source.statement(line) for line in lines)
        if any(last_name(call.func) in _CLIP for call in calls_in(s))
    ]
    if not clips:
        raise UnsureError(f"line {finding.site.line} of {source.path} clips no gradients")
    clip = clips[0]
    body, at = source.block(clip)
    for later in body[at + 1 :]:
        if is_method(later, "unscale_"):
            text = source.moved_text(later, clip)
            start, _ = source.whole_lines(clip)
            yield Proposal(
                what="Unscale the gradients before they are clipped.",
                edits=(source.remove(later), Edit(start=start, end=start, text=text)),
            )
            return
    for step, call in method_calls(source, "step"):
        if len(call.args) == 1 and _same_function(source, step, clip):
            code = f"{source.code(owner(call))}.unscale_({source.code(call.args[0])})"
            yield Proposal(
                what="Unscale the gradients before they are clipped.",
                edits=(source.insert_before(clip, code),),
            )
            return


def move_scheduler(finding: Finding, source: Source) -> Iterator[Proposal]:
    """Behind the optimizer's step; or out of the inner loop, to once an epoch."""
    lines = [s.line for s in (finding.site, *finding.related) if s and s.file == source.path]
    seen: set[ast.stmt] = set()
    for line in lines:
        statement = source.statement(line)
        if statement in seen or not is_method(statement, "step"):
            continue
        seen.add(statement)
        call = statement.value  # pyright: ignore[reportAttributeAccessIssue]
        if not is_scheduler(source, owner(call)):
            continue
        code = source.code(statement)
        body, at = source.block(statement)
        steps = [s for s, _ in optimizer_steps(source)]
        later = [s for s in body[at + 1 :] if s in steps]
        if later:
            yield Proposal(
                what=f"Call {code} after the optimizer's step.",
                edits=(source.remove(statement), source.insert_after(later[-1], code)),
            )
        loop = next((up for up in source.above(statement) if isinstance(up, LOOPS)), None)
        if loop is not None and any(
            isinstance(up, (*LOOPS, ast.FunctionDef)) for up in source.above(loop)
        ):
            yield Proposal(
                what=f"Call {code} once after the inner loop.",
                edits=(source.remove(statement), source.insert_after(loop, code)),
            )


def back_to_train(finding: Finding, source: Source) -> Iterator[Proposal]:
    """`.train()` at the end of the function, or block, that called `.eval()`."""
    if finding.site is None:
        return
    statement = source.statement(finding.site.line)
    if not is_method(statement, "eval"):
        raise UnsureError(f"line {finding.site.line} of {source.path} calls no eval()")
    call = statement.value  # pyright: ignore[reportAttributeAccessIssue]
    code = f"{source.code(owner(call))}.train()"
    body, _ = source.block(statement)
    last = body[-1]
    edit = (
        source.insert_before(last, code)
        if isinstance(last, (ast.Return, ast.Continue, ast.Break))
        else source.insert_after(last, code)
    )
    yield Proposal(what=f"Call {code} after the evaluation.", edits=(edit,))
