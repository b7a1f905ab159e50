"""What is loaded is what was saved: weights as peft and transformers load them, moments by name."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from entropy_experiments.checkpoints.layout import find_checkpoint
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.training_facts import read_facts
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.types import AdamGroup
from entropy_experiments.update.optimizer import read_state
from oracles.tiny_models import save_tiny_checkpoint, tiny_model, tiny_rollouts

pytestmark = pytest.mark.naive

LAYOUTS = ("hf", "step", "accelerate")
ADAPTERS = {
    "plain": {},
    "rank_pattern": {
        "rank_pattern": {"layers.0.self_attn.q_proj": 6},
        "alpha_pattern": {"layers.1.self_attn.v_proj": 3},
    },
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "biases": {"bias": "lora_only"},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "dropout": {"lora_dropout": 0.5},
}


def assert_same_model(ours, theirs) -> None:
    rollouts = tiny_rollouts()
    inputs = {"input_ids": rollouts.tokens_NS, "attention_mask": rollouts.attention_NS.long()}
    with torch.no_grad():
        assert torch.equal(ours(**inputs).logits, theirs(**inputs).logits)


def assert_same_optimizer(loaded, saved) -> None:
    expected = read_state(saved.optimizer, dict(saved.model.named_parameters()))
    assert loaded.optimizer.groups == expected.groups
    assert set(loaded.optimizer.state) == set(expected.state)
    for name, entry in expected.state.items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(loaded.optimizer.state[name][key]), value)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_back_model_and_optimizer(tmp_path, kind, layout):
    saved = save_tiny_checkpoint(tmp_path, kind, layout)
    loaded = load_checkpoint(saved.path)
    assert (loaded.kind, loaded.step, loaded.name, loaded.lr) == (kind, 3, "step_3", 1e-3)
    assert not loaded.model.training
    assert_same_model(loaded.model, saved.model)
    assert_same_optimizer(loaded, saved)
    trainable = {n for n, p in loaded.model.named_parameters() if p.requires_grad}
    assert trainable == {n for n, p in saved.model.named_parameters() if p.requires_grad}
    assert loaded.coverage["matched"] == loaded.coverage["parameters"] == len(trainable)
    assert loaded.coverage["missing"] == loaded.coverage["unused"] == []
    assert any("optimizer order" in note for note in loaded.not_verifiable)
    assert ("lora_alpha" in " ".join(loaded.not_verifiable)) == (kind == "lora")
    assert any(name.endswith(".safetensors") for name in loaded.hashes)
    assert loaded.tokenizer.decode(loaded.tokenizer("12+3")["input_ids"]) == "12+3"


def test_the_trainers_order_is_not_that_of_the_parameters(tmp_path):
    """So matching by position would be wrong, and the test above has teeth."""
    saved = save_tiny_checkpoint(tmp_path, "full", "hf")
    loaded = load_checkpoint(saved.path)
    stored = [name for group in loaded.optimizer.groups for name in group.names]
    assert stored != list(dict(loaded.model.named_parameters()))
    assert loaded.coverage["order"] == "Trainer"
    assert [group.weight_decay for group in loaded.optimizer.groups] == [0.1, 0.0]


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias:UserWarning")
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_load_and_score_as_pefts_own(tmp_path, name):
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf", architecture="llama", lora=ADAPTERS[name])
    loaded = load_checkpoint(saved.path)
    base = AutoModelForCausalLM.from_pretrained(saved.base)
    theirs = PeftModel.from_pretrained(base, saved.path, is_trainable=True).eval()
    assert_same_model(loaded.model, theirs)
    assert_same_optimizer(loaded, saved)
    ours, peft = SequenceProcessor(loaded.model), SequenceProcessor(theirs)
    assert set(ours.params) == set(peft.params)
    scores = ours.score(ours.params, tiny_rollouts())
    for one, other in zip(scores, peft.score(peft.params, tiny_rollouts()), strict=True):
        assert torch.equal(one, other)
    # The adapter does something, or all of the above would hold without it.
    with theirs.disable_adapter(), torch.no_grad():
        plain = theirs(input_ids=tiny_rollouts().tokens_NS).logits
    with torch.no_grad():
        adapted = loaded.model(input_ids=tiny_rollouts().tokens_NS).logits
    assert float((plain - adapted).abs().max()) > 0.01


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_loading_leaves_the_process_as_it_was(tmp_path, kind):
    saved = save_tiny_checkpoint(tmp_path, kind, "hf")
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    policy = SequenceProcessor(load_checkpoint(saved.path).model)
    policy.score(policy.params, tiny_rollouts())
    after = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_the_base_may_be_given_moved_or_relative(tmp_path, monkeypatch):
    saved = save_tiny_checkpoint(tmp_path / "run", "lora", "hf", base_name=None)
    saved.base.rename(tmp_path / "elsewhere")
    loaded = load_checkpoint(saved.path, base=str(tmp_path / "elsewhere"))
    assert "checkpoint.base" in loaded.base
    assert_same_model(loaded.model, saved.model)
    monkeypatch.chdir(tmp_path)
    assert_same_model(load_checkpoint(saved.path, base="elsewhere").model, saved.model)
    assert_same_model(load_checkpoint(saved.path, base="../../elsewhere").model, saved.model)


def test_paths_as_people_give_them(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "step")
    for path in (saved.path, saved.path / "model", saved.path / "model" / "adapter_config.json"):
        loaded = load_checkpoint(path)
        assert loaded.name == "step_3"
        assert loaded.optimizer is not None
    weights = (saved.path / "model").rename(tmp_path / "weights")
    (tmp_path / "weights" / "adapter_config.json").write_text(
        (weights / "adapter_config.json").read_text().replace("../../base", "../base")
    )
    moments = (saved.path / "optimizer.pt").rename(tmp_path / "moments.pt")
    loaded = load_checkpoint(saved.path, adapter_path=weights, optimizer_path=moments)
    assert_same_model(loaded.model, saved.model)
    assert load_checkpoint(weights, need_optimizer=False).optimizer is None


def told(path):
    """What a checkpoint's folder says, without loading its weights."""
    layout = find_checkpoint(path)
    facts, _, files = read_facts(layout.folders)
    return layout.root, layout.weights, layout.name, layout.step, layout.recorded, facts, files


