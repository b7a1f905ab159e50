"""Broken checkpoints: refused before any compute, by file and key, with nothing executed."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.optimizer_state import read_optimizer_state, refuse_zero_lr
from entropy_experiments.checkpoints.runs import packaged_checkpoint
from oracles.tiny_models import save_tiny_checkpoint, tiny_model

pytestmark = pytest.mark.faults

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def lora(tmp_path):
    return save_tiny_checkpoint(tmp_path, "lora", "hf")


@pytest.fixture
def full(tmp_path):
    return save_tiny_checkpoint(tmp_path, "full", "hf")


def edit_json(path: Path, **changes) -> None:
    found = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            del found[key]
        else:
            found[key] = value
    path.write_text(json.dumps(found))


def edit_tensors(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_optimizer(path: Path, change) -> None:
    stored = torch.load(path, weights_only=True)
    change(stored)
    torch.save(stored, path)


def refused(path, *parts, kind=ValueError, **settings) -> None:
    """An error of this kind whose message has all parts, in this order."""
    with pytest.raises(kind, match="(?s)" + ".*".join(re.escape(part) for part in parts)):
        load_checkpoint(path, **settings)


# Weights


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_truncated_weights(tmp_path, kind):
    saved = save_tiny_checkpoint(tmp_path, kind, "hf")
    name = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    file = saved.path / name
    file.write_bytes(file.read_bytes()[:-100])
    refused(saved.path, name, "is not a complete safetensors file", "truncated")


def test_a_truncated_base(lora):
    file = lora.base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    refused(lora.path, "base/model.safetensors", "is not a complete safetensors file")


@pytest.mark.parametrize("place", [(), ("text_config",)], ids=["own", "nested"])
@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_an_attention_kernel_on_the_hub(full, key, place):
    file = full.path / "config.json"
    content = json.loads(file.read_text())
    inner = content
    for name in place:
        inner = inner.setdefault(name, {})
    inner[key] = "somebody/flash"
    file.write_text(json.dumps(content))
    refused(full.path, f"config.json: {key} is 'somebody/flash', code on a hub", "nothing was loa")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number(lora, value):
    file = lora.path / "adapter_model.safetensors"
    edit_tensors(file, lambda t: t[A][0, :2].fill_(value))
    refused(lora.path, "adapter_model.safetensors", A, "2 non-finite values of 128")


def test_nan_in_a_full_model_or_a_base(tmp_path, full):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(full.path / "model.safetensors", lambda t: t[name][3].fill_(torch.nan))
    refused(full.path, "model.safetensors", name, "32 non-finite")
    lora = save_tiny_checkpoint(tmp_path / "other", "lora", "hf")
    edit_tensors(lora.base / "model.safetensors", lambda t: t[name][3].fill_(torch.nan))
    refused(lora.path, "base/model.safetensors", name, "32 non-finite")


def test_extra_and_missing_adapter_keys(lora):
    file = lora.path / "adapter_model.safetensors"
    whole = load_file(file)
    edit_tensors(file, lambda t: t.update({A.replace("q_proj", "k_proj"): torch.ones(4, 32)}))
    refused(lora.path, "adapter_model.safetensors", "missing tensors [] (0", "k_proj", "(1 in all)")
    save_file({k: v for k, v in whole.items() if k != A}, file)
    refused(lora.path, "adapter_model.safetensors", f"missing tensors ['{A}'] (1 in all)")


def test_extra_and_missing_keys_of_a_full_model(full):
    file = full.path / "model.safetensors"
    whole = load_file(file)
    save_file({**whole, "value_head.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    refused(full.path, "model.safetensors", "extra tensors ['value_head.weight'] (1 in all)")
    name = "model.layers.0.mlp.up_proj.weight"
    rest = {k: v for k, v in whole.items() if k != name}
    save_file(rest, file, metadata={"format": "pt"})
    refused(full.path, "model.safetensors", f"missing tensors ['{name}'] (1 in all)")


def test_wrong_shapes(lora, tmp_path):
    edit_tensors(
        lora.path / "adapter_model.safetensors", lambda t: t.update({A: torch.ones(3, 32)})
    )
    refused(lora.path, "adapter_model.safetensors", A, "shape (3, 32); expected (4, 32)", "rank")
    full = save_tiny_checkpoint(tmp_path / "full", "full", "hf")
    edit_tensors(
        full.path / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.ones(5)})
    )
    refused(full.path, "model.safetensors", "model.norm.weight has shape (5,); expected (32,)")


def test_a_missing_shard(full):
    (full.path / "model.safetensors").unlink()
    full.model.save_pretrained(full.path, max_shard_size="20KB")
    shard = sorted(full.path.glob("model-0000*.safetensors"))[1]
    shard.unlink()
    refused(full.path, "model.safetensors.index.json", shard.name, kind=FileNotFoundError)


# The adapter's config


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("lora_alpha", ..., "lora_alpha is missing; expected a positive number"),
        ("lora_alpha", None, "lora_alpha is missing; expected a positive number"),
        ("lora_alpha", 0, "lora_alpha is 0; expected a positive number"),
        ("lora_alpha", -8, "lora_alpha is -8; expected a positive number"),
        ("lora_alpha", float("inf"), "lora_alpha is inf; expected a positive number"),
        ("lora_alpha", "16", "lora_alpha is '16'; expected a positive number"),
        ("r", ..., "r is missing; expected a positive integer"),
        ("r", 0, "r is 0; expected a positive integer"),
        ("r", True, "r is True; expected a positive integer"),
        ("rank_pattern", {"q_proj": 0}, "rank_pattern['q_proj'] is 0"),
        ("alpha_pattern", {"q_proj": -1}, "alpha_pattern['q_proj'] is -1"),
        ("lora_alfa", 16, "unknown keys ['lora_alfa']. Did you mean 'lora_alpha'?"),
        ("peft_type", "IA3", "peft_type is 'IA3'; expected 'LORA'"),
        ("alora_invocation_tokens", [5], "alora_invocation_tokens is set"),
    ],
)
def test_adapter_configs_that_mean_another_model(lora, key, value, says):
    edit_json(lora.path / "adapter_config.json", **{key: value})
    refused(lora.path, "adapter_config.json", says)


@pytest.mark.parametrize("value", [None, False, {}, [], ""])
def test_options_of_a_newer_peft_that_are_unset_change_nothing(lora, value):
    before = load_checkpoint(lora.path)
    edit_json(lora.path / "adapter_config.json", option_of_tomorrow=value)
    after = load_checkpoint(lora.path)
    assert after.model.peft_config == before.model.peft_config
    for name, p in before.model.named_parameters():
        assert torch.equal(after.model.get_parameter(name), p)


@pytest.mark.parametrize("value", [True, 0, 0.0, 16, "on", [0], {"rank": None}])
def test_options_of_a_newer_peft_that_are_set_are_refused_by_name(lora, value):
    edit_json(lora.path / "adapter_config.json", unset_one=None, option_of_tomorrow=value)
    refused(lora.path, "unknown keys ['option_of_tomorrow']", "upgrade peft")


def test_another_rank_than_the_weights_have(lora):
    edit_json(lora.path / "adapter_config.json", r=8)
    refused(lora.path, "adapter_model.safetensors", "(4, 32); expected (8, 32)")


def test_an_adapter_config_cut_short(lora):
    file = lora.path / "adapter_config.json"
    file.write_text(file.read_text()[:40])
    refused(lora.path, "adapter_config.json is not valid JSON")


@pytest.mark.parametrize("recorded", [None, ""])
def test_an_adapter_without_base(tmp_path, recorded):
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf", base_name=recorded)
    refused(saved.path, "adapter_config.json", "base_model_name_or_path", "Set checkpoint.base")


def test_a_base_that_is_not_there(lora):
    edit_json(lora.path / "adapter_config.json", base_model_name_or_path="../elsewhere/base")
    refused(lora.path, "adapter_config.json says '../elsewhere/base'", kind=FileNotFoundError)
    refused(lora.path, "checkpoint.base says './no.gguf'", base="./no.gguf", kind=FileNotFoundError)
    refused(lora.path, "backbone is 'smolm2'", "Did you mean 'smollm2'?", backbone="smolm2")


def test_other_modules_than_the_config_says(lora):
    edit_json(lora.path / "adapter_config.json", target_modules=["q_proj", "k_proj"])
    refused(lora.path, "adapter_model.safetensors", "missing", "k_proj", "extra", "v_proj")


def test_a_base_of_another_size(lora, tmp_path):
    wide = tmp_path / "wide"
    tiny_model("qwen2", hidden_size=64).save_pretrained(wide)
    refused(lora.path, "adapter_model.safetensors", "(4, 32); expected (4, 64)", base=str(wide))


# The folder


def test_nothing_there(tmp_path):
    missing = tmp_path / "checkpoint-7"
    refused(missing, f"Checkpoint not found: {missing}", "config.json", kind=FileNotFoundError)
    missing.mkdir()
    refused(missing, f"Checkpoint not found: {missing}", "Expected", kind=FileNotFoundError)


def test_messages_name_the_folder_as_it_was_given(lora, monkeypatch):
    (lora.path / "optimizer.pt").unlink()
    monkeypatch.chdir(lora.path)
    refused(".", "No optimizer state for .:", kind=FileNotFoundError)
    refused("../no", "Checkpoint not found: ../no is", kind=FileNotFoundError)
    (lora.path / "adapter_model.safetensors").unlink()
    refused(f"../{lora.path.name}", f"not found: ../{lora.path.name} has", kind=FileNotFoundError)


def test_the_folder_of_a_run_names_its_checkpoints(lora):
    refused(lora.path.parent, "checkpoint-3: give one of those", kind=FileNotFoundError)
    for step in (10, 5):
        other = lora.path.parent / f"checkpoint-{step}"
        shutil.copytree(lora.path, other)
        (other / "update_batch").mkdir(exist_ok=True)
    refused(
        lora.path.parent,
        "It holds checkpoint-3, checkpoint-5, checkpoint-10: give one of those. The step that "
        "followed is recorded in checkpoint-5, checkpoint-10.",
        kind=FileNotFoundError,
    )


def test_an_adapter_without_weights_or_config(lora):
    (lora.path / "adapter_model.safetensors").rename(lora.path / "x")
    refused(lora.path, "adapter_config.json but no weights", kind=FileNotFoundError)
    (lora.path / "x").rename(lora.path / "adapter_model.safetensors")
    (lora.path / "adapter_config.json").unlink()
    refused(lora.path, "no adapter_config.json beside it", kind=FileNotFoundError)


def test_shards_outside_the_folder(full):
    (full.path / "model.safetensors").rename(full.path.parent / "elsewhere.safetensors")
    index = full.path / "model.safetensors.index.json"
    for name in ("../elsewhere.safetensors", "/etc/passwd", "a\\b", "..", "", 7, None):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        refused(full.path, "model.safetensors.index.json names the shards", "beside it")
    index.write_text(json.dumps({"weight_map": ["model.safetensors"]}))
    refused(full.path, "model.safetensors.index.json names the shards")


def test_the_state_of_another_step(lora):
    state = lora.path / "trainer_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "global_step": 4}))
    refused(lora.path, "says global_step 4, and its folder is checkpoint-3", "name it checkpoint-4")


def test_a_half_written_folder(lora):
    state = lora.path / "trainer_state.json"
    state.write_text(state.read_text()[:5])
    refused(lora.path, "trainer_state.json is not valid JSON")
    state.unlink()
    refused(lora.path, "checkpoint-3 is half-written: trainer_state.json", kind=FileNotFoundError)


def test_formats_that_need_unsafe_pickle(tmp_path):
    for name, file, says in (
        ("deepspeed", "global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_to_fp32.py"),
        ("zero", "zero_pp_rank_0_mp_rank_00_model_states.pt", "DeepSpeed shards"),
    ):
        path = tmp_path / name / file
        path.parent.mkdir(parents=True)
        path.write_bytes(b"never opened")
        refused(tmp_path / name, says)


# The optimizer


def test_no_optimizer(lora):
    (lora.path / "optimizer.pt").unlink()
    refused(
        lora.path, "No optimizer state", "checkpoint.optimizer to the file", kind=FileNotFoundError
    )
    refused(
        lora.path, "checkpoint.optimizer is no.pt", optimizer_path="no.pt", kind=FileNotFoundError
    )
    assert load_checkpoint(lora.path, need_optimizer=False).optimizer is None


def test_an_optimizer_of_another_size(lora, tmp_path):
    wide = save_tiny_checkpoint(
        tmp_path / "w", "lora", "hf", lora={"target_modules": ["q_proj", "k_proj", "v_proj"]}
    )
    refused(
        lora.path,
        "optimizer.pt",
        "another size: it holds 12 parameters; expected 8",
        optimizer_path=wide.path / "optimizer.pt",
    )
    deep = save_tiny_checkpoint(tmp_path / "d", "lora", "hf", lora={"r": 6})
    refused(
        lora.path,
        "optimizer.pt: exp_avg of parameter 0 has shape (6, 32); expected (4, 32)",
        A.replace("lora_A.weight", "lora_A.default.weight"),
        optimizer_path=deep.path / "optimizer.pt",
    )


def test_an_optimizer_in_another_order(lora):
    """Torch loads this in silence: as many parameters, other shapes at each place."""

    def reverse(stored):
        last = len(stored["state"]) - 1
        stored["state"] = {last - i: entry for i, entry in stored["state"].items()}

    edit_optimizer(lora.path / "optimizer.pt", reverse)
    refused(lora.path, "optimizer.pt: exp_avg of parameter 0", "another order")


def test_groups_of_no_known_order(full):
    def regroup(stored):
        first = stored["param_groups"][0]
        ids = [i for group in stored["param_groups"] for i in group["params"]]
        stored["param_groups"] = [{**first, "params": ids[:3]}, {**first, "params": ids[3:]}]

    edit_optimizer(full.path / "optimizer.pt", regroup)
    refused(full.path, "groups of [3, 23] parameters", "optimizer_param_names.json")


def test_names_of_another_model(lora):
    names = [f"layer{i}" for i in range(8)]
    (lora.path / "optimizer_param_names.json").write_text(json.dumps(names))
    refused(lora.path, "optimizer_param_names.json names other parameters", "unknown ['layer0'")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('["layer0", ', "is not valid JSON"),
        ("3", "holds 3; expected a list of parameter names"),
        ("[1, 2]", "holds [1, 2]; expected a list of parameter names"),
        ('["a", ["b"]]', "holds ['a', ['b']]; expected a list of parameter names"),
        ('{"param_names": null}', "holds None; expected a list of parameter names"),
    ],
)
def test_a_file_of_names_that_is_none(lora, text, says):
    (lora.path / "optimizer_param_names.json").write_text(text)
    refused(lora.path, f"optimizer_param_names.json {says}", "remove it")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("exp_avg", torch.nan, "128 non-finite values"),
        ("exp_avg_sq", torch.inf, "128 non-finite values"),
        ("exp_avg_sq", -1.0, "is negative (minimum -1)"),
    ],
)
def test_moments_that_cannot_be(lora, key, value, says):
    edit_optimizer(lora.path / "optimizer.pt", lambda s: s["state"][0][key].fill_(value))
    refused(lora.path, f"optimizer.pt: {key} of 'base_model", says)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("lr", -1e-3, "lr of a parameter group is -0.001; expected 0 or more"),
        ("betas", (1.0, 0.999), "betas[0] of a parameter group is 1; expected 0 or more and below"),
        ("betas", (0.9, 1.5), "betas[1] of a parameter group is 1.5"),
        ("eps", -1e-8, "eps of a parameter group is -1e-08"),
        ("weight_decay", float("inf"), "weight_decay of a parameter group is inf"),
    ],
)
def test_hyper_parameters_that_cannot_be(lora, key, value, says):
    edit_optimizer(lora.path / "optimizer.pt", lambda s: s["param_groups"][0].update({key: value}))
    refused(lora.path, "optimizer.pt", says)


@pytest.mark.parametrize("value", [-3.0, 2.5, torch.nan])
def test_a_count_of_steps_that_cannot_be(lora, value):
    edit_optimizer(lora.path / "optimizer.pt", lambda s: s["state"][0]["step"].fill_(value))
    refused(lora.path, "optimizer.pt: step of 'base_model", "expected a count of steps")


def test_state_for_some_parameters_only(lora):
    edit_optimizer(lora.path / "optimizer.pt", lambda s: s["state"].pop(5))
    refused(lora.path, "optimizer.pt has no state for 1 of 8 parameters", "layers.1.self_attn")


def test_state_without_a_moment(lora):
    edit_optimizer(lora.path / "optimizer.pt", lambda s: s["state"][0].pop("exp_avg_sq"))
    refused(lora.path, "optimizer.pt: the state of", "lacks ['exp_avg_sq']")


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", ["RAdam", "NAdam", "Adamax", "SparseAdam", "Muon"])
def test_relatives_of_adam_and_sgd_are_refused_by_name(name, stepped, tmp_path):
    """Moments of RAdam, SparseAdam and Muon have the very names of Adam's and SGD's."""
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = kind(model.parameters(), lr=0.1)
    if stepped:
        gradient = torch.ones(2, 3)
        model.weight.grad = gradient.to_sparse() if name == "SparseAdam" else gradient
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match=rf"cannot be rebuilt: {name} without"):
        read_optimizer_state(tmp_path / "optimizer.pt", model)


def test_optimizers_that_cannot_be_rebuilt(lora):
    def eight_bit(stored):
        for entry in stored["state"].values():
            entry["state1"] = entry.pop("exp_avg").to(torch.uint8)

    edit_optimizer(lora.path / "optimizer.pt", eight_bit)
    refused(lora.path, "optimizer.pt", "cannot be rebuilt: it holds ['state1']")
    torch.save({"model": torch.ones(1)}, lora.path / "optimizer.pt")
    refused(lora.path, "optimizer.pt is not an optimizer's state: got ['model']")


@pytest.mark.parametrize("value", [True, 0.5, "mean", torch.ones(1)])
def test_an_unknown_option_that_is_set_is_refused_by_name(lora, value):
    """timm's AdamW has Adam's moments, and with caution=True another step."""
    edit_optimizer(lora.path / "optimizer.pt", lambda s: s["param_groups"][0].update(caution=value))
    refused(lora.path, "optimizer.pt", "cannot be rebuilt: its option 'caution' is ")


def test_options_that_change_no_step_are_read_over(lora):
    """Unset ones of a relative, a scheduler's notes, and how torch computes the step."""
    harmless = {
        "caution": False,
        "corrected_weight_decay": None,
        "initial_lr": 1e-3,
        "max_lr": 1e-2,
        "fused": True,
        "foreach": True,
        "capturable": True,
    }
    edit_optimizer(lora.path / "optimizer.pt", lambda s: s["param_groups"][0].update(harmless))
    assert load_checkpoint(lora.path).optimizer is not None


