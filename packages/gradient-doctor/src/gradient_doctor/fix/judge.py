"""Did the fix help? Two trials of the same steps, compared in the sense of the finding's class.

A fix is proven if all of this holds:

- the finding is gone, and no other of warning or above has come;
- the script runs at least as far, and its losses are finite;
- no parameter that moved stands still now;
- and, by class: parameters that stood still now move; or the script no longer crashes; or the
  updates are others and the loss falls.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradient_doctor.findings import Finding, listed
from gradient_doctor.fix.trial import Trial

# classes whose parameters stood still, or missed a term's gradient
MOVES = {1, 2, 3, 4, 6, 7, 8, 10, 11, 21, 23}
DETACHED = {12, 14}  # mended by a cut: it must not be the parameters' only way to the loss
_SAME = 1e-12  # relative: two movements that are one


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What changed, and whether that proves the fix."""

    proven: bool
    reason: str  # why not; empty if proven
    gone: tuple[Finding, ...]
    new: tuple[Finding, ...]
    now_move: tuple[str, ...]
    move_differently: tuple[str, ...]
    stopped: tuple[str, ...]


def judge(
    targets: Sequence[Finding],
    before: Trial,
    after: Trial,
    lines: Mapping[str, Mapping[int, int]],
) -> Verdict:
    """`lines` maps each changed file's new line numbers to the old ones."""
    remaining, new = _matched(before.serious, after.serious, lines)
    gone = tuple(f for f in before.serious if f not in remaining)
    moving = {name for name, distance in after.moved.items() if distance > 0}
    moved = {name for name, distance in before.moved.items() if distance > 0}
    now_move = tuple(name for name in after.moved if name in moving - moved)
    stopped = tuple(name for name in before.moved if name in moved - moving)
    differently = tuple(
        name
        for name in after.moved
        if name in moved & moving
        and not math.isclose(before.moved[name], after.moved[name], rel_tol=_SAME)
    )
    reason = (
        _ended_badly(before, after)
        or _still_there(targets, remaining, new)
        or (f"it stops {listed(stopped)}" if stopped else "")
        or _not_finite(before, after)
        or next(
            filter(None, (_no_better(t, before, after, now_move, differently) for t in targets)), ""
        )
    )
    return Verdict(
        proven=not reason,
        reason=reason,
        gone=gone,
        new=new,
        now_move=now_move,
        move_differently=differently,
        stopped=stopped,
    )


def _ended_badly(before: Trial, after: Trial) -> str:
    if after.error is not None and after.error != before.error:
        return f"the changed script ends with {_first_line(after.error)}"
    if after.error is not None:
        return f"the script still ends with {_first_line(after.error)}"
    if after.timed_out and not before.timed_out:
        return f"the changed script reached {after.steps} steps within the time limit"
    if after.steps < before.steps:
        return f"the changed script takes {after.steps} steps instead of {before.steps}"
    return ""


def _still_there(
    targets: Sequence[Finding], remaining: Sequence[Finding], new: Sequence[Finding]
) -> str:
    for target in targets:
        if target in remaining:
            return "the finding is still there"
    if new:
        return f"it brings a new finding: {new[0].slug}: {new[0].what.rstrip('.')}"
    return ""


def _not_finite(before: Trial, after: Trial) -> str:
    if not all(math.isfinite(v) for v in after.main_loss):
        return "the loss is not finite"
    if not all(math.isfinite(v) for v in after.moved.values()):
        return "parameters are not finite"
    return ""


def _no_better(
    target: Finding,
    before: Trial,
    after: Trial,
    now_move: tuple[str, ...],
    differently: tuple[str, ...],
) -> str:
    if target.number in DETACHED:
        idle = [p for p in target.parameters if after.moved.get(p) == 0]
        if idle:
            return f"{listed(idle)} gets no gradient any more"
    if before.error is not None:
        return ""  # it crashed, and now it runs
    if target.number in MOVES:
        still = [p for p in target.parameters if before.moved.get(p, 0.0) == 0 and p in after.moved]
        if still and not set(still) <= set(now_move):
            return f"{listed([p for p in still if p not in now_move])} still does not move"
        if not still and not now_move and not differently:
            return "no parameter moves otherwise than before"
        return ""
    if not now_move and not differently:
        return "no parameter moves otherwise than before"
    if not after.main_loss:
        return "no loss was seen, so whether it falls is not known"
    start, end = ends(after.main_loss)
    was = ends(before.main_loss)[1]
    if not (end < start or (math.isfinite(was) and end <= was) or not math.isfinite(was)):
        return f"the loss does not fall ({start:.4g} to {end:.4g})"
    return ""


def ends(losses: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last quarter: single batches are noisy."""
    if not losses:
        return math.nan, math.nan
    quarter = max(1, len(losses) // 4)
    return sum(losses[:quarter]) / quarter, sum(losses[-quarter:]) / quarter


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else text


def _matched(
    old: Sequence[Finding], new: Sequence[Finding], lines: Mapping[str, Mapping[int, int]]
) -> tuple[list[Finding], tuple[Finding, ...]]:
    """The findings that remain, and those that have come: by line first, then by parameters.

    A finding of the same class and parameters behind another line was moved, not mended.
    """
    remaining: list[Finding] = []
    unmatched: list[Finding] = []
    for g in new:
        same = next((f for f in old if f not in remaining and _same_line(f, g, lines)), None)
        if same is None:
            unmatched.append(g)
        else:
            remaining.append(same)
    come = []
    for g in unmatched:
        moved = [f for f in old if f not in remaining and f.number == g.number]
        same = next((f for f in moved if {*f.parameters} & {*g.parameters}), None)
        if same is None:
            come.append(g)
        else:
            remaining.append(same)
    return remaining, tuple(come)


def _same_line(old: Finding, new: Finding, lines: Mapping[str, Mapping[int, int]]) -> bool:
    if old.number != new.number:
        return False
    if old.site is None or new.site is None or old.site.file != new.site.file:
        return old.site is None and new.site is None and old.parameters == new.parameters
    changed = lines.get(new.site.file)
    return old.site.line == (new.site.line if changed is None else changed.get(new.site.line))


def old_lines(before: str, after: str) -> dict[int, int]:
    """For each line of the new text that is in the old one too, its old number."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return {
        block.b + k + 1: block.a + k + 1
        for block in matcher.get_matching_blocks()
        for k in range(block.size)
    }
