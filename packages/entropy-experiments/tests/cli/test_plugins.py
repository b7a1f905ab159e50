"""Commands of other packages: mounted where they are installed, and only there."""

from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner

from entropy_experiments.cli import app, plugins

pytestmark = pytest.mark.contract

calls = []


def main(argv, *, prog):
    calls.append((argv, prog))
    return len(argv)


def mounted(monkeypatch, *points):
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    own = typer.Typer(rich_markup_mode=None, add_completion=False)
    own.command("run")(lambda: None)
    plugins.mount_plugins(own)
    return own


@pytest.mark.parametrize("argv", [[], ["--help"], ["--json", "x", "train.py", "-m", "--json=y"]])
def test_a_function_reads_its_own_arguments(monkeypatch, argv):
    point = EntryPoint("look", f"{__name__}:main", plugins.GROUP)
    calls.clear()
    result = CliRunner().invoke(mounted(monkeypatch, point), ["look", *argv])
    assert result.exit_code == len(argv)
    assert calls == [(argv, "entropy-probe look")]


def test_a_package_that_is_not_installed_has_no_command(monkeypatch):
    result = CliRunner().invoke(mounted(monkeypatch), ["look"])
    assert result.exit_code == 2


def test_a_function_is_not_imported_for_help(monkeypatch):
    point = EntryPoint("look", "no_such_module:main", plugins.GROUP)
    result = CliRunner().invoke(mounted(monkeypatch, point), ["--help"])
    assert result.exit_code == 0
    assert "look" in result.stdout


def test_both_packages_of_this_repository_are_mounted(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(9)")
    result = CliRunner().invoke(app, ["doctor", "--quiet", str(script), "--lr", "1"])
    assert (result.exit_code, result.stdout) == (9, "['--lr', '1']\n")
    assert "train" in CliRunner().invoke(app, ["arc", "--help"]).stdout
