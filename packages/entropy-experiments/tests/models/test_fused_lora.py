"""Adapters added in place: peft's numbers within rounding, only where nothing is differentiated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from entropy_experiments.models.lora import fused_adapters, plain_lora_layers
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import pullback, pushforward, pushforwards, shifted
from oracles.tiny_models import LORA, tiny_lora, tiny_model, tiny_rollouts
from tolerances import SCORES_FP32

pytestmark = pytest.mark.naive

ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Relative to the largest number: a dozen products added in another order."""


class InPlace(TorchDispatchMode):
    """How many accumulating products ran: one for each adapter of each fused layer."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm_.default
        return func(*args, **(kwargs or {}))


def two_adapters() -> Any:
    model = tiny_lora("qwen2", r=3, lora_alpha=5)
    model.add_adapter("other", LoraConfig(**{**LORA, "r": 6, "lora_alpha": 7}))
    for name, value in model.named_parameters():
        if "other" in name:
            nn.init.normal_(value, std=0.2)
    model.base_model.set_adapter(["default", "other"])
    return model.eval()


FUSED: dict[str, Callable[[], Any]] = {
    "two targets": lambda: tiny_lora("llama"),
    "biases below": lambda: tiny_lora("qwen2", r=3, lora_alpha=5),
    "all linear": lambda: tiny_lora("llama", target_modules="all-linear", lora_alpha=3),
    "rank-stabilised": lambda: tiny_lora("qwen2", use_rslora=True, r=3, lora_alpha=5),
    "two adapters": two_adapters,
    "dropout": lambda: tiny_lora("qwen2", lora_dropout=0.5),
}


def seen(layer: Any, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, layer.in_features, generator=draw, dtype=torch.float64)
    return x.to(layer.base_layer.weight.dtype)


@torch.no_grad()
def both(layer: Any, x: Tensor, **given: Any) -> tuple[Tensor, Tensor, int]:
    """Fused, peft's own, and how many products of the first accumulated."""
    with fused_adapters([layer]), InPlace() as spy:
        fused = layer(x, **given)
    return fused, layer(x, **given), spy.count


