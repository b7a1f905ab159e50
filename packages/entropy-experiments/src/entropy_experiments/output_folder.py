"""Whose folder `--out` is: results of two settings in one folder would look like one run's.

    <out>/run.json    the verb and its settings, from the moment the command begins

The same command again continues. Another verb or other settings are refused where there are
results, unless they are to replace these: rollouts alone, of a command that failed, are kept under
what drew them and are in nobody's way. A command that ends before anything else is in the folder
leaves no claim.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entropy_experiments.artifacts import sweep_partials, write_changed
from entropy_experiments.config import Config
from entropy_experiments.config.documents import FIELDS
from entropy_experiments.distributed import current

CLAIM = "run.json"
FORMAT = "entropy_experiments.run"
NOT_RESULTS = ("detailed_logging", "output", "rollouts.save")
"""Sections and keys that say where things go, and how much of them."""
ROLLOUTS = "rollouts"
"""Folder of finished rollouts (`Config.rollout_folder`)."""
LISTED = 3


@contextmanager
def claim_folder(
    out: Path | None, config: Config, *, verb: str, overwrite: bool = False
) -> Iterator[None]:
    """Inside, the folder is this command's; None: results go nowhere in particular.

    Args:
        out: The folder, made if it is missing.
        config: What the command was asked for.
        verb: `run` or `measure`.
        overwrite: Whether results of other settings may be replaced.
    """
    if out is None:
        yield
        return
    new = current().broadcast_from_zero(lambda: _claim(out, _settings(config), verb, overwrite))
    new = new and current().first
    try:
        yield
    except BaseException:
        if new:
            _withdraw_claim(out)  # on the rank that made it; the others may be gone
        raise


def _claim(out: Path, settings: dict[str, Any], verb: str, overwrite: bool) -> bool:
    """Whether the claim is new."""
    path = out / CLAIM
    mine = {"format": FORMAT, "verb": verb, "settings": settings}
    if path.is_file() and not overwrite:
        _refuse_other(path, mine)
    new = not path.is_file()
    sweep_partials(out)
    write_changed(path, json.dumps(mine, indent=1, sort_keys=True).encode())
    return new


def _refuse_other(path: Path, mine: dict[str, Any]) -> None:
    try:
        theirs = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}). Delete it, or give another --out."
        ) from error
    if not isinstance(theirs, dict) or theirs.get("format") != FORMAT:
        raise ValueError(
            f"{path} was not written by `entropy-probe`; expected an empty or a new folder, or one "
            "of an earlier run. Give another --out."
        )
    if not _has_results(path.parent):
        return
    if theirs.get("verb") != mine["verb"]:
        raise ValueError(
            f"{path.parent} holds results of `entropy-probe {theirs.get('verb')}`. Give another "
            "--out, or let this command replace them with --overwrite."
        )
    there, here = theirs.get("settings"), mine["settings"]
    there = there if isinstance(there, dict) else {}
    keys = sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key))
    if keys:
        # Under today's names, each setting once: the claim has the documents', second names too.
        named = {FIELDS.get(key, key): key for key in reversed(keys)}
        differ = [
            f"{name} is {there.get(key)!r} there and {here.get(key)!r} here"
            for name, key in sorted(named.items())
        ]
        listed = "; ".join(differ[:LISTED])
        more = f" (and {len(differ) - LISTED} more)" if len(differ) > LISTED else ""
        raise ValueError(
            f"{path.parent} holds results of other settings: {listed}{more}. Give another --out, "
            "or let this command replace them with --overwrite."
        )


def _has_results(out: Path) -> bool:
    """Whether anything is there besides the claim and finished rollouts."""
    return any(
        file.is_file() and file.name != CLAIM and ROLLOUTS not in file.relative_to(out).parts
        for file in out.rglob("*")
    )


def _withdraw_claim(out: Path) -> None:
    """Nothing but the claim is there: nothing was computed."""
    if out.is_dir() and [path.name for path in out.iterdir()] == [CLAIM]:
        (out / CLAIM).unlink()
        out.rmdir()


def _settings(config: Config) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if key in NOT_RESULTS:
            return
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                walk(inner, f"{key}.{name}" if key else str(name))
        else:
            flat[key] = value

    walk(json.loads(json.dumps(config.documents())), "")
    return flat
