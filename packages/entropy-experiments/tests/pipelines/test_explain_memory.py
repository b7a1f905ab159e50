"""What the ledger of a run holds does not grow by step: summary, tables and page."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow
import pytest
import torch

from entropy_experiments.pipelines.run_ledger import files
from entropy_experiments.pipelines.run_ledger.evaluation import PromptDigests
from entropy_experiments.pipelines.run_ledger.stored_estimates import pack
from entropy_experiments.pipelines.run_ledger.summary import ledger_summary
from entropy_experiments.pipelines.run_ledger.window import ExplainOptions, Window
from entropy_experiments.report import run_ledger as report
from entropy_experiments.results.run_ledger import TOKEN_TABLE
from entropy_experiments.types import Estimand, Estimate
from entropy_experiments.types.estimate import Influence
from oracles.run_ledger_example import example_run_ledger

pytestmark = pytest.mark.invariant

PROMPTS = 2000
COLUMNS = ("dH_a", "dH_b", "dR_a", "dR_b")


def peak(run: Callable[[], Any]) -> int:
    """Bytes that Python allocates for it at most."""
    gc.collect()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def visits(count: int) -> Iterator[dict[str, Any]]:
    """As a walk keeps them, each read when it is asked for."""
    draw = torch.Generator().manual_seed(0)

    def estimate() -> Any:
        one = Influence(
            value_C=torch.randn(PROMPTS, generator=draw, dtype=torch.float64),
            prompt_C=torch.arange(PROMPTS),
            stratum_C=torch.zeros(PROMPTS, dtype=torch.int64),
            sample="prompts",
        )
        return pack(Estimate.build(value=0.1, estimand=Estimand(), influences=[one]))

    numbers = dict.fromkeys(COLUMNS, 0.1)
    for at in range(count):
        facts = {name: estimate() for name in ("level", "reward", "path", "reward_path")}
        facts |= {"tangent": None, "evaluation": {"prompts": PROMPTS}, "evaluation_notes": []}
        if at in (0, count - 1):
            facts["fresh"] = {"level": estimate(), "reward": estimate()}
        if at < count - 1:
            parts = ("path_by_column", "batch", "decay", "uncovered", "momentum_before")
            facts |= dict.fromkeys((*parts, "unfinished"), numbers)
            facts |= {"batch_reward": 0.5, "rollouts": 8, "tokens": 80, "replayed": False}
            facts |= {"step_distance": 0.0, "gradient_distance": 0.0, "clip_factor": 1.0}
            facts |= {"lr": 1e-3, "notes": [], "assumed": {}}
        yield facts


def summed(steps: int, hold: Callable[[Iterator[Any]], Any] = iter) -> None:
    window = Window(start=0, end=steps, anchors=tuple(range(steps + 1)))
    ledger_summary(hold(visits(steps + 1)), [], window, ExplainOptions(), key="k", run="run")


def test_the_summary_holds_no_visit():
    """Teeth: a list of the visits takes a hundred kilobytes more for each."""
    few, many = peak(lambda: summed(4)), peak(lambda: summed(16))
    assert many - few < 12 * 4_000
    assert peak(lambda: summed(16, list)) - few > 12 * 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return example_run_ledger(tmp_path_factory.mktemp("long") / "run", steps=12)


def while_reading(folder, monkeypatch, keep: Callable[[Any], Any]) -> list[int]:
    """Arrow's bytes after each step of the token table, its tables kept or not."""
    held: list[Any] = []
    seen: list[int] = []
    tables = report.step_tables

    def measured(folder, name=TOKEN_TABLE):
        for table in tables(folder, name):
            if name == TOKEN_TABLE:
                held.append(keep(table))
            yield table
            del table
            if name == TOKEN_TABLE:
                seen.append(pyarrow.total_allocated_bytes())

    monkeypatch.setattr(report, "step_tables", measured)
    gc.collect()  # what stands in cycles is nobody's, and goes when the collector comes
    before = pyarrow.total_allocated_bytes()
    view = report.run_ledger_view(folder)
    assert len(view["rollouts"]) > 12  # of every step one and more
    if keep(1) is None:
        gc.collect()
        assert pyarrow.total_allocated_bytes() == before
    return [now - before for now in seen]


def test_the_page_keeps_no_step(folder, monkeypatch):
    """A slice of a rollout would keep the table of its step. Teeth: tables that are kept show."""
    with monkeypatch.context() as patch:
        held = while_reading(folder, patch, lambda table: None)
    assert len(held) == 12
    assert max(held[1:]) <= held[0] + 1024
    with monkeypatch.context() as patch:
        kept = while_reading(folder, patch, lambda table: table)
    assert kept[-1] > 5 * held[-1]


def test_the_tables_are_written_one_step_at_a_time(monkeypatch, tmp_path):
    """At each step that is written, Arrow holds as much as at the first."""
    seen: list[int] = []
    columns = files._columns

    def measured(data: bytes) -> dict[str, Any]:
        seen.append(pyarrow.total_allocated_bytes())
        return columns(data)

    monkeypatch.setattr(files, "_columns", measured)
    example_run_ledger(tmp_path / "run", steps=12)
    assert len(seen) == 12
    assert max(seen[2:]) <= seen[1] + 1024


def test_prompts_of_a_run_take_the_same_however_long_they_are():
    def known(length: int) -> PromptDigests:
        prompts = PromptDigests()
        for k in range(200):
            prompts.update([tuple(range(1000 + k, 1000 + k + length))])
        return prompts

    def held(length: int) -> int:
        gc.collect()
        tracemalloc.start()
        prompts = known(length)
        assert len(prompts) == 200
        now = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return now

    assert held(500) < 1.5 * held(5)
