"""The sketch of a vector: what it promises about norms and distances, over many vectors."""

from __future__ import annotations

import pytest
import torch

from entropy_experiments.numerics import sketch as sketches
from entropy_experiments.numerics.sketch import BUCKETS, Fingerprint, distance, sketch

pytestmark = pytest.mark.statistical


def _vectors(count: int, *, size: int = 3000) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {f"layer {i}.A": torch.randn(size, generator=generator, dtype=torch.float64) ** 3}
        for i in range(count)
    ]


def test_norms_are_unbiased_and_spread_as_promised():
    """E|s|^2 = |x|^2, relative standard deviation sqrt(2 / 64) = 0.18; 400 vectors."""
    ratio = torch.tensor(
        [float(sketch(x).norm() ** 2 / x[n].norm() ** 2) for x in _vectors(400) for n in x]
    )
    assert abs(float(ratio.mean()) - 1) < 4 * 0.18 / 20
    assert 0.13 < float(ratio.std()) < 0.24


@pytest.mark.parametrize("apart", [1e-3, 0.05, 0.4])
def test_distances_are_within_half(apart):
    generator = torch.Generator().manual_seed(0)
    for x in _vectors(60):
        (name,) = x
        noise = torch.randn(x[name].shape, generator=generator, dtype=torch.float64)
        other = x[name] + apart * noise * x[name].norm() / noise.norm()
        assert distance(sketch({name: other}), sketch(x)) == pytest.approx(apart, rel=0.5)


def test_it_is_linear_so_a_step_is_a_difference():
    x, step = torch.randn(500).double(), 1e-6 * torch.randn(500).double()
    both = sketch({"w": x + step}) - sketch({"w": x})
    assert float((both - sketch({"w": step})).norm()) < 1e-12


def test_place_name_and_chunks_matter_as_they_should(monkeypatch):
    x = torch.randn(1000).double()
    whole = sketch({"w": x})
    monkeypatch.setattr(sketches, "CHUNK", 7)
    assert torch.allclose(sketch({"w": x}), whole, atol=1e-12)
    assert distance(sketch({"w": x.roll(1)}), whole) > 0.5
    assert distance(sketch({"v": x}), whole) > 0.5
    assert torch.equal(sketch({"w": x.view(10, 100)}), sketch({"w": x}))


def test_every_bucket_and_both_signs_are_used():
    ones = sketch({"w": torch.ones(64_000).double()})
    assert len(ones) == BUCKETS
    assert float(ones.abs().max()) < 6 * 1000**0.5  # signs cancel
    hashed = sketches._mixed(torch.arange(64_000))
    counts = torch.bincount(hashed & (BUCKETS - 1), minlength=BUCKETS)
    assert 800 < int(counts.min()) <= int(counts.max()) < 1200


def test_a_fingerprint_survives_json():
    found = Fingerprint.of({"a": torch.randn(4, 5), "b": torch.randn(3)})
    again = Fingerprint.from_json(found.as_json())
    assert again.distance(found) == 0
    assert again.norm == found.norm
    assert again.norms == found.norms
    with pytest.raises(ValueError, match="has 3 numbers; expected 64"):
        Fingerprint.from_json({**found.as_json(), "sketch": [1.0, 2.0, 3.0]})
