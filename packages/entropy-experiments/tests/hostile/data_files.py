"""Hostile data: JSONL problems, recorded update batches, saved rollouts, folders to report on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.harness import Box, Cases, edit_json, probe
from hostile.mutations import ESCAPES, deep, long_integer, mutate_bytes, mutate_json, mutate_text

JSONL = Cases("problems")
ROLLOUTS = Cases("rollouts")
REPORTS = Cases("reports")

LINES = "\n".join(json.dumps({"prompt": f"{n} 2 3 : {n}", "answer": str(n)}) for n in range(1, 12))


def problems(content: str | bytes, *sets: str) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        file = box.write("problems.jsonl", content)
        named = ("batch_config.dataset_name=jsonl", f"batch_config.dataset_path={file}")
        more = ("reward.functions=[answer_exact]", "update.batch=drawn")
        return probe(box, sets=(*named, *more, *sets))

    return make


BY_LINE: dict[str, Any] = {"ends": (2,), "names": ("problems.jsonl",)}
JSONL.add("as it is", problems(LINES), ends=(0,))
for name, content in {
    "empty": "",
    "blank": "\n\n  \n",
    "not JSON": "{",
    "a list": "[1]\n",
    "a number": "5\n",
    "null": "null\n",
    "nested deeply": deep(),
    "nested deeply inside": '{"prompt": "x", "answer": ' + deep() + "}",
    "an integer of 5000 digits": '{"prompt": "x", "answer": ' + long_integer() + "}",
    "no prompt": '{"answer": "x"}',
    "prompt empty": '{"prompt": "  ", "answer": "x"}',
    "prompt a number": '{"prompt": 5, "answer": "x"}',
    "prompt a list": '{"prompt": [{"role": "user"}], "answer": "x"}',
    "no answer": '{"prompt": "x"}',
    "answer a list": '{"prompt": "x", "answer": []}',
    "answer true": '{"prompt": "x", "answer": true}',
    "answer null": '{"prompt": "x", "answer": null}',
    "not UTF-8": b'{"prompt": "\xff", "answer": "x"}',
    "UTF-16": LINES.encode("utf-16"),
    "escapes": json.dumps({"prompt": ESCAPES}),
    "escapes raw": '{"prompt": "' + ESCAPES + '"',
    "a last line cut off": LINES + '\n{"prompt": "1 2',
    "gzip": b"\x1f\x8b\x08\x00" + bytes(100),
    "zero bytes": b"\0" * 100,
    "parquet": b"PAR1" + bytes(100) + b"PAR1",
}.items():
    JSONL.add(
        name, problems(content), **{**BY_LINE, "quick": name in ("nested deeply", "not UTF-8")}
    )
for name, content in {
    "answer NaN": LINES + '\n{"prompt": "x", "answer": NaN}',
    "a surrogate": LINES.replace('"1 2', '"\\ud800 1 2'),
    "a surrogate in an answer": LINES.replace('"answer": "1"', '"answer": "\\ud800"'),
    "controls": LINES.replace('"1 2', '"\\u0000\\u001b 1 2'),
    "a prompt of 100,000 words": LINES + "\n" + json.dumps({"prompt": "1 " * 10**5, "answer": "x"}),
    "all the same": "\n".join([LINES.split("\n")[0]] * 20),
    "keys twice": '{"prompt": "x", "prompt": "y", "answer": "z", "answer": "w"}',
    "ids of lists": LINES.replace('{"prompt"', '{"id": [1, {"a": 2}], "prompt"'),
    "styles of anything": LINES.replace('{"prompt"', '{"style": 5, "opening": 7, "prompt"'),
    "a mark before the text": b"\xef\xbb\xbf" + LINES.encode(),
    "returns": LINES.replace("\n", "\r\n"),
    "one problem": LINES.split("\n")[0],
}.items():
    JSONL.add(name, problems(content))


def dataset(path: Callable[[Box], str], name: str = "jsonl") -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        named = (f"batch_config.dataset_name={name}", f"batch_config.dataset_path={path(box)}")
        return probe(box, sets=(*named, "update.batch=drawn"))

    return make


def _pipe(box: Box) -> str:
    os.mkfifo(box.path("pipe.jsonl"))
    return "pipe.jsonl"


JSONL.add("not there", dataset(lambda b: "nowhere.jsonl"), ends=(2,), names=("nowhere",))
JSONL.add("a folder without files", dataset(lambda b: str(b.folder)), ends=(2,))
JSONL.add("a pipe", dataset(_pipe), ends=(2,), names=("pipe.jsonl",))
JSONL.add("an endless device", dataset(lambda b: "/dev/zero"), ends=(2,), names=("/dev/zero",))
JSONL.add(
    "a line without end",
    dataset(lambda b: str(b.write("long.jsonl", b'{"prompt": "' + b"x" * 80_000_000))),
    ends=(2,),
    names=("long.jsonl",),
)
JSONL.add(
    "GSM8K without an answer",
    dataset(lambda b: str(b.write("g.jsonl", '{"question": "x", "answer": "5"}')), "gsm8k"),
    ends=(2,),
    names=("g.jsonl",),
)


def _seeded_problems(box: Box) -> list[str]:
    return problems(mutate_text(LINES, box.rng))(box)


JSONL.seeded(8, _seeded_problems)


# --- recorded update batches ---------------------------------------------------------------------


def recorded(change: Callable[[Path], None]) -> Callable[[Box], list[str]]:
    """`change` gets the folder of the recorded batch."""

    def make(box: Box) -> list[str]:
        change(box.lora(recorded=True) / "update_batch")
        return probe(box)

    return make


def manifest(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "manifest.json", **changes)


def _text(content: str | bytes) -> Callable[[Path], None]:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / "manifest.json").write_bytes(data) and None


def tensors(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Other tensors, under a manifest that fits them: someone wrote them so."""

    def act(folder: Path) -> None:
        from safetensors.torch import load_file, save

        held = load_file(folder / "rollouts.safetensors")
        change(held)
        data = save({name: value.contiguous() for name, value in held.items()})
        (folder / "rollouts.safetensors").write_bytes(data)
        described = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        edit_json(folder / "manifest.json", files={"rollouts.safetensors": described})

    return act


