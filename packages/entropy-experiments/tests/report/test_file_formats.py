"""docs/file_formats.md against the files of real runs: every name is there, none is missing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from safetensors import safe_open

from checkout import DOCS
from entropy_experiments import (
    OfflineEntropyProbe,
    StepOptions,
    analyze_step,
    load_config,
    probe_trajectory,
)
from entropy_experiments.attribution.proxies import PROXIES
from entropy_experiments.attribution.token_rows import token_rows
from entropy_experiments.attribution.token_table import fold_columns
from entropy_experiments.config import parse_config
from entropy_experiments.pipelines.probe_log import LEVELS, DetailedLogger, read_log
from entropy_experiments.pipelines.trajectory import write_trajectory
from entropy_experiments.toy import BigramPolicy

pytestmark = pytest.mark.contract

PAGE = (DOCS / "file_formats.md").read_text("utf-8")
OPTIONAL = {"step_certificate", "nulls"}


def section(title: str) -> str:
    return PAGE.split(f"{title}\n", 1)[1].split("\n## ")[0].split("\n### ")[0]


def rows(title: str) -> list[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def at(content: Any, name: str) -> bool:
    """Whether a dotted name exists; of a list, in its every entry."""
    head, _, rest = name.partition(".")
    many = head.endswith("[]")
    head = head.removesuffix("[]")
    if not isinstance(content, dict) or head not in content:
        return False
    inner = content[head]
    if many:
        return bool(inner) and all(not rest or at(one, rest) for one in inner)
    return not rest or at(inner, rest)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    settings = {
        "batch_config": {"B_E": 5, "B_U": 2, "G": 4},
        "importance": {"is_mode": "snis"},  # which has the to-go form beside its own
        "memory_config": {"microbatch_size": 16},
        "approx_delta_h": {"variance": False},
        "update": {"batch": "drawn"},
        "rollouts": {"save": str(tmp_path_factory.mktemp("rollouts"))},
    }
    return OfflineEntropyProbe(settings, quiet=True).findings()


def test_names_of_the_log_by_level(found, tmp_path):
    said = rows("## The log")
    for depth, level in enumerate(LEVELS):
        settings = {"level": level, "output_directory": str(tmp_path)}
        path = DetailedLogger(parse_config({"detailed_logging": settings})).write(*found)
        assert path is not None
        log = read_log(path)
        for cell, its_level, _ in said:
            for name in names(cell):
                assert at(log, name) == (LEVELS.index(its_level) <= depth), (level, name)
        listed = {re.split(r"[.\[]", name)[0] for cell, _, _ in said for name in names(cell)}
        assert set(log) <= listed | OPTIONAL
    estimate = {name for cell, _ in rows("## An estimate") for name in names(cell)}
    assert set(log["estimates"]["deltaH1"]) == estimate
    assert estimate < set(log["sweep"][0])


@pytest.mark.slow
def test_files_of_a_study(study):
    folder, summary, _ = study
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    listed = [names(cell)[0] for cell, _ in rows("## The directory of an influence study")]
    patterns = [re.escape(name).replace("ETA", r"[\w.+-]+") for name in listed]
    for name, pattern in zip(listed, patterns):
        whole = pattern + (".+" if name.endswith("/") else "")
        assert any(re.fullmatch(whole, file) for file in there), name
    named = "|".join([p + (".+" if n.endswith("/") else "") for n, p in zip(listed, patterns)])
    others = {file for file in there if not re.fullmatch(named, file.replace("eval_01", "eval_00"))}
    told = section("## The directory of an influence study")
    for file in others - {"report.html"}:
        assert file.startswith("plots/") or f"`{Path(file).name}`" in told, file
    for cell, _ in rows("### summary.json"):
        for name in names(cell):
            reward_on_fresh = name == "evaluations[].ledger.reward"
            where = {**summary, "evaluations": summary["evaluations"][:1]}
            assert at(where if reward_on_fresh else summary, name), name
    listed = {re.split(r"[.\[]", n)[0] for cell, _ in rows("### summary.json") for n in names(cell)}
    assert set(json.loads((folder / "summary.json").read_text())) <= listed | {"evaluations"}


@pytest.mark.slow
def test_columns_of_the_token_table(study):
    schema = pyarrow.parquet.read_schema(study[0] / "tokens.parquet")
    check_columns(dict(zip(schema.names, map(str, schema.types), strict=True)))


def test_columns_of_a_toys_token_table():
    """The same of a step small enough for every run of the tests: a new column has its row."""
    policy = BigramPolicy()
    optimizer = torch.optim.AdamW(policy.params.values(), lr=0.02)
    batch, evaluation = policy.update_batch(seed=1), policy.draw(seed=2)
    analysis = analyze_step(policy, optimizer, batch, evaluation, StepOptions())
    columns = {**token_rows(analysis.tokens), **fold_columns(analysis.tokens)}
    # The study's files add the pieces, from the whole text, and a type where every uid is null.
    columns |= {"piece": columns["text"], "uid": ["a"] * len(columns["uid"])}
    schema = pyarrow.table(columns).schema
    check_columns(dict(zip(schema.names, map(str, schema.types), strict=True)))


def test_a_token_carries_its_rollouts_name():
    policy = BigramPolicy()
    optimizer = torch.optim.AdamW(policy.params.values(), lr=0.02)
    batch, evaluation = policy.update_batch(seed=1), policy.draw(seed=2)
    named = tuple(None if n == 1 else f"run/{n}" for n in range(len(batch.rollouts)))
    for uid in (None, named):
        own = replace(batch, rollouts=replace(batch.rollouts, uid=uid))
        columns = token_rows(analyze_step(policy, optimizer, own, evaluation, StepOptions()).tokens)
        assert set(columns["uid"]) == {
            None if uid is None else uid[i] for i in columns["rollout"].tolist()
        }
        for name, rollout in zip(columns["uid"], columns["rollout"].tolist(), strict=True):
            assert name == (None if uid is None else uid[rollout])


def check_columns(types: dict[str, str]) -> None:
    """Every column is a row of the page's table, with its type, and every row is a column."""
    listed = {names(cell)[0]: kind for cell, kind, _ in rows("### tokens.parquet")}
    assert len(listed) == len(rows("### tokens.parquet"))
    # The page lists proxies from their module, which mkdocstrings reads.
    assert "\n::: entropy_experiments.attribution.proxies\n" in PAGE
    made = {f"proxy_{proxy.__name__}" for proxy in PROXIES}
    assert {types[name] for name in made} == {listed.pop("proxy_*")}
    assert {
        re.sub(r"_\d+$", "_0", name): kind for name, kind in types.items() if name not in made
    } == listed