def test_amsgrad_without_its_maximum(lora):
    edit_optimizer(lora.path / "optimizer.pt", lambda s: s["param_groups"][0].update(amsgrad=True))
    refused(lora.path, "optimizer.pt: amsgrad is set and the state of", "lacks max_exp_avg_sq")


def test_a_full_model_that_was_frozen_in_part(full):
    """No adapter config is to blame."""

    def frozen(stored):
        left = stored["param_groups"][0]["params"].pop()
        stored["state"].pop(left)

    edit_optimizer(full.path / "optimizer.pt", frozen)
    refused(full.path, "it holds 25 parameters; expected 26", "training froze a part of the model")


def test_a_base_that_was_changed_at_random_is_refused(tmp_path):
    """A randomised SVD gives another residual each time: the logits would be of no policy."""
    saved = save_tiny_checkpoint(
        tmp_path, "lora", "hf", lora={"init_lora_weights": "pissa_niter_4"}
    )
    refused(
        saved.path,
        "adapter_config.json: init_lora_weights is 'pissa_niter_4'",
        "cannot be made again",
        "path_initial_model_for_weight_conversion",
    )


@pytest.mark.parametrize("start", ["pissa", "olora", "orthogonal"])
def test_starts_without_random_numbers_in_the_base_give_the_trained_logits(tmp_path, start):
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf", lora={"init_lora_weights": start})
    loaded = load_checkpoint(saved.path)
    ids = torch.arange(2, 14).reshape(2, 6)
    with torch.no_grad():
        gap = loaded.model(input_ids=ids).logits - saved.model.eval()(input_ids=ids).logits
    assert float(gap.abs().max()) < 1e-4
    changed = any("changes the base at the start" in note for note in loaded.not_verifiable)
    assert changed is (start != "orthogonal")