def _set(name: str, act: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(held: dict[str, Any]) -> None:
        held[name] = act(held[name])

    return change


for name, change in {
    "format of nobody": manifest(format="x"),
    "schema of the future": manifest(schema=99),
    "schema text": manifest(schema="2"),
    "kind of nobody": manifest(kind="x"),
    "files a list": manifest(files=[1]),
    "files outside": manifest(files={"../../../x": {"sha256": "0", "bytes": 1}}),
    "files of text": manifest(files={"rollouts.safetensors": "x"}),
    "files missing": manifest(files=...),
    "no files": manifest(files={}),
    "meta a list": manifest(meta=[1]),
    "meta text": manifest(meta="x"),
    "meta missing": manifest(meta=...),
    "weights a number": manifest(meta={"weights": 5, "step": 13}),
    "weights of others": manifest(meta={"weights": "0" * 64, "step": 13}),
    "share text": manifest(share="x"),
    "share negative": manifest(share=-1.0),
    "nested deeply": _text(deep()),
    "an integer of 5000 digits": _text('{"schema": ' + long_integer() + "}"),
    "a list": _text("[]"),
    "empty": _text(""),
    "not UTF-8": _text(b"\xff\xff"),
    "no tensors": lambda folder: (folder / "rollouts.safetensors").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "cut tensors": lambda folder: os.truncate(folder / "rollouts.safetensors", 1000),
    "tokens missing": tensors(lambda held: held.__delitem__("tokens_NS")),
    "tokens outside": tensors(_set("tokens_NS", lambda t: t.int() + 10**6)),
    "tokens negative": tensors(_set("tokens_NS", lambda t: t.int() - 10**6)),
    "tokens fractions": tensors(_set("tokens_NS", lambda t: t.float())),
    "tokens flat": tensors(_set("tokens_NS", lambda t: t.flatten())),
    "tokens none": tensors(_set("tokens_NS", lambda t: t[:0])),
    "prompts fractions": tensors(_set("prompt_N", lambda t: t.float())),
    "prompts too few": tensors(_set("prompt_N", lambda t: t[:3])),
    "masks of another width": tensors(_set("response_NS", lambda t: t[:, :1])),
    "masks of fractions": tensors(_set("attention_NS", lambda t: t.float())),
    "weights negative": tensors(_set("weight_N", lambda t: -t)),
    "weights NaN": tensors(_set("weight_N", lambda t: t * float("nan"))),
    "weights missing": tensors(lambda held: held.__delitem__("weight_N")),
    "truncated of numbers": tensors(_set("truncated_N", lambda t: t.float())),
    "a tensor too many": tensors(lambda held: held.update(x=held["prompt_N"].clone())),
}.items():
    ROLLOUTS.add(
        name,
        recorded(change),
        ends=(2,),
        names=("update_batch",),
        quick=name in ("tokens negative", "files a list"),
    )
ROLLOUTS.add("as it is", recorded(lambda folder: None), ends=(0,))


def _seeded_manifest(box: Box) -> list[str]:
    folder = box.lora(recorded=True) / "update_batch"
    mutate_json(folder / "manifest.json", box.rng)
    return probe(box)


def _seeded_tensors(box: Box) -> list[str]:
    folder = box.lora(recorded=True) / "update_batch"
    mutate_bytes(folder / "rollouts.safetensors", box.rng)
    return probe(box)


ROLLOUTS.seeded(8, _seeded_manifest)
for seed in range(5):
    ROLLOUTS.add(f"tensors seed {seed}", _seeded_tensors, ends=(2,), names=("update_batch",))


# --- what `report` and `influence --from` read ----------------------------------------------------


def report(name: str, content: str | bytes, *more: str) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        file = box.write(f"finished/{name}", content)
        return ["report", str(file if "." in name and not more else file.parent), *more]

    return make


for name, content in {
    "nested deeply": deep(),
    "a list": "[]",
    "empty": "",
    "null": "null",
    "not UTF-8": b"\xff\xff",
    "an integer of 5000 digits": '{"steps": ' + long_integer() + "}",
    "of nobody": '{"x": 1}',
    "escapes": json.dumps({ESCAPES: ESCAPES}),
}.items():
    REPORTS.add(
        f"trajectory {name}",
        report("trajectory.json", content),
        ends=(2,),
        names=("trajectory.json",),
        quick=name == "nested deeply",
    )
    REPORTS.add(f"log {name}", report("entropy_probe_1.json", content), ends=(2,))
    REPORTS.add(f"study {name}", report("manifest.json", content, "--no-html"), ends=(2,))
REPORTS.add("log no gzip", report("entropy_probe_1.json.gz", b"not gzip"), ends=(2,))
REPORTS.add("log gzip cut", report("entropy_probe_1.json.gz", b"\x1f\x8b\x08\0\0"), ends=(2,))
REPORTS.add("nowhere", lambda b: ["report", str(b.folder / "nowhere")], ends=(2,))
REPORTS.add("a folder of nothing", lambda b: ["report", str(b.folder)], ends=(2,))
REPORTS.add(
    "a pipe", lambda b: (os.mkfifo(b.folder / "x.json"), ["report", "x.json"])[1], ends=(2,)
)
REPORTS.add("a device", lambda b: ["report", "/dev/zero"], ends=(2,))
REPORTS.add(
    "from nothing",
    lambda b: ["influence", "--from", str(b.folder), "--what-if", "drop=negative"],
    ends=(2,),
)
REPORTS.add(
    "from a broken manifest",
    lambda b: [
        "influence",
        "--from",
        str(b.write("study/manifest.json", deep()).parent),
        "--what-if",
        "drop=negative",
    ],
    ends=(2,),
)

FAMILIES = (JSONL, ROLLOUTS, REPORTS)
