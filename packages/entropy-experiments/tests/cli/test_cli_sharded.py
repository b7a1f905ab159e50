"""`run` and `measure` with a model cut over two processes: the numbers of one process.

In fp64, where nothing but the order of sums differs. In fp32 the gradients of two ranks are added
in fp32, and differences of entropies magnify that last digit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.test_cli_ranks import NOT_NUMBERS, command, done, files, options
from entropy_experiments.config import parse_config
from entropy_experiments.pipelines.probe_sampling import open_checkpoint
from entropy_experiments.pipelines.run_conditions import refuse_sharding

pytestmark = pytest.mark.contract

SHARDED = "checkpoint.sharding=fsdp"
WIDE = ("checkpoint.dtype=float64", "approx_delta_h.variance=false")
RELATIVE, ABSOLUTE = 1e-6, 1e-9
"""The smallest numbers are biases and ends of intervals near 0, in nats."""
SAID_ELSEWHERE = (*NOT_NUMBERS, "config", "results_path")


def gaps(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two JSON documents differ by more than the tolerance."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{at}: {sorted(one.keys() ^ other.keys())}"]
        return [
            gap
            for name in one.keys() - set(SAID_ELSEWHERE)
            for gap in gaps(one[name], other[name], f"{at}.{name}")
        ]
    if isinstance(one, list) and len(one) == len(other):
        return [gap for i, pair in enumerate(zip(one, other)) for gap in gaps(*pair, f"{at}[{i}]")]
    if isinstance(one, float) and isinstance(other, float):
        close = other == pytest.approx(one, rel=RELATIVE, abs=ABSOLUTE)
        return [] if close else [f"{at}: {one} and {other}"]
    return [] if one == other else [f"{at}: {one!r} and {other!r}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "method", "more"),
    [
        ("run", "central", ()),
        # The reference policy is the base: the adapter is switched off for a pass.
        ("run", "reverse", ("update.beta=0.05", "memory_config.gradient_checkpointing=true")),
        ("measure", "central", ("experiment.compute_linquad=true",)),
    ],
)
def test_a_sharded_model_gives_the_results_of_one_process(tmp_path, verb, method, more):
    one, two = tmp_path / "one", tmp_path / "two"
    asked = (*WIDE, f"approx_delta_h.method={method}", *more)
    alone = done(command(verb, "--out", str(one), *options(*asked)))
    shared = done(command(verb, "--out", str(two), *options(*asked, SHARDED), ranks=2))
    assert alone.returncode == shared.returncode == 0, alone.stderr + shared.stderr
    found = [json.loads((out / "results.json").read_text()) for out in (one, two)]
    assert not gaps(*found)
    # The rollouts, too, are the same, and so is what they are named by.
    assert _named(one) == _named(two)


def _named(out: Path) -> set[str]:
    """Repeats are named by the configuration, which says whether the model was cut."""
    return {name for name in files(out) if "measurements" not in name}


@pytest.mark.slow
def test_what_cannot_be_sharded_is_refused():
    refused = {
        "influence": (
            2,
            ("influence.fisher=true",),
            "influence.fisher is true with checkpoint.sharding 'fsdp'; expected false",
        ),
        "run": (1, ("approx_delta_h.method=central",), "A sharded model in 1 process"),
        "measure": (
            2,
            ("approx_delta_h.method=central", "generation.top_p=0.9"),
            "sampling.top_p is 0.9 with checkpoint.sharding 'fsdp'; expected 1",
        ),
    }
    for verb, (ranks, more, said) in refused.items():
        ended = done(command(verb, *options(SHARDED, *more), ranks=ranks))
        assert ended.returncode != 0
        assert said in " ".join(ended.stderr.split())


@pytest.mark.parametrize("method", ["jvp", "double_backward"])
def test_forward_mode_of_a_sharded_model_is_refused_before_it_is_read(method):
    given = {"checkpoint": {"sharding": "fsdp"}, "approx_delta_h": {"method": method}}
    said = rf"predict\.method is '{method}' with checkpoint\.sharding 'fsdp'.* central"
    with pytest.raises(ValueError, match=said):
        open_checkpoint(parse_config(given), "no such checkpoint", may_shard=True)


def test_other_commands_refuse_a_sharded_model():
    given = {"checkpoint": {"sharding": "fsdp"}, "approx_delta_h": {"method": "reverse"}}
    refuse_sharding(parse_config({}))
    with pytest.raises(ValueError, match=r"sharding is 'fsdp'; expected 'none': only `run`, `meas"):
        refuse_sharding(parse_config(given))
