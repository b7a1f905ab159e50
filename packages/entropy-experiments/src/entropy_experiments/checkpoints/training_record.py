"""`entropy_probe_record.json`: what a recorded run says about itself; read before all assumptions.

The callback writes it beside every checkpoint (and once into the record's folder):

    trainer     class, module and versions
    options     every trainer option that changes the loss or the sampling
    unfollowed  those of them that this program does not rebuild, in words
    sampling    those that shape the sampling distribution beyond temperature and top_p, in words
    rewards     the reward functions: where each can be imported from, or why it cannot
    prompts     where the prompts are, with every column of the dataset, and their sha256
    files       sha256 of every file of the checkpoint as the trainer saved it
    base        a fingerprint of the frozen weights below a LoRA adapter
    base_location   the name that these were loaded by, and the folder if it was a local one

Beside a recorded batch, `RecordedStep` is what is known of the step that training made from it:

    made_step/fingerprint.json      step, learning rate, and sketches (`numerics.sketch`) of g, as
                                    the optimizer saw it, and of theta_after - theta_before
    made_step/gradient.safetensors  g itself, where it is small enough or was asked for; its sha256
                                    is in fingerprint.json

A reward function is the user's code, and a record may come with a download. So code is run only
from a file outside of the run's folders that has the recorded sha256, and only as TRL calls it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as dump_tensors
from torch import Tensor

from entropy_experiments.artifacts import sha256
from entropy_experiments.checkpoints.layout import read_json
from entropy_experiments.numerics.sketch import BUCKETS, Fingerprint, sketch
from entropy_experiments.types import Params

RECORD_FILE = "entropy_probe_record.json"
SCHEMA = 1
MADE_STEP = "made_step"
"""Folder beside a recorded batch: fingerprint.json and perhaps gradient.safetensors."""
FINGERPRINT_FILE, GRADIENT_FILE = "fingerprint.json", "gradient.safetensors"
RECORDED = "recorded"
"""Name of the dataset whose problems are the run's own prompts."""
SETS = ("train", "eval")
LONGEST_LINE = 1 << 20
REQUIRED = ("schema", "trainer", "options", "unfollowed", "sampling", "rewards", "prompts")
STEP_SCHEMA = 1
GRADIENT_TOLERANCE = 1e-6
"""The gradient beside a fingerprint must be the one that it is of."""
BASE_ELEMENTS = 4096
"""Of each frozen parameter, spread over it: enough to tell one base from another."""
BASE_TOLERANCE = 0.01
"""Rounding of the whole base to bf16 is 0.2 %; another base is 100 %."""


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    path: Path
    content: Mapping[str, Any]

    @property
    def unfollowed(self) -> tuple[str, ...]:
        return tuple(self.content["unfollowed"])

    @property
    def sampling(self) -> tuple[str, ...]:
        return tuple(self.content["sampling"])

    @property
    def files(self) -> Mapping[str, str]:
        return self.content.get("files") or {}

    @property
    def base(self) -> Mapping[str, Any] | None:
        return self.content.get("base")

    @property
    def base_folder(self) -> Path | None:
        """The local folder that training had the base from; None: a name on a hub, or unknown."""
        folder = (self.content.get("base_location") or {}).get("folder")
        return None if folder is None else Path(str(folder))

    @property
    def prompts_folder(self) -> Path | None:
        folder = self.content["prompts"].get("folder")
        return None if folder is None else (self.path.parent / folder).resolve()

    def step_folder(self, step: int) -> Path | None:
        """What the record's own folder, where the prompts are, has of a step."""
        folder = self.prompts_folder
        return None if folder is None else folder.parent / f"step_{step}"

    @property
    def sets(self) -> Mapping[str, Mapping[str, Any]]:
        return self.content["prompts"].get("sets") or {}

    @property
    def messages(self) -> bool:
        """Whether prompts were conversations; of earlier records the first prompt tells."""
        noted = self.content["prompts"].get("messages")
        if noted is not None or self.prompts_folder is None:
            return bool(noted)
        file = self.prompts_folder / f"{next(iter(self.sets))}.jsonl"
        if not file.is_file():
            return False
        with file.open(encoding="utf-8", errors="replace") as lines:
            first = lines.readline(LONGEST_LINE)
        try:
            row = json.loads(first)
        except ValueError:  # damaged: refused by its sha256 when the prompts are asked for
            return False
        return isinstance(row, dict) and isinstance(row.get("prompt"), list)

    def facts(self) -> dict[str, Any]:
        """Dataset and rewards, under the names of the training facts."""
        facts: dict[str, Any] = {"dataset_name": RECORDED}
        if self.sets:
            facts["dataset_path"] = str(self.prompts_folder)
            facts["E_split"] = "eval" if "eval" in self.sets else "train"
            facts["U_split"] = "train" if "train" in self.sets else "eval"
            if self.messages:
                facts["chat_template"] = True
        else:
            facts["dataset_absent"] = self.content["prompts"].get("why_not") or "no reason is given"
        rewards, run = self.content["rewards"], self._folders
        reasons = [why for one in rewards["functions"] if (why := code_refused(one, run))]
        if reasons:  # a file beside weights names no code that cannot be vouched for
            return {**facts, "reward_absent": "; ".join(reasons)}
        return {
            **facts,
            "reward_functions": [one["name"] for one in rewards["functions"]],
            "reward_sources": list(rewards["functions"]),
            "reward_weights": list(rewards["weights"]),
        }

    @property
    def _folders(self) -> tuple[Path, ...]:
        """The run's own: nothing in them is imported."""
        own = self.path.parent.resolve()
        in_checkpoint = own.name.startswith(("checkpoint-", "step_"))
        prompts = self.prompts_folder
        return (
            own.parent if in_checkpoint else own,
            *(() if prompts is None else (prompts.parent,)),
        )

    def check_prompts(self) -> None:
        """Refuse prompts that are missing, or are not those that were recorded."""
        for name, entry in self.sets.items():
            folder = self.prompts_folder
            assert folder is not None  # sets are written with their folder
            file = folder / f"{name}.jsonl"
            if not file.is_file():
                raise FileNotFoundError(
                    f"{self.path} says that the run's prompts are in {file}, and there is no such "
                    "file. Copy the record's folder with the checkpoints, or name other prompts: "
                    "batch_config.dataset_name and batch_config.dataset_path."
                )
            if sha256(file) != entry["sha256"]:
                raise ValueError(
                    f"{file} is not the file that training recorded (its sha256 is another). Copy "
                    "it again, or name other prompts: batch_config.dataset_name and "
                    "batch_config.dataset_path."
                )

    def covers(self, file: Path) -> bool:
        """Whether this file's sha256 is on record; one that differs is refused on loading."""
        own = self.path.parent.resolve()
        file = file.resolve()
        return file.is_relative_to(own) and str(file.relative_to(own)) in self.files

    def holds(self, names: Iterable[str]) -> bool:
        """Whether the sha256 of each of these files is on record."""
        return all(name in self.files for name in names)

    def changed(self, present: Mapping[str, str]) -> list[str]:
        """Of these files (name: sha256), those that are not as the trainer saved them."""
        return [
            name
            for name, digest in present.items()
            if name in self.files and self.files[name] != digest
        ]

    def refuse_changed(self, present: Mapping[str, str]) -> None:
        changed = self.changed(present)
        if changed:
            raise ValueError(
                f"{', '.join(changed)} in {self.path.parent} is not the file that training saved: "
                f"its sha256 differs from the one in {RECORD_FILE}. Copy the checkpoint again. If "
                "the change is meant, delete that record: the result then speaks of the changed "
                "files, and of no recorded step."
            )


