"""One fix at a time, then all that are proven together."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gradient_doctor.findings import Finding
from gradient_doctor.fix import judge as judging
from gradient_doctor.fix.judge import Verdict
from gradient_doctor.fix.recipes import RECIPES, proposals
from gradient_doctor.fix.recipes.proposal import Proposal
from gradient_doctor.fix.source import Edit, Source, UnsureError
from gradient_doctor.fix.trial import Plan, Trial

TRIES = 6  # proposals that are tried for one finding
Run = Callable[[Plan, Mapping[str, bytes]], Trial]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A proven change, with what its trial showed."""

    findings: tuple[Finding, ...]
    what: tuple[str, ...]
    cautions: tuple[str, ...]
    edits: Mapping[str, tuple[Edit, ...]]
    diff: str
    after: Trial
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A finding, and its fix or the reasons why none is offered."""

    finding: Finding
    fix: Fix | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    before: Trial
    attempts: tuple[Attempt, ...] = ()
    whole: Fix | None = None  # every proven fix that also works beside the others
    left_out: tuple[str, ...] = ()  # fixes that are proven alone and fail beside the others
    sources: Mapping[str, Source] = field(default_factory=dict)


class Search:
    """The sources that may be edited, and the trials of one examination."""

    def __init__(self, plan: Plan, run: Run, say: Say) -> None:
        self.plan = plan
        self.sources: dict[str, Source] = {}
        self._run = run
        self._say = say

    def outcome(self) -> Outcome:
        self._say(f"running the script as it is ({self.plan.steps} steps at most)")
        before = self._run(self.plan, {})
        attempts: list[Attempt] = []
        for finding in before.serious:
            attempts.append(self._attempt(finding, before, attempts))
        whole, left_out = self._together(before, attempts)
        return Outcome(
            before=before,
            attempts=tuple(attempts),
            whole=whole,
            left_out=left_out,
            sources=self.sources,
        )

    def _attempt(self, finding: Finding, before: Trial, earlier: Sequence[Attempt]) -> Attempt:
        for other in earlier:  # the same cause under another name
            if other.fix is not None and finding in other.fix.verdict.gone:
                return Attempt(finding=finding, fix=other.fix)
        reasons: list[str] = []
        try:
            source = self._source(finding)
            for number, proposal in enumerate(proposals(finding, source)):
                if number == TRIES:
                    break
                fix = self._try(finding, before, source, proposal, reasons)
                if fix is not None:
                    return Attempt(finding=finding, fix=fix)
        except UnsureError as why:
            reasons.append(f"{why}.")
        if not reasons:
            reasons.append("the line does not have the form that the recipe changes.")
        return Attempt(finding=finding, reasons=tuple(reasons))

    def _source(self, finding: Finding) -> Source:
        if finding.number not in RECIPES:
            raise UnsureError("there is no mechanical fix for this class")
        if finding.site is None:
            raise UnsureError("the finding names no line")
        path = finding.site.file
        if not any(path.startswith(root + os.sep) for root in self.plan.roots) or _installed(path):
            raise UnsureError(f"the line is in {path}, which is not part of this project")
        if path not in self.sources:
            self.sources[path] = Source.read(path)
        return self.sources[path]

    def _try(
        self,
        finding: Finding,
        before: Trial,
        source: Source,
        proposal: Proposal,
        reasons: list[str],
    ) -> Fix | None:
        self._say(f"trying: {proposal.what}")
        try:
            fix = self._tried(
                [finding],
                before,
                {source.path: proposal.edits},
                [proposal.what],
                [proposal.caution],
            )
        except UnsureError as why:
            reasons.append(f"{proposal.what} Not tried: {why}.")
            return None
        if not fix.verdict.proven:
            reasons.append(f"{proposal.what} Tried, and not offered: {fix.verdict.reason}.")
            return None
        return fix

    def _tried(
        self,
        findings: Sequence[Finding],
        before: Trial,
        edits: Mapping[str, tuple[Edit, ...]],
        what: Sequence[str],
        cautions: Sequence[str],
    ) -> Fix:
        texts = {path: self.sources[path].edited(changes) for path, changes in edits.items()}
        content = {path: self.sources[path].encoded(text) for path, text in texts.items()}
        after = self._run(self.plan, content)
        lines = {p: judging.old_lines(self.sources[p].text, text) for p, text in texts.items()}
        return Fix(
            findings=tuple(findings),
            what=tuple(what),
            cautions=tuple(dict.fromkeys(c for c in cautions if c)),
            edits=dict(edits),
            diff="".join(diff_of(self.sources[p], text) for p, text in texts.items()),
            after=after,
            verdict=judging.judge(findings, before, after, lines),
        )

    def _together(
        self, before: Trial, attempts: Sequence[Attempt]
    ) -> tuple[Fix | None, tuple[str, ...]]:
        """Add one proven fix after the other, as long as all of their findings stay away."""
        single: list[Fix] = []
        for attempt in attempts:
            if attempt.fix is not None and not any(attempt.fix is fix for fix in single):
                single.append(attempt.fix)
        whole: Fix | None = None
        left_out: list[str] = []
        for fix in single:
            if whole is None:
                whole = fix
                continue
            self._say(f"trying together: {' '.join([*whole.what, *fix.what])}")
            edits = {path: tuple(changes) for path, changes in whole.edits.items()}
            for path, changes in fix.edits.items():
                edits[path] = (*edits.get(path, ()), *changes)
            try:
                both = self._tried(
                    [*whole.findings, *fix.findings],
                    before,
                    edits,
                    [*whole.what, *fix.what],
                    [*whole.cautions, *fix.cautions],
                )
            except UnsureError as why:
                left_out.append(f"{' '.join(fix.what)} Left out beside the others: {why}.")
                continue
            if both.verdict.proven:
                whole = both
            else:
                why = both.verdict.reason
                left_out.append(f"{' '.join(fix.what)} Left out beside the others: {why}.")
        return whole, tuple(left_out)


def _installed(path: str) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in path.split(os.sep))


def diff_of(source: Source, text: str) -> str:
    """A unified diff that `patch -p1` and `git apply` read, with paths from the working folder."""
    path = os.path.relpath(source.path)
    name = source.path if path.startswith(os.pardir) else path
    lines = difflib.unified_diff(
        source.text.splitlines(keepends=True),
        text.splitlines(keepends=True),
        f"a/{name}",
        f"b/{name}",
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
