"""The noise scale against full enumeration, plain formulas, torch's Adam, and two ranks.

Samples are drawn from three points with equal chances. One `NoiseScale` is given *every* draw of a
step as a step of its own, so its mean over steps is the expectation: agreement is to rounding.
"""

import itertools
import json
import math
import weakref

import pytest
import torch
from scipy import stats
from torch import multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

from entropy_experiments.online import noise_scale
from entropy_experiments.online.noise_scale import (
    METRICS,
    NoiseScale,
    StepSums,
    adam_preconditioner,
    summarise_steps,
)
from tolerances import EXACT, INVARIANT, assert_exact

pytestmark = pytest.mark.exact

POINTS = torch.tensor([[1.0, -2.0, 0.5], [0.3, 1.0, -1.0], [2.0, 0.4, 1.5]], dtype=torch.float64)
METRIC = torch.tensor([2.0, 0.5, 7.0], dtype=torch.float64)
SIZES = (1, 2, 3)
"""Microbatches of different sizes: 3 ** 6 draws in all."""


def as_params(x):
    """Two parameters of different shapes."""
    return {"a": x[:1], "b": x[1:].reshape(2, 1)}


def truth(metric):
    mean = POINTS.mean(0)
    return float((metric * mean**2).sum()), float((metric * (POINTS - mean) ** 2).sum() / 3)


def every_draw():
    for draw in itertools.product(range(3), repeat=sum(SIZES)):
        yield [part.mean(0) for part in POINTS[list(draw)].split(SIZES)]


@pytest.fixture(scope="module")
def enumerated():
    noise = NoiseScale(as_params(POINTS[0]))
    for gradients in every_draw():
        noise.open_step(as_params(METRIC))
        for gradient, size in zip(gradients, SIZES, strict=True):
            noise.add(as_params(gradient), size)
        assert noise.close_step()
    return noise


@pytest.mark.parametrize("metric", METRICS)
def test_both_parts_are_unbiased_for_microbatches_of_any_size(enumerated, metric):
    signal, spread = truth(METRIC if metric == "adam" else torch.ones(3))
    found = enumerated.estimate(metric)
    assert found.steps == 3 ** sum(SIZES)
    assert_exact(found.signal.value, signal)
    assert_exact(found.noise.value, spread)
    assert found.critical_batch is not None
    assert_exact(found.critical_batch, spread / signal)


def test_the_enumeration_has_teeth():
    """The squared norm of the mean, and the formulas of equal sizes, miss by far."""
    signal, spread = truth(torch.ones(3))
    mean_square, unweighted = [], []
    for parts in every_draw():
        g = torch.stack(parts)
        size = torch.tensor(SIZES, dtype=g.dtype)[:, None]
        mean_square.append(float(((size * g).sum(0) / size.sum()).square().sum()))
        unweighted.append(float(g.var(0).sum() * size.mean()))
    assert sum(mean_square) / len(mean_square) - signal > 0.1 * signal
    assert_exact(sum(mean_square) / len(mean_square) - spread / sum(SIZES), signal)
    assert abs(sum(unweighted) / len(unweighted) - spread) > 0.1 * spread


