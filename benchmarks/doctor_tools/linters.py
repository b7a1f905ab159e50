"""Linters: they read the file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from benchmarks.doctor_tools.base import Message, Subject

TORCH_PREFLIGHT = {
    "TG001": (12, 14), "TG002": (26,), "TG005": (18,), "TG006": (18,), "TG011": (26,),
    "TG014": (22,),
}  # fmt: skip


def torch_preflight(subject: Subject) -> list[Message]:
    output = _command("-m", "torch_preflight", "check", "-j1", "--format=json", subject.script)
    return [
        Message(
            row["code"], row["message"], TORCH_PREFLIGHT.get(row["code"], ()), line=row["line"],
            alarm=row["severity"] != "note",
        )
        for row in json.loads(output)["diagnostics"]
    ]  # fmt: skip


def torchfix(subject: Subject) -> list[Message]:
    output = _command("-m", "torchfix", "-j1", "--select=ALL", subject.script)
    rows = re.findall(r"^[^:\n]+:(\d+):\d+: (TOR\d+) (.*)$", output, re.MULTILINE)
    return [Message(rule, text, line=int(line)) for line, rule, text in rows]


def _command(*words: Any) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, check=False
    )
    return done.stdout
