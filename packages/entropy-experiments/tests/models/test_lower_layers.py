"""Layers below all that is trained run once for many settings, and no number changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from entropy_experiments.models.lower_layers import Below, lower_layers
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.types import Scores
from models.test_shared_prompts import groups
from models.test_stacked_settings import gap, one_by_one, passes, settings_of
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts
from tolerances import SCORES_FP32

pytestmark = pytest.mark.naive

LAYERS = 4


def deep(architecture: str = "llama") -> Any:
    size = "n_layer" if architecture == "gpt2" else "num_hidden_layers"
    return tiny_model(architecture, **{size: LAYERS})


def trained(model: Any, *parts: str) -> Any:
    for name, value in model.named_parameters():
        value.requires_grad_(any(part in name for part in parts))
    return model


def upper_lora(first: int, architecture: str = "llama") -> Any:
    chosen = list(range(first, LAYERS))
    return tiny_lora(base=deep(architecture), layers_to_transform=chosen)


KEPT: dict[str, tuple[int, Callable[[], Any]]] = {
    "adapters on the last": (3, lambda: upper_lora(3)),
    "adapters on the upper half": (2, lambda: upper_lora(2, "qwen2")),
    "adapters on one in the middle": (
        1,
        lambda: tiny_lora(base=deep(), layers_to_transform=[1]),
    ),
    "the upper half in full": (2, lambda: trained(deep(), ".layers.2.", ".layers.3.")),
    "the last of gpt2": (3, lambda: trained(deep("gpt2"), ".h.3.")),
}
NOT_KEPT: dict[str, Callable[[], Any]] = {
    "all layers": lambda: tiny_lora(base=deep()),
    "the first": lambda: trained(deep(), ".layers.0."),
    "embeddings": lambda: trained(deep(), ".layers.3.", "embed_tokens"),
    "a norm outside": lambda: trained(deep(), ".layers.3.", "model.norm"),
    "everything": deep,
}


def calls(layers: Any) -> list[int]:
    """A list that grows with every call of each of these layers."""
    seen: list[int] = []
    for i, layer in enumerate(layers):
        # Inside: a skipped layer does not run it. And no hook, which would be heard.
        own = layer.mlp.forward
        layer.mlp.forward = lambda *args, i=i, own=own: seen.append(i) or own(*args)
    return seen


@torch.no_grad()
def many_scores(policy: SequenceProcessor, many: list, rollouts: Any) -> list[Scores]:
    return policy.score_many(many, rollouts)


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("rollouts", [tiny_rollouts(), groups()], ids=["alone", "shared"])
@pytest.mark.parametrize("name", KEPT)
def test_they_run_once_and_change_nothing(name, rollouts, size, monkeypatch):
    """The first setting by itself, the others as many together as may be."""
    count, make = KEPT[name]
    policy = SequenceProcessor(make())
    assert len(policy._kept()) == count
    many = settings_of(policy, 4)
    expected = one_by_one(policy, many, rollouts)
    layers, size = policy._kept(), size if policy._stacks() else 1
    seen = calls(layers)
    monkeypatch.setattr(policy, "_stack_size", lambda _: size)
    with passes(policy, monkeypatch, 1) as together:
        found = many_scores(policy, many, rollouts)
    assert together == {1: [1, 1, 1, 1], 2: [1, 2, 1], 9: [1, 3]}[size]
    # Of stacked rows the upper layers' products may round differently on other machines.
    assert gap(found, expected) <= (0 if size == 1 else SCORES_FP32)
    assert seen == list(range(count))
    assert gap([expected[0]], [expected[1]]) > 1e-3
    one_by_one(policy, many, rollouts)
    assert len(seen) == 5 * count


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_training_moves_is_never_kept(name):
    policy, rollouts = SequenceProcessor(NOT_KEPT[name]()), tiny_rollouts()
    assert policy._kept() == ()
    many = settings_of(policy, 3, size=0.01)
    expected = one_by_one(policy, many, rollouts)
    assert gap(many_scores(policy, many, rollouts), expected) == 0
    assert gap([expected[0]], [expected[1]]) > 1e-5


def test_too_many_kept_layers_would_be_seen():
    """Teeth: the trial refuses a layer that training moves."""
    policy = SequenceProcessor(upper_lora(2))
    names = [n for n, _ in policy.model.named_parameters() if ".layers.3." in n]
    right, wrong = policy._kept(), lower_layers(policy.model, names)
    assert (len(right), len(wrong)) == (2, 3)
    for size in (1, 2, 3):
        assert policy._together_changes_nothing(right, size)
        assert not policy._together_changes_nothing(wrong, size)


@torch.no_grad()
@pytest.mark.parametrize("place", ["last kept", "first above"])
def test_states_that_are_changed_in_place_are_not_kept_so(place):
    policy, rollouts = SequenceProcessor(upper_lora(2)), tiny_rollouts()
    many, last = settings_of(policy, 3), policy._kept()[-1]
    assert policy.spares_work
    layers: Any = policy.model.base_model.model.model.layers
    plain = one_by_one(policy, many, rollouts)
    if place == "last kept":
        last.register_forward_hook(lambda m, x, found: found.add_(0.3))
    else:
        layers[2].register_forward_pre_hook(lambda m, x: (x[0].add_(0.3),))
    expected = one_by_one(policy, many, rollouts)
    assert gap(many_scores(policy, many, rollouts), expected) == 0
    assert gap(plain, expected) > 1e-3


def test_whoever_has_a_hook_there_is_told_of_every_pass():
    policy, rollouts, seen = SequenceProcessor(upper_lora(2)), tiny_rollouts(), []
    layers: Any = policy._kept()
    layers[0].register_forward_hook(lambda m, x, found: seen.append(float(found.norm())))
    many_scores(policy, settings_of(policy, 3), rollouts)
    assert len(seen) == 3
    assert max(seen) == min(seen) > 0


class Handing(nn.Module):
    """A layer that leaves something for a later one, as shared keys and values are left."""

    def __init__(self, own: nn.Module, shelf: dict[str, Tensor], takes: bool) -> None:
        super().__init__()
        self.own, self.shelf, self.takes = own, shelf, takes

    def forward(self, x: Tensor) -> Tensor:
        if self.takes:
            return self.own(x) + self.shelf.pop("left")
        self.shelf["left"] = x
        return self.own(x)


def test_layers_that_hand_on_more_than_states_are_not_kept():
    """As where upper layers use the keys of lower ones: an error in the trial, and no more."""
    model, shelf = upper_lora(2), {}
    layers: Any = model.base_model.model.model.layers
    for i, takes in ((0, False), (3, True)):
        layers[i].mlp = Handing(layers[i].mlp, shelf, takes)
    policy, rollouts = SequenceProcessor(model), tiny_rollouts()
    assert len(lower_layers(model, policy._names)) == 2
    assert policy._kept() == ()
    many = settings_of(policy, 3)
    found = many_scores(policy, many, rollouts)
    assert gap(found, one_by_one(policy, many, rollouts)) <= SCORES_FP32


def test_derivatives_keep_nothing():
    policy, rollouts = SequenceProcessor(upper_lora(2)), tiny_rollouts()
    many = [{n: p.clone().requires_grad_() for n, p in s.items()} for s in settings_of(policy, 2)]
    assert not policy._without_effect  # tried once, before the first graph
    seen = calls(policy._kept())
    seen.clear()
    for params, one in zip(many, policy.score_many(many, rollouts), strict=True):
        one.entropy_NS.sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in params.values())
    assert len(seen) == 4


class Giving(nn.Module):
    def __init__(self, gives: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.gives = gives

    def forward(self, x: Tensor) -> Any:
        return self.gives(x + 1)


@pytest.mark.parametrize(
    "gives",
    [lambda x: (x, 7), lambda x: x[None].repeat(4, 1, 1, 1), lambda x: x.transpose(0, 1)],
    ids=["a tuple", "several versions", "sequence first"],
)
def test_other_states_than_rows_are_made_again(gives):
    """Of those it is not known what may be repeated."""
    layer, x = Giving(gives), torch.zeros(2, 3, 5)
    below = Below([layer], len(x))
    with torch.no_grad():
        for value in (0.0, 5.0):
            with below.once():
                found = layer(x + value)
            assert float((found[0] if isinstance(found, tuple) else found).max()) == value + 1


@torch.no_grad()
def test_states_of_rows_are_kept():
    layer, x = Giving(lambda x: x), torch.zeros(2, 3, 5)
    below = Below([layer], len(x))
    for value in (0.0, 5.0):
        with below.once():
            assert float(layer(x + value).max()) == 1
    with below.once(3):
        assert layer(x).shape == (6, 3, 5)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(fails, monkeypatch):
    policy, rollouts = SequenceProcessor(upper_lora(2)), tiny_rollouts()
    if fails:
        monkeypatch.setattr(policy, "_call", lambda *_, **__: 1 / 0)
    try:
        many_scores(policy, settings_of(policy, 3), rollouts)
    except ZeroDivisionError:
        assert fails
    assert not any("forward" in m.__dict__ for m in policy.model.modules())
