"""Gradients that come parameter by parameter: the same numbers as whole ones."""

import pytest
import torch

from entropy_experiments.online.noise_scale import METRICS, NoiseScale
from entropy_experiments.online.watch import Throttle
from tolerances import assert_exact

pytestmark = pytest.mark.exact

PARAMS = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(2, 2, dtype=torch.float64)}
METRIC = {"a": torch.tensor([1.0, 3.0, 0.2]).double(), "b": torch.full((2, 2), 0.7).double()}
STEPS, PASSES, SIZE = 6, 3, 2.0


def gradients():
    draws = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        yield [
            {
                n: torch.randn(p.shape, generator=draws, dtype=p.dtype) + 0.3
                for n, p in PARAMS.items()
            }
            for _ in range(PASSES)
        ]


def same(one, other):
    for metric in METRICS:
        a, b = one.estimate(metric), other.estimate(metric)
        assert_exact(a.signal.value, b.signal.value)
        assert_exact(a.noise.value, b.noise.value)
        assert a.samples == b.samples


def test_pieces_of_a_microbatch_are_the_microbatch():
    whole, pieces = NoiseScale(PARAMS), NoiseScale(PARAMS)
    for passes in gradients():
        whole.open_step(METRIC)
        pieces.open_step(METRIC)
        for gradient in passes:
            whole.add(gradient, SIZE)
            for name in reversed(PARAMS):  # backward's order
                # A pass of a loss that is divided by the number of passes.
                pieces.add_piece(name, gradient[name] / PASSES, scale=PASSES * SIZE)
            pieces.end_microbatch(SIZE)
        whole.close_step(distributed=False)
        pieces.close_step(distributed=False)
    assert whole.adam_steps == pieces.adam_steps == STEPS
    same(pieces, whole)


def test_merged_passes_are_one_microbatch():
    """Of one rank: its square is that of the sum, cross terms included."""
    merged = NoiseScale(PARAMS)
    (passes, *_) = gradients()
    merged.open_step(METRIC, merged=True)
    for gradient in passes:
        for name, g in gradient.items():
            merged.add_piece(name, g, scale=1.0)
    merged.end_microbatch(2.0)
    total = {n: sum(g[n] for g in passes) for n in PARAMS}
    square = float(sum((x**2).sum() for x in total.values()))
    inside = float(sum((METRIC[n] * x**2).sum() for n, x in total.items()))
    for found, expected in zip(
        merged._squares.tolist(), [square, square / 2, inside, inside / 2], strict=True
    ):
        assert_exact(found, expected)
    apart = float(sum((g[n] ** 2).sum() for g in passes for n in PARAMS))
    assert abs(square - apart) > 0.1 * square  # teeth: the sum of squares is another number


def test_mistakes_with_pieces_are_named():
    noise = NoiseScale(PARAMS)
    with pytest.raises(ValueError, match="'c' is none of the parameters"):
        noise.add_piece("c", PARAMS["a"])
    with pytest.raises(ValueError, match=r"shape \(3,\) for 'b'; expected \(2, 2\)"):
        noise.add_piece("b", PARAMS["a"])
    noise.add_piece("a", PARAMS["a"])
    with pytest.raises(ValueError, match="gave 'a' two gradients; expected one"):
        noise.add_piece("a", PARAMS["a"])
    noise.discard_step()
    for _ in range(2):
        noise.add_piece("a", PARAMS["a"])
        noise.end_microbatch(1.0)
    noise.add_piece("a", PARAMS["a"])
    with pytest.raises(ValueError, match="pieces of a microbatch that did not end"):
        noise.close_step(distributed=False)
    noise.open_step(merged=True)
    noise.add_piece("a", PARAMS["a"])
    noise.add_piece("a", PARAMS["a"])
    noise.end_microbatch(1.0)
    with pytest.raises(ValueError, match="merged step has one microbatch on each rank"):
        noise.end_microbatch(1.0)


def test_what_was_asked_for_is_overhead_and_skips_no_step():
    now = 0.0
    throttle = Throttle(max_overhead=0.5, clock=lambda: now)
    throttle.note(0)
    with throttle.timing():
        now += 1.0
    now += 10.0  # training
    with throttle.timing(requested=True):
        now += 30.0
    assert throttle.overhead == pytest.approx(31 / 10)
    assert throttle.wants(1)  # 2 seconds of 10
    throttle.seconds += 30.0  # teeth: counted as the probe's, the step would be skipped
    assert not throttle.wants(1)