@pytest.mark.parametrize("batch", ["update_batch", "../update_batches/step_3"])
def test_the_inner_folder_tells_what_the_outer_does(tmp_path, monkeypatch, batch):
    saved = save_tiny_checkpoint(tmp_path / "run", "lora", "step", facts={"loss": "grpo"})
    (saved.path / batch).mkdir(parents=True)
    (tmp_path / "run" / "trl.yaml").write_text("beta: 0.5\n")
    (tmp_path / "latest").symlink_to(saved.path / "model")
    outer = told(saved.path)
    assert outer[0] == saved.path
    assert outer[2:4] == ("step_3", 3)
    assert outer[4] == (saved.path / batch).resolve()
    assert outer[5] == {"loss": "grpo", "beta": 0.5}
    assert told(saved.path / "model") == told(tmp_path / "latest") == outer
    assert told(saved.path / "model" / "adapter_config.json") == outer
    monkeypatch.chdir(saved.path / "model")
    assert told(".") == told("..") == told("../model/") == outer
    # Weights kept elsewhere and linked are still this checkpoint's.
    (saved.path / "model").rename(tmp_path / "kept")
    (saved.path / "model").symlink_to(tmp_path / "kept")
    assert told(saved.path / "model") == told(saved.path) == outer


def test_a_checkpoint_named_from_inside(tmp_path, monkeypatch):
    saved = save_tiny_checkpoint(tmp_path / "run", "lora", "hf", step=10)
    (tmp_path / "run" / "update_batches" / "checkpoint-10").mkdir(parents=True)
    (tmp_path / "run" / "entropy_probe.json").write_text('{"beta": 0.25}')
    expected = told(saved.path)
    assert expected[2:4] == ("step_10", 10)
    assert expected[4] is not None
    assert expected[5] == {"beta": 0.25}
    monkeypatch.chdir(saved.path)
    assert told(".") == told("../checkpoint-10") == expected
    loaded = load_checkpoint(".")
    assert (loaded.path, loaded.recorded, loaded.facts) == (saved.path, *expected[4:6])


def test_a_folder_that_only_happens_to_be_called_model(tmp_path):
    saved = save_tiny_checkpoint(tmp_path / "zoo", "full", "hf")
    alone = saved.path.rename(tmp_path / "zoo" / "model")
    assert find_checkpoint(alone).root == alone
    outer = save_tiny_checkpoint(tmp_path / "other", "full", "hf").path
    inner = alone.rename(outer / "model")
    assert (find_checkpoint(inner).root, find_checkpoint(outer).weights) == (inner, outer)


def test_sharded_and_bare_weights(tmp_path):
    """Shards behind an index; and Accelerate's weights, which come without a config."""
    saved = save_tiny_checkpoint(tmp_path, "full", "accelerate")
    base = tmp_path / "base"
    tiny_model("qwen2", seed=9).save_pretrained(base)
    for name in ("config.json", "generation_config.json"):
        (saved.path / name).unlink()
    loaded = load_checkpoint(saved.path, base=str(base))
    assert_same_model(loaded.model, saved.model)
    assert "with the config of" in loaded.base
    (saved.path / "model.safetensors").unlink()
    saved.model.save_pretrained(saved.path, max_shard_size="20KB")
    assert (saved.path / "model.safetensors.index.json").is_file()
    assert_same_model(load_checkpoint(saved.path).model, saved.model)