def gap(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", FUSED)
def test_every_layer_is_pefts_own(name, dtype):
    model = FUSED[name]().to(dtype)
    layers: Any = plain_lora_layers(model)
    targets = [m for m in model.modules() if hasattr(m, "lora_A")]
    assert list(layers) == targets
    for layer in layers:
        for shape in ((2, 5), (7,), (), (2, 3, 1), (0, 4)):
            x = seen(layer, *shape)
            before = x.clone()
            got, expected, products = both(layer, x)
            assert products == len(layer.active_adapters)
            assert got.shape == expected.shape
            assert got.dtype == expected.dtype
            assert torch.equal(x, before)
            if x.numel():
                assert gap(got, expected) <= ROUNDING[dtype]
                assert gap(layer.base_layer(x), expected) > 1e-2  # the adapter is no trifle


def test_a_wrong_scaling_would_be_seen():
    (layer, *_) = plain_lora_layers(tiny_lora())
    x = seen(layer, 2, 5)
    _, expected, _ = both(layer, x)
    layer.scale_layer(1.001)  # type: ignore[operator]
    got, _, products = both(layer, x)
    assert products == 1
    assert gap(got, expected) > 10 * ROUNDING[torch.float32]


@pytest.mark.parametrize("name", FUSED)
def test_scores_are_those_of_pefts_forward(name):
    """And of the parameters that are given, not of those that the model holds."""
    policy, rollouts = SequenceProcessor(FUSED[name]()), tiny_rollouts()
    one = {n: torch.ones_like(p) for n, p in policy.params.items()}
    here, there = policy.params, shifted(policy.params, one, 0.05)
    with torch.no_grad(), InPlace() as spy:
        found = policy.score_many([here, there], rollouts)
    layers: Any = policy._adapters
    assert spy.count == 2 * sum(len(layer.active_adapters) for layer in layers) > 0
    policy._adapters = {}
    with torch.no_grad(), InPlace() as spy:
        expected = policy.score_many([here, there], rollouts)
    assert spy.count == 0
    for mine, theirs in zip(found, expected, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert float((x - y).abs().max()) <= SCORES_FP32
    moved = (expected[0].logprob_NS - expected[1].logprob_NS).abs().max()
    assert float(moved) > 100 * SCORES_FP32


def test_only_where_nothing_is_differentiated():
    policy, rollouts = SequenceProcessor(tiny_lora("llama")), tiny_rollouts()
    params = policy.params
    v = {name: torch.ones_like(p) for name, p in params.items()}

    def total(params: Any) -> Tensor:
        return policy.score(params, rollouts).entropy_NS.sum()

    def many() -> Any:
        stacked = {name: torch.stack([p, p]) for name, p in params.items()}
        with torch.no_grad():
            return torch.vmap(total)(stacked)

    ways: dict[str, Callable[[], Any]] = {
        "graph": lambda: total(params),
        "backward": lambda: pullback(total, params),
        "jvp": lambda: pushforward(total, params, v),
        "double backward": lambda: pushforward(total, params, v, how="double_backward"),
        "jvp of vmap": lambda: pushforwards(total, params, [v, v]),
        "vmap": many,
        "nothing": lambda: policy.score_all(rollouts),
    }
    used = {}
    for name, way in ways.items():
        with InPlace() as spy:
            way()
        used[name] = spy.count
    assert used.pop("nothing") == len(policy._adapters) == 4
    assert used == dict.fromkeys(used, 0)


def test_a_graph_begun_inside_keeps_pefts_forward():
    (layer, *_) = plain_lora_layers(tiny_lora())
    x = seen(layer, 5)
    with torch.no_grad(), fused_adapters([layer]), torch.enable_grad(), InPlace() as spy:
        y = layer(x)
    assert spy.count == 0
    assert y.requires_grad


def test_dual_numbers_made_by_hand_keep_their_tangents():
    """No transform is under way then; the product in place has a tangent all the same."""
    layer: Any = next(iter(plain_lora_layers(tiny_lora().double())))
    x = seen(layer, 5)
    tangents = []
    for layers in ([layer], []):
        with torch.no_grad(), fused_adapters(layers), forward_ad.dual_level():
            dual = layer(forward_ad.make_dual(x, torch.ones_like(x)))
            tangents.append(forward_ad.unpack_dual(dual).tangent)
    assert gap(*tangents) <= ROUNDING[torch.float64]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(fails):
    model = tiny_lora("llama")
    layers = plain_lora_layers(model)
    assert layers
    before = [(p, p.clone()) for p in model.parameters()]

    def use() -> None:
        with torch.no_grad(), fused_adapters(layers):
            assert all("forward" in layer.__dict__ for layer in layers)
            model(input_ids=tiny_rollouts().tokens_NS)
            if fails:
                raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle") if fails else nullcontext():
        use()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(torch.equal(p, was) for p, was in before)
    with torch.enable_grad(), fused_adapters(layers):
        assert not any("forward" in layer.__dict__ for layer in layers)


def test_layers_of_other_kinds_are_left_alone():
    assert plain_lora_layers(tiny_model("llama")) == {}
    conv1d = tiny_lora("gpt2", target_modules=["c_attn"], fan_in_fan_out=True)
    assert plain_lora_layers(conv1d) == {}
    embedding = tiny_lora("llama", target_modules=["embed_tokens"])
    assert plain_lora_layers(embedding) == {}
    model = tiny_lora("llama")
    (layer, *others) = plain_lora_layers(model)
    layer.fan_in_fan_out = True  # type: ignore[assignment]
    assert list(plain_lora_layers(model)) == others


def test_a_forward_that_someone_else_put_there_stays():
    (layer, *_) = plain_lora_layers(tiny_lora())
    layer.forward = lambda x: x  # as accelerate does for offloaded layers
    x = seen(layer, 3)
    with torch.no_grad(), fused_adapters([layer]):
        assert layer(x) is x
    assert "forward" in layer.__dict__


def _missing(layer: Any) -> None:
    layer._active_adapter = ["default", "nowhere"]


def _bf16(layer: Any) -> None:
    layer.to(torch.bfloat16)


def _adapter_in_fp64(layer: Any) -> None:
    layer.lora_A.double()
    layer.lora_B.double()


def _training(layer: Any) -> None:
    layer.lora_dropout["default"].train()


def _own_scaling(layer: Any) -> None:
    layer.scaling["default"] = torch.tensor(3.0)


def _wrapped(layer: Any) -> None:
    own = layer.lora_B["default"].forward
    layer.lora_B["default"].forward = lambda x: 2 * own(x)


def _two_faced(layer: Any) -> None:
    class Doubling(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layer.lora_A["default"].__class__ = Doubling


CHANGES: dict[str, Callable[[Any], Any]] = {
    "merged": lambda layer: layer.merge(),
    "disabled": lambda layer: layer.enable_adapters(False),
    "an active adapter that is missing": _missing,
    "half precision": _bf16,
    "mixed precision": _adapter_in_fp64,
    "dropout in training": _training,
    "a scaling that is a tensor": _own_scaling,
    "a module with a forward of its own": _wrapped,
    "a subclass of nn.Linear": _two_faced,
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_states_fall_back_to_pefts_forward(name):
    (layer, *_) = plain_lora_layers(tiny_lora(lora_dropout=0.5))
    x = seen(layer, 2, 5)
    usual, _, products = both(layer, x)
    assert products == 1
    CHANGES[name](layer)
    x = x.to(layer.base_layer.weight.dtype)  # type: ignore[union-attr]
    torch.manual_seed(0)
    with torch.no_grad(), fused_adapters([layer]), InPlace() as spy:
        got = layer(x)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = layer(x)
    assert spy.count == 0
    assert torch.equal(got, expected)
    if name in ("disabled", "dropout in training", "a subclass of nn.Linear"):
        assert gap(got, usual) > 1e-2  # the formula would have been wrong


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed:UserWarning")
@pytest.mark.parametrize("kind", [{"use_dora": True}, {"lora_bias": True}])
def test_other_kinds_of_adapters_fall_back(kind):
    model = tiny_lora("llama", **kind)
    layers = plain_lora_layers(model)
    assert layers
    for layer in layers:
        got, expected, products = both(layer, seen(layer, 2, 5))
        assert products == 0
        assert torch.equal(got, expected)


@pytest.mark.parametrize("given", ["autocast", "adapter_names", "strides"])
def test_other_calls_fall_back(given):
    (layer, *_) = plain_lora_layers(tiny_lora())
    x, names = seen(layer, 2, 5), {}
    if given == "adapter_names":
        names = {"adapter_names": ["default", "__base__"]}
    if given == "strides":
        x = x.transpose(0, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16) if given == "autocast" else nullcontext():
        got, expected, products = both(layer, x, **names)
    assert products == 0
    assert torch.equal(got, expected)


@contextmanager
def hooked(layer: Any, where: str, hook: Callable[..., Any], *, before: bool) -> Iterator[None]:
    if where == "everywhere":
        register = register_module_forward_pre_hook if before else register_module_forward_hook
        handle = register(hook)
    else:
        inside = layer.get_submodule(where)
        handle = (inside.register_forward_pre_hook if before else inside.register_forward_hook)(
            hook
        )
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    "where",
    ["base_layer", "lora_A.default", "lora_B.default", "lora_dropout.default", "everywhere"],
)
def test_hooks_inside_are_told_what_peft_would_tell_them(where, before):
    (layer, *_) = plain_lora_layers(tiny_lora())
    x, told = seen(layer, 2, 5), []

    def listen(module: nn.Module, given: Any, *result: Any) -> None:
        told.extend([*given, *result])

    with hooked(layer, where, listen, before=before):
        _, _, products = both(layer, x)
    assert products == 0
    half = len(told) // 2  # once with ours around, once without
    assert half > 0
    assert all(torch.equal(a, b) for a, b in zip(told[:half], told[half:], strict=True))
    assert both(layer, x)[2] == 1  # and when nobody listens any more, fused again
