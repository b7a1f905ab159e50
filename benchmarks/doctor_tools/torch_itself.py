"""torch itself: its errors and warnings, and detect_anomaly."""

from __future__ import annotations

import re
import traceback
import warnings
from pathlib import Path

import torch

from benchmarks.doctor_tools.base import Message, Subject, run, torch_kinds


def torch_alone(subject: Subject) -> list[Message]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = run(subject.script)
    found = [_warning(warned, subject.script) for warned in caught if not _idle(warned)]
    if error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f.lineno for f in frames if Path(f.filename).name == subject.script.name]
        text = f"{type(error).__name__}: {error}"
        rule = type(error).__name__
        found.append(Message(rule, text, torch_kinds(text), line=own[-1] if own else None))
    return found


def detect_anomaly(subject: Subject) -> list[Message]:
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        return torch_alone(subject)


def _idle(warned: warnings.WarningMessage) -> bool:
    """Deprecations and the notice that anomaly detection is slow speak of no fault."""
    text = str(warned.message)
    return not issubclass(warned.category, UserWarning) or "Anomaly Detection has been" in text


def _warning(warned: warnings.WarningMessage, script: Path) -> Message:
    text = str(warned.message)
    # The traceback of the forward call, where there is one, is part of the warning's text.
    frames = re.findall(rf'File "[^"]*{re.escape(script.name)}", line (\d+)', text)
    line = int(frames[-1]) if frames else None
    if line is None and Path(warned.filename).name == script.name:
        line = warned.lineno
    rule = "traceback of the forward call" if frames else text[:60]
    return Message(rule, text, torch_kinds(text), line=line)
