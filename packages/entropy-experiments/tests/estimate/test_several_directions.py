"""Several directions and step sizes at a time: the numbers of one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entropy_experiments.attribution.finite import finite_columns
from entropy_experiments.estimate import several_directions
from entropy_experiments.estimate.measured import measured_many
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import shifted
from entropy_experiments.types import Direction, Estimand
from models.test_shared_prompts import groups
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts

pytestmark = pytest.mark.naive

ETAS = (1e-3, 1e-1)
ESTIMAND = Estimand()


def directions_of(policy: SequenceProcessor, count: int = 3) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    return {
        f"v{k}": {n: torch.randn(p.shape, generator=draw).to(p) for n, p in policy.params.items()}
        for k in range(count)
    }


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_chunks_change_no_number(kind):
    policy = SequenceProcessor(tiny_lora("llama") if kind == "lora" else tiny_model("llama"))
    rollouts, along = groups(), directions_of(policy)
    alone = {
        (name, eta): finite_columns(
            policy, rollouts, {name: v}, [eta], estimand=ESTIMAND, microbatch=3
        )[name, eta]
        for name, v in along.items()
        for eta in ETAS
    }
    for chunk in (None, 1, 2, 4, 6, 100):
        together = finite_columns(
            policy, rollouts, along, ETAS, estimand=ESTIMAND, microbatch=3, grad_chunk=chunk
        )
        assert list(together) == list(alone)
        for case, one in alone.items():
            assert together[case].value == one.value
            assert together[case].stderr == one.stderr
    values = [one.value for one in alone.values()]
    assert len(set(values)) == len(values)  # teeth: no two of them can be mixed up


def test_measured_along_several_is_measured_along_each():
    policy, rollouts = SequenceProcessor(tiny_lora("llama")), groups()
    along = {name: Direction(parts={"v": v}, lr=1.0) for name, v in directions_of(policy).items()}
    together = measured_many(policy, rollouts, along, ETAS, microbatch=3, clips=(None, 2.0))
    for name, direction in along.items():
        alone = measured_many(
            policy, rollouts, {name: direction}, ETAS, microbatch=3, clips=(None, 2.0)
        )
        for case, one in alone.items():
            assert together[case].value == one.value
            assert together[case].stderr == one.stderr


@pytest.mark.parametrize(("chunk", "most"), [(None, 1), (1, 1), (4, 4), (100, 6)])
def test_so_many_settings_are_held_at_a_time(chunk, most, monkeypatch):
    """Of a fully trained model each is as large as the model."""
    policy, rollouts, held = SequenceProcessor(tiny_model("llama")), tiny_rollouts(), []
    own = several_directions.score_each

    def seen(policy: Any, settings: Any, *args: Any, **kwargs: Any) -> Any:
        held.append(len(settings))
        return own(policy, settings, *args, **kwargs)

    monkeypatch.setattr(several_directions, "score_each", seen)
    finite_columns(
        policy, rollouts, directions_of(policy), ETAS, estimand=ESTIMAND, grad_chunk=chunk
    )
    assert max(held) == most
    assert sum(held) == 6


def test_the_model_is_as_before():
    policy, rollouts = SequenceProcessor(tiny_lora("llama", lora_dropout=0.5)), tiny_rollouts()
    policy.model.train()
    modes = [m.training for m in policy.model.modules()]
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    finite_columns(policy, rollouts, directions_of(policy), ETAS, estimand=ESTIMAND, grad_chunk=3)
    assert not any("forward" in m.__dict__ for m in policy.model.modules())
    assert modes == [m.training for m in policy.model.modules()]
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())


@pytest.mark.faults
def test_wrong_parameters_are_refused():
    policy, rollouts = SequenceProcessor(tiny_lora("llama")), tiny_rollouts()
    bad = shifted(policy.params, directions_of(policy, 1)["v0"], 0.1)
    bad.pop(next(iter(bad)))
    with torch.no_grad(), pytest.raises(ValueError, match="params"):
        policy.score_many([policy.params, bad], rollouts)
    with pytest.raises(ValueError, match="direction 'v0'"):
        finite_columns(policy, rollouts, {"v0": bad}, ETAS, estimand=ESTIMAND)
