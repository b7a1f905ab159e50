"""What the benchmarks compute from times: exponents, ratios, the peak, working memory, tables."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from benchmarks import (
    estimators,
    growth,
    online,
    plots,
    profile,
    ranks,
    retraining,
    scoring,
    summary,
    tables,
)
from benchmarks.counting import LiveBytes, WorkingBytes, flops
from benchmarks.products import Products
from torch import nn
from torch.nn.modules import module as nn_module
from transformers import LlamaConfig, LlamaForCausalLM

from checkout import ROOT
from entropy_experiments.models.scoring import SequenceProcessor

pytestmark = pytest.mark.contract

SIZES = (16, 32, 64, 128, 256)


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return SequenceProcessor(LlamaForCausalLM(config))


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_the_power(power):
    found = growth.fitted_exponent(SIZES, [3.0 * n**power for n in SIZES])
    assert found == pytest.approx(power, abs=1e-12)


def test_the_exponent_is_that_of_least_squares():
    seconds = [0.9, 2.4, 3.1, 8.8, 14.0]
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (SIZES, seconds))
    design = torch.stack([torch.ones_like(x), x], 1)
    expected = float(torch.linalg.lstsq(design, y[:, None]).solution[1])
    assert growth.fitted_exponent(SIZES, seconds) == pytest.approx(expected, abs=1e-10)
    assert abs(expected - 1.0) > 0.005  # another slope than the ideal one


def test_a_constant_hides_growth_that_the_last_sizes_show():
    times = {n: [5.0 + 0.001 * n**2, 5.1 + 0.001 * n**2] for n in SIZES}
    found = growth.grown(times)
    assert found["exponent"]["median"] < 1.1 < found["last"]["median"]
    low, high = found["exponent"]["range"]
    assert low < high


@pytest.mark.parametrize(
    ("sizes", "values", "message"),
    [
        ([1, 2], [1.0], "2 sizes and 1 values; expected as many"),
        ([4, 4], [1.0, 2.0], "two or more different sizes"),
        ([1, 2], [0.0, 1.0], "The smallest number is 0; expected all above 0"),
    ],
)
def test_what_has_no_exponent_is_refused(sizes, values, message):
    with pytest.raises(ValueError, match=message):
        growth.fitted_exponent(sizes, values)


def test_groups_of_prompts_are_whole():
    with pytest.raises(ValueError, match="12 rollouts; expected a multiple of 8"):
        growth.rollouts(12, 4, 96, seed=0)
    found = growth.rollouts(32, 4, 96, seed=0)
    tokens_P = found.tokens_N.reshape(4, 8).sum(1)
    assert bool((tokens_P == tokens_P[0]).all())  # else the largest part would grow with N


def test_every_axis_grows_one_size_alone():
    for axis, sizes in growth.SIZES.items():
        assert len(sizes) >= 5
        assert list(sizes) == sorted(set(sizes))
        assert axis in growth.USUAL
        assert set(growth.WAYS_OF[axis]) <= set(plots.COLOURS)


def test_all_ways_of_growth_run_on_a_small_model(policy):
    made = growth.problem(policy, {"N_E": 16, "N_U": 24, "S": 4, "V": 96})
    answers = {name: run() for name, run in made.ways().items()}
    assert answers["pass"].logprob_NS.shape == made.evaluation.tokens_NS.shape
    assert answers["tokens"].value_NS.shape == made.batch.rollouts.tokens_NS.shape
    assert answers["prediction"].stderr is not None
    assert len(answers["measurement"]) == 1


def test_ours_and_the_plain_ways_agree_on_a_small_model(policy):
    rollouts = growth.rollouts(16, 6, 96, seed=0)
    found = estimators.examine(policy, rollouts, 1)
    assert max(found["largest_difference"].values()) < 1e-4
    assert found["scaled_by"] == {
        "b_graphs": 2.0,
        "b_gradients": 4.0,
        "c": 2.0 * 16 * 3,
        "d": 4.0,
    }
    assert 1 < found["operations_in_passes"]["prediction"] < 4
    scored = scoring.examine(policy, rollouts, 1, [1])
    assert scored["largest_difference"] < 1e-4
    assert scored["tokens_through"]["head"] == scored["response_tokens"]
    assert scored["threads_1"]["of_peak"]["median"] > 0


def test_counting_is_of_the_ways_that_are_timed(policy):
    """A hook on all modules would change them; and torch's own counter has one."""
    x = torch.ones(3, 16)
    heard: list[bool] = []

    def product() -> None:
        everywhere = nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks
        own = any(m._forward_hooks or m._forward_pre_hooks for m in policy.model.modules())
        heard.append(bool(everywhere) or own)
        policy.model.model.layers[0].mlp(x)

    assert flops(product) == 3 * 2 * 3 * 16 * 40
    assert heard == [False]


