"""`entropy_probe_record.json`: what a recorded run says about itself; read before all assumptions.

The callback writes it beside every checkpoint (and once into the record's folder):

    trainer     class, module and versions
    options     every trainer option that changes the loss or the sampling
    unfollowed  those of them that this program does not rebuild, in words
    sampling    those that shape the sampling distribution beyond temperature and top_p, in words
    rewards     the reward functions: where each can be imported from, or why it cannot
    prompts     where the prompts are, with every column of the dataset, and their sha256
    files       sha256 of every file of the checkpoint as the trainer saved it
    facts       the training facts, as entropy_probe.json beside it has them
    step        optimizer steps made before a checkpoint was saved, whatever its folder is called
    base        a fingerprint of the frozen weights below a LoRA adapter
    base_location   the name that these were loaded by, and the folder if it was a local one

What is known of the step that training made is beside its batch (`recorded_step`). Nothing here
needs torch: a training's settings are checked without it.

A reward function is the user's code, and a record may come with a download. So code is run only
from a file outside of the run's folders that has the recorded sha256, and only as TRL calls it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from entropy_experiments.artifacts import sha256
from entropy_experiments.checkpoints.layout import read_json

RECORD_FILE = "entropy_probe_record.json"
SCHEMA = 1
RECORDED = "recorded"
"""Name of the dataset whose problems are the run's own prompts."""
LONGEST_LINE = 1 << 20
REQUIRED = ("schema", "trainer", "options", "unfollowed", "sampling", "rewards", "prompts")


class RewardSource(TypedDict):
    """Where a reward function can be imported from, or `why_not`."""

    name: str
    module: NotRequired[str | None]
    """None: a script, which is read from its file."""
    function: NotRequired[str]
    file: NotRequired[str]
    sha256: NotRequired[str]
    why_not: NotRequired[str]


class RecordedRewards(TypedDict):
    """Functions in the trainer's order, and their weights."""

    functions: list[RewardSource]
    weights: list[float]


class PromptSet(TypedDict):
    """A file of prompts: `rows` of the `of` rows that the dataset has."""

    rows: int
    of: int
    sha256: str


class RecordedPrompts(TypedDict):
    sets: dict[str, PromptSet]
    dropped: list[str]
    """Columns that JSON cannot hold."""
    messages: NotRequired[bool]
    """Whether prompts are conversations, put in the chat template."""
    why_not: NotRequired[str]
    folder: NotRequired[str]


class BaseFingerprint(TypedDict):
    elements: int
    sketch: list[float]


class BaseLocation(TypedDict):
    name: str
    folder: str | None


class RecordContent(TypedDict):
    """The file, key by key; the module docstring says what each is."""

    schema: int
    trainer: dict[str, str]
    options: dict[str, Any]
    unfollowed: list[str]
    sampling: list[str]
    rewards: RecordedRewards
    prompts: RecordedPrompts
    base: NotRequired[BaseFingerprint | None]
    base_location: NotRequired[BaseLocation | None]
    files: NotRequired[Mapping[str, str]]
    facts: NotRequired[Mapping[str, Any]]
    """Earlier records have none."""
    step: NotRequired[int]


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    path: Path
    content: RecordContent

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
    def base(self) -> BaseFingerprint | None:
        return self.content.get("base")

    @property
    def base_folder(self) -> Path | None:
        """The local folder that training had the base from; None: a name on a hub, or unknown."""
        location = self.content.get("base_location")
        folder = None if location is None else location.get("folder")
        return None if folder is None else Path(str(folder))

    @property
    def step(self) -> int | None:
        """Optimizer steps made before the checkpoint; None: a record that does not say."""
        return self.content.get("step")

    @property
    def prompts_folder(self) -> Path | None:
        folder = self.content["prompts"].get("folder")
        return None if folder is None else (self.path.parent / folder).resolve()

    def step_folder(self, step: int) -> Path | None:
        """What the record's own folder, where the prompts are, has of a step."""
        folder = self.prompts_folder
        return None if folder is None else folder.parent / f"step_{step}"

    @property
    def sets(self) -> Mapping[str, PromptSet]:
        return self.content["prompts"].get("sets") or {}

    @property
    def messages(self) -> bool:
        """Whether prompts were conversations; of earlier records the first prompt tells."""
        noted = self.content["prompts"].get("messages")
        if noted is not None or self.prompts_folder is None or not self.sets:
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
        in_checkpoint = own.name.startswith(("checkpoint-", "step_", "global_step_"))
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
                    "data.dataset and data.file."
                )
            if sha256(file) != entry["sha256"]:
                raise ValueError(
                    f"{file} is not the file that training recorded (its sha256 is another). Copy "
                    "it again, or name other prompts: data.dataset and data.file."
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
                "the change is meant, delete that record: the result is then of the changed files, "
                "and of no recorded step."
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
    for name in ("facts", "options"):
        if not isinstance(content.get(name, {}), dict):
            raise ValueError(
                f"{path}: {name} is a {type(content[name]).__name__}; expected an object. Restore "
                "the file."
            )
    step = content.get("step", 0)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(
            f"{path}: step is {step!r}; expected how many optimizer steps were made before the "
            "checkpoint. Restore the file."
        )
    return TrainingRecord(path=path, content=cast(RecordContent, content))


def code_refused(reward: RewardSource, run: tuple[Path, ...]) -> str:
    """Why this recorded function cannot be called here; empty: it can."""
    name = reward.get("name")
    if why_not := reward.get("why_not"):
        return f"reward function {name!r}: {why_not}"
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
