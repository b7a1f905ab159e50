"""A loop of one's own: bit-identical with and without the probe, and throttled as told."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.online.loop import LoopProbe
from entropy_experiments.online.probe import SKIPPED, named_gradients
from entropy_experiments.online.rows import RowFile, metrics_of, read_rows
from entropy_experiments.online.watch import FARTHEST, Throttle
from oracles.tiny_grpo import PROMPTS
from oracles.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.naive


def _loop(steps: int, probed: Any) -> dict[str, torch.Tensor]:
    """Plain language modelling on the prompts; `probed(model, optimizer, tokenizer)` or None."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = probed and probed(model, optimizer, tokenizer)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    for _ in range(steps):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        if probe is None:
            optimizer.step()
        else:
            with probe.step():
                optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("order", [1, 2])
def test_a_loop_of_one_s_own(order, tmp_path):
    made: list[LoopProbe] = []

    def probed(model, optimizer, tokenizer):
        made.append(
            LoopProbe(
                model,
                optimizer,
                tokenizer,
                prompts=PROMPTS,
                max_new_tokens=10,
                drawn=6,
                max_overhead=None,
                order=order,
                out=tmp_path / "rows.jsonl",
            )
        )
        return made[0]

    watched, alone = _loop(4, probed), _loop(4, None)
    for name, value in alone.items():
        assert torch.equal(value, watched[name]), name
    (probe,) = made
    assert probe.off is None
    assert read_rows(tmp_path / "rows.jsonl") == probe.rows
    assert [row["step"] for row in probe.rows] == [0, 1, 2, 3]
    assert all(row["step_mismatch"] < 1e-3 for row in probe.rows)
    for row in probe.rows:
        if order == 1:
            assert row["second_order"] is None
            assert row["missing"]["second_miss_low"] == "order=1"
            continue
        assert row["second_miss"] == pytest.approx(row["measured"] - row["second_order"])
        assert row["second_order_low"] < row["second_order"] < row["second_order_high"]
        assert metrics_of(row)["entropy_probe/second_order"] == row["second_order"]


def test_a_step_that_was_never_made_is_told_and_not_trusted(caplog):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"prompts": PROMPTS, "max_new_tokens": 10, "drawn": 6, "max_overhead": None}
    probe = LoopProbe(model, optimizer, tokenizer, **options)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    for made in (False, False, True):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        with probe.step():
            if made:
                optimizer.step()
        optimizer.zero_grad()
    assert probe.off is None
    *never, last = probe.rows
    for row in never:
        assert row["skipped"] == 1
        assert row["step_mismatch"] is None
        assert "no weight changed" in row["missing"]["step_mismatch"]
        assert row["trusted"] == 0
        assert "no weight changed" in row["why_not"][0]
        assert "entropy_probe/step_mismatch" not in metrics_of(row)
    assert last["step_mismatch"] < 1e-3
    assert "step_mismatch" not in last.get("missing", {})
    assert not any("no weight changed" in why for why in last["why_not"])
    said = [r.getMessage() for r in caplog.records if "no weight changed" in r.getMessage()]
    assert len(said) == 1
    assert "optimizer.step() belongs inside" in said[0]


class _Halving(torch.optim.AdamW):
    """A step() of its own: half of AdamW's."""

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in params]
        super().step(closure)
        with torch.no_grad():
            for p, old in zip(params, before, strict=True):
                p.lerp_(old, 0.5)


@pytest.mark.parametrize("how", ["as predicted", "clipped inside", "its own step()"])
def test_a_step_other_than_the_one_predicted_is_not_trusted(how):
    """The offline rule: 5 %. Before, such rows were trusted whatever was made of the step."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    kind = {
        "as predicted": torch.optim.AdamW,
        "clipped inside": torch.optim.SGD,
        "its own step()": _Halving,
    }[how]
    optimizer = kind(model.parameters(), lr=1e-3)
    options = {"prompts": PROMPTS, "max_new_tokens": 10, "drawn": 6, "max_overhead": None}
    probe = LoopProbe(model, optimizer, tokenizer, **options)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    with probe.step():
        if how == "clipped inside":
            clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    assert probe.off is None
    (row,) = probe.rows
    made = how == "as predicted"
    assert (row["step_mismatch"] < 0.05) == made
    assert bool(row["trusted"]) == made
    told = [why for why in row["why_not"] if "away from the one predicted, more than 5%" in why]
    assert len(told) == (not made)
    for reason in ("gradients were changed", "hooks", "subclass"):
        assert all(reason in why for why in told)


class _Logging(torch.optim.AdamW):
    """A step() of its own that makes AdamW's: nobody can know."""

    def step(self, closure=None):
        return super().step(closure)


