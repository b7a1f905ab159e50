"""What the doctor says: the class of the fault, its line, parameters, cause and fix."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from gradient_doctor.classes import CLASSES

_SHOWN = 6


class Severity(enum.IntEnum):
    """A note is worth knowing, a warning costs something, an error means that nothing is learnt."""

    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True)
class Site:
    """A line of source, and the path of the module whose forward was running."""

    file: str
    line: int
    function: str = ""
    module: str = ""

    def __str__(self) -> str:
        inside = f" in {self.module}" if self.module else ""
        return f"{self.file}:{self.line}{inside}"


@dataclass(frozen=True)
class Finding:
    """One diagnosis; `number` is its class (docs/doctor.md), 0 a blind spot of the doctor."""

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
    def key(self) -> tuple[int, Site | None, tuple[str, ...], str]:
        """The same fault in a later step has the same key; each blind spot is one of its own."""
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

    def __str__(self) -> str:
        lines = [f"{self.severity.name} [{self.number} {self.slug}] {self.what}"]
        if self.site is not None:
            lines.append(f"  where: {self.site}")
        lines.append(f"  why:   {self.why}")
        if self.parameters:
            lines.append(f"  parameters ({len(self.parameters)}): {listed(self.parameters)}")
        lines.extend(f"  see:   {site}" for site in self.related)
        lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


def listed(names: tuple[str, ...] | list[str], shown: int = _SHOWN) -> str:
    """`a, b, c and 5 more`."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def ordered(findings: list[Finding]) -> list[Finding]:
    """Worst first, then by the order of discovery."""
    return sorted(findings, key=lambda f: -f.severity)
