"""Finished stages of a study, found again by what determines them; and its files, manifest last.

A stage's key is a sha256 over everything that its result depends on, so that what is read back is
what would be computed:

    <run>/stages/<name>.<key>.stage      64 digits of sha256, then safetensors (JSON inside)

A stage is written whole when it is finished: a study that was killed loses the stage under way. The
files that people read are made from finished stages alone and written only where their bytes
differ, so a rerun of a finished study touches nothing:

    <run>/manifest.json                  written last: the study's key, sha256 of every file

The manifest also lists what the files were made from (`stored`: rollouts and stages). A rerun looks
at all of it, and makes again what is gone or damaged; a stage or a unit of rollouts whose contents
do not have the hash it begins with is refused by name, as when it is read.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor

from entropy_experiments.artifacts import (
    MANIFEST,
    HashedFiles,
    described,
    digest_of_json,
    hashed_body,
    is_described,
    is_partial,
    json_bytes,
    read_json_object,
    sweep_partials,
    write_changed,
    write_with_manifest,
)
from entropy_experiments.distributed import current
from entropy_experiments.results import INFLUENCE, InfluenceResult, JSONObject
from entropy_experiments.sampling.rollout_files import UNIT
from entropy_experiments.study_files import (
    IDENTITY,
    PAGE,
    ArrayFacts,
    StoredFacts,
    StudyManifest,
    open_run,
    read_manifest,
)
from entropy_experiments.types import UpdateBatch

__all__ = [
    "RunDirectory",
    "Stage",
    "StageStore",
    "batch_digest",
    "digest_of_tensors",
    "open_run",
]

STAGES, ROLLOUTS = "stages", "rollouts"
STAGE = ".stage"
_JSON = "__json__"


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """What a stage leaves behind: numbers for the summary, and tensors."""

    facts: JSONObject = field(default_factory=dict)
    """JSON; floats come back bit by bit."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0


def digest_of_tensors(tensors: Mapping[str, Tensor | None]) -> str:
    """sha256 of named tensors, absent ones included by name."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        if value is None:
            digest.update(f"{name} none".encode())
            continue
        value = value.detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def batch_digest(batch: UpdateBatch) -> str:
    """sha256 of what training knows of a batch's tokens, which its fingerprint does not say."""
    return digest_of_tensors(
        {
            "advantage": batch.advantage_NS,
            "reward": batch.reward_N,
            "old": batch.old_logprob_NS,
            "reference": batch.ref_logprob_NS,
            "microbatch": batch.microbatch_N,
            "loss": batch.loss_NS,
        }
    )


