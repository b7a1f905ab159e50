"""Rollout folders, stores and dumps that are broken, foreign or hostile: refused by name."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save

from entropy_experiments.sampling.advantages import group_advantages, weighted_rewards
from entropy_experiments.sampling.importers import from_jsonl, from_trl_completions
from entropy_experiments.sampling.rollout_files import (
    RolloutStore,
    load_rollouts,
    load_update_batch,
    save_rollouts,
    save_update_batch,
)
from entropy_experiments.types import Rollouts, UpdateBatch
from oracles.tiny_models import EOS, tiny_tokenizer

pytestmark = pytest.mark.faults


def update_batch(rows=4, **changes):
    generator = torch.Generator().manual_seed(0)
    tokens_NS = torch.randint(3, 30, (rows, 9), generator=generator)
    attention_NS = torch.ones(rows, 9, dtype=torch.bool)
    attention_NS[0, :2] = False
    response_NS = torch.zeros_like(attention_NS)
    response_NS[:, 4:] = True
    response_NS[1, 5] = False
    value_NS = -torch.rand(rows, 9, generator=generator)
    rollouts = Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=attention_NS,
        response_NS=response_NS,
        prompt_N=torch.arange(rows) // 2,
        behaviour_logprob_NS=value_NS.double(),
        truncated_N=torch.arange(rows) == 1,
        text=tuple(f"naïve \n {n}" for n in range(rows)),
    )
    fields = {
        "rollouts": rollouts,
        "advantage_NS": value_NS,
        "reward_N": torch.rand(rows, generator=generator, dtype=torch.float64),
        "old_logprob_NS": value_NS.double(),
        "ref_logprob_NS": value_NS.bfloat16(),
        "microbatch_N": torch.arange(rows) % 2,
        "loss_NS": response_NS & (torch.arange(rows) != 1)[:, None],
    }
    return UpdateBatch(**{**fields, **changes})


def same(one, other, names):
    for name in names:
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype, name
            assert torch.equal(a, b), name


ROLLOUT_FIELDS = (
    *("tokens_NS", "attention_NS", "response_NS", "prompt_N", "weight_N"),
    *("behaviour_logprob_NS", "truncated_N"),
)
BATCH_FIELDS = (
    *("advantage_NS", "reward_N", "old_logprob_NS", "ref_logprob_NS", "microbatch_N", "loss_NS"),
)


def test_what_is_saved_comes_back_bit_by_bit(tmp_path):
    batch = update_batch()
    manifest = save_update_batch(tmp_path / "a" / "b", batch, meta={"step": 7, "lr": 8e-7})
    again, meta = load_update_batch(tmp_path / "a" / "b")
    assert meta == {"step": 7, "lr": 8e-7}
    same(again, batch, BATCH_FIELDS)
    same(again.rollouts, batch.rollouts, ROLLOUT_FIELDS)
    assert again.rollouts.text == batch.rollouts.text
    assert set(json.loads(manifest.read_text())["files"]) == {"rollouts.safetensors", "text.json"}
    assert not list((tmp_path / "a" / "b").glob(".*"))
    rollouts, _ = load_rollouts(tmp_path / "a" / "b")
    same(rollouts, batch.rollouts, ROLLOUT_FIELDS)


def test_parts_and_missing_fields_come_back_too(tmp_path):
    part = update_batch().rollouts.take(torch.tensor([1, 3]))
    save_rollouts(tmp_path, part)
    again, meta = load_rollouts(tmp_path)
    assert meta == {}
    assert again.share == part.share == 0.5
    same(again, part, ROLLOUT_FIELDS)
    bare = UpdateBatch(rollouts=update_batch().rollouts, advantage_NS=torch.ones(4, 9))
    save_update_batch(tmp_path, bare)  # over the old one
    same(load_update_batch(tmp_path)[0], bare, BATCH_FIELDS)


def test_a_folder_written_over_forgets_the_old_text(tmp_path):
    batch = update_batch()
    save_rollouts(tmp_path, batch.rollouts)
    silent = Rollouts(
        tokens_NS=batch.rollouts.tokens_NS,
        attention_NS=batch.rollouts.attention_NS,
        response_NS=batch.rollouts.response_NS,
        prompt_N=batch.rollouts.prompt_N,
    )
    save_rollouts(tmp_path, silent)
    assert load_rollouts(tmp_path)[0].text is None
    assert not (tmp_path / "text.json").exists()


def edit(name, change):
    def apply(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def manifest(**changes):
    return edit("manifest.json", lambda data: json.dumps({**json.loads(data), **changes}).encode())


def foreign_tensors(**tensors):
    """A safetensors file with a proper hash that does not hold an update batch."""

    def apply(folder):
        import hashlib

        data = save(tensors)
        (folder / "rollouts.safetensors").write_bytes(data)
        facts = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        manifest(files={"rollouts.safetensors": facts})(folder)

    return apply


class Bomb:
    def __reduce__(self):
        return (open, ("exploded", "w"))


def hostile_pickle(folder):
    import hashlib

    data = pickle.dumps(Bomb())
    (folder / "rollouts.safetensors").write_bytes(data)
    facts = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    manifest(files={"rollouts.safetensors": facts})(folder)


BREAKAGES = {
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        FileNotFoundError,
        r"No manifest.json in .*: it is half-written",
    ),
    "not a folder of rollouts": (
        lambda folder: [path.unlink() for path in folder.iterdir()],
        FileNotFoundError,
        r"it is not a folder of rollouts. Expected rollouts.safetensors and manifest.json",
    ),
    "no tensors": (
        lambda folder: (folder / "rollouts.safetensors").unlink(),
        FileNotFoundError,
        r"rollouts.safetensors is missing though manifest.json lists it",
    ),
    "truncated": (
        edit("rollouts.safetensors", lambda data: data[:-7]),
        ValueError,
        r"rollouts.safetensors is damaged or was changed: got \d+ bytes .* expected \d+",
    ),
    "one bit": (
        edit("rollouts.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ValueError,
        r"rollouts.safetensors is damaged",
    ),
    "text changed": (edit("text.json", lambda data: data + b" "), ValueError, r"text.json is dam"),
    "manifest not JSON": (
        edit("manifest.json", lambda data: data[:40]),
        ValueError,
        r"manifest.json is not JSON",
    ),
    "manifest not an object": (
        edit("manifest.json", lambda data: b"[]"),
        ValueError,
        r"manifest.json holds a list; expected an object",
    ),
    "foreign": (manifest(format="other"), ValueError, r"format 'other'; expected 'entropy_exper"),
    "newer": (
        manifest(schema=9),
        ValueError,
        r"schema 9; this version .* 2\. A newer version",
    ),
    "another kind": (manifest(kind="cake"), ValueError, r"holds a 'cake'; expected 'update_batch'"),
    "path outside": (
        manifest(files={"../../secret": {}}),
        ValueError,
        r"lists the files \['../../secret'\]; expected rollouts.safetensors",
    ),
    "another count": (
        manifest(rollouts=99),
        ValueError,
        r"manifest.json says rollouts 99, and rollouts.safetensors beside it has \d+",
    ),
    "another share": (
        manifest(share=0.5),
        ValueError,
        r"sum to its share 0.5; got sum 1",
    ),
    "other tokens": (
        manifest(fingerprint="feedbeef"),
        ValueError,
        r"manifest.json says fingerprint 'feedbeef', and rollouts.safetensors beside it has",
    ),
    "no share": (manifest(share=None), ValueError, r"lacks a usable kind, share or meta"),
    "hostile pickle": (hostile_pickle, ValueError, r"is not a safetensors file"),
    "other tensors": (
        foreign_tensors(weight=torch.zeros(2)),
        ValueError,
        r"does not hold a update_batch of schema 2: missing \['advantage_NS', .* unknown \['weight",
    ),
    "a mask of another width": (
        foreign_tensors(
            tokens_NS=torch.ones(2, 9, dtype=torch.uint8),
            response_NS=torch.ones(2, 9, dtype=torch.bool),
        ),
        ValueError,
        r"mask of torch.bool \(2, 9\); expected a bit per token, torch.uint8 \(2, 2\)",
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_broken_folders_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    apply, error, match = BREAKAGES[name]
    save_update_batch(tmp_path / "batch", update_batch())
    apply(tmp_path / "batch")
    with pytest.raises(error, match=match):
        load_update_batch(tmp_path / "batch")
    assert not (tmp_path / "exploded").exists()


def test_rollouts_are_no_update_batch(tmp_path):
    save_rollouts(tmp_path, update_batch().rollouts)
    with pytest.raises(ValueError, match=r"holds a 'rollouts'; expected 'update_batch'"):
        load_update_batch(tmp_path)


def test_meta_must_be_json(tmp_path):
    for meta in ({"x": torch.zeros(1)}, {"x": float("nan")}):
        with pytest.raises(ValueError, match=r"meta cannot be written as JSON"):
            save_update_batch(tmp_path / "x", update_batch(), meta=meta)
    assert not (tmp_path / "x").exists()


def test_a_crash_while_saving_leaves_no_whole_folder(tmp_path, monkeypatch):
    save_update_batch(tmp_path, update_batch())
    real, calls = os.replace, []

    def failing(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("disk full")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="disk full"):
        save_update_batch(tmp_path, update_batch(rows=6))
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="half-written"):
        load_update_batch(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_damaged_units_and_stores_are_refused(tmp_path):
    store = RolloutStore(tmp_path / "s")
    assert store.get("k") is None
    store.bind({"model": "a", "temperature": 1.0})
    store.bind({"model": "a", "temperature": 1.0})
    store.put("k", {"x": torch.arange(3)})
    found = store.get("k")
    assert found is not None
    assert found["x"].tolist() == [0, 1, 2]
    path = tmp_path / "s" / "k.unit"
    data = path.read_bytes()
    for damaged in (data[:-3], data[:-1] + b"\x01", b"", pickle.dumps(Bomb())):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"k.unit is damaged.* Delete it"):
            store.get("k")
    with pytest.raises(ValueError, match=r"model is 'a' there and 'b' here; top_p is None there"):
        store.bind({"model": "b", "temperature": 1.0, "top_p": 0.9})
    (tmp_path / "s" / "store.json").write_text("{")
    with pytest.raises(ValueError, match=r"store.json is not JSON"):
        store.bind({"model": "a"})
    (tmp_path / "s" / "store.json").write_text("[]")
    with pytest.raises(ValueError, match=r"store.json holds a list; expected an object"):
        store.bind({"model": "a"})
    shutil.rmtree(tmp_path / "s")
    assert len(store) == 0


def jsonl(path, *records):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in records))
    return path


def test_jsonl_dumps_are_read_grouped_and_rescored_later(tmp_path):
    path = jsonl(
        tmp_path / "d.jsonl",
        {"prompt": "1+1=", "completion": "2", "reward": 1.0, "logprobs": [-0.5, -0.1]},
        {"prompt": "2+2=", "completion": "5", "reward": 0, "logprobs": [-1.5, -0.1]},
        {"prompt": "1+1=", "completion": "345", "reward": 0.0, "logprobs": [-1, -1, -1, -1]},
        {"prompt": "2+2=", "completion": "4", "reward": 1, "logprobs": [-1.25, -0.1]},
    )
    tokenizer = tiny_tokenizer()
    found = from_jsonl(path, tokenizer)
    rollouts = found.rollouts
    assert rollouts.prompt_N.tolist() == [0, 0, 1, 1]
    assert rollouts.text == ("2", "345", "5", "4")
    assert found.mismatched == 0
    assert rollouts.tokens_NS[1][rollouts.response_NS[1]].tolist() == [
        *tokenizer("345")["input_ids"],
        EOS,
    ]
    assert rollouts.behaviour_logprob_NS is not None
    assert rollouts.behaviour_logprob_NS[0][rollouts.response_NS[0]].tolist() == pytest.approx(
        [-0.5, -0.1]
    )
    assert found.batch is not None
    assert found.batch.reward_N is not None
    assert found.batch.reward_N.tolist() == [1, 0, 0, 1]
    expected_N = group_advantages(found.batch.reward_N, 2)
    assert torch.equal(found.batch.advantage_NS.gather(1, torch.full((4, 1), 4))[:, 0], expected_N)
    assert any("computed from rewards" in note for note in found.notes)
    assert any("taken to end with EOS" in note for note in found.notes)


def test_verl_dumps_and_steps(tmp_path):
    lines = [
        {"input": "1+1=", "output": f"{n}", "score": float(n), "step": 1 + n // 2} for n in range(4)
    ]
    path = jsonl(tmp_path / "verl.jsonl", *lines)
    with pytest.raises(ValueError, match=r"holds the steps \[1, 2\]; .* step=\.\.\."):
        from_jsonl(path, tiny_tokenizer())
    found = from_jsonl(path, tiny_tokenizer(), step=2)
    assert found.rollouts.text == ("2", "3")
    assert any("verl" in note for note in found.notes)
    with pytest.raises(ValueError, match=r"no rollouts of step 9; it has steps \[1, 2\]"):
        from_jsonl(path, tiny_tokenizer(), step=9)


def test_what_text_loses_is_counted(tmp_path):
    path = jsonl(
        tmp_path / "d.jsonl",
        {"prompt": "1", "completion": "12", "advantage": 1.0, "logprobs": [-1.0]},
        {"prompt": "1", "completion": "é2", "advantage": -1.0},
        {"prompt": "1", "completion": "123456", "advantage": 0.5},
    )
    found = from_jsonl(path, tiny_tokenizer(), max_completion_length=6)
    assert found.mismatched == 1  # é is unknown to this tokenizer
    assert found.rollouts.truncated_N.tolist() == [False, False, True]
    assert found.rollouts.tokens_N.tolist() == [3, 3, 6]
    assert found.rollouts.behaviour_logprob_NS is None
    assert any("log-probs of the file were left out: 3 of 3" in note for note in found.notes)


def test_token_ids_are_taken_as_they_are(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", {"prompt_ids": [5, 6], "completion_ids": [7, 8, 1]})
    found = from_jsonl(path, tiny_tokenizer())
    assert found.batch is None
    assert found.rollouts.tokens_NS.tolist() == [[5, 6, 7, 8, 1]]
    assert found.notes == ()


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        (['{"prompt": "1"'], r"d.jsonl:1: not JSON"),
        ([{"prompt": "1"}], r"d.jsonl:1: no response; expected one of .*Got \['prompt'\]"),
        ([{"completion": "1"}], r"d.jsonl:1: no prompt; expected one of"),
        ([{"prompt": 3, "completion": "1"}], r"d.jsonl:1: got int '3'; expected text or a list of"),
        (
            [{"prompt": "1", "completion": "2", "reward": "x"}],
            r"d.jsonl:1: reward is 'x'; exp",
        ),
        (
            [{"prompt": "1", "completion": "2", "reward": 1}, {"prompt": "1", "completion": "3"}],
            r"0 advantages and 1 rewards for 2 rollouts",
        ),
        (
            [{"prompt": p, "completion": "2", "reward": 1} for p in "112"],
            r"between 1 and 2 responses and no advantages are given",
        ),
        ([{"prompt_ids": ["a"], "completion": "2"}], r"prompt_ids must be a list of token ids"),
        ([{"prompt": "", "completion": "2"}], r"d.jsonl:1: the prompt has no tokens"),
        (
            [{"prompt": [{"role": "user", "content": "1"}], "completion": "2"}],
            r"list of chat messages, and this tokenizer has no chat template",
        ),
        (
            [{"prompt": "1", "completion": [{"role": "assistant", "content": "2"}] * 2}],
            r"the response has 2 chat messages; expected one",
        ),
    ],
)
def test_bad_dumps_are_refused(tmp_path, lines, match):
    with pytest.raises(ValueError, match=match):
        from_jsonl(jsonl(tmp_path / "d.jsonl", *lines), tiny_tokenizer())


def test_empty_responses_and_missing_ends(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "1", "completion": ""})
    assert from_jsonl(path, tiny_tokenizer()).rollouts.tokens_N.tolist() == [1]
    with pytest.raises(ValueError, match=r"the response has no tokens.* keep append_eos=True"):
        from_jsonl(path, tiny_tokenizer(), append_eos=False)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"has no EOS token.*append_eos=False"):
        from_jsonl(path, tokenizer)
    with pytest.raises(FileNotFoundError, match=r"No such file"):
        from_jsonl(tmp_path / "absent.jsonl", tokenizer)


def test_bad_parquet_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with pytest.raises(FileNotFoundError, match=r"No such file: .*x.parquet"):
        from_trl_completions(tmp_path / "x.parquet", tiny_tokenizer())
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match=r"cannot be read as parquet"):
        from_trl_completions(tmp_path / "x.parquet", tiny_tokenizer())

    def write(**columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
        return tmp_path / "x.parquet"

    with pytest.raises(ValueError, match=r"no column 'completion'; got \['step', 'prompt'\]"):
        from_trl_completions(write(step=[1], prompt=["1"]), tiny_tokenizer())
    good = write(step=[1, 1], prompt=["1", "1"], completion=["2", "3"], mine=[1.0, 0.0])
    with pytest.raises(ValueError, match=r"has no reward columns \['yours'\]"):
        from_trl_completions(good, tiny_tokenizer(), reward_columns=["yours"])
    with pytest.raises(ValueError, match=r"2 weights for 1 reward functions"):
        from_trl_completions(good, tiny_tokenizer(), weights=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"x.parquet has no rows"):
        from_trl_completions(
            write(prompt=pyarrow.array([], "string"), completion=pyarrow.array([], "string")),
            tiny_tokenizer(),
        )
    chat = write(
        prompt=[[{"role": "user", "content": "1"}]],
        completion=[[{"role": "assistant", "content": "2"}]],
        advantage=[1.5],
    )
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "({{ messages[0].content }})"
    found = from_trl_completions(chat, tokenizer)
    assert found.batch is not None
    assert found.rollouts.tokens_NS[0].tolist() == [*tokenizer("(1)2")["input_ids"], EOS]


def test_bad_rewards_are_refused():
    with pytest.raises(ValueError, match=r"scale is 'std'; expected one of"):
        group_advantages(torch.zeros(4), 2, "std")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"5 rewards do not divide into groups of 2"):
        group_advantages(torch.zeros(5), 2)
    with pytest.raises(ValueError, match=r"1-D floating point tensor; got \(2, 2\)"):
        group_advantages(torch.zeros(2, 2), 2)
    with pytest.raises(ValueError, match=r"1 weights for 2 reward functions"):
        weighted_rewards(torch.zeros(3, 2), [1.0])
