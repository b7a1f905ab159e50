"""Finished checkpoints of an evaluation on disk, so that a killed one continues.

    evaluation.json           the whole result; written last
    settings.json             what the folder's numbers have in common
    checkpoints/LABEL.parquet a row per rollout
    checkpoints/LABEL.json    written after it: key, hash of the parquet file, tokens, facts
    units/                    drawn rollouts of a checkpoint under way

A checkpoint is finished if its JSON has the key of what is asked (settings and the hashes of its
files) and its parquet file has the hash that the JSON says.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropy_experiments.artifacts import (
    described,
    differing_keys,
    read_json_object,
    write_json,
    write_whole,
)
from entropy_experiments.results import EvaluationResult, JSONObject

AGAIN = "Delete it: what it holds is then computed again."
RESULT, SETTINGS, CHECKPOINTS, UNITS = "evaluation.json", "settings.json", "checkpoints", "units"


@dataclass(frozen=True, kw_only=True, eq=False)
class Finished:
    """One checkpoint's rows and facts."""

    rows: Mapping[str, list[Any]]
    facts: JSONObject


class EvaluationStore:
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def refuse_others(self, settings: Mapping[str, object], keys: Mapping[str, str]) -> None:
        """Numbers of other settings do not belong here, nor of others under the same label."""
        mine, theirs = _plain(settings), read_json_object(self.folder / SETTINGS, advice=AGAIN)
        if theirs is not None and theirs != mine:
            names = differing_keys(mine, theirs)
            raise ValueError(
                f"{self.folder} holds an evaluation with other settings ({', '.join(names)}). Give "
                "another --out, or replace it with --overwrite."
            )
        if theirs is None and self.folder.is_dir() and any(self.folder.iterdir()):
            raise ValueError(
                f"{self.folder} is not empty, and holds no evaluation. Give another --out."
            )
        for label, key in keys.items():
            facts = read_json_object(self._path(label, "json"), advice=AGAIN)
            if facts is not None and facts.get("key") != key:
                raise ValueError(
                    f"{self.folder} holds another {label}, with other weights. Give another --out, "
                    "or replace it with --overwrite."
                )

    def bind(self, settings: Mapping[str, object]) -> None:
        """From here on the folder is about these settings."""
        mine, path = _plain(settings), self.folder / SETTINGS
        (self.folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        if read_json_object(path, advice=AGAIN) != mine:
            (self.folder / RESULT).unlink(missing_ok=True)
            for old in sorted((self.folder / CHECKPOINTS).glob("*.json")):
                old.unlink()
                old.with_suffix(".parquet").unlink(missing_ok=True)
            write_json(path, mine)

    def get(self, label: str, key: str) -> Finished | None:
        """What was finished under this very key; None: it has to be done (again)."""
        facts = read_json_object(self._path(label, "json"), advice=AGAIN)
        if facts is None or facts.get("key") != key:
            return None
        path = self._path(label, "parquet")
        data = path.read_bytes() if path.is_file() else b""
        if described(data)["sha256"] != facts.get("rows_sha256"):
            return None
        return Finished(rows=_read(data), facts=facts)

    def put(
        self, label: str, key: str, rows: Mapping[str, list[Any]], facts: JSONObject
    ) -> Finished:
        data = _parquet(rows)
        said = {**facts, "key": key, "rows_sha256": described(data)["sha256"]}
        write_whole(self._path(label, "parquet"), data)
        write_json(self._path(label, "json"), said)
        # As read, not as made: a resumed evaluation must say the same to the last bit.
        return Finished(rows=_read(data), facts=json.loads(json.dumps(said)))

    def finish(self, result: EvaluationResult) -> None:
        write_json(self.folder / RESULT, result)

    def name_of(self, label: str) -> str:
        """The parquet file, as the result names it."""
        return f"{CHECKPOINTS}/{label}.parquet"

    def _path(self, label: str, suffix: str) -> Path:
        return self.folder / CHECKPOINTS / f"{label}.{suffix}"


def _plain(settings: Mapping[str, object]) -> JSONObject:
    """As JSON gives it back."""
    return json.loads(json.dumps(dict(settings)))


def _parquet(rows: Mapping[str, list[Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(dict(rows)), buffer, compression="zstd")
    return buffer.getvalue()


def _read(data: bytes) -> dict[str, list[Any]]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(io.BytesIO(data)).to_pydict()
