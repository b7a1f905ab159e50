"""Rollouts and update batches on disk: safetensors, beside a manifest with hashes.

A folder holds

    rollouts.safetensors    tokens, masks, log-probs, advantages: whatever the value has
    text.json               the responses as text, if they were kept
    uid.json                what the framework calls each rollout, if it has names for them
    manifest.json           written last: schema, sha256 of each file, free `meta`

Every file is written under a temporary name, synced and renamed, so a folder with a manifest is
whole. Tokens take the narrowest integer type that holds them, masks a bit per token, and advantages
that are one number per rollout are stored as such. Nothing here is ever unpickled, and a file that
does not match its hash is not opened.

`RolloutStore` keeps the finished units of a run that may be interrupted. A unit is found again by
its key, a hash of all that determines its tokens, so what is read back is what would be drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor

from entropy_experiments.artifacts import (
    MANIFEST,
    HashedFiles,
    described,
    differing_keys,
    read_described,
    read_json_object,
    write_changed,
    write_with_manifest,
)
from entropy_experiments.results import JSONObject, Schema
from entropy_experiments.types import Rollouts, UpdateBatch

SCHEMA = Schema(name="entropy_experiments.rollouts", version=2)
TENSORS, TEXT, UID = "rollouts.safetensors", "text.json", "uid.json"
UNIT = ".unit"
COPY = "Copy it again, or make the rollouts again."

_ROLLOUT_TENSORS = {
    "tokens_NS": True,
    "attention_NS": True,
    "response_NS": True,
    "prompt_N": True,
    "weight_N": True,
    "behaviour_logprob_NS": False,
    "truncated_N": True,
}
_UPDATE_TENSORS = {
    "advantage_NS": True,
    "reward_N": False,
    "old_logprob_NS": False,
    "ref_logprob_NS": False,
    "microbatch_N": False,
    "loss_NS": False,
}
"""Names of the dataclass fields, and whether a file must hold them."""
_MASKS = ("attention_NS", "response_NS", "loss_NS")


def save_rollouts(
    folder: str | Path, rollouts: Rollouts, *, meta: Mapping[str, object] | None = None
) -> Path:
    """Write rollouts as safetensors, beside a manifest with hashes.

    Args:
        folder: Made if missing.
        rollouts: What to write.
        meta: JSON values of your own, kept in the manifest.

    Returns:
        The manifest's path; it is written last, so a folder that has one is whole.

    Examples:
        >>> import tempfile
        >>> from entropy_experiments.toy import BigramPolicy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(save_rollouts(folder, BigramPolicy().draw(seed=2)).name)
        manifest.json
    """
    return _save(Path(folder), "rollouts", rollouts, _fields(rollouts, _ROLLOUT_TENSORS), meta)


def load_rollouts(folder: str | Path) -> tuple[Rollouts, JSONObject]:
    """Rollouts as `save_rollouts` wrote them.

    An update batch may be read as rollouts; the reverse may not.

    Args:
        folder: With the manifest.

    Returns:
        The rollouts, and the meta that was given.

    Raises:
        ValueError: If a file does not match its hash, or is not of this kind.

    Examples:
        >>> import tempfile
        >>> from entropy_experiments.toy import BigramPolicy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save_rollouts(folder, BigramPolicy().draw(seed=2), meta={"seed": 2})
        ...     rollouts, meta = load_rollouts(folder)
        >>> len(rollouts), meta
        (32, {'seed': 2})
    """
    with _naming(Path(folder)):
        tensors, names, manifest = _load(Path(folder), ("rollouts", "update_batch"))
        return _rollouts(tensors, names, manifest), manifest["meta"]


def save_update_batch(
    folder: str | Path, batch: UpdateBatch, *, meta: Mapping[str, object] | None = None
) -> Path:
    """Write the batch of an optimizer step as safetensors, beside a manifest with hashes.

    Args:
        folder: Made if missing.
        batch: What to write.
        meta: JSON values of your own, kept in the manifest.

    Returns:
        The manifest's path; it is written last, so a folder that has one is whole.

    Examples:
        >>> import tempfile
        >>> from entropy_experiments.toy import BigramPolicy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(save_update_batch(folder, BigramPolicy().update_batch(seed=1)).name)
        manifest.json
    """
    tensors = _fields(batch.rollouts, _ROLLOUT_TENSORS) | _fields(batch, _UPDATE_TENSORS)
    return _save(Path(folder), "update_batch", batch.rollouts, tensors, meta)


def load_update_batch(folder: str | Path) -> tuple[UpdateBatch, JSONObject]:
    """The batch as `save_update_batch` wrote it; every bit the same.

    Args:
        folder: With the manifest.

    Returns:
        The batch, and the meta that was given.

    Raises:
        ValueError: If a file does not match its hash, or holds no update batch.

    Examples:
        >>> folder = embedded_trajectory() / "checkpoint-13" / "update_batch"
        >>> batch, meta = load_update_batch(folder)
        >>> len(batch.rollouts)
        384
    """
    with _naming(Path(folder)):
        tensors, names, manifest = _load(Path(folder), ("update_batch",))
        update = {name: tensors.get(name) for name in _UPDATE_TENSORS}
        advantage_NS = update.pop("advantage_NS")
        assert advantage_NS is not None  # _load refuses a file without it
        batch = UpdateBatch(
            rollouts=_rollouts(tensors, names, manifest), advantage_NS=advantage_NS, **update
        )
        return batch, manifest["meta"]


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """What is wrong with the tensors is said of the file that holds them."""
    try:
        yield
    except ValueError as error:
        if str(folder) in str(error):
            raise
        raise ValueError(f"{folder / TENSORS}: {error}") from error


def recorded_meta(folder: str | Path) -> JSONObject:
    """The meta of a folder, without reading its tensors."""
    return _manifest(Path(folder))["meta"]


def _fields(value: Rollouts | UpdateBatch, names: Mapping[str, bool]) -> dict[str, Tensor]:
    return {name: x for name in names if (x := getattr(value, name)) is not None}


def _save(
    folder: Path,
    kind: str,
    rollouts: Rollouts,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, object] | None,
) -> Path:
    packed = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    packed["tokens_NS"] = _narrow(packed["tokens_NS"])
    if "advantage_NS" in packed:
        packed |= _per_rollout(packed.pop("advantage_NS"), packed["response_NS"])
    packed |= {name: _bits(packed[name]) for name in _MASKS if name in packed}
    contents = {TENSORS: dump_tensors(packed)}
    if rollouts.text is not None:
        contents[TEXT] = json.dumps(list(rollouts.text), ensure_ascii=False).encode()
    if rollouts.uid is not None:
        contents[UID] = json.dumps(list(rollouts.uid)).encode()
    manifest = {
        **SCHEMA.stamp,
        "kind": kind,
        "rollouts": len(rollouts),
        "share": rollouts.share,
        "fingerprint": rollouts.fingerprint,
        "files": {name: described(data) for name, data in contents.items()},
        "meta": dict(meta or {}),
    }
    try:
        encoded = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"meta cannot be written as JSON ({error}); expected text, finite numbers, lists and "
            "mappings of them."
        ) from error
    for name in (TEXT, UID):
        if name not in contents and (folder / name).exists():
            (folder / MANIFEST).unlink(missing_ok=True)  # first: it lists the file
            (folder / name).unlink()
    write_with_manifest(folder, contents, encoded)
    return folder / MANIFEST


def _narrow(tokens_NS: Tensor) -> Tensor:
    highest = int(tokens_NS.max())
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if highest <= torch.iinfo(dtype).max:
            return tokens_NS.to(dtype)
    raise ValueError(f"Token id {highest} does not fit into int32, as which tokens are stored.")


def _bits(mask_NS: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask_NS.numpy(), axis=1))


def _mask(bits: Tensor, tokens_NS: Tensor, where: Path) -> Tensor:
    n, s = tokens_NS.shape
    if bits.dtype != torch.uint8 or tuple(bits.shape) != (n, (s + 7) // 8):
        raise ValueError(
            f"{where} has a mask of {bits.dtype} {tuple(bits.shape)}; expected a bit per token, "
            f"torch.uint8 {(n, (s + 7) // 8)}. Was it made by another program?"
        )
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=s)).bool()


def _per_rollout(advantage_NS: Tensor, response_NS: Tensor) -> dict[str, Tensor]:
    """One advantage per rollout where that says it all, bit by bit."""
    first_N1 = response_NS.int().argmax(1, keepdim=True)
    advantage_N = advantage_NS.gather(1, first_N1).squeeze(1)
    if torch.equal(_spread(advantage_N, response_NS), advantage_NS):
        return {"advantage_N": advantage_N.contiguous()}
    return {"advantage_NS": advantage_NS}


def _spread(advantage_N: Tensor, response_NS: Tensor) -> Tensor:
    return torch.where(response_NS, advantage_N[:, None], torch.zeros((), dtype=advantage_N.dtype))


def _load(
    folder: Path, kinds: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, tuple[Any, ...]], JSONObject]:
    """Tensors by name, `text` and `uid` where they were kept, and the manifest."""
    manifest = _manifest(folder)
    if manifest["kind"] not in kinds:
        raise ValueError(
            f"{folder} holds a {manifest['kind']!r}; expected {' or '.join(map(repr, kinds))}. "
            "Rollouts without advantages cannot make an update: save them with save_update_batch."
        )
    contents = {}
    for name, facts in manifest["files"].items():
        contents[name] = read_described(folder / name, facts, advice=COPY)
    tensors = _tensors(folder / TENSORS, contents[TENSORS])
    if "tokens_NS" in tensors and tensors["tokens_NS"].dim() != 2:
        raise ValueError(
            f"{folder / TENSORS} has tokens_NS of shape {tuple(tensors['tokens_NS'].shape)}; "
            "expected (rollouts, positions). Was it made by another program?"
        )
    for name in _MASKS:
        if name in tensors and "tokens_NS" in tensors:
            tensors[name] = _mask(tensors[name], tensors["tokens_NS"], folder / TENSORS)
    if "advantage_N" in tensors and "response_NS" in tensors and "advantage_NS" not in tensors:
        tensors["advantage_NS"] = _spread(tensors.pop("advantage_N"), tensors["response_NS"])
    required = {n for n, must in _ROLLOUT_TENSORS.items() if must}
    if manifest["kind"] == "update_batch":
        required |= {n for n, must in _UPDATE_TENSORS.items() if must}
    known = _ROLLOUT_TENSORS | (_UPDATE_TENSORS if manifest["kind"] == "update_batch" else {})
    missing, unknown = sorted(required - tensors.keys()), sorted(tensors.keys() - known.keys())
    if missing or unknown:
        raise ValueError(
            f"{folder / TENSORS} does not hold a {manifest['kind']} of schema {SCHEMA.version}: "
            f"missing {missing}, unknown {unknown}. Was it made by another program?"
        )
    if tensors["tokens_NS"].is_floating_point() or tensors["tokens_NS"].dtype == torch.bool:
        raise ValueError(
            f"{folder / TENSORS} has tokens_NS of {tensors['tokens_NS'].dtype}; expected integers."
        )
    if bool((tensors["tokens_NS"] < 0).any()):
        raise ValueError(f"{folder / TENSORS} has negative token ids; expected ids of a tokenizer.")
    tensors["tokens_NS"] = tensors["tokens_NS"].long()
    names = {
        field: _strings(folder / name, contents[name], null=null)
        for field, name, null in (("text", TEXT, False), ("uid", UID, True))
        if name in contents
    }
    return tensors, names, manifest


def _strings(path: Path, data: bytes, *, null: bool) -> tuple[Any, ...]:
    values = json.loads(data)
    kinds = (str, type(None)) if null else str
    if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
        or_null = " or null" if null else ""
        raise ValueError(f"{path} must be a JSON list of strings{or_null}, one per rollout.")
    return tuple(values)


def _manifest(folder: Path) -> JSONObject:
    path = folder / MANIFEST
    if not path.is_file():
        state = "half-written" if (folder / TENSORS).exists() else "not a folder of rollouts"
        raise FileNotFoundError(
            f"No {MANIFEST} in {folder}: it is {state}. Expected {TENSORS} and {MANIFEST}, as "
            "save_rollouts and save_update_batch write them; sampling.importers.read_dump reads "
            "the dumps of other frameworks."
        )
    manifest = read_json_object(path, advice="Make the rollouts again.") or {}
    if manifest.get("format") != SCHEMA.name:
        raise ValueError(
            f"{path} has format {manifest.get('format')!r}; expected {SCHEMA.name!r}. It was made "
            "by another program: sampling.importers.read_dump reads the dumps of other frameworks."
        )
    SCHEMA.check(
        manifest,
        path,
        advice="Use the version of entropy-experiments that wrote it, or make the rollouts again.",
    )
    files = manifest.get("files")
    if not isinstance(files, dict) or TENSORS not in files or set(files) - {TENSORS, TEXT, UID}:
        names = sorted(files) if isinstance(files, dict) else files
        raise ValueError(
            f"{path} lists the files {names}; expected {TENSORS}, perhaps {TEXT} and {UID}, "
            "nothing else."
        )
    share, meta = manifest.get("share"), manifest.get("meta")
    if not isinstance(share, float) or not isinstance(meta, dict) or "kind" not in manifest:
        raise ValueError(
            f"{path} lacks a usable kind, share or meta (got kind {manifest.get('kind')!r}, share "
            f"{share!r}, meta {type(meta).__name__}). Make the rollouts again."
        )
    return manifest


def _tensors(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        return load_tensors(data)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error}).") from error


def _rollouts(
    tensors: Mapping[str, Tensor], names: Mapping[str, tuple[Any, ...]], manifest: JSONObject
) -> Rollouts:
    fields: dict[str, Any] = {name: tensors.get(name) for name in _ROLLOUT_TENSORS}
    rollouts = Rollouts(
        **fields, text=names.get("text"), uid=names.get("uid"), share=manifest["share"]
    )
    own = {"rollouts": len(rollouts), "fingerprint": rollouts.fingerprint}
    for name, value in own.items():
        if manifest.get(name, value) != value:
            raise ValueError(
                f"{MANIFEST} says {name} {manifest[name]!r}, and {TENSORS} beside it has "
                f"{value!r}; expected the same. Copy the folder again, or make the rollouts again."
            )
    return rollouts


class RolloutStore:
    """Finished units of sampling, one file each, for one model and one set of settings.

    `bind` names both. A folder bound to something else is refused, not mixed: rollouts of two
    policies in one batch would look like one policy with a strange distribution.
    """

    IDENTITY = "store.json"

    def __init__(self, folder: str | Path) -> None:
        self.folder: Path = Path(folder)
        self._files: HashedFiles = HashedFiles(folder, UNIT)

    def bind(self, identity: Mapping[str, object]) -> None:
        """Declare what the units of this folder depend on, or check that it is the same."""
        mine = json.loads(json.dumps(dict(identity), sort_keys=True))
        path = self.folder / self.IDENTITY
        encoded = json.dumps(mine, indent=2, sort_keys=True).encode()
        theirs = read_json_object(path, advice=f"Delete {self.folder}.")
        if theirs is None:
            write_changed(path, encoded)
            return
        differing = differing_keys(mine, theirs)
        if differing:
            listed = "; ".join(
                f"{key} is {_short(theirs.get(key))} there and {_short(mine.get(key))} here"
                for key in differing
            )
            raise ValueError(
                f"{self.folder} holds rollouts of another policy or of other settings: {listed}. "
                "Give another folder, or delete this one to start over."
            )
        write_changed(path, encoded)

    def holds(self, key: str) -> bool:
        return self._files.holds(key)

    def get(self, key: str) -> dict[str, Tensor] | None:
        """The tensors of a finished unit; None if it has not been drawn yet."""
        data = self._files.raw(key)
        if data is None:
            return None
        return _tensors(self._files.path(key), self._files.body(key, data))

    def put(self, key: str, unit: Mapping[str, Tensor]) -> None:
        body = dump_tensors({name: x.detach().cpu().contiguous() for name, x in unit.items()})
        self._files.put(key, body)

    def __len__(self) -> int:
        return len(self._files)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}...{text[-8:]}"
