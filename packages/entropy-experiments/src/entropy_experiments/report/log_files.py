"""Logs of `entropy-probe run`, found and read. Without torch: reading is quick."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

SCHEMA = 1


def read_log(path: str | Path) -> dict[str, Any]:
    """The content of a log, compressed or not.

    Args:
        path: A .json or .json.gz file that `entropy-probe run` wrote.

    Returns:
        The log as a dict.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no log, or of another version.

    Examples:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "entropy_probe_12-00-00_step_13.json"
        ...     _ = path.write_text(json.dumps({"schema": 1, "level": "minimal", "B_E": 64}))
        ...     log = read_log(path)
        >>> log["B_E"]
        64
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No log {path}; expected a .json or .json.gz file of a run.")
    data = path.read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise ValueError(
            f"{path} is no log, or cut short ({error}). Run the probe again."
        ) from None
    if not isinstance(content, dict) or "level" not in content:
        raise ValueError(
            f"{path} is no log of `entropy-probe run`; expected its entropy_probe_*.json or "
            ".json.gz, not the summary beside it."
        )
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has log schema {content.get('schema')!r}; this version reads {SCHEMA}. Run "
            "the probe again, or read it with the version that wrote it."
        )
    return content


def newest_log(folder: str | Path) -> Path | None:
    """The last log below a folder that `entropy-probe run --out` or its `logs` was; or None."""
    found = [log for top in ("logs", ".") for log in logs_below(Path(folder) / top)]
    return max(found, key=_written, default=None)


def _written(log: Path) -> tuple[Any, ...]:
    """Date and time of the name, which copying keeps; within a second, the file's own time."""
    clock = log.name.removeprefix("entropy_probe_")[: len("HH-MM-SS")]
    numbers = [int(found) for found in re.findall(r"\d+", log.name)]  # -10 comes after -2
    return (log.parent.name, clock, log.stat().st_mtime_ns, numbers)


def logs_below(directory: Path) -> list[Path]:
    """Under their dates, in no order."""
    found = directory.glob("*/entropy_probe_*.json*")
    return [
        path
        for path in found
        if path.name.endswith((".json", ".json.gz")) and not path.name.endswith("_summary.json")
    ]
