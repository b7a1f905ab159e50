"""What is declared is what is tried: bounds, the tier of tests, the Makefile and the log."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

import tiers
import versions

pytestmark = pytest.mark.contract

PROJECT = tomllib.loads((versions.DISTRIBUTION / "pyproject.toml").read_text())["project"]
ROW = re.compile(
    r"\| (lowest|newest) \| 3\.\d+\.\d+ \| \d{4}-\d\d-\d\d \| [0-9a-f]{7,}\+? \| \d+ \| \d+ \| \d+ "
    r"\| demo (works|failed), run (works|failed) \| torch .+ \|"
)


def test_every_declared_bound_is_in_the_lowest_set():
    lowest = dict(pin.split("==") for pin in versions.pins("lowest"))
    declared = [*PROJECT["dependencies"]]
    for extra in versions.EXTRAS:
        declared += PROJECT["optional-dependencies"][extra]
    for line in declared:
        requirement = Requirement(line)
        assert requirement.specifier.contains(lowest[requirement.name]), line
        assert f">={lowest[requirement.name]}" in line, line
    assert set(versions.NAMED) <= set(lowest)
    assert versions.pins("newest") == []


def test_a_dependency_without_a_lower_bound_is_refused():
    for line in ("torch", "torch<3", "torch==2.6"):
        with pytest.raises(ValueError, match="expected one lower bound"):
            versions.lower_bound(Requirement(line))


def test_a_bound_is_declared_once():
    everything = [*PROJECT["dependencies"]]
    for lines in PROJECT["optional-dependencies"].values():
        everything += lines
    bounds: dict[str, set[str]] = {}
    for line in map(Requirement, everything):
        bounds.setdefault(line.name, set()).add(str(line.specifier))
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}


def test_pinned_versions_are_within_the_bounds():
    pinned = dict(
        line.split("==")
        for line in (versions.ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    pinned = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    for requirement in versions.requirements():
        assert requirement.specifier.contains(pinned[requirement.name]), str(requirement)


def test_the_page_on_installing_names_these_bounds():
    page = (versions.ROOT / "docs" / "install.md").read_text()
    rows = dict(re.findall(r"^\| (\w+)(?: \(extra\))? \| ([\d.]+)[^|]* \| [\d.]+ \|$", page, re.M))
    assert PROJECT["requires-python"] == f">={rows.pop('Python')}"
    lowest = dict(pin.split("==") for pin in versions.pins("lowest"))
    assert rows == {name: lowest[name] for name in versions.NAMED}


def test_files_and_tools_are_there():
    assert set(versions.FILES) <= set(tiers.test_files())
    assert set(versions.TOOLS) <= {one.name for one in versions.requirements()}


def test_make_knows_both_sets():
    makefile = (versions.ROOT / "Makefile").read_text()
    for which in ("lowest", "newest"):
        assert f"\ntest-{which}: setup" in makefile
        assert f"tests/versions.py {which} --python $(PYTHON)" in makefile


def test_the_log_has_a_row_of_each_set():
    _, heading, table = versions.LOG.read_text().partition(versions.HEADING)
    assert heading
    rows = [ROW.fullmatch(row) for row in table.split("\n\n")[0].strip().split("\n")[1:]]
    assert {row[1] for row in rows} == {"lowest", "newest"}


def test_a_result_takes_the_place_of_the_one_before():
    log = f"# Log\n\n{versions.TITLE}\n\n{versions.HEADING}\n|---|\n| lowest | 3.11 | old |\n"
    again = versions.noted(log, "| newest | 3.12 | first |")
    again = versions.noted(again, "| lowest | 3.11 | new |")
    assert again.endswith("|---|\n| lowest | 3.11 | new |\n| newest | 3.12 | first |\n")
    with pytest.raises(ValueError, match="has no table of versions"):
        versions.noted("# Log", "| lowest |")
