"""Which tokens end a text, and in which precision a model is: of shards as of safetensors.

transformers' own loader sees to both. Shards, and weights without a config.json, go another way.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from entropy_experiments.checkpoints.layout import find_checkpoint
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.stored_weights import load_sharded_causal_lm
from entropy_experiments.config import parse_config
from entropy_experiments.pipelines.evaluation_request import _candidate
from entropy_experiments.sampling.generate import end_tokens
from oracles.dcp_pieces import save_dcp
from oracles.tiny_models import EOS, TinyCheckpoint, save_tiny_checkpoint, tiny_model

pytestmark = pytest.mark.naive

NAME = "generation_config.json"
ENDS = [EOS, 7]
"""As a model of chats has them: the end of a turn and that of the text."""
FORMS = ("shards", "one file", "config of the run", "config of the base", "bare safetensors")


def saved_with_ends(folder: Path) -> TinyCheckpoint:
    saved = save_tiny_checkpoint(folder, "full", "hf")
    write_ends(saved.path / NAME)
    return saved


def write_ends(path: Path) -> None:
    path.write_text(json.dumps({"eos_token_id": ENDS, "pad_token_id": 0}))


def made_into(form: str, saved: TinyCheckpoint, run: Path) -> dict[str, Any]:
    """Change the checkpoint; what its loading then needs."""
    weights = saved.model.state_dict()
    if form != "bare safetensors":
        (saved.path / "model.safetensors").unlink()
        if form == "one file":
            torch.save(weights, saved.path / "pytorch_model_fsdp.bin")
        else:
            save_dcp({"model": weights}, saved.path / "pytorch_model_fsdp_0")
    if form in ("config of the base", "bare safetensors"):
        (run / "base").mkdir()
        for name in ("config.json", NAME):
            shutil.move(saved.path / name, run / "base")
        return {"base": run / "base"}
    if form == "config of the run":
        for name in ("config.json", NAME):
            shutil.move(saved.path / name, run)
    return {}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_ends_texts_as_the_ordinary_checkpoint(tmp_path, form):
    saved = saved_with_ends(tmp_path)
    ordinary = load_checkpoint(saved.path)
    ends = end_tokens(ordinary.model, ordinary.tokenizer)
    assert ends == tuple(ENDS)
    loaded = load_checkpoint(saved.path, **made_into(form, saved, tmp_path))
    assert end_tokens(loaded.model, loaded.tokenizer) == ends
    assert any(name.endswith(NAME) for name in loaded.hashes)


@pytest.mark.parametrize("form", FORMS)
def test_without_the_file_the_models_config_says(tmp_path, form):
    saved = saved_with_ends(tmp_path)
    (saved.path / NAME).write_text("{}")
    config = json.loads((saved.path / "config.json").read_text())
    (saved.path / "config.json").write_text(json.dumps({**config, "eos_token_id": [EOS, 9]}))
    given = made_into(form, saved, tmp_path)
    for path in tmp_path.rglob(NAME):
        path.unlink()
    loaded = load_checkpoint(saved.path, **given)
    assert end_tokens(loaded.model, loaded.tokenizer) == (EOS, 9)


def test_the_checkpoints_own_comes_before_the_bases(tmp_path):
    saved = saved_with_ends(tmp_path)
    given = made_into("bare safetensors", saved, tmp_path)
    (saved.path / NAME).write_text(json.dumps({"eos_token_id": [EOS, 5]}))
    loaded = load_checkpoint(saved.path, **given)
    assert end_tokens(loaded.model, loaded.tokenizer) == (EOS, 5)


@pytest.mark.parametrize("form", ["shards", "bare safetensors"])
def test_a_damaged_file_is_not_a_missing_one(tmp_path, form):
    saved = saved_with_ends(tmp_path)
    given = made_into(form, saved, tmp_path)
    (path,) = tmp_path.rglob(NAME)
    path.write_text('{"eos_token_id": [1,')
    with pytest.raises(ValueError, match=r"generation_config\.json is not valid JSON .*restore it"):
        load_checkpoint(saved.path, **given)


PARTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


@pytest.mark.parametrize(
    ("part", "dtype", "refused"),
    [
        (PARTS[0], torch.float16, True),
        (PARTS[0], torch.bfloat16, False),
        (PARTS[1], torch.float16, True),
        (PARTS[1], torch.bfloat16, True),
        (PARTS[1], torch.float32, False),
    ],
)
def test_modules_that_stay_in_fp32_are_not_cast(tmp_path, monkeypatch, part, dtype, refused):
    """Refused just where transformers' own loader would keep them."""
    model: Any = tiny_model("llama")
    save_dcp({"model": model.state_dict()}, tmp_path / "shards")
    model.save_pretrained(tmp_path / "whole")
    monkeypatch.setattr(type(model), part, ["norm"])
    kept = type(model).from_pretrained(tmp_path / "whole", dtype=dtype)
    assert (len({p.dtype for p in kept.parameters()}) == 2) == refused

    def load() -> Any:
        return load_sharded_causal_lm(tmp_path / "shards", model.config, dtype=dtype)

    if refused:
        match = r"LlamaForCausalLM keeps norm in float32; got checkpoint\.dtype .*Set checkpoint"
        with pytest.raises(ValueError, match=match):
            load()
    else:
        assert {p.dtype for p in load().parameters()} == {dtype}


@pytest.mark.parametrize("form", FORMS)
def test_an_evaluation_is_named_by_what_ends_its_texts(tmp_path, form):
    """Numbers of other ends are made again, not found."""
    saved = saved_with_ends(tmp_path)
    where = made_into(form, saved, tmp_path)
    config = parse_config({"checkpoint": {key: str(path) for key, path in where.items()}})
    layout = find_checkpoint(saved.path)
    known = _candidate(config, layout, "step").files
    assert _candidate(config, layout, "step").files == known
    (file,) = tmp_path.rglob(NAME)
    file.write_text(json.dumps({"eos_token_id": [EOS], "pad_token_id": 0}))
    assert _candidate(config, layout, "step").files != known
