"""The store: a folder with a manifest is complete, and finished work is found again or refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from entropy_experiments.artifacts import (
    MANIFEST,
    DamagedFileError,
    HashedFiles,
    described,
    differing_keys,
    is_described,
    json_bytes,
    read_described,
    read_json_object,
    write_with_manifest,
)


def test_a_described_file_is_read_and_a_changed_one_is_not(tmp_path: Path):
    path, facts = tmp_path / "a.bin", described(b"abc")
    assert facts == {"sha256": hashlib.sha256(b"abc").hexdigest(), "bytes": 3}
    with pytest.raises(FileNotFoundError, match=r"a\.bin is missing though .* lists it\. Again\."):
        read_described(path, facts, advice="Again.")
    path.write_bytes(b"abc")
    assert read_described(path, facts, advice="Again.") == b"abc"
    assert read_described(path, {**facts, "more": 1}, advice="Again.") == b"abc"
    path.write_bytes(b"abd")
    with pytest.raises(DamagedFileError, match=r"a\.bin is damaged .* got 3 bytes .*Again\."):
        read_described(path, facts, advice="Again.")
    assert not is_described(b"abc", None)
    assert not is_described(b"abc", {"bytes": 3})


def test_the_manifest_is_gone_before_a_file_changes(tmp_path: Path, monkeypatch):
    write_with_manifest(tmp_path, {"a": b"1", "deep/b": b"2"}, b"first")
    stamps = {name: (tmp_path / name).stat().st_mtime_ns for name in ("a", "deep/b", MANIFEST)}
    write_with_manifest(tmp_path, {"a": b"1", "deep/b": b"2"}, b"first")
    assert stamps == {name: (tmp_path / name).stat().st_mtime_ns for name in stamps}
    seen = []

    def killed(path: Path, data: bytes) -> None:
        seen.append((path.name, (tmp_path / MANIFEST).exists()))
        raise KeyboardInterrupt

    monkeypatch.setattr("entropy_experiments.artifacts.write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        write_with_manifest(tmp_path, {"a": b"changed"}, b"second")
    assert seen == [("a", False)]


def test_hashed_files_as_the_version_before_wrote_them(tmp_path: Path):
    """64 digits of sha256, then the body: stages and units of rollouts resume."""
    files = HashedFiles(tmp_path, ".unit")
    (tmp_path / "k.unit").write_bytes(hashlib.sha256(b"body").hexdigest().encode() + b"body")
    raw = files.raw("k")
    assert raw is not None
    assert files.body("k", raw) == b"body"
    files.put("l", b"body")
    assert (tmp_path / "l.unit").read_bytes() == raw
    assert len(files) == 2
    assert files.holds("l")
    assert files.raw("m") is None
    with pytest.raises(ValueError, match=r"k\.unit is damaged.* Delete it"):
        files.body("k", raw[:-1])


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="its folder is gone"):
        HashedFiles(tmp_path / "gone", ".unit").put("k", b"")


def test_json_objects_and_their_differences(tmp_path: Path):
    path = tmp_path / "x.json"
    assert read_json_object(path, advice="Delete it.") is None
    path.write_bytes(json_bytes({"a": 1}))
    assert read_json_object(path, advice="Delete it.") == {"a": 1}
    assert path.read_text() == json.dumps({"a": 1}, indent=1)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"holds a list; expected an object\. Delete it\."):
        read_json_object(path, advice="Delete it.")
    path.write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is not JSON .* Delete it\."):
        read_json_object(path, advice="Delete it.")
    with pytest.raises(ValueError, match="JSON compliant"):
        json_bytes(float("nan"))
    assert differing_keys({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None, "d": 0}) == ["b", "d"]
