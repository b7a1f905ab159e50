"""Several settings of adapters in one pass: the numbers of a pass for each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from entropy_experiments.attribution.finite import finite_columns
from entropy_experiments.estimate import measured
from entropy_experiments.estimate.measured import measured_many
from entropy_experiments.models import lora, stacked_settings
from entropy_experiments.models.precision import true_float64
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.shared_prompts import shared_rows
from entropy_experiments.numerics.derivatives import shifted
from entropy_experiments.types import Direction, Estimand, Rollouts, Scores
from models.test_fused_lora import FUSED
from models.test_shared_prompts import groups
from oracles.tiny_models import LORA, tiny_lora, tiny_model, tiny_rollouts
from tolerances import INVARIANT, SCORES_FP32

pytestmark = pytest.mark.naive

SETTINGS = 5


def frozen_beside() -> Any:
    """A trained adapter and a frozen one, both active."""
    model = tiny_lora("llama")
    model.add_adapter("frozen", LoraConfig(**{**LORA, "r": 2}))
    for name, value in model.named_parameters():
        if "frozen" in name:
            nn.init.normal_(value, std=0.2)
    model.base_model.set_adapter(["default", "frozen"])
    for name, value in model.named_parameters():
        value.requires_grad_("lora" in name and "frozen" not in name)
    return model.eval()


def eager() -> Any:
    base = tiny_model("qwen2")
    base.set_attn_implementation("eager")
    return tiny_lora(base=base)


STACKED: dict[str, Callable[[], Any]] = {**FUSED, "frozen beside": frozen_beside, "eager": eager}
ROLLOUTS: dict[str, Callable[[], Rollouts]] = {
    "alone": tiny_rollouts,
    "sharing prompts": lambda: groups(sizes={6: (3, 1, 9, 4), 2: (7, 7), 11: (5,)}),
    "very different": lambda: groups(sizes={1: (2, 1, 60), 50: (1, 3, 3), 7: (5, 30)}),
}


def settings_of(policy: SequenceProcessor, count: int = SETTINGS, size: float = 0.05) -> list:
    draw = torch.Generator().manual_seed(1)
    steps = [
        {n: torch.randn(p.shape, generator=draw).to(p) for n, p in policy.params.items()}
        for _ in range(count - 1)
    ]
    return [policy.params, *(shifted(policy.params, step, size) for step in steps)]


@contextmanager
def passes(policy: SequenceProcessor, monkeypatch: pytest.MonkeyPatch, tokens: int):
    """The settings of each pass through the model, when `tokens` of them may share one."""
    found: list[int] = []
    own = policy._call

    def spy(*args: Any, stacked: int = 1, **kwargs: Any) -> Any:
        found.append(stacked)
        return own(*args, stacked=stacked, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(stacked_settings, "STACKED_TOKENS", (1, tokens))
        patch.setattr(policy, "_call", spy)
        assert policy.spares_work in (True, False)  # so that the trial is over
        found.clear()
        yield found


@torch.no_grad()
def stacked(policy, many, rollouts, monkeypatch, tokens: int = 10**9) -> list[Scores]:
    with passes(policy, monkeypatch, tokens) as found:
        scores = policy.score_many(many, rollouts)
    assert found == [len(many)]
    return scores


@torch.no_grad()
def gradients_one_by_one(policy, many, rollouts) -> list[Scores]:
    return [policy.score(params, rollouts) for params in many]


def gap(a: list[Scores], b: list[Scores]) -> float:
    pairs = [xy for one, two in zip(a, b, strict=True) for xy in zip(one, two, strict=True)]
    return max(float((x - y).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("which", ROLLOUTS)
@pytest.mark.parametrize("name", STACKED)
def test_each_gets_the_scores_of_a_pass_of_its_own(name, which, monkeypatch):
    policy, rollouts = SequenceProcessor(STACKED[name]()), ROLLOUTS[which]()
    many = settings_of(policy)
    expected = gradients_one_by_one(policy, many, rollouts)
    assert gap(stacked(policy, many, rollouts, monkeypatch), expected) <= SCORES_FP32
    for k in range(1, SETTINGS):  # neighbours are told apart, so blocks cannot be mixed up
        assert gap([expected[k]], [expected[k - 1]]) > 100 * SCORES_FP32


@pytest.mark.parametrize("which", ROLLOUTS)
@pytest.mark.parametrize("name", ["all linear", "two adapters"])
def test_in_double_precision_to_the_last_digits(name, which, monkeypatch):
    policy, rollouts = SequenceProcessor(true_float64(STACKED[name]())), ROLLOUTS[which]()
    many = settings_of(policy)
    found = stacked(policy, many, rollouts, monkeypatch)
    assert gap(found, gradients_one_by_one(policy, many, rollouts)) <= INVARIANT


def test_settings_are_not_mixed_up(monkeypatch):
    """Teeth: the blocks of another order are seen."""
    policy, rollouts = SequenceProcessor(tiny_lora("llama")), tiny_rollouts()
    many = settings_of(policy)
    turned = stacked(policy, many[::-1], rollouts, monkeypatch)
    expected = gradients_one_by_one(policy, many, rollouts)
    assert gap(turned[::-1], expected) <= SCORES_FP32 < 0.01 * gap(turned, expected)


class Products(TorchFunctionMode):
    """How many rows each weight was multiplied by, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, list[int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight = args[:2]
            self.rows.setdefault(id(weight), []).append(x.numel() // x.shape[-1])
        return func(*args, **(kwargs or {}))


def test_frozen_weights_are_multiplied_once(monkeypatch):
    policy, rollouts = SequenceProcessor(tiny_lora("llama")), tiny_rollouts()
    tokens = len(rollouts) * int(rollouts.attention_NS.sum(1).max() - 1)
    assert policy.spares_work
    with Products() as products:
        stacked(policy, settings_of(policy), rollouts, monkeypatch)
    layers: Any = policy._adapters
    assert layers
    for layer in layers:
        assert products.rows[id(layer.base_layer.weight)] == [SETTINGS * tokens]


def test_the_true_mask_is_as_tall_as_the_stack():
    """For models that do something else with it than attention."""
    rows = shared_rows(groups())
    assert rows is not None
    by_segments = rows.by_segments(3)
    with by_segments:
        square_R1SS = by_segments.mask | False
    assert torch.equal(square_R1SS, torch.cat([rows.looks_R1SS] * 3))
    assert square_R1SS.shape == by_segments.mask.shape


def test_as_many_as_the_tokens_allow(monkeypatch):
    policy, rollouts = SequenceProcessor(tiny_lora("llama")), tiny_rollouts()
    each = len(rollouts) * int(rollouts.attention_NS.sum(1).max())
    many = settings_of(policy, 7)
    assert each > stacked_settings.STACKED_TOKENS[0]
    for tokens, expected in (
        (each - 1, [1] * 7),
        (3 * each, [3, 3, 1]),
        (7 * each, [7]),
    ):
        with torch.no_grad(), passes(policy, monkeypatch, tokens) as found:
            policy.score_many(many, rollouts)
        assert found == expected


def test_products_of_a_few_rows_stay_alone(monkeypatch):
    """They may round differently among others, and small steps need the base pass's rounding."""
    policy, rollouts = (
        SequenceProcessor(tiny_lora("llama")),
        tiny_rollouts(prompts=(2, 3), responses=(1, 2)),
    )
    with torch.no_grad(), passes(policy, monkeypatch, 10**9) as found:
        monkeypatch.setattr(stacked_settings, "STACKED_TOKENS", (11, 10**9))
        policy.score_many(settings_of(policy, 3), rollouts)
        monkeypatch.setattr(stacked_settings, "STACKED_TOKENS", (10, 10**9))
        policy.score_many(settings_of(policy, 3), rollouts)
    assert found == [1, 1, 1, 3]


@torch.no_grad()
def test_tokens_that_are_dealt_out_are_refused():
    """Should the trial not have seen it: an error, and no other setting's adapters."""
    (layer, *_) = lora.plain_lora_layers(tiny_lora("llama"))
    stacked_layer, width = stacked_settings._stacked(layer, [[], []], 4), layer.in_features
    assert len(stacked_layer(torch.zeros(4, width))) == 4
    for rows in (0, 2, 5):
        with pytest.raises(ValueError, match="expected 4 rows, one block for each of 2"):
            stacked_layer(torch.zeros(rows, width))


def _hooked(model: Any) -> Any:
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    layer.base_layer.register_forward_hook(lambda *_: None)
    return model


def _own_forward(model: Any) -> Any:
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs)  # as accelerate's offloading
    return model


def _tied() -> Any:
    """One A in two layers: it has one name, and both must follow it."""
    model = tiny_lora("llama", target_modules=["q_proj"])
    first, second = (m for m in model.modules() if hasattr(m, "lora_A"))
    second.lora_A["default"].weight = first.lora_A["default"].weight
    return model


class SequenceFirst(nn.Module):
    """An MLP that has its tokens in another order than one row after the other."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x.transpose(0, 1).contiguous()).transpose(0, 1)


class Routed(SequenceFirst):
    """Only some of the tokens go in."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen = flat[:, 0] > 0
        return flat.index_put((chosen,), self.own(flat[chosen])).view(x.shape)


class ByItself(SequenceFirst):
    """A product that is made of the adapter's weights, and not by its layer."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.own.up_proj
        return self.own(x) + (x @ layer.lora_A["default"].weight.t()).sum(-1, keepdim=True)


def _with_mlps(kind: Callable[[nn.Module], nn.Module]) -> Any:
    model = tiny_lora("llama", target_modules=["up_proj", "down_proj"])
    for layer in model.base_model.model.model.layers:
        layer.mlp = kind(layer.mlp)
    return model


def _patched(model: Any) -> Any:
    """Activation patching: a hook that means the first row of *its* pass."""
    model.base_model.model.model.layers[1].register_forward_hook(
        lambda m, x, found: torch.cat([found[:1] * 1.5, found[1:]])
    )
    return model


def _head_adapted() -> Any:
    base = tiny_model("llama", tie_word_embeddings=False)
    return tiny_lora(base=base, target_modules=["q_proj", "lm_head"])


NOT_STACKED: dict[str, Callable[[], Any]] = {
    "full": lambda: tiny_model("llama"),
    "dora": lambda: tiny_lora("llama", use_dora=True),
    "embedding": lambda: tiny_lora("llama", target_modules=["q_proj", "embed_tokens"]),
    "saved norm": lambda: tiny_lora("llama", modules_to_save=["norm"]),
    "conv1d": lambda: tiny_lora("gpt2", target_modules=["c_attn"], fan_in_fan_out=True),
    "head": _head_adapted,
    "tied": _tied,
    "tokens first": lambda: _with_mlps(SequenceFirst),
    "routed": lambda: _with_mlps(Routed),
    "by itself": lambda: _with_mlps(ByItself),
    "patched": lambda: _patched(tiny_lora("llama")),
    "hooked": lambda: _hooked(tiny_lora("llama")),
    "a forward of its own": lambda: _own_forward(tiny_lora("llama")),
}


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning")
@pytest.mark.parametrize("name", NOT_STACKED)
def test_anything_else_goes_one_by_one(name, monkeypatch):
    policy, rollouts = SequenceProcessor(NOT_STACKED[name]()), tiny_rollouts()
    assert not policy.spares_work
    many = settings_of(policy, 3, size=0.01)
    with torch.no_grad(), passes(policy, monkeypatch, 10**9) as found:
        scores = policy.score_many(many, rollouts)
    assert found == [1, 1, 1]
    assert gap(scores, gradients_one_by_one(policy, many, rollouts)) == 0


def test_what_is_differentiated_goes_one_by_one(monkeypatch):
    policy, rollouts = SequenceProcessor(tiny_lora("llama")), tiny_rollouts()
    many = [{n: p.clone().requires_grad_() for n, p in s.items()} for s in settings_of(policy, 2)]
    assert not policy._without_effect  # tried once, before the first graph
    with passes(policy, monkeypatch, 10**9) as found:
        scores = policy.score_many(many, rollouts)
    assert found == [1, 1]
    for params, one in zip(many, scores, strict=True):
        one.entropy_NS.sum().backward()
        assert all(p.grad is not None for p in params.values())


def test_half_precision_is_what_peft_makes_of_it(monkeypatch):
    """A bf16 base with fp32 adapters, as on CUDA."""
    model = tiny_lora("llama").to(torch.bfloat16)
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data = value.data.float()
    policy, rollouts = SequenceProcessor(model), tiny_rollouts()
    many = settings_of(policy, 3)
    assert {p.dtype for p in policy.params.values()} == {torch.float32}
    found, expected = (
        stacked(policy, many, rollouts, monkeypatch),
        gradients_one_by_one(policy, many, rollouts),
    )
    moved = gap([expected[0]], [expected[1]])
    assert gap(found, expected) <= 0.02 * moved  # a few roundings to bf16 may fall elsewhere


@torch.no_grad()
def test_a_truncated_law_is_no_hindrance(monkeypatch):
    policy, rollouts = SequenceProcessor(tiny_lora("llama"), top_p=0.999), tiny_rollouts()
    many = settings_of(policy, 3, size=0.01)
    found, expected = (
        stacked(policy, many, rollouts, monkeypatch),
        gradients_one_by_one(policy, many, rollouts),
    )
    inside = [torch.isfinite(x_NS) for one in expected for x_NS in one]
    assert all(bool(x_NS.any()) for x_NS in inside)
    for one, other in zip(found, expected, strict=True):
        for x_NS, y_NS in zip(one, other, strict=True):
            torch.testing.assert_close(x_NS, y_NS, atol=SCORES_FP32, rtol=0)


def test_wrong_parameters_are_refused(monkeypatch):
    policy, rollouts = SequenceProcessor(tiny_lora("llama")), tiny_rollouts()
    good, bad = settings_of(policy, 2)
    bad.pop(next(iter(bad)))
    with torch.no_grad(), pytest.raises(ValueError, match="params"):
        policy.score_many([good, bad], rollouts)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(fails, monkeypatch):
    policy, rollouts = SequenceProcessor(tiny_lora("llama", lora_dropout=0.5)), tiny_rollouts()
    policy.model.train()
    assert policy.spares_work  # a call is made in eval mode
    modes = [m.training for m in policy.model.modules()]
    before = {n: p.clone() for n, p in policy.model.named_parameters()}
    if fails:
        monkeypatch.setattr(policy, "_call", lambda *_, **__: 1 / 0)
    with torch.no_grad():
        try:
            policy.score_many(settings_of(policy, 3), rollouts)
        except ZeroDivisionError:
            assert fails
    assert not any("forward" in m.__dict__ for m in policy.model.modules())
    assert modes == [m.training for m in policy.model.modules()]
    assert all(torch.equal(p, before[n]) for n, p in policy.model.named_parameters())


@pytest.mark.parametrize("kind", ["measured", "columns"])
def test_estimates_are_those_of_single_passes(kind, monkeypatch):
    policy, rollouts = SequenceProcessor(true_float64(tiny_lora("llama"))), groups()
    steps = {f"v{k}": step for k, step in enumerate(settings_of(policy, 4)[1:])}
    etas = [1e-3, 1e-1]

    def found() -> dict[Any, Any]:
        if kind == "columns":
            return finite_columns(policy, rollouts, steps, etas, estimand=Estimand(), microbatch=3)
        directions = {n: Direction(parts={"v": v}, lr=1.0) for n, v in steps.items()}
        return measured_many(policy, rollouts, directions, etas, microbatch=3, clips=(None, 2.0))

    with passes(policy, monkeypatch, 10**9) as together:
        got = found()
    with passes(policy, monkeypatch, 1) as alone:
        expected = found()
    assert max(together) == 6
    assert max(alone) == 1
    assert len(together) < len(alone)
    assert list(got) == list(expected)
    for case, one in expected.items():
        assert abs(got[case].value - one.value) <= INVARIANT
        assert abs(got[case].stderr - one.stderr) <= INVARIANT
        assert abs(one.value) > 1e3 * INVARIANT


def test_only_adapters_are_held_several_at_a_time(monkeypatch):
    """Of a fully trained model a second copy is as large as the model."""
    policy, rollouts = SequenceProcessor(tiny_model("llama")), tiny_rollouts()
    direction = Direction(parts={"v": settings_of(policy, 2)[1]}, lr=1.0)
    seen = []
    own = policy.score_many
    monkeypatch.setattr(
        policy, "score_many", lambda many, part: seen.append(len(many)) or own(many, part)
    )
    measured_many(policy, rollouts, {"v": direction}, [1e-4, 1e-3], repackings=0)
    assert set(seen) == {1}


@pytest.mark.parametrize(("room", "together"), [(1 << 30, 8), (3.5, 3), (1, 1), (0.5, 1)])
def test_as_many_settings_as_there_is_room_for(room, together, monkeypatch):
    policy, rollouts = SequenceProcessor(tiny_lora("llama")), tiny_rollouts()
    size = sum(p.nbytes for p in policy.params.values())
    monkeypatch.setattr(measured, "SETTINGS_BYTES", int(room * size))
    step = {"v": settings_of(policy, 2)[1]}
    etas = [1e-3 * k for k in range(1, 10)]
    with passes(policy, monkeypatch, 10**9) as found:
        finite_columns(policy, rollouts, step, etas, estimand=Estimand(), base=None)
    assert max(found) == together
    with passes(policy, monkeypatch, 10**9) as found:  # unless it was asked for
        finite_columns(policy, rollouts, step, etas, estimand=Estimand(), grad_chunk=2)
    assert max(found) == 2