def read_record(folders: tuple[Path, ...]) -> TrainingRecord | None:
    """The record of the nearest folder that has one."""
    path = next((f / RECORD_FILE for f in folders if (f / RECORD_FILE).is_file()), None)
    if path is None:
        return None
    content = read_json(path)
    missing = [name for name in REQUIRED if name not in content]
    if missing or content["schema"] != SCHEMA:
        raise ValueError(
            f"{path} has schema {content.get('schema')!r} and lacks {missing}; expected schema "
            f"{SCHEMA}, as EntropyProbeCallback(record=...) writes it. Restore it, or delete it to "
            "go on without the record."
        )
    return TrainingRecord(path=path, content=content)


def code_refused(reward: Mapping[str, Any], run: tuple[Path, ...]) -> str:
    """Why this recorded function cannot be called here; empty: it can."""
    name = reward.get("name")
    if reward.get("why_not"):
        return f"reward function {name!r}: {reward['why_not']}"
    file = Path(str(reward.get("file")))
    if not file.is_file():
        return f"reward function {name!r}: its file {file} is not on this machine"
    if any(file.resolve().is_relative_to(folder) for folder in run):
        return (
            f"reward function {name!r}: its file {file} lies in the run's own folder, from which "
            "no code is run (it may be a download); keep it outside"
        )
    if sha256(file) != reward.get("sha256"):
        return f"reward function {name!r}: {file} has changed since training"
    return ""