class _Renamed(torch.optim.AdamW):
    """A subclass with torch's step."""


@pytest.mark.parametrize("kind", [_Logging, _Renamed])
def test_an_optimizer_with_its_own_step_is_named(kind):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    optimizer = kind(model.parameters(), lr=1e-3)
    options = {"prompts": PROMPTS, "max_new_tokens": 6, "drawn": 6, "max_overhead": None}
    probe = LoopProbe(model, optimizer, tokenizer, **options)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    with probe.step():
        optimizer.step()
    (row,) = probe.rows
    named = [why for why in row["why_not"] if "is a _Logging, a subclass of AdamW" in why]
    assert len(named) == (kind is _Logging)


def test_a_compiled_model_is_refused_by_what_to_pass_instead():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend="eager")
    options = {"prompts": PROMPTS, "max_new_tokens": 10, "drawn": 6, "max_overhead": None}
    with pytest.raises(ValueError, match=r"torch.compile has wrapped.*pass the uncompiled model"):
        LoopProbe(compiled, optimizer, tokenizer, **options)
    with pytest.raises(ValueError, match="pass the uncompiled model"):
        SequenceProcessor(compiled)
    probe = LoopProbe(model, optimizer, tokenizer, **options)  # the same weights
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    compiled(**batch, labels=batch["input_ids"]).loss.backward()
    with probe.step():
        optimizer.step()
    (row,) = probe.rows
    assert row["step_mismatch"] < 1e-3


