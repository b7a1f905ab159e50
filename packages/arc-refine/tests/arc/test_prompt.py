"""The prompt embedding: its formula, what it caches, and that it is the same every time (G12)."""

import copy
import dataclasses

import pytest
import torch

from arc.grids import episodes
from arc_refine import prompt as prompt_module
from arc_refine.batch import collate
from arc_refine.data import Episode
from arc_refine.language import load_language_model, pooled_states, token_ids
from arc_refine.prompt import PromptEncoder
from entropy_experiments.models.precision import low_precision_operations, true_float64

E = 16


def encoder_of(train="full", fuse=0.3):
    torch.manual_seed(0)
    return PromptEncoder(load_language_model("tiny", train), E, fuse)


@pytest.fixture
def inputs():
    return collate(episodes()).inputs


@pytest.mark.parametrize("train", ["none", "full", "lora"])
def test_the_formula(inputs, train):
    encoder = encoder_of(train)
    rows = [token_ids(encoder.tokenizer, t) for t in inputs.texts]
    h_BW = pooled_states(encoder.lm, rows)
    text = encoder.text_norm(h_BW @ encoder.text.weight.T)
    expected = 0.7 * text + 0.3 * encoder.ctrl(inputs.features_BF)
    torch.testing.assert_close(encoder(inputs), expected, rtol=0, atol=2e-5)
    assert (expected - 0.3 * text - 0.7 * encoder.ctrl(inputs.features_BF)).abs().max() > 0.1


@pytest.mark.parametrize("train", ["none", "full", "lora"])
def test_the_same_input_gives_the_same_bits_in_train_mode(inputs, train):
    encoder = encoder_of(train).train()
    assert torch.equal(encoder(inputs), encoder(inputs))
    assert torch.equal(encoder(inputs), encoder.eval()(inputs))


def test_every_parameter_learns(inputs):
    encoder = encoder_of()
    (encoder(inputs) * torch.randn(5, E)).sum().backward()
    for name, p in encoder.named_parameters():
        assert p.grad is not None, name
        assert p.grad.norm() > 0, name


def test_text_and_features_both_matter(inputs):
    encoder = encoder_of()
    plain = encoder(inputs)
    texts = dataclasses.replace(inputs, texts=inputs.texts[::-1])
    assert (encoder(texts) - plain).abs().max() > 1e-3
    numbers = dataclasses.replace(inputs, features_BF=inputs.features_BF.flip(0))
    assert (encoder(numbers) - plain).abs().max() > 1e-3


def test_neither_query_nor_target_matters(inputs):
    encoder = encoder_of()
    made = episodes()
    others = [Episode(dataclasses.replace(e.inputs, query=e.target), e.inputs.query) for e in made]
    assert torch.equal(encoder(inputs), encoder(collate(others).inputs))


@pytest.mark.parametrize(
    ("fuse", "name", "parts"),
    [(1.0, "tiny", {"ctrl"}), (0.0, "tiny", {"lm", "text", "text_norm"}), (0.3, "none", {"ctrl"})],
)
def test_a_part_without_a_share_is_not_built(inputs, fuse, name, parts):
    encoder = PromptEncoder(load_language_model(name), E, fuse)
    assert {n.split(".")[0] for n, _ in encoder.named_parameters()} == parts
    assert encoder(inputs).shape == (5, E)


def test_fuse_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"fuse is 1\.5; expected the share of the numbers"):
        PromptEncoder(None, E, 1.5)
    with pytest.raises(ValueError, match="this encoder has no language model"):
        PromptEncoder(None, E).pooled(("x",))


@pytest.fixture
def counted(monkeypatch):
    """How many texts the language model has read."""
    calls = []
    real = prompt_module.pooled_states

    def counting(model, rows):
        calls.append(len(rows))
        return real(model, rows)

    monkeypatch.setattr(prompt_module, "pooled_states", counting)
    return calls


def test_a_frozen_model_reads_each_text_once(inputs, counted):
    encoder = encoder_of("none")
    first = encoder(inputs)
    distinct = len(set(inputs.texts))
    assert counted == [1] * distinct
    assert torch.equal(encoder(inputs), first)
    assert len(counted) == distinct  # nothing was read again
    assert not any(h.requires_grad for h in encoder._pooled.values())


def test_a_cached_state_does_not_depend_on_its_batch(inputs):
    """So a resumed run, with an empty cache and another first batch, gets the same bits."""
    encoder, other = encoder_of("none"), encoder_of("none")
    other(dataclasses.replace(inputs, texts=tuple("a much longer text " * 5 for _ in range(5))))
    backwards = dataclasses.replace(inputs, texts=inputs.texts[::-1])
    other(backwards)
    assert torch.equal(encoder.pooled(inputs.texts), other.pooled(inputs.texts))


def test_other_weights_empty_the_cache(inputs, counted):
    encoder = encoder_of("none")
    before = encoder(inputs)
    with torch.no_grad():
        next(encoder.lm.parameters()).mul_(1.5)
    after = encoder(inputs)
    assert len(counted) == 2 * len(set(inputs.texts))
    assert (after - before).abs().max() > 1e-4
    encoder.lm.load_state_dict(encoder_of("none").lm.state_dict())
    assert torch.equal(encoder(inputs), before)
    encoder.clear_cache()
    assert torch.equal(encoder(inputs), before)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_model_in_training_is_never_cached(inputs, counted, train):
    encoder = encoder_of(train)
    encoder(inputs)
    before = encoder(inputs)
    assert len(counted) == 2
    assert encoder._pooled == {}
    optimizer = torch.optim.SGD(encoder.lm.parameters(), lr=0.5)
    for _ in range(2):  # a stale graph would fail in the second backward
        optimizer.zero_grad()
        encoder(inputs).square().sum().backward()
        optimizer.step()
    assert (encoder(inputs) - before).abs().max() > 1e-4


def test_equal_texts_are_read_once_and_share_the_gradient(inputs, counted):
    encoder = encoder_of()
    same = dataclasses.replace(inputs, texts=(inputs.texts[0],) * 5)
    h_BW = encoder.pooled(same.texts)
    assert counted == [1]
    assert torch.equal(h_BW[0], h_BW[4])
    weight = next(encoder.lm.parameters())
    (five,) = torch.autograd.grad(h_BW.sum(), weight)
    (one,) = torch.autograd.grad(encoder.pooled(same.texts[:1]).sum(), weight)
    torch.testing.assert_close(five, 5 * one, rtol=1e-4, atol=1e-5)


def test_it_runs_in_true_fp64(inputs):
    """What finite differences of the whole loss need; features and masks must follow."""
    encoder = copy.deepcopy(encoder_of()).double()
    true_float64(encoder.lm)
    assert low_precision_operations(encoder.lm) == []
    value = encoder(inputs)
    assert value.dtype == torch.float64
    weight = encoder.text.weight
    step = torch.randn_like(weight)
    (grad,) = torch.autograd.grad(value.square().sum(), weight)
    with torch.no_grad():
        ends = []
        for sign in (1, -1):
            weight.add_(sign * 1e-6 * step)
            ends.append(encoder(inputs).square().sum())
            weight.sub_(sign * 1e-6 * step)
    slope = (ends[0] - ends[1]) / 2e-6
    assert slope.item() == pytest.approx((grad * step).sum().item(), rel=1e-5)
