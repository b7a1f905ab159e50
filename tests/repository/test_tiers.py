"""The slow tier as jobs: every slow test in exactly one, none too long, results noted once."""

from __future__ import annotations

import re
import tomllib

import pytest

import tiers

pytestmark = pytest.mark.contract

ROWS = re.compile(r"\| (\d+) \| \d{4}-\d\d-\d\d \| [0-9a-f]{7,}\+? \| \d+ \| \d+ \| \d+ \| \d+ \|")
LONGEST = 45 * 60
CORES = 2


def test_every_file_is_in_exactly_one_job():
    dealt = [file for job in range(1, tiers.JOBS + 1) for file in tiers.slow_job(job)]
    assert sorted(dealt) == tiers.test_files()
    assert "tests/repository/test_tiers.py" in dealt


def test_a_file_that_nobody_timed_is_in_a_job_too():
    seconds = {"a": 50.0, "b": 40.0, "c": 5.0}
    assert tiers.deal(["a", "b", "c", "new"], seconds, 2) == [["a", "c"], ["b", "new"]]


def test_files_that_share_stay_together():
    files = [file for together in tiers.TOGETHER.values() for file in together]
    assert set(files) <= set(tiers.test_files())
    assert len(files) == len(set(files))
    jobs = [set(tiers.slow_job(job)) for job in range(1, tiers.JOBS + 1)]
    for together in tiers.TOGETHER.values():
        assert sum(set(together) <= job for job in jobs) == 1


def test_no_job_takes_longer_than_it_may():
    slow = tiers.seconds_by_file("slow")
    assert slow, "nothing is recorded: pytest -m slow --record-durations slow"
    for job in range(1, tiers.JOBS + 1):
        seconds = [slow.get(file, 0.0) for file in tiers.slow_job(job)]
        assert max(max(seconds), sum(seconds) / CORES) < LONGEST, f"job {job}"


def test_jobs_are_balanced():
    slow = tiers.seconds_by_file("slow")
    loads = [sum(slow.get(file, 0.0) for file in tiers.slow_job(j + 1)) for j in range(tiers.JOBS)]
    longest = next(iter(tiers.longest_first(slow, slow).values()))
    assert max(loads) <= sum(loads) / tiers.JOBS + sum(slow[file] for file in longest)


def test_make_knows_every_job():
    makefile = (tiers.ROOT / "Makefile").read_text()
    (numbers,) = re.findall(r"for job in ([\d ]+);", makefile)
    assert [int(number) for number in numbers.split()] == list(range(1, tiers.JOBS + 1))
    assert f"JOB=1 to {tiers.JOBS}" in makefile


def test_results_in_the_log_are_of_jobs_that_there_are():
    _, heading, table = tiers.LOG.read_text().partition(tiers.HEADING)
    assert heading
    jobs = [int(ROWS.fullmatch(row)[1]) for row in table.split("\n\n")[0].split("\n")[2:]]
    assert jobs == sorted(set(jobs) & set(range(1, tiers.JOBS + 1)))


def test_a_result_takes_the_place_of_the_one_before():
    log = f"# Log\n\n{tiers.HEADING}\n|---|\n| 1 | old |\n| 3 | kept |\n\nmore\n"
    again = tiers.noted(tiers.noted(log, 1, "| 1 | new |"), 2, "| 2 | first |")
    rows = "| 1 | new |\n| 2 | first |\n| 3 | kept |"
    assert again == f"# Log\n\n{tiers.HEADING}\n|---|\n{rows}\n\nmore\n"
    with pytest.raises(ValueError, match="has no table of slow jobs"):
        tiers.noted("# Log", 1, "| 1 |")


def test_a_job_that_is_not_there():
    with pytest.raises(ValueError, match=r"There is no slow job 9: expected 1 to"):
        tiers.slow_job(9)


def test_tiers_are_known_markers():
    settings = tomllib.loads((tiers.ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    names = {line.partition(":")[0] for line in settings["ini_options"]["markers"]}
    assert {"slow", "wild"} <= names
