"""What the doctor says: the class of the fault, its line, parameters, cause and fix."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gradient_doctor.classes import CLASSES

_SHOWN = 6


class Severity(enum.IntEnum):
    """How grave a finding is.

    A note is worth knowing, a warning costs something, an error means that nothing is learnt.

    Examples:
        >>> Severity.ERROR > Severity.WARNING > Severity.NOTE
        True
    """

    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True)
class Site:
    """A line of source, and the path of the module whose forward was running.

    Args:
        file: The file.
        line: The line.
        function: In which function.
        module: Path of the module, such as "policy.layers.0".

    Examples:
        >>> str(Site("train.py", 12, module="policy.head"))
        'train.py:12 in policy.head'
    """

    file: str
    line: int
    function: str = ""
    module: str = ""

    def __str__(self) -> str:
        inside = f" in {self.module}" if self.module else ""
        return f"{self.file}:{self.line}{inside}"

    @property
    def place(self) -> tuple[str, int]:
        """The line alone: one line may run in many modules."""
        return self.file, self.line


@dataclass(frozen=True)
class Finding:
    """One diagnosis: what is wrong, where, why, and how to mend it.

    Args:
        number: Its class (docs/doctor.md); 0 is a blind spot of the doctor.
        severity: How grave it is.
        what: What was seen.
        why: The cause.
        fix: What to do.
        site: The line.
        parameters: Names of the parameters behind it.
        step: The training step in which it was seen first.
        related: Other lines that matter.

    Examples:
        >>> print(Finding(22, Severity.WARNING, "The gradient doubles.", "A sum.", "Use a mean."))
        WARNING [22 magnitude] The gradient doubles.
          why:   A sum.
          fix:   Use a mean.
    """

    number: int
    severity: Severity
    what: str
    why: str
    fix: str
    site: Site | None = None
    parameters: tuple[str, ...] = ()
    step: int | None = None
    related: tuple[Site, ...] = ()

    @property
    def slug(self) -> str:
        return CLASSES[self.number].slug

    @property
    def title(self) -> str:
        return CLASSES[self.number].title

    @property
    def key(self) -> tuple[Any, ...]:
        """One culprit line is one finding per class; each blind spot is one of its own."""
        if self.number and self.site is not None:
            return self.number, self.site.place
        return self.number, self.site, self.parameters, "" if self.number else self.what

    def at(self, severity: Severity) -> Finding:
        return replace(self, severity=severity)

    def to_dict(self) -> dict[str, Any]:
        def site(value: Site | None) -> dict[str, Any] | None:
            return None if value is None else dict(vars(value))

        return {
            "number": self.number,
            "class": self.slug,
            "title": self.title,
            "severity": self.severity.name.lower(),
            "what": self.what,
            "why": self.why,
            "fix": self.fix,
            "site": site(self.site),
            "parameters": list(self.parameters),
            "step": self.step,
            "related": [site(s) for s in self.related],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Finding:
        """What `to_dict` gave; ValueError if it is not that."""

        def site(value: Any) -> Site | None:
            return None if value is None else Site(**value)

        try:
            finding = cls(
                number=stored["number"],
                severity=Severity[stored["severity"].upper()],
                what=stored["what"],
                why=stored["why"],
                fix=stored["fix"],
                site=site(stored["site"]),
                parameters=tuple(stored["parameters"]),
                step=stored["step"],
                related=tuple(Site(**value) for value in stored["related"]),
            )
            if finding.to_dict() != dict(stored):
                raise ValueError("its fields do not fit together")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a stored finding: {type(error).__name__}: {error}") from None
        return finding

    @property
    def brief(self) -> str:
        """For a report that stands beside the error on which this is noted."""
        where = "" if self.site is None else f"  where: {self.site}\n"
        return f"{self._heading}\n{where}  why, and how to mend it: see the error"

    @property
    def _heading(self) -> str:
        return f"{self.severity.name} [{self.number} {self.slug}] {self.what}"

    def __str__(self) -> str:
        lines = [self._heading]
        if self.site is not None:
            lines.append(f"  where: {self.site}")
        lines.append(f"  why:   {self.why}")
        if self.parameters:
            lines.append(f"  parameters ({len(self.parameters)}): {listed(self.parameters)}")
        lines.extend(f"  see:   {site}" for site in self.related)
        lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


@dataclass
class Culprit:
    """All that was found of one class at one line, said as one finding."""

    whole: Finding
    parts: list[Finding] = field(default_factory=list)

    def add(self, part: Finding, order: Callable[[Iterable[str]], tuple[str, ...]]) -> None:
        """A repetition that is neither graver nor about other parameters adds nothing."""
        earlier = self.parts[0] if self.parts else None
        new = {*part.parameters} - {*self.whole.parameters}
        if earlier is not None and part.severity <= self.whole.severity and not new:
            # a later step, or another module that runs this line
            if part.site not in [p.site for p in self.parts]:
                self.parts.append(replace(part, what=earlier.what, why=earlier.why))
                self.whole = replace(self.whole, site=self._site())
            return
        if earlier is not None and part.severity > earlier.severity:
            self.parts.insert(0, part)
        else:
            self.parts.append(part)
        first = self.parts[0]
        names = order(dict.fromkeys(name for p in self.parts for name in p.parameters))
        related = dict.fromkeys(site for p in self.parts for site in p.related)
        self.whole = replace(
            first,
            what=_recounted(first, len(names)),
            why=self._why(),
            site=self._site(),
            parameters=names if len(self.parts) > 1 else first.parameters,
            related=tuple(related),
        )

    def _site(self) -> Site | None:
        first = self.parts[0].site
        return None if first is None else joined([p.site for p in self.parts if p.site is not None])

    def _why(self) -> str:
        """The first cause, then those that say something else than other numbers."""
        first = self.parts[0]
        reasons = {_without_numbers(first.why)}
        text, left = first.why, 0
        for part in self.parts[1:]:
            bare = _without_numbers(part.why)
            if bare in reasons:
                left += part.why != first.why
                continue
            reasons.add(bare)
            same = _without_numbers(part.what) == _without_numbers(first.what)
            text += f" Also: {part.why}" if same else f" Also: {part.what} {part.why}"
        if left:
            text += f" The same holds {left} more time{'s' if left > 1 else ''} at this line."
        return text


def joined(sites: list[Site]) -> Site:
    """One line that runs in several modules."""
    modules = list(dict.fromkeys(site.module for site in sites))
    if len(modules) == 1:
        return sites[0]
    return replace(sites[0], module=listed([m for m in modules if m], 3))


def _without_numbers(text: str) -> str:
    """What remains of a sentence when counts, names and places are left out."""
    return re.sub(r"\S*[\d.]\S*", "#", text)


def _recounted(finding: Finding, total: int) -> str:
    """The number of parameters in a sentence, if it says one, set right."""
    own = len(finding.parameters)
    if own == total:
        return finding.what
    pattern = re.compile(rf"\b{own} parameters?\b")
    if own == 1 and pattern.search(finding.what):
        return f"{finding.what} With others of this line they are {total}."
    return pattern.sub(count(total, "parameter"), finding.what)


def count(number: int, thing: str) -> str:
    """`1 parameter`, `3 parameters`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def listed(names: tuple[str, ...] | list[str], shown: int = _SHOWN) -> str:
    """`a, b, c and 5 more`."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def note_of(finding: Finding) -> str:
    """A finding as it stands on the error that it explains."""
    return f"gradient_doctor: {finding}"


def add_note(error: BaseException, finding: Finding, earlier: Finding | None = None) -> None:
    """Note it on the error, once: in the place of what was noted of it earlier, if it has grown."""
    notes: list[str] = getattr(error, "__notes__", [])
    note, old = note_of(finding), None if earlier is None else note_of(earlier)
    if old in notes:
        notes[notes.index(old)] = note
    elif note not in notes:
        error.add_note(note)


def noted(error: BaseException | None) -> set[str]:
    """All notes of an error and of those that led to it."""
    notes: set[str] = set()
    seen: set[int] = set()
    chain = [error]
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            notes.update(getattr(one, "__notes__", ()))
            chain += [one.__cause__, one.__context__]
    return notes


def ordered(findings: list[Finding]) -> list[Finding]:
    """Worst first, then by the order of discovery."""
    return sorted(findings, key=lambda f: -f.severity)