def test_pickled_weights_are_read_without_executing(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf")
    from safetensors.torch import load_file

    file = saved.path / "adapter_model.safetensors"
    torch.save(load_file(file), saved.path / "adapter_model.bin")
    file.unlink()
    assert_same_model(load_checkpoint(saved.path).model, saved.model)


def test_state_keyed_by_name_needs_no_guess(tmp_path):
    """As FSDP's full state dicts and torch's named parameters write it; wrappers are stripped."""
    saved = save_tiny_checkpoint(tmp_path, "full", "step")
    file = saved.path / "optimizer.pt"
    names = list(dict(saved.model.named_parameters()))
    stored = torch.load(file, weights_only=True)
    named = {
        "state": {f"module.{names[i]}": entry for i, entry in stored["state"].items()},
        "param_groups": [
            {
                **group,
                "decoupled_weight_decay": True,  # torch writes it since 2.7
                "params": [f"module.{names[i]}" for i in reversed(group["params"])],
            }
            for group in stored["param_groups"]
        ],
    }
    torch.save(named, file)
    loaded = load_checkpoint(saved.path)
    assert loaded.coverage["order"] == "names in the file"
    assert loaded.not_verifiable == ()
    for name, p in saved.model.named_parameters():
        entry = saved.optimizer.state[p]
        assert torch.equal(loaded.optimizer.state[name]["exp_avg"], entry["exp_avg"])


def test_names_beside_the_optimizer_are_believed(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "step")
    names = [n for n, p in saved.model.named_parameters() if p.requires_grad]
    file = saved.path / "optimizer.pt"
    stored = torch.load(file, weights_only=True)
    last = len(names) - 1
    stored["state"] = {last - i: entry for i, entry in stored["state"].items()}
    torch.save(stored, file)
    (saved.path / "optimizer_param_names.json").write_text(json.dumps(names[::-1]))
    loaded = load_checkpoint(saved.path)
    for name, p in saved.model.named_parameters():
        if p.requires_grad:
            entry = saved.optimizer.state[p]
            assert torch.equal(loaded.optimizer.state[name]["exp_avg"], entry["exp_avg"])


def test_hyper_parameters_come_from_the_groups(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "step", lr=3e-4, weight_decay=0.2)
    file = saved.path / "optimizer.pt"
    stored = torch.load(file, weights_only=True)
    stored["param_groups"][0].pop("decoupled_weight_decay", None)  # torch writes it since 2.7
    stored["param_groups"][0].update(lr=torch.tensor(3e-4), eps=1e-6, fused=True)
    torch.save(stored, file)
    loaded = load_checkpoint(saved.path)
    (group,) = loaded.optimizer.groups
    assert isinstance(group, AdamGroup)
    assert (group.betas, group.eps, group.weight_decay) == ((0.9, 0.99), 1e-6, 0.2)
    assert group.lr == pytest.approx(3e-4)
    assert any("weight decay 0.2" in note and "Adam's" in note for note in loaded.not_verifiable)


def test_an_optimizer_before_its_first_step_has_no_state(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "step")
    file = saved.path / "optimizer.pt"
    stored = torch.load(file, weights_only=True)
    torch.save({**stored, "state": {}}, file)
    loaded = load_checkpoint(saved.path)
    assert loaded.optimizer.state == {}
    assert loaded.coverage["matched"] == 0


def test_true_fp64_on_request(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf")
    loaded = load_checkpoint(saved.path, dtype="float64")
    policy = SequenceProcessor(loaded.model)
    assert {p.dtype for p in policy.params.values()} == {torch.float64}
    half = load_checkpoint(saved.path, dtype="bfloat16")
    assert {p.dtype for p in SequenceProcessor(half.model).params.values()} == {torch.float32}
    assert "bfloat16" in half.base


def test_training_facts_are_read_with_their_sources(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf", facts={"loss": "grpo", "beta": 0.0})
    (tmp_path / "trl.yaml").write_text(
        "learning_rate: 1e-6\nloss_type: dapo\nepsilon: 0.2\nscale_rewards: false\nbf16: true\n"
        "importance_sampling_level: sequence\nper_device_train_batch_size: 4\nload_in_4bit: true\n"
    )
    (saved.path / "update_batch").mkdir()
    loaded = load_checkpoint(saved.path)
    assert loaded.facts == {
        "loss": "grpo",
        "beta": 0.0,
        "lr": 1e-6,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "advantage": "none",
        "ratio": "sequence",
        "amp_dtype": "bfloat16",
        "load_in_4bit": True,
    }
    assert loaded.fact_sources["loss"] == "entropy_probe.json"
    assert loaded.fact_sources["lr"] == "trl.yaml"
    assert loaded.recorded == saved.path / "update_batch"
    assert "unquantised, though training used it in 4 bit" in loaded.base