def random_step(seed, count=5):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (4, 3), "b": (5,)}
    return [
        {n: 1 + torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
        for _ in range(count)
    ]


def test_accumulated_gradients_give_the_same():
    weights = [2.0, 3.0, 1.0, 5.0, 4.0]
    one, other = (NoiseScale(random_step(0)[0]) for _ in range(2))
    for seed in range(6):
        total = {"a": torch.zeros(4, 3).double(), "b": torch.zeros(5).double()}
        for gradient, weight in zip(random_step(seed), weights, strict=True):
            one.add(gradient, weight)
            total = {name: t + gradient[name] * weight / sum(weights) for name, t in total.items()}
            other.add_accumulated(total, weight, scale=sum(weights))
        assert one.close_step()
        assert other.close_step()
    ours, theirs = one.estimate().as_dict(), other.estimate().as_dict()
    assert ours["critical_batch"] == pytest.approx(theirs["critical_batch"], rel=INVARIANT * 100)
    assert ours["signal"]["value"] == pytest.approx(theirs["signal"]["value"], rel=INVARIANT * 100)
    assert ours["samples"] == 15.0


def test_no_gradient_means_zero():
    one, other = (NoiseScale(random_step(0)[0]) for _ in range(2))
    for gradient in random_step(1):
        one.add({**gradient, "b": None})
        other.add({**gradient, "b": torch.zeros(5)})
    assert one.close_step()
    assert other.close_step()
    assert one.estimate().signal == other.estimate().signal


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_preconditioner_is_adams_before_the_step(amsgrad):
    a, b = (torch.nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (2, 3))
    groups = [{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.05}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=1e-3, amsgrad=amsgrad)
    params = {"a": a, "b": b}
    assert adam_preconditioner(optimizer, params) is None
    moment, largest = torch.zeros(5).double(), torch.zeros(5).double()
    for step in range(1, 4):
        g = torch.arange(1.0, 6.0).double() / step**2
        a.grad, b.grad = g[:2].clone(), g[2:].clone()
        optimizer.step()
        moment = 0.99 * moment + 0.01 * g**2
        largest = torch.maximum(largest, moment)
    expected = 1 / (((largest if amsgrad else moment) / (1 - 0.99**3)).sqrt() + 1e-3)
    found = adam_preconditioner(optimizer, params)
    assert found is not None
    assert (found["a"] - expected[:2]).abs().max() < EXACT
    assert (found["b"] - 0.5 * expected[2:]).abs().max() < EXACT
    optimizer.step()
    with pytest.raises(ValueError, match=r"has stepped since open_step \(step 3 then, 4 now\)"):
        found["a"]


def test_other_optimizers_are_refused():
    a = torch.nn.Parameter(torch.ones(2))
    a.grad = torch.ones(2)
    plain = torch.optim.SGD([a], lr=0.1, momentum=0.9)
    plain.step()
    with pytest.raises(ValueError, match="'a' is not in an Adam group"):
        adam_preconditioner(plain, {"a": a})
    adam = torch.optim.Adam([a])
    adam.step()
    adam.state[a].pop("exp_avg_sq")
    with pytest.raises(ValueError, match="has no exp_avg_sq for 'a'"):
        adam_preconditioner(adam, {"a": a})


def held(value, seen):
    """Elements of all tensors that an object holds, each storage once."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, dict):
        for inner in value.values():
            held(inner, seen)
    elif isinstance(value, (list, tuple)) or hasattr(value, "popleft"):
        for inner in value:
            held(inner, seen)
    return sum(seen.values())


def test_one_buffer_is_all_that_is_kept():
    params = {"w": torch.zeros(1000, 10), "v": torch.zeros(77)}
    noise = NoiseScale(params)
    for seed in range(30):
        for i in range(3):
            generator = torch.Generator().manual_seed(3 * seed + i)
            gradient = {n: torch.randn(p.shape, generator=generator) for n, p in params.items()}
            alive = weakref.ref(gradient["w"])
            noise.add(gradient)
            del gradient
            assert alive() is None
        assert noise.close_step()
        assert held(vars(noise), {}) <= 4 * (10_077 + 20)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made, views of known storages aside."""

    def __init__(self, known):
        super().__init__()
        self.known, self.bytes = {x.untyped_storage().data_ptr() for x in known}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return made


def test_temporaries_are_small(monkeypatch):
    monkeypatch.setattr(noise_scale, "CHUNK", 64)
    params = {"w": torch.ones(100, 10), "v": torch.ones(7)}
    gradient = {name: 2 * p for name, p in params.items()}
    metric = {name: 3 * p for name, p in params.items()}
    noise = NoiseScale(params)
    known = [*gradient.values(), *metric.values(), *noise._flat]
    with Largest(known) as made:
        noise.open_step(metric)
        noise.add(gradient, 2)
        noise.add_accumulated({name: 3 * x for name, x in gradient.items()}, 1)
        tripled = made.bytes  # the test's own tensor, which is as large as a gradient
        made.bytes = 0
        noise.add(gradient, 2)
        noise.add_accumulated(gradient, 1)
        assert noise.close_step()
    assert tripled == 4000
    assert 0 < made.bytes <= 64 * 8


def test_chunks_change_nothing(monkeypatch):
    def found():
        noise = NoiseScale(random_step(0)[0])
        for seed in range(5):
            noise.open_step({n: x.abs() for n, x in random_step(7)[0].items()})
            for i, gradient in enumerate(random_step(seed)):
                noise.add(gradient, 1 + i)
            noise.close_step()
        return [noise.estimate(metric) for metric in METRICS]

    whole = found()
    monkeypatch.setattr(noise_scale, "CHUNK", 3)
    for one, other in zip(whole, found(), strict=True):
        assert one.signal.value == pytest.approx(other.signal.value, rel=INVARIANT)
        assert one.noise.value == pytest.approx(other.noise.value, rel=INVARIANT)


def test_half_precision_is_summed_in_full():
    noise = NoiseScale({"w": torch.zeros(3, dtype=torch.bfloat16)})
    for x in (256.0, 1.0, 1.0):
        noise.add({"w": torch.full((3,), x, dtype=torch.bfloat16)})
    noise.close_step()
    expected = 3 * 2 * (256 + 256 + 1) / 6  # 256 + 1 is 256 in bfloat16
    assert noise.estimate().signal.value == pytest.approx(expected, rel=INVARIANT)


def test_a_step_that_is_not_finite_is_skipped_and_told():
    noise = NoiseScale(random_step(0)[0], window=6)
    for seed in range(8):
        for i, gradient in enumerate(random_step(seed)):
            noise.add({**gradient, "b": gradient["b"] * (math.nan if (seed, i) == (3, 2) else 1)})
        assert noise.close_step() == (seed != 3)
    found = noise.estimate()
    assert (found.steps, found.skipped) == (6, 1)
    assert "1 steps with a non-finite gradient are left out" in found.why_not
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_discarded_step_leaves_nothing():
    one, other = (NoiseScale(random_step(0)[0]) for _ in range(2))
    one.add(random_step(9)[0])
    one.discard_step()
    for noise in (one, other):
        for gradient in random_step(1):
            noise.add(gradient)
        noise.close_step()
    assert one.estimate() == other.estimate()


def test_few_steps_have_no_critical_batch():
    noise = NoiseScale(random_step(0)[0])
    for seed in range(4):
        for gradient in random_step(seed):
            noise.add(gradient)
        noise.close_step()
    found = noise.estimate()
    assert found.signal.value > 0
    assert found.signal.interval is None
    assert found.critical_batch is None
    assert "4 steps: an interval needs at least 5" in found.why_not[0]


def test_mistakes_are_named():
    params = random_step(0)[0]
    noise = NoiseScale(params)
    with pytest.raises(ValueError, match="No step has been closed in the metric 'raw'"):
        noise.estimate()
    with pytest.raises(ValueError, match=r"missing \['b'\], unknown \['c'\]"):
        noise.add({"a": params["a"], "c": params["b"]})
    with pytest.raises(ValueError, match="weight is 0; expected the number of samples"):
        noise.add(params, 0)
    with pytest.raises(ValueError, match=r"shape \(4,\) for 'b'; expected \(5,\)"):
        noise.add({**params, "b": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"has 0 microbatch\(es\)"):
        noise.close_step()  # what was refused left nothing
    with pytest.raises(ValueError, match="scale is 0"):
        noise.add_accumulated(params, scale=0)
    noise.add(params)
    with pytest.raises(ValueError, match="A step with 1 microbatches is open"):
        noise.open_step()
    with pytest.raises(ValueError, match=r"has 1 microbatch\(es\); expected at least 2"):
        noise.close_step()
    with pytest.raises(ValueError, match="metric is 'sgd'"):
        noise.estimate("sgd")
    with pytest.raises(ValueError, match="got no parameters"):
        NoiseScale({})
    with pytest.raises(ValueError, match="window is 2; expected at least 5"):
        NoiseScale(params, window=2)


@pytest.mark.parametrize("signal", [1.0, 0.15, 0.0, -1.0])
def test_the_ratio_has_fiellers_interval(signal):
    """At its ends noise - B signal is as far from 0 as t allows, inside nearer, outside farther."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(12, 2, dtype=torch.float64, generator=generator) * 0.4
    x = x - x.mean(0) + torch.tensor([signal, 3.0])
    found = summarise_steps([StepSums(*row) for row in x.tolist()], "raw", skipped=0, samples=1.0)
    t = stats.t.ppf(0.975, min(found.signal.free, found.noise.free))

    def fits(ratio):
        d = x[:, 1] - ratio * x[:, 0]
        return float(abs(d.mean()) / (d.std() / 12**0.5)) / t

    if signal == 1.0:
        assert found.critical_batch == pytest.approx(3.0)
        low, high = found.critical_batch_interval
        assert fits(low) == pytest.approx(1, rel=EXACT * 100)
        assert fits(high) == pytest.approx(1, rel=EXACT * 100)
        assert fits(0.99 * low) > 1 > fits(1.01 * low)
        assert fits(1.01 * high) > 1 > fits(0.99 * high)
        return
    assert found.critical_batch is None
    if signal < 0:
        assert found.critical_batch_interval is None
        assert "came out below 0" in found.why_not[0]
        return
    low, high = found.critical_batch_interval
    assert high is None
    assert fits(low) == pytest.approx(1, rel=EXACT * 100)
    assert fits(0.99 * low) > 1 > fits(1e6 * low)
    assert "the noise scale has no upper bound" in found.why_not[0]


RANKS = 2


def shared_steps(noise, rank, ranks, **options):
    """Rank 0 of two has one microbatch in five, and none in every third step."""
    for seed in range(7):
        noise.open_step({n: 1 + x.abs() for n, x in random_step(100)[0].items()})
        for i, gradient in enumerate(random_step(seed)):
            owner = 0 if i == 0 and seed % 3 else 1
            if ranks == 1 or owner == rank:
                noise.add(gradient, 1 + i)
        assert noise.close_step(**options)
    return {metric: noise.estimate(metric).as_dict() for metric in METRICS}


def on_a_rank(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    found = shared_steps(NoiseScale(random_step(0)[0]), rank, RANKS)
    one_sided = NoiseScale(random_step(0)[0])
    one_sided.open_step(random_step(0)[0] if rank == 0 else None)
    one_sided.add(random_step(0)[0])
    with pytest.raises(ValueError, match="1 of 2 ranks opened the step with a preconditioner"):
        one_sided.close_step()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.mark.slow  # two processes that import torch
def test_two_ranks_are_one_process(tmp_path):
    alone = shared_steps(NoiseScale(random_step(0)[0]), 0, 1)
    multiprocessing.spawn(on_a_rank, args=(tmp_path,), nprocs=RANKS)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for metric in METRICS:
            for part in ("signal", "noise"):
                assert found[metric][part]["value"] == pytest.approx(
                    alone[metric][part]["value"], rel=INVARIANT
                )
            assert found[metric]["critical_batch"] == pytest.approx(
                alone[metric]["critical_batch"], rel=INVARIANT
            )
            assert found[metric]["samples"] == alone[metric]["samples"]