@pytest.mark.slow
def test_tensors_of_rollouts(study):
    listed = {name for cell, _ in rows("## Rollouts and update batches") for name in names(cell)}
    seen = set()
    for folder in (study[0] / "rollouts").iterdir():
        if folder.name == "units":
            continue
        manifest = json.loads((folder / "manifest.json").read_text())
        described = names(rows("## Rollouts and update batches")[0][1])
        assert set(manifest) <= set(described)
        assert {*manifest["files"], "manifest.json"} <= listed
        with safe_open(folder / "rollouts.safetensors", "pt") as file:
            seen |= set(file.keys())
    assert seen <= listed
    assert {"tokens_NS", "attention_NS", "response_NS", "prompt_N", "advantage_N"} <= seen


def test_names_of_a_trajectory(tmp_path):
    changes = ["batch_config.B_E=5", "memory_config.microbatch_size=64"]
    config = load_config("test_deltaH1").under(tmp_path).with_overrides(changes)
    run = probe_trajectory(config, steps=slice(13, 15))
    content = json.loads(write_trajectory(run, tmp_path / "trajectory.json").read_text())
    said = [name for cell, _ in rows("## trajectory.json") for name in names(cell)]
    for name in said:
        assert at(content, name), name
    assert set(content) <= {re.split(r"[.\[]", name)[0] for name in said}
    assert set(content["steps"][0]) == {n.split(".")[1] for n in said if n.startswith("steps[]")}
