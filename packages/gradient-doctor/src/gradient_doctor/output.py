"""What the doctor hands out: the report as text and as JSON."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradient_doctor.findings import Finding, Severity, count, note_of, noted

SCHEMA = 1


def report_text(findings: Sequence[Finding], steps: int, error: BaseException | None = None) -> str:
    """Worst first. Without findings it says what was looked at, not that all is well.

    What is noted on `error`, which is shown beside the report, is not told at length again.
    """
    if not findings:
        if not steps:
            return "gradient_doctor: nothing to examine: no training step was seen."
        return f"gradient_doctor: nothing found in {count(steps, 'step')}."
    tallies = ((sum(f.severity is s for f in findings), s.name.lower()) for s in reversed(Severity))
    counts = ", ".join(count(number, name) for number, name in tallies if number)
    when = f"in {count(steps, 'step')}" if steps else "before the end of the first step"
    notes = noted(error)
    lines = (f.brief if note_of(f) in notes else str(f) for f in findings)
    return "\n\n".join([f"gradient_doctor: {counts} {when}.", *lines])


def to_json(findings: Sequence[Finding], steps: int, **about: Any) -> str:
    """See docs/doctor.md#json."""
    return json.dumps(
        {"schema": SCHEMA, **about, "steps": steps, "findings": [f.to_dict() for f in findings]},
        indent=2,
    )


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """The whole file or none: written under another name, then renamed."""
    target = Path(path)
    if target.exists() and not target.is_file():  # a device would be replaced by the report
        raise OSError(f"{target} is not a regular file; expected one, or a name that is free")
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp's files are for their owner alone
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
