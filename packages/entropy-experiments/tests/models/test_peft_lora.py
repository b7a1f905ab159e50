"""What policy/lora.py relies upon inside peft's LoRA layer, name by name, and its formula."""

from __future__ import annotations

import inspect

import pytest
import torch
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn.modules import module as nn_module

from oracles.tiny_models import tiny_lora

pytestmark = pytest.mark.contract


def _layer(**changes) -> Linear:
    return next(m for m in tiny_lora(**changes).modules() if type(m) is Linear)


def test_the_names_are_still_there():
    layer = _layer(r=4, lora_alpha=6, lora_dropout=0.5)
    assert type(layer.base_layer) is nn.Linear
    assert layer.fan_in_fan_out is False
    assert layer.active_adapters == ["default"]
    assert layer.scaling == {"default": 1.5}
    assert type(layer.scaling["default"]) is float
    assert layer.lora_variant == {}
    assert type(layer.lora_A["default"]) is type(layer.lora_B["default"]) is nn.Linear
    assert layer.lora_A["default"].bias is None
    assert layer.lora_B["default"].bias is None
    assert type(layer.lora_dropout["default"]) is nn.Dropout
    assert type(_layer().lora_dropout["default"]) is nn.Identity
    assert layer.merged is False
    assert layer.disable_adapters is False
    layer.enable_adapters(False)
    assert layer.disable_adapters is True
    layer.enable_adapters(True)
    layer.merge()
    assert layer.merged is True
    for name in ("active_adapters", "merged", "disable_adapters"):
        assert isinstance(inspect.getattr_static(BaseTunerLayer, name), property), name


def test_variants_are_entered_where_they_are_looked_for():
    assert list(_layer(use_dora=True).lora_variant) == ["default"]


def test_the_forward_is_still_the_formula():
    source = inspect.getsource(Linear.forward)
    assert "result = self.base_layer(x, *args, **kwargs)" in source
    assert "result = result + lora_B(lora_A(dropout(x))) * scaling" in source
    # Disabled, mixed, merged; base, plain, variant; and the cast, which is none here.
    assert source.count("result = ") == 7
    layer = _layer(lora_alpha=5)
    a, b, s = layer.lora_A["default"], layer.lora_B["default"], layer.scaling["default"]
    x = torch.randn(3, a.in_features)
    with torch.no_grad():
        assert torch.equal(layer(x), layer.base_layer(x) + b(a(x)) * s)


def test_torch_keeps_hooks_where_they_are_looked_for():
    module = nn.Linear(1, 1)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    assert module._forward_hooks
    assert module._forward_pre_hooks
    handle = nn_module.register_module_forward_hook(lambda *_: None)
    assert nn_module._global_forward_hooks
    handle.remove()
    handle = nn_module.register_module_forward_pre_hook(lambda *_: None)
    assert nn_module._global_forward_pre_hooks
    handle.remove()
    assert not nn_module._global_forward_hooks
    assert not nn_module._global_forward_pre_hooks