def test_a_profile_has_the_largest_operators_first(policy):
    rollouts = growth.rollouts(16, 6, 96, seed=0)
    found = profile.examine(policy, rollouts)
    assert list(found) == ["pass", "prediction", "measurement"]
    for rows in found.values():
        shares = [row["share"] for row in rows.values()]
        assert shares == sorted(shares, reverse=True)
        assert 0 < shares[-1] <= sum(shares) <= 1
    lines = summary.profiles({"profile": {"models": {"random": found}}})
    assert [line.split(" | ")[0] for line in lines[-3:]] == [
        "| pass",
        "| prediction",
        "| measurement",
    ]
    operator, first = next(iter(found["pass"].items()))
    assert f"| {operator} {first['share']:.1%}, " in lines[-3]
    assert summary.profiles({}) == []


def test_a_profile_is_of_the_operators_own_time():
    x = torch.ones(300, 300)
    found = profile.profiled(lambda: [nn.functional.linear(x, x) for _ in range(5)])
    operator, first = next(iter(found.items()))
    assert (operator, first["calls"]) == ("mm", 5)  # not linear, which only calls it
    assert first["share"] > 0.5


def test_other_influences_are_no_result(policy, monkeypatch):
    work = estimators.Work(policy, growth.rollouts(16, 6, 96, seed=0))
    monkeypatch.setattr(work, "tokens", lambda: torch.zeros(16))
    with pytest.raises(RuntimeError, match="ours and the plain ways differ"):
        estimators.differences(work)


def test_the_typical_batch_is_scaled_by_padded_tokens():
    rollouts = growth.rollouts(24, 6, 96, seed=0)
    attention_NS = rollouts.attention_NS.clone()
    attention_NS[:8, 9:] = False  # a batch of short ones: 9 tokens wide
    short = replace(
        rollouts, attention_NS=attention_NS, response_NS=rollouts.response_NS & attention_NS
    )
    rows_N, share = estimators._typical(short)
    width = rollouts.tokens_NS.shape[1]
    assert rows_N.tolist() == list(range(8, 16))
    assert share == pytest.approx((9 + 2 * width) / width)


def test_ways_are_timed_in_turn_and_ratios_are_of_one_round():
    order = []
    ways = {name: lambda name=name: order.append(name) for name in "ab"}
    found = tables.alternately(ways, 3, time.perf_counter)
    assert "".join(order) == "baabba"
    assert all(len(taken) == 3 for taken in found.values())
    ratio = tables.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0], scale=10)
    assert ratio == {"median": 20.0, "range": [10.0, 30.0]}
    assert tables.told(ratio) == "20.00 (10.00 to 30.00)"
    with pytest.raises(ValueError, match="rounds is 0; expected at least 1"):
        tables.alternately(ways, 0)


def test_working_memory_leaves_out_what_is_one_number_per_rollout():
    def run():
        answer_N = torch.zeros(1000, dtype=torch.float64)
        for start in range(0, 1000, 100):
            part = torch.ones(100, 7)
            answer_N[start : start + 100] = part.sum(1)
        return answer_N

    with LiveBytes() as all_of_it, WorkingBytes({1000}, 4000) as working:
        run()
    assert all_of_it.peak - working.peak == 8000
    assert 100 * 7 * 4 <= working.peak < 8000
    with WorkingBytes({1000}, 4000) as working:
        torch.zeros(1000, 500)  # logits of every rollout, say
    assert working.peak == 4 * 1000 * 500


def test_operations_that_torch_does_not_count():
    x, a, b = torch.ones(8, 5), torch.ones(5, 3), torch.ones(8, 3)
    assert flops(lambda: b.addmm_(x, a)) == 2 * 8 * 5 * 3
    q, k = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 6, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert flops(lambda: attention(q, k, k)) == 2 * 2 * 3 * 4 * 6 * (8 + 8)


def test_products_of_the_peak_are_those_that_the_model_makes(policy):
    rollouts = growth.rollouts(16, 4, 96, seed=0)
    alone = policy.without_sharing()

    def run():
        with torch.no_grad():
            alone.score(alone.params, rollouts)

    found, nothing = Products.of(policy.model, run)
    assert nothing is None
    rows = 16 * (rollouts.tokens_NS.shape[1] - 1)
    predicted = int(rollouts.response_NS.sum())
    per_token = 2 * 2 * (4 * 16 * 16 + 3 * 16 * 40)
    assert found.tokens(policy.model) == {"layers": rows, "head": predicted}
    assert found.operations == per_token * rows + 2 * predicted * 16 * 96
    assert found.other == 0
    assert found.alone(time.perf_counter) > 0
    with pytest.raises(ValueError, match="no product with the model's own weights"):
        Products.of(policy.model, lambda: torch.ones(2, 2) @ torch.ones(2, 2))


def test_two_ranks_that_differ_are_no_result():
    assert ranks.compared([1.0, -2.0], [1.0, -2.0]) == 0.0
    with pytest.raises(RuntimeError, match=r"differ by 1e-11 \(relative\); expected at most 1e-12"):
        ranks.compared([1.0, 2.0], [1.0 + 1e-11, 2.0])


