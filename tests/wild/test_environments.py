"""The maker of environments: once, whole or not at all, and a failure says why."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from wild import environments
from wild.environments import STAMP, environment


@pytest.fixture
def installs(tmp_path, monkeypatch):
    """An environment `one` in a folder of its own; what was installed into it."""
    made = []
    monkeypatch.setattr(environments, "HOME", tmp_path)
    monkeypatch.setitem(environments.REQUIREMENTS, "one", ("iniconfig==2.0.0",))
    monkeypatch.setattr(environments, "_install", lambda _, requirements: made.append(requirements))
    return made


def test_it_is_made_once_by_whoever_comes_first(installs):
    with ThreadPoolExecutor(4) as pool:
        (python,) = set(pool.map(environment, ["one"] * 4))
    assert len(installs) == 1
    found = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], check=False)
    assert found.returncode == 0  # of the environment below


def test_another_list_or_a_missing_stamp_makes_it_anew(installs, tmp_path, monkeypatch):
    environment("one")
    (tmp_path / "one" / STAMP).unlink()
    (tmp_path / "one" / "rest").touch()
    environment("one")
    assert not (tmp_path / "one" / "rest").exists()
    monkeypatch.setitem(environments.REQUIREMENTS, "one", ("iniconfig==2.1.0",))
    environment("one")
    assert installs == [("iniconfig==2.0.0",)] * 2 + [("iniconfig==2.1.0",)]


def test_a_failed_install_is_an_error_with_the_last_lines_of_pip(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "HOME", tmp_path)
    monkeypatch.setitem(environments.REQUIREMENTS, "none", ("iniconfig==0.0.0.dev999",))
    with pytest.raises(RuntimeError, match="No matching distribution found for iniconfig=="):
        environment("none")
    assert not (tmp_path / "none" / STAMP).exists()


def test_without_a_registry_it_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "HOME", tmp_path)
    monkeypatch.setitem(environments.REQUIREMENTS, "none", ("iniconfig==2.0.0",))
    settings = {"CONFIG_FILE": "/dev/null", "INDEX_URL": "http://127.0.0.1:9", "RETRIES": "0"}
    for name, value in (settings | {"EXTRA_INDEX_URL": "", "FIND_LINKS": ""}).items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(pytest.skip.Exception, match="the package registry cannot be reached"):
        environment("none")
    assert not (tmp_path / "none" / STAMP).exists()