def module_is_file(module: str, file: Path) -> bool:
    """Whether importing `module` here means running this very file."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin) == file


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedStep:
    """What is known of a step that training made: fingerprints, and perhaps the gradient."""

    folder: Path
    step: int
    lr: float
    gradient: Fingerprint
    without_gradient: tuple[str, ...]
    """Parameters that had none: the optimizer left them alone."""
    change: Tensor | None
    """Sketch of theta_after - theta_before; None: the run ended before it was known."""
    gradient_sha256: str | None = None
    """Of the file; None: not recorded, and the sketch alone must do."""

    @property
    def has_gradient(self) -> bool:
        return (self.folder / GRADIENT_FILE).is_file()

    def as_json(self) -> bytes:
        """The content of fingerprint.json."""
        content = {
            "schema": STEP_SCHEMA,
            "step": self.step,
            "lr": self.lr,
            "gradient": self.gradient.as_json(),
            "without_gradient": list(self.without_gradient),
            "change": None if self.change is None else self.change.tolist(),
        }
        if self.gradient_sha256 is not None:
            content["gradient_sha256"] = self.gradient_sha256
        return json.dumps(content, indent=1, allow_nan=False).encode()

    def load_gradient(self, params: Params) -> dict[str, Tensor]:
        """g by the policy's names, on its devices; refused if it is not the fingerprint's."""
        file = self.folder / GRADIENT_FILE
        try:
            gradient = load_file(file)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} cannot be read ({error}). Copy it again, or delete it."
            ) from (error)
        expected = {n: tuple(p.shape) for n, p in params.items() if n not in self.without_gradient}
        got = {name: tuple(value.shape) for name, value in gradient.items()}
        if got != expected:
            odd = sorted({*got.items()} ^ {*expected.items()})[:4]
            raise ValueError(
                f"{file} does not hold the gradient of this policy: {odd} differ. It belongs to "
                "another model; delete it to go on without it."
            )
        if self.gradient_sha256 is not None and sha256(file) != self.gradient_sha256:
            raise ValueError(
                f"{file} is not the gradient that was recorded: its sha256 differs from the one in "
                f"{FINGERPRINT_FILE}. Copy it again, or delete it."
            )
        apart = Fingerprint.of(gradient).distance(self.gradient)
        if not apart <= GRADIENT_TOLERANCE:
            raise ValueError(
                f"{file} is not the gradient that was recorded: it is {apart:.2g} of its size away "
                f"from its fingerprint in {FINGERPRINT_FILE}. Copy it again, or delete it."
            )
        return {name: value.to(params[name].device) for name, value in gradient.items()}


def read_recorded_step(folder: Path) -> RecordedStep | None:
    """What is beside a recorded batch; None: nothing."""
    file = folder / FINGERPRINT_FILE
    if not file.is_file():
        return None
    content = read_json(file)
    if content.get("schema") != STEP_SCHEMA:
        raise ValueError(
            f"{file} has schema {content.get('schema')!r}; this version reads {STEP_SCHEMA}. "
            f"Delete {folder} to go on without the fingerprint."
        )
    change = content.get("change")
    return RecordedStep(
        folder=folder,
        step=int(content["step"]),
        lr=float(content["lr"]),
        gradient=Fingerprint.from_json(content["gradient"]),
        without_gradient=tuple(content["without_gradient"]),
        change=None if change is None else torch.tensor(change, dtype=torch.float64),
        gradient_sha256=content.get("gradient_sha256"),
    )


def gradient_bytes(gradient: Params) -> bytes:
    return dump_tensors({n: g.detach().cpu().contiguous() for n, g in gradient.items()})


def base_fingerprint(model: Any) -> dict[str, Any] | None:
    """Of the frozen weights, by an even sample of each; None: nothing is frozen, or quantised."""
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    if not frozen or not all(p.is_floating_point() for p in frozen.values()):
        return None
    return {"elements": sum(p.numel() for p in frozen.values()), "sketch": _sampled(frozen)}


def base_location(model: Any) -> dict[str, str | None] | None:
    """Where the base below an adapter was: the name that it was loaded by and, if that was a local
    folder, which one. None: there is no adapter, or the base has no name."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return None
    name = next(iter(configs.values())).base_model_name_or_path
    if not name:
        return None
    # The name is relative to the folder in which training runs, which is the one at hand.
    folder = Path(name).expanduser()
    return {"name": str(name), "folder": str(folder.resolve()) if folder.is_dir() else None}


def _sampled(frozen: Mapping[str, Tensor]) -> list[float]:
    sampled = {}
    for name, value in frozen.items():
        flat = value.detach().reshape(-1)
        sampled[name] = flat[:: max(1, flat.numel() // BASE_ELEMENTS)]
    return sketch(sampled).tolist()


def refuse_other_base(model: Any, recorded: Mapping[str, Any], words: str) -> str | None:
    """Why the base cannot be compared; an error if it is another than training's."""
    fingerprint = base_fingerprint(model)
    if fingerprint is None or fingerprint["elements"] != recorded["elements"]:
        return "base: its frozen weights cannot be compared with the record's fingerprint"
    theirs, ours = (torch.tensor(x["sketch"], dtype=torch.float64) for x in (recorded, fingerprint))
    assert len(theirs) == BUCKETS
    apart = float((ours - theirs).norm() / theirs.norm()) if bool(theirs.any()) else 0.0
    if apart > BASE_TOLERANCE:
        raise ValueError(
            f"The base under this adapter ({words}) is not the one that training used: their "
            f"weights are {apart:.0%} apart. Set checkpoint.base to the base of the training."
        )
    return None
