"""DCP shards give back the tensors that were saved, bit for bit, and by whatever path.

Saved here by one process, or in pieces cut by hand; by real ranks in invariant/test_fsdp_ranks.py.
"""

from __future__ import annotations

import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkout import DOCS
from checkpoints.test_loading import ADAPTERS, assert_same_model, assert_same_optimizer
from entropy_experiments.checkpoints import dcp as reader
from entropy_experiments.checkpoints.dcp import read_sharded
from entropy_experiments.checkpoints.dcp_state import read_sharded_weights
from entropy_experiments.checkpoints.layout import find_checkpoint
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.stored_weights import load_sharded_causal_lm
from oracles.dcp_pieces import save_dcp, write_pieces
from oracles.tiny_models import save_tiny_checkpoint, tiny_model

pytestmark = pytest.mark.naive

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_make_the_tensor(tmp_path, dtype):
    numbers = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(1))
    whole = (numbers > 0) if dtype == torch.bool else (100 * numbers).to(dtype)
    cuts = {
        "one": [((0, 0, 0), (7, 5, 3))],
        "rows": [((0, 0, 0), (4, 5, 3)), ((4, 0, 0), (3, 5, 3)), ((7, 0, 0), (0, 5, 3))],
        "boxes": [
            ((0, 0, 0), (4, 2, 3)),
            ((0, 2, 0), (4, 3, 3)),
            ((4, 0, 0), (3, 5, 1)),
            ((4, 0, 1), (3, 5, 2)),
        ],
    }
    write_pieces(tmp_path, {name: (whole, boxes) for name, boxes in cuts.items()})
    files = read_sharded(tmp_path)
    for name in cuts:
        assert torch.equal(files.tensor(name), whole)
        assert files.tensor(name).dtype == dtype