RESULTS = {
    "ranks": {"speedup": {"median": 1.7, "range": [1.5, 1.8]}, "targets": {"speedup": 1.6}},
    "growth": {
        "axes": {
            "N_E": {
                "pass": growth.grown({n: [0.1 * n**1.2, 0.11 * n**1.2] for n in SIZES}),
            }
        },
        "memory": {"pass": {"growth": {"working": 0.012, "all": 0.3}}},
    },
}


def test_the_table_says_what_was_measured_and_what_was_not():
    text = "\n".join(summary.lines(RESULTS))
    assert "| two ranks of one thread over one | >= 1.6 | 1.70 (1.50 to 1.80) | yes |" in text
    assert "| 30M: exponent of pass over N_E | <= 1.1 | 1.20 (1.20 to 1.20) | no |" in text
    assert "working memory, growth from N_E = 128 to 2048 | <= 5 % | 1.2 % | yes |" in text
    assert "all memory, growth from N_E = 128 to 2048 | <= 5 % | 30 % | no |" in text
    assert "(d) |  | not stored yet |  |" in text


def test_the_table_and_the_programs_have_the_same_targets():
    programs = {
        "scoring": scoring.TARGETS,
        "estimators": estimators.LIMITS,
        "ranks": {"speedup": ranks.TARGET},
        "growth": growth.LIMITS,
        "online": online.LIMITS,
    }
    for row in summary.ROWS:
        if row.target is not None:
            names = programs[row.file].keys() & set(row.at)
            assert [programs[row.file][name] for name in names] == [row.target], row.what


@pytest.mark.slow
def test_memory_per_rollout_is_no_working_memory(policy):
    found = growth.memory(policy, growth.MEMORY_SMALL)
    for way in ("pass", "prediction", "measurement"):
        assert found[way]["growth"]["working"] == pytest.approx(0, abs=0.05)
        assert found[way]["growth"]["all"] > 0.05


def test_the_page_has_the_stored_numbers():
    text = summary.PAGE.read_text(encoding="utf-8")
    assert summary.page(text, summary.stored()) == text  # else: python -m benchmarks.summary
    with pytest.raises(ValueError, match="no single part between"):
        summary.page("# Benchmarks", {})


def test_drawings_are_made_of_what_is_stored(tmp_path, capsys):
    stored, images = tmp_path / "stored", tmp_path / "images"
    plots.main(["--results", str(stored), "--out", str(images)])
    assert capsys.readouterr().out.count("not stored yet; not drawn") == 2
    for name, found in RESULTS.items():
        tables.write(stored / f"{name}.json", found)
    plots.main(["--results", str(stored), "--out", str(images)])
    once = {path.name: path.read_bytes() for path in images.iterdir()}
    assert sorted(once) == ["benchmarks_growth.svg", "benchmarks_ratios.svg"]
    plots.main(["--results", str(stored), "--out", str(images)])
    assert {path.name: path.read_bytes() for path in images.iterdir()} == once


APART = {"arc_ablations", "doctor_comparison", "retraining", "doctor_threads", "explain_smollm2"}
"""Hours of training, tools that are no dependency, and questions that are not ours: by hand."""


def test_make_bench_runs_every_program():
    recipe = (ROOT / "Makefile").read_text()
    programs = {f.stem for f in (ROOT / "benchmarks").glob("*.py") if "__main__" in f.read_text()}
    assert programs > APART
    for name in programs - APART:
        assert f"-m benchmarks.{name}" in recipe, name


def test_blamed_prompts_are_the_lowest_and_random_ones_are_others():
    sums = {f"p{i:02}": float(i) for i in range(40)}
    blamed = retraining.blamed_prompts(sums)
    assert blamed == ["p00", "p01"]
    other = retraining.random_prompts(sums, 3, besides=blamed)
    assert len(other) == 2
    assert not set(other) & set(blamed)
    assert other == retraining.random_prompts(sums, 3, besides=blamed)
    assert retraining.blamed_prompts({"a": 1.0}) == ["a"]


def test_cross_fitting_adds_up_by_the_half_that_did_not_choose():
    halves = {"a": (-5.0, 1.0), "b": (2.0, -3.0), "c": (0.0, 0.0)}
    assert retraining.cross_fitted(halves, share=1 / 3) == 1.0 + 2.0


@pytest.mark.parametrize(
    ("signs", "p"), [([1] * 9 + [-1], 11 / 1024), ([1, -1, 0], 0.75), ([-1, -1], 1.0)]
)
def test_the_sign_test_is_that_of_a_coin(signs, p):
    assert retraining.sign_test(signs) == pytest.approx(p)


def test_prompts_that_are_not_the_tasks_are_refused():
    assert retraining.places_of(["y"], ["x", "y", "y"]) == [1, 2]
    with pytest.raises(ValueError, match=r"1 prompts of the ledger are none of the task's"):
        retraining.places_of(["z"], ["x"])