def test_a_truncated_optimizer(lora):
    file = lora.path / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:500])
    refused(lora.path, "optimizer.pt cannot be read", "truncated")


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("name", ["optimizer.pt", "adapter_model.bin"])
def test_a_hostile_pickle_is_not_executed(lora, tmp_path, name):
    target = tmp_path / "owned"
    torch.save({"state": Hostile(target), "param_groups": []}, lora.path / name)
    if name == "adapter_model.bin":
        (lora.path / "adapter_model.safetensors").unlink()
    refused(lora.path, name, "was refused", "nothing in it was executed")
    assert not target.exists()
    torch.load(lora.path / name, weights_only=False)
    assert target.exists()  # the file was loaded, so the test has teeth


def test_a_hostile_full_model_is_not_executed(full, tmp_path):
    target = tmp_path / "owned"
    (full.path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Hostile(target)}, full.path / "pytorch_model.bin")
    refused(full.path, "pytorch_model.bin", "was refused", "nothing in it was executed")
    assert not target.exists()


def test_a_learning_rate_of_zero_is_kept_and_refused_by_the_run(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf", lr=0.0)
    loaded = load_checkpoint(saved.path)
    assert loaded.lr == 0.0
    with pytest.raises(
        ValueError, match=r"stored learning rate is 0 in .*optimizer.pt.*update\.lr"
    ):
        refuse_zero_lr(loaded.lr, loaded.optimizer_path)
    refuse_zero_lr(1e-6, "x")


# Facts, dtype, tokenizer


def test_facts_that_are_not_ours(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf", facts={"los": "grpo"})
    refused(saved.path, "entropy_probe.json has unknown keys ['los']. Did you mean 'loss'?", "beta")
    (saved.path / "entropy_probe.json").write_text("[1]")
    refused(saved.path, "entropy_probe.json holds a list; expected a JSON object")
    (saved.path / "entropy_probe.json").unlink()
    (saved.path / "trl.yaml").write_text("beta: lots\n")
    refused(saved.path, "trl.yaml: beta is 'lots'; expected a number")


def test_an_unknown_dtype(lora):
    refused(lora.path, "checkpoint.dtype is 'fp8'; expected auto, float32", dtype="fp8")


def test_no_tokenizer(full):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (full.path / name).unlink()
    refused(full.path, "No tokenizer found", str(full.path), kind=FileNotFoundError)


def test_checkpoints_of_the_package_are_named_in_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = packaged_checkpoint("embedded/checkpoint-20")
    assert (found / "adapter_model.safetensors").is_file()
    assert found.name == "checkpoint-20"
    assert packaged_checkpoint("runs/checkpoint-20") == Path("runs/checkpoint-20")
    for name in ("embedded/checkpoint-999", "embedded", "embedded/base/model.safetensors"):
        with pytest.raises(
            FileNotFoundError,
            match=r"Checkpoint not found: .*checkpoint-0 to embedded/checkpoint-56",
        ):
            packaged_checkpoint(name)
    # A folder of the reader's own comes first.
    (tmp_path / "embedded" / "checkpoint-20").mkdir(parents=True)
    assert packaged_checkpoint("embedded/checkpoint-20") == Path("embedded/checkpoint-20")