def test_nothing_nan_and_scalars_survive(tmp_path):
    held = {
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    save_dcp({"model": held}, tmp_path)
    stored = read_sharded_weights(tmp_path)
    for name, value in held.items():
        got = stored[name]
        assert got.shape == value.shape
        assert got.numpy().tobytes() == value.numpy().tobytes()


FORMS = {
    "accelerate": lambda weights, moments: (
        ("pytorch_model_fsdp_0", {"model": weights}),
        ("optimizer_0", {"optimizer": moments}),
    ),
    "one folder": lambda weights, moments: ((".", {"model": weights, "optimizer": moments}),),
    "inside": lambda weights, moments: (("model", {"model": weights, "optim": moments}),),
    "app": lambda weights, moments: ((".", {"app": {"model": weights, "optim": moments}}),),
    "more": lambda weights, moments: (
        (".", {"model": weights, "optim": moments, "step": 3, "lr_scheduler": {"last_lr": [1.0]}}),
    ),
    "names alone": lambda weights, moments: (("weights", weights), ("optim", moments)),
}


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_ordinary_checkpoint(tmp_path, kind, form):
    saved = save_tiny_checkpoint(tmp_path, kind, "hf")
    loaded = load_checkpoint(saved.path)
    weights = saved.model.state_dict()
    for folder, tree in FORMS[form](weights, saved.optimizer.state_dict()):
        save_dcp(tree, saved.path / folder)
    for name in ("adapter_model.safetensors", "model.safetensors", "optimizer.pt"):
        (saved.path / name).unlink(missing_ok=True)
    sharded = load_checkpoint(saved.path)
    assert (sharded.kind, sharded.step, sharded.name, sharded.lr) == (kind, 3, "step_3", 1e-3)
    assert_same_model(sharded.model, saved.model)
    assert_same_optimizer(sharded, saved)
    assert sharded.coverage == loaded.coverage
    assert sharded.optimizer.groups == loaded.optimizer.groups  # type: ignore[union-attr]
    assert any(name.endswith(".distcp") for name in sharded.hashes)
    trainable = {n for n, p in sharded.model.named_parameters() if p.requires_grad}
    assert trainable == {n for n, p in saved.model.named_parameters() if p.requires_grad}


def test_state_by_name_is_believed(tmp_path, monkeypatch):
    """As get_optimizer_state_dict gives it: the order is told, nothing is to be guessed."""
    saved = save_tiny_checkpoint(tmp_path, "full", "hf")
    names = {id(p): name for name, p in saved.model.named_parameters()}
    order = [names[id(p)] for group in saved.optimizer.param_groups for p in group["params"]]
    plain = saved.optimizer.state_dict()
    named = {
        "state": {order[i]: entry for i, entry in plain["state"].items()},
        "param_groups": [
            {**group, "params": [order[i] for i in group["params"]]}
            for group in plain["param_groups"]
        ],
    }
    settings = {
        f"param_groups.{name}.{key}": value
        for group in named["param_groups"]
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    flat = {f"state.{n}.{k}": v for n, entry in named["state"].items() for k, v in entry.items()}
    for label, tree in (("nested", named), ("flat", {**flat, **settings})):
        save_dcp({"optimizer": tree}, tmp_path / label)
        loaded = load_checkpoint(saved.path, optimizer_path=tmp_path / label)
        assert_same_optimizer(loaded, saved)
        assert loaded.coverage["order"] == "names in the file"
        assert loaded.not_verifiable == ()
    monkeypatch.setattr(dcp._version, "_derived_version", "2_3")  # groups in one piece
    save_dcp({"optimizer": named}, tmp_path / "older")
    assert ("optimizer", "param_groups") in read_sharded(tmp_path / "older").paths.values()
    assert_same_optimizer(load_checkpoint(saved.path, optimizer_path=tmp_path / "older"), saved)


def test_pefts_names_as_the_trainer_saves_them(tmp_path):
    """Adapter alone, `lora_A.weight`; the config of the whole run lies one folder above."""
    from peft import get_peft_model_state_dict

    saved = save_tiny_checkpoint(tmp_path, "lora", "hf", base_name="base")
    save_dcp(
        {"model": get_peft_model_state_dict(saved.model, save_embedding_layers=False)},
        saved.path / "pytorch_model_fsdp_0",
    )
    (saved.path / "adapter_model.safetensors").unlink()
    shutil.move(saved.path / "adapter_config.json", tmp_path)
    layout = find_checkpoint(saved.path / "pytorch_model_fsdp_0")
    assert (layout.root, layout.config, layout.kind) == (saved.path, tmp_path, "lora")
    assert layout.weights == saved.path / "pytorch_model_fsdp_0"
    loaded = load_checkpoint(saved.path)
    assert_same_model(loaded.model, saved.model)
    assert_same_optimizer(loaded, saved)
    assert any(note.startswith("base:") for note in loaded.not_verifiable)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.filterwarnings("ignore:Careful, disabling adapter layers with bias:UserWarning")
@pytest.mark.parametrize("names", ["own", "peft"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_every_sort(tmp_path, name, names):
    from peft import get_peft_model_state_dict

    saved = save_tiny_checkpoint(tmp_path, "lora", "hf", architecture="llama", lora=ADAPTERS[name])
    own = saved.model.state_dict()
    kept = get_peft_model_state_dict(saved.model, save_embedding_layers=False)
    save_dcp({"model": own if names == "own" else kept}, saved.path / "pytorch_model_fsdp_0")
    (saved.path / "adapter_model.safetensors").unlink()
    loaded = load_checkpoint(saved.path)
    assert_same_model(loaded.model, saved.model)
    assert_same_optimizer(loaded, saved)


def test_a_base_saved_with_the_adapter_is_the_one_that_counts(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "lora", "hf")
    save_dcp({"model": saved.model.state_dict()}, saved.path / "pytorch_model_fsdp_0")
    (saved.path / "adapter_model.safetensors").unlink()
    tiny_model(seed=5).save_pretrained(saved.base)
    loaded = load_checkpoint(saved.path)
    assert "with the weights saved beside the adapter" in loaded.base
    assert not any(note.startswith("base:") for note in loaded.not_verifiable)
    assert_same_model(loaded.model, saved.model)


def test_one_file_of_names(tmp_path):
    """FULL_STATE_DICT through Accelerate alone: no safetensors, and the base gives the config."""
    saved = save_tiny_checkpoint(tmp_path, "full", "accelerate")
    tiny_model().save_pretrained(tmp_path / "start")
    shutil.copy(saved.path / "tokenizer.json", tmp_path / "start")
    shutil.copy(saved.path / "tokenizer_config.json", tmp_path / "start")
    torch.save(saved.model.state_dict(), saved.path / "pytorch_model_fsdp.bin")
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        (saved.path / name).unlink()
    loaded = load_checkpoint(saved.path, base=tmp_path / "start")
    assert_same_model(loaded.model, saved.model)
    assert_same_optimizer(loaded, saved)
    assert "with the config of folder" in loaded.base


def test_ordinary_weights_come_first_and_shards_hold_the_optimizer(tmp_path):
    saved = save_tiny_checkpoint(tmp_path, "full", "hf")
    other = tiny_model(seed=9)
    save_dcp({"model": other.state_dict()}, saved.path / "pytorch_model_fsdp_0")
    save_dcp({"optimizer": saved.optimizer.state_dict()}, saved.path / "optimizer_0")
    (saved.path / "optimizer.pt").unlink()
    loaded = load_checkpoint(saved.path)
    assert_same_model(loaded.model, saved.model)
    assert_same_optimizer(loaded, saved)


def test_tied_names(tmp_path):
    """Either may be stored; both must agree."""
    model = tiny_model("qwen2")
    weights = dict(model.state_dict())
    tied = ("lm_head.weight", "model.embed_tokens.weight")
    for label, leave in (("head", tied[1]), ("embedding", tied[0])):
        save_dcp({"model": {n: v for n, v in weights.items() if n != leave}}, tmp_path / label)
        loaded = load_sharded_causal_lm(tmp_path / label, model.config, dtype=torch.float32)
        assert_same_model(loaded.eval(), model)
    save_dcp({"model": {**weights, tied[0]: weights[tied[0]] + 1}}, tmp_path / "apart")
    with pytest.raises(ValueError, match="differs from the parameter that it is tied to"):
        load_sharded_causal_lm(tmp_path / "apart", model.config, dtype=torch.float32)


def test_precision_and_place(tmp_path):
    model = tiny_model("qwen2")
    save_dcp({"model": model.state_dict()}, tmp_path)
    loaded = load_sharded_causal_lm(
        tmp_path, model.config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].bfloat16())


def test_reading_needs_no_process_group_and_one_tensor_of_memory(tmp_path, monkeypatch):
    """Tensors are read when asked for, each alone."""
    save_dcp({"model": {f"w{i}": torch.full((4, 4), float(i)) for i in range(5)}}, tmp_path)
    stored = read_sharded_weights(tmp_path)
    asked, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: asked.append(a) or load(*a, **k))
    assert float(stored["w3"].sum()) == 48.0
    assert len(asked) == 1
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize(("form", "tables"), [("one folder", 1), ("accelerate", 2)])
def test_each_table_of_contents_is_read_once(tmp_path, monkeypatch, kind, form, tables):
    """For many ranks it is long."""
    saved = save_tiny_checkpoint(tmp_path, kind, "hf")
    for folder, tree in FORMS[form](saved.model.state_dict(), saved.optimizer.state_dict()):
        save_dcp(tree, saved.path / folder)
    for name in ("adapter_model.safetensors", "model.safetensors", "optimizer.pt"):
        (saved.path / name).unlink(missing_ok=True)
    read, own = [], reader.read_metadata
    monkeypatch.setattr(reader, "read_metadata", lambda f: read.append(f) or own(f))
    load_checkpoint(saved.path)
    assert len(read) == len(set(read)) == tables


def test_the_comparison_has_teeth(tmp_path):
    """A step further is another checkpoint: the tests above would see it."""
    saved = save_tiny_checkpoint(tmp_path, "full", "hf")
    weights = {n: v.clone() for n, v in saved.model.state_dict().items()}
    weights["model.norm.weight"][3] += 1e-3
    save_dcp({"model": weights}, saved.path / "pytorch_model_fsdp_0")
    (saved.path / "model.safetensors").unlink()
    with pytest.raises(AssertionError):
        assert_same_model(load_checkpoint(saved.path).model, saved.model)


def test_dcps_own_reader_agrees(tmp_path):
    """A contract with torch: what we read is what its reader loads."""
    model = tiny_model("llama")
    save_dcp({"model": model.state_dict()}, tmp_path)
    empty = {"model": {n: torch.zeros_like(v) for n, v in model.state_dict().items()}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(empty, checkpoint_id=tmp_path)
    stored = read_sharded_weights(tmp_path)
    assert set(stored) == set(empty["model"])
    for name, value in empty["model"].items():
        assert torch.equal(stored[name], value)


def test_keys_in_the_page_on_file_formats(tmp_path):
    page = DOCS / "file_formats.md"
    section = page.read_text("utf-8").split("## FSDP shards")[1]
    said = re.findall(r"^\| `((?:model|optimizer)\.[^`]+)`", section, re.MULTILINE)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    moments = {"weight": optimizer.state[model.weight]}
    groups = optimizer.state_dict()["param_groups"]
    save_dcp(
        {"model": model.state_dict(), "optimizer": {"state": moments, "param_groups": groups}},
        tmp_path,
    )
    assert len(said) == 3
    assert {key.replace("NAME", "weight") for key in said} <= set(read_sharded(tmp_path).paths)