def test_a_step_of_nothing_is_not_trusted(caplog):
    """No gradient, no momentum, no decay: predicted as nothing, made as nothing."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    options = {"prompts": PROMPTS, "max_new_tokens": 10, "drawn": 6, "max_overhead": None}
    probe = LoopProbe(model, optimizer, tokenizer, **options)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with probe.step():
        optimizer.step()
    assert probe.off is None
    (row,) = probe.rows
    assert (row["skipped"], row["step_mismatch"], row["trusted"]) == (1, 0, 0)
    assert row["why_not"][0] == SKIPPED
    assert not caplog.records  # as it was to be


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_rounding_of_coarse_weights_is_not_in_the_interval(dtype):
    """Of frozen ones too: below fp32 adapters a bf16 base rounds every activation."""
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, tokenizer = get_peft_model(tiny_model().to(dtype), adapter), tiny_tokenizer()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    options = {"prompts": PROMPTS, "max_new_tokens": 10, "drawn": 6, "max_overhead": None}
    probe = LoopProbe(model, optimizer, tokenizer, order=2, **options)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    with probe.step():
        predicted = probe._watch.probe.predicted
        optimizer.step()
    assert probe.off is None
    (row,) = probe.rows
    assert {p.dtype for p in trained} == {torch.float32}
    why = "weights are bfloat16, whose rounding the interval has not"
    assert (row["trusted"] == 0) == (dtype == torch.bfloat16)
    assert (why in row["why_not"]) == (dtype == torch.bfloat16)
    # To second order the prediction rests on a measurement with the same weights.
    assert (why in predicted.second_order.why_not) == (dtype == torch.bfloat16)
    assert why not in predicted.change.why_not


def test_where_a_scaler_may_leave_steps_out_it_is_no_surprise(caplog):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"prompts": PROMPTS, "max_new_tokens": 10, "drawn": 6, "max_overhead": None}
    probe = LoopProbe(model, optimizer, tokenizer, **options)
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    probe._watch.before(0, lambda: named_gradients(model), lambda: optimizer)
    probe._watch.after(0, scaler=True)
    (row,) = probe.rows
    assert (row["skipped"], row["step_mismatch"]) == (1, None)
    assert not caplog.records


def _scaled(steps: int, overflow: str | None, *, probed: bool) -> tuple[Any, list[bool], Any]:
    """(probe or None, which steps moved weights, the model) of a loop with a gradient scaler.

    In step 1 an element of `overflow`'s gradient is infinite: the policy's own, or that of a value
    head which the same optimizer trains.
    """
    model, tokenizer = tiny_model(), tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    options = {"prompts": PROMPTS, "max_new_tokens": 10, "drawn": 6, "max_overhead": None}
    probe = LoopProbe(model, optimizer, tokenizer, **options) if probed else None
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    moved = []
    for step in range(steps):
        loss = model(**batch, labels=batch["input_ids"]).loss + head(torch.ones(3)).sum()
        scaler.scale(loss).backward()
        if step == 1 and overflow is not None:
            spoilt = {"policy": model, "head": head}[overflow]
            next(p for p in spoilt.parameters() if p.grad is not None).grad.view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        before = [p.detach().clone() for p in model.parameters()]
        with nullcontext() if probe is None else probe.step():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters())))
    assert scaler.get_scale() == 2.0 ** (10 if overflow is None else 9)
    return probe, moved, model


@pytest.mark.parametrize("overflow", ["policy", "head", None])
def test_a_step_that_a_gradient_scaler_leaves_out(overflow, caplog):
    probe, moved, watched = _scaled(3, overflow, probed=True)
    _, _, alone = _scaled(3, overflow, probed=False)
    for (name, a), b in zip(watched.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert moved == [True, overflow is None, True]
    assert probe.off is None
    rows = {row["step"]: row for row in probe.rows}
    said = [r.getMessage() for r in caplog.records if r.name.startswith("entropy_experiments")]
    for step in (0, 2):  # also right after the step that was left out
        assert rows[step]["skipped"] == 0
        assert rows[step]["step_mismatch"] < 1e-3
    if overflow == "policy":  # there is no step to predict
        assert list(rows) == [0, 2]
        assert len(said) == 1
        assert "Step 1 has a gradient that is not finite" in said[0]
    elif overflow == "head":  # the policy's own gradient was good, and its step was predicted
        assert (rows[1]["skipped"], rows[1]["step_mismatch"], rows[1]["trusted"]) == (1, None, 0)
        assert abs(rows[1]["measured"]) < 1e-4 * abs(rows[1]["predicted"])  # rounding
        assert len(said) == 1
        assert "Step 1 was predicted, and no weight changed" in said[0]
    else:
        assert list(rows) == [0, 1, 2]
        assert not said


def test_nothing_to_evaluate_on_is_refused():
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        LoopProbe(model, optimizer)


def _steps(cost: float, **options: Any) -> list[int]:
    """Steps probed of 100, when a step takes a second and the probe `cost` seconds."""
    now = 0.0
    throttle = Throttle(clock=lambda: now, **options)
    out = []
    for step in range(100):
        now += 1.0
        if throttle.wants(step):
            throttle.note(step)
            out.append(step)
            with throttle.timing():
                now += cost
    return out


def test_the_throttle_keeps_to_its_share_but_for_every_tenth_step():
    assert _steps(5.0) == list(range(100))
    assert _steps(5.0, every=4) == list(range(0, 100, 4))
    cheap = _steps(0.5, max_overhead=0.1)
    assert 18 <= len(cheap) <= 22  # half a second each: every fifth
    dear = _steps(50.0, max_overhead=0.1)
    assert dear == list(range(0, 100, FARTHEST))
    assert _steps(50.0, every=25, max_overhead=0.1) == [0, 25, 50, 75]
    # Never more than ten steps apart, whatever the cadence: the turn before is taken.
    assert _steps(50.0, every=9, max_overhead=0.1) == list(range(0, 100, 9))
    assert _steps(50.0, every=3, max_overhead=0.1) == list(range(0, 100, 9))


def test_a_torn_row_is_cut_off_and_a_repeated_step_counts_once(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    file = RowFile(path)
    others = {"entropy": 1.0, "predicted": 1.0}
    file.add({"step": 0, "measured": 1.0, **others})
    file.add({"step": 1, "measured": 2.0, **others})
    with path.open("a") as torn:
        torn.write('{"step": 2, "mea')
    RowFile(path).add({"step": 1, "measured": 3.0, **others})  # resumed from before step 1
    assert [(row["step"], row["measured"]) for row in read_rows(path)] == [(0, 1.0), (1, 3.0)]