class StageStore:
    """The stages of one run directory."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = HashedFiles(folder, STAGE)

    def __len__(self) -> int:
        return len(self._files)

    def holds(self, name: str, key: str) -> bool:
        return self._files.holds(_file_name(name, key))

    def once(self, name: str, key: str, compute: Callable[[], Stage]) -> Stage:
        """The finished stage, or what `compute` gives, which is on disk before it is returned.

        Several ranks compute it together. Rank 0 alone reads and writes, and tells the others what
        is in the file: they go on with the same bits, whichever disks they see.
        """
        ranks = current()
        data = ranks.broadcast_from_zero(lambda: self._files.raw(_file_name(name, key)))
        if data is None:
            started = time.perf_counter()
            stage = compute()
            ranks.broadcast_from_zero(
                lambda: self.put(name, key, stage, time.perf_counter() - started)
            )
            # The same path for a first run and for a resumed one.
            data = ranks.broadcast_from_zero(lambda: self._files.raw(_file_name(name, key)))
        assert data is not None
        return self._unpacked(_file_name(name, key), data)

    def get(self, name: str, key: str) -> Stage | None:
        data = self._files.raw(_file_name(name, key))
        return None if data is None else self._unpacked(_file_name(name, key), data)

    def remove(self, name: str, key: str) -> None:
        """A stage that nobody needs any more; one that is not there is left so."""
        self._files.path(_file_name(name, key)).unlink(missing_ok=True)

    def _unpacked(self, file: str, data: bytes) -> Stage:
        try:
            tensors = load_tensors(self._files.body(file, data))
        except SafetensorError as error:
            path = self._files.path(file)
            raise ValueError(f"{path} is not a stage of a study ({error}). Delete it.") from error
        header = json.loads(tensors.pop(_JSON).numpy().tobytes())
        # The format keeps no order, and sums over parameters are added in the order of their names.
        ordered = {name: tensors[name] for name in header["order"]}
        return Stage(facts=header["facts"], tensors=ordered, seconds=header["seconds"])

    def put(self, name: str, key: str, stage: Stage, seconds: float) -> None:
        order = list(stage.tensors)
        header = {"facts": dict(stage.facts), "seconds": seconds, "order": order}
        try:
            text = json.dumps(header, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RuntimeError(f"Stage {name!r} left what is no JSON ({error}).") from error
        # Clones: views of one tensor would share memory, which the format refuses.
        packed = {k: x.detach().cpu().clone().contiguous() for k, x in stage.tensors.items()}
        packed[_JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.folder.mkdir(exist_ok=True)
        self._files.put(_file_name(name, key), dump_tensors(packed))


def _file_name(name: str, key: str) -> str:
    return f"{name}.{key[:24]}"


class RunDirectory:
    """Where the files of one study go. Another study's folder is refused, not mixed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.stages = StageStore(self.folder / STAGES)

    def bind(self, key: str, *, overwrite: bool = False) -> None:
        """Declare whose folder this is, or check that it is the same study's."""
        theirs = self._bound_to()
        if theirs is not None and theirs != key and not overwrite:
            raise ValueError(
                f"{self.folder} holds another study ({theirs[:12]}... there, {key[:12]}... here): "
                "other settings, another checkpoint or another version of the package. Give "
                "another folder, or let this study replace it with --overwrite (overwrite=True); "
                "stages that both need are kept."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        sweep_partials(self.folder)
        if theirs != key:
            self._identify(key, replaces=self._earlier_files())
            (self.folder / MANIFEST).unlink(missing_ok=True)

    def release(self) -> None:
        """The folder is nobody's again, if nothing was computed in it. Nothing else is deleted."""
        stages = self.stages.folder
        if self.manifest() is not None or (stages.is_dir() and any(stages.iterdir())):
            return
        if self._earlier_files():
            return
        (self.folder / IDENTITY).unlink(missing_ok=True)
        for folder in (stages, self.folder):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _identify(self, key: str, *, replaces: set[str]) -> None:
        """`replaces`: files of an earlier study, to be gone when this one is finished."""
        write_changed(self.folder / IDENTITY, _identity(key, replaces))

    def _earlier_files(self) -> set[str]:
        path = self.folder / IDENTITY
        manifest = json.loads(path.read_bytes()) if path.is_file() else {}
        return {*manifest.get("replaces", ()), *(self.manifest() or {"files": ()})["files"]}

    def finished(self, key: str) -> bool:
        """Whether every file of this very study is there, bit by bit."""
        manifest = self.manifest()
        if manifest is None or manifest.get("key") != key:
            return False
        listed = {**manifest["files"], **manifest.get("stored", {})}
        if not all(self._as_described(name, facts) for name, facts in listed.items()):
            return False
        # Read, but not to the byte what was written: put right.
        self._identify(str(self._bound_to()), replaces=set())
        if "stored" in manifest:  # a study of an earlier version is left as it is
            write_changed(self.folder / MANIFEST, _encoded(manifest))
        return True

    def _as_described(self, name: str, facts: StoredFacts) -> bool:
        path = self.folder / name
        if not path.is_file():
            return False
        data = path.read_bytes()
        if facts.get("own_hash"):
            hashed_body(path, data)
            return True
        return is_described(data, facts)

    def _stored(self) -> dict[str, StoredFacts]:
        """What the study's files were made from: rollouts by their hashes.

        Stages and units begin with their own; their bytes also hold how long they took.
        """
        stored: dict[str, StoredFacts] = {}
        for top in (ROLLOUTS, STAGES):
            for path in sorted((self.folder / top).rglob("*")):
                if path.is_file() and not is_partial(path.name):
                    own = path.suffix in (UNIT, STAGE)
                    name = path.relative_to(self.folder).as_posix()
                    stored[name] = {"own_hash": True} if own else {**described(path.read_bytes())}
        return stored

    def manifest(self) -> StudyManifest | None:
        return read_manifest(self.folder)

    def answers(self) -> InfluenceResult | None:
        """summary.json of the last command, whole; None: there is none."""
        manifest, path = self.manifest(), self.folder / "summary.json"
        if manifest is None or not path.is_file():
            return None
        data = path.read_bytes()
        return json.loads(data) if is_described(data, manifest["files"].get(path.name)) else None

    def write(
        self, files: Mapping[str, bytes], key: str, arrays: Mapping[str, ArrayFacts]
    ) -> list[str]:
        """All files, then the manifest; a file whose bytes are right already is left alone.

        What an earlier study of this folder wrote, and this one does not, is deleted; so is the
        HTML report, which tells what was there before. Returns what was deleted.
        """
        path = self.folder / MANIFEST
        manifest: StudyManifest = {
            **INFLUENCE.stamp,
            "key": key,
            "files": {name: described(data) for name, data in sorted(files.items())},
            "arrays": dict(arrays),
            "stored": self._stored(),
        }
        encoded = _encoded(manifest)
        stale = self._earlier_files() - set(files)
        gone = sorted(name for name in stale if (self.folder / name).is_file())
        bound = self._bound_to()
        same = path.is_file() and path.read_bytes() == encoded
        if not same and (self.folder / PAGE).is_file():
            (self.folder / PAGE).unlink()  # first: after a crash nobody would know it is old
            gone.append(PAGE)
        if path.is_file() and not same:
            self._identify(str(bound), replaces=stale)  # a crash must not forget them
            path.unlink()  # a crash from here on must not leave it beside other files
        for name in stale:
            self._remove(self.folder / name)
        write_with_manifest(
            self.folder, {**files, IDENTITY: _identity(str(bound), replaces=set())}, encoded
        )
        return gone

    def _remove(self, path: Path) -> None:
        """The file, and the folders that are empty without it."""
        if self.folder.resolve() not in path.resolve().parents:
            raise ValueError(f"{path} is outside {self.folder}: its {MANIFEST} was tampered with.")
        path.unlink(missing_ok=True)
        for folder in path.parents:
            if folder == self.folder or not folder.is_dir() or any(folder.iterdir()):
                return
            folder.rmdir()

    def _bound_to(self) -> str | None:
        path = self.folder / IDENTITY
        if not path.is_file():
            others = [p.name for p in self.folder.iterdir()] if self.folder.is_dir() else []
            strange = sorted(
                set(others) - {ROLLOUTS, "logs", STAGES} - {n for n in others if is_partial(n)}
            )
            if strange:
                raise ValueError(
                    f"{self.folder} has files that are no study's ({', '.join(strange[:4])}); "
                    "expected an empty or a new folder, or one of an earlier study."
                )
            return None
        identity = read_json_object(path, advice=f"Delete {self.folder}.") or {}
        if identity.get("format") != INFLUENCE.name:
            raise ValueError(f"{path} is not an influence study's. Give another folder.")
        return str(identity.get("key"))


def _identity(key: str, replaces: set[str]) -> bytes:
    return json_bytes({**INFLUENCE.stamp, "key": key, "replaces": sorted(replaces)})


def _encoded(manifest: StudyManifest) -> bytes:
    return json_bytes({**manifest, "digest": digest_of_json(manifest)})
