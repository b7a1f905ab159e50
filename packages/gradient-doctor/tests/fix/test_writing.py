"""Several files are replaced together or not at all, wherever it fails."""

import os

import pytest

from gradient_doctor.fix import writing
from gradient_doctor.fix.writing import Change, ChangedError, replace_all

NAMES = ("a.py", "b.py", "sub/c.py")


@pytest.fixture
def changes(tmp_path):
    (tmp_path / "sub").mkdir()
    made = []
    for number, name in enumerate(NAMES):
        path = tmp_path / name
        path.write_bytes(f"old {number}\n".encode())
        path.chmod(0o640 + number)
        made.append(Change(path=str(path), old=path.read_bytes(), new=b"new\r\n"))
    return made


def contents(folder):
    """Every file below, with its content and its mode."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p): (p.read_bytes(), p.stat().st_mode) for p in files}


def test_all_are_replaced_and_kept(changes, tmp_path):
    before = contents(tmp_path)
    pairs = replace_all(changes)
    after = contents(tmp_path)
    assert [path for path, _ in pairs] == [change.path for change in changes]
    for path, backup in pairs:
        assert after.pop(backup) == before[path]
        assert after.pop(path) == (b"new\r\n", before[path][1])
    assert not after


def test_an_older_backup_is_not_overwritten(changes, tmp_path):
    (tmp_path / "a.py.bak").write_text("an older one")
    assert replace_all(changes)[0][1] == str(tmp_path / "a.py.bak1")
    assert (tmp_path / "a.py.bak").read_text() == "an older one"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [False, True], ids=["before it is done", "right after"])
@pytest.mark.parametrize("call", range(len(NAMES)))
def test_a_rename_that_fails_leaves_all_as_it_was(
    changes, tmp_path, monkeypatch, call, after, error
):
    """At each file; also an interruption that comes when the rename itself has been done."""
    before = contents(tmp_path)
    fails(monkeypatch, "replace", call, error, after=after)
    with pytest.raises(type(error)):
        replace_all(changes)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["fsync", "chmod"])
@pytest.mark.parametrize("call", range(2 * len(NAMES)))
def test_a_file_that_cannot_be_prepared_leaves_all_as_it_was(
    changes, tmp_path, monkeypatch, name, call
):
    """Each file is written twice: its new content, and its backup."""
    before = contents(tmp_path)
    fails(monkeypatch, name, call, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        replace_all(changes)
    assert contents(tmp_path) == before


def test_folders_that_cannot_be_synced_undo_everything(changes, tmp_path, monkeypatch):
    before = contents(tmp_path)
    fails(monkeypatch, "fsync", 2 * len(NAMES), OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        replace_all(changes)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("call", range(len(NAMES)))
def test_a_file_that_changes_meanwhile_is_left_alone(changes, tmp_path, call):
    """Its new content stays, and the files before it are put back."""
    with open(changes[call].path, "ab") as file:
        file.write(b"edited by its author\n")
    before = contents(tmp_path)
    with pytest.raises(ChangedError):
        replace_all(changes)
    assert contents(tmp_path) == before


def fails(monkeypatch, name, call, error, *, after=False):
    """The call of this number raises, before or after it has done its work; the others work."""
    original = getattr(os, name)
    calls = iter(range(1000))

    def stand_in(*args, **kwargs):
        number = next(calls)
        if number == call and not after:
            raise error
        result = original(*args, **kwargs)
        if number == call:
            raise error
        return result

    monkeypatch.setattr(writing.os, name, stand_in)
