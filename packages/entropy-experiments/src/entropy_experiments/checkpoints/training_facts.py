"""What training was like, as far as files beside a checkpoint say.

`entropy_probe.json` is this project's own: a flat object of the names below, others refused, values
held to the config's own rules. A TRL YAML (the file given to `trl grpo --config`) has hundreds of
keys; those that decide the step are translated, or noted in `facts["note"]` where this program does
not follow them, and the rest are not ours to judge. `entropy_probe_record.json` is what the
callback saw: the run's own prompts and rewards, the options that are not followed, and the facts as
they were, which the JSON beside it must still have. The JSON wins over the record, and the record
over the YAML. Where a record was lost, no dataset and no reward are assumed in its place.

All may come with a download, so none can name code to run; but for the record, which may name code
that is already on this machine, under the conditions that `training_record` states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypedDict

from pydantic import ConfigDict, TypeAdapter, ValidationError

from entropy_experiments.checkpoints.layout import OF_RECORDS, STEP, read_json
from entropy_experiments.checkpoints.layout import UPDATE_BATCH as BATCH
from entropy_experiments.checkpoints.training_record import RECORD_FILE, RECORDED, read_record
from entropy_experiments.config.fields import Names, Text
from entropy_experiments.config.keys import shown
from entropy_experiments.config.reading import LARGEST_FILE
from entropy_experiments.config.sections import Data, Sampling, Update
from entropy_experiments.config.yaml_dialect import parse_text
from entropy_experiments.input_errors import check_regular, short

FACTS_FILE = "entropy_probe.json"
TRL_FILES = ("trl.yaml", "trl_config.yaml", "grpo.yaml", "training.yaml", "train.yaml")

ReadFacts = Mapping[str, Any]
"""What the files beside a checkpoint say, by name: those of `FactsFile`, and more of a record."""


class FactsFile(TypedDict, total=False):
    """`entropy_probe.json`, key by key."""

    loss: str
    advantage: str
    clip_low: float
    clip_high: float
    ratio: str
    beta: float
    kl_ratio: bool
    entropy_coef: float
    delta: float
    sapo_positive: float
    sapo_negative: float
    max_grad_norm: float
    max_completion_length: int
    num_iterations: int
    lr: float
    amp_dtype: str
    temperature: float
    top_p: float
    stop: list[str]
    dataset_name: str
    dataset_path: str
    split: str
    B_U: int
    G: int
    reward_functions: list[str]
    reward_weights: list[float]
    load_in_4bit: bool
    load_in_8bit: bool
    note: list[str]


KNOWN_FACTS = tuple(FactsFile.__annotations__)

DATASETS = ("gsm8k_r1_template", "gsm8k", "jsonl", "countdown", "countdown_r1_template")
GYM = "reasoning_gym:"
REWARD_NAMES = ("math_verify", "answer_exact", "format", "countdown", "reasoning_gym")
"""Those of the tasks, a layer above this one; a test holds them together."""

FIELDS: dict[str, Any] = {
    **{name: (Sampling, name) for name in ("temperature", "top_p", "stop")},
    **{name: (Data, name) for name in ("split", "reward_functions", "reward_weights")},
    "dataset_path": (Data, "file"),
    "B_U": (Data, "update_prompts"),
    "G": (Data, "responses_per_prompt"),
}
"""Whose rules a fact obeys, where it is not `update`'s."""
OTHERS: dict[str, Any] = {"dataset_name": Text, "note": Names, "load_in_4bit": bool}
OTHERS["load_in_8bit"] = bool

NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "generation_kwargs": ({},),
    "mask_truncated_completions": (False,),
    "top_entropy_quantile": (1,),
}
"""TRL's keys that change the step in ways this program does not rebuild, and where they do not."""
CHANGE_THE_LOSS = ("top_entropy_quantile",)
"""Those that make the step rebuilt from a recorded batch another one."""


def _same(value: Any) -> Any:
    return value


def _number(value: Any) -> float:
    """YAML 1.1 reads 1e-6 as text; a bool is no number."""
    if isinstance(value, bool):
        raise ValueError("a bool")
    return float(value)


def _whole(value: Any) -> int:
    number = _number(value)
    if not number.is_integer():
        raise ValueError("not whole")
    return int(number)


def _scale(value: Any) -> Any:
    """TRL's scale_rewards: true and "group", false and "none" mean the same."""
    return {True: "group", False: "none", "true": "group", "false": "none"}.get(value, value)


FROM_TRL: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "loss_type": ("loss", _same),
    "scale_rewards": ("advantage", _scale),
    "epsilon": ("clip_low", _number),
    "epsilon_high": ("clip_high", _number),
    "importance_sampling_level": ("ratio", _same),
    "beta": ("beta", _number),
    "entropy_coef": ("entropy_coef", _number),
    "delta": ("delta", _number),
    "use_bias_correction_kl": ("kl_ratio", _same),
    "sapo_temperature_pos": ("sapo_positive", _number),
    "sapo_temperature_neg": ("sapo_negative", _number),
    "max_grad_norm": ("max_grad_norm", _number),
    "max_completion_length": ("max_completion_length", _whole),
    "num_iterations": ("num_iterations", _whole),
    "learning_rate": ("lr", _number),
    "temperature": ("temperature", _number),
    "top_p": ("top_p", _number),
    "num_generations": ("G", _whole),
    "dataset_name": ("dataset_name", _same),
    "reward_funcs": ("reward_functions", _same),
    "reward_weights": ("reward_weights", _same),
    "load_in_4bit": ("load_in_4bit", _same),
    "load_in_8bit": ("load_in_8bit", _same),
}


def read_facts(folders: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str], list[Path]]:
    """(facts, where each was read, files read), from the nearest folder that has the file."""
    facts: dict[str, Any] = {}
    sources: dict[str, str] = {}
    files: list[Path] = []
    record = read_record(folders)
    for names, read in (((FACTS_FILE,), _own), ((RECORD_FILE,), _recorded), (TRL_FILES, _trl)):
        path = next((f / n for f in folders for n in names if (f / n).is_file()), None)
        if path is None:
            continue
        if read is _own and record is not None and "facts" in record.content:
            if folders.index(record.path.parent) < folders.index(path.parent):
                continue  # the checkpoint's own file is gone, and its record has the facts
            if record.path.parent == path.parent:
                _refuse_edited(path, record.content["facts"])
        files.append(path)
        content = read(path, tuple(facts))
        if "note" in content and "note" in facts:
            facts["note"] += content["note"]
            sources["note"] += f", {path.name}"
        for name, value in content.items():
            if name not in facts:
                facts[name], sources[name] = value, path.name
    if record is None and (sign := _sign_of_a_record(folders)) is not None:
        lost = f"{RECORD_FILE} is missing, and {sign} shows that the run was recorded; copy it back"
        for group, absent in zip(GROUPS, (LOST_PROMPTS, LOST_REWARDS), strict=True):
            if not any(name in facts for name in group):
                facts |= {name: value or lost for name, value in absent.items()}
                sources |= dict.fromkeys(absent, "what is left of a record")
    return facts, sources, files


def _sign_of_a_record(folders: tuple[Path, ...]) -> Path | None:
    """What only a recorded run leaves, in the checkpoint or beside it; None: there is nothing."""
    for folder in folders[:-1] or folders:
        # a batch may have been put there by hand, as entropy_probe.json may
        signs = [folder / name for name in sorted(OF_RECORDS - {BATCH})]
        if (sign := next((sign for sign in signs if sign.is_dir()), None)) is not None:
            return sign
    *inner, run = folders
    if not inner or STEP.search(inner[-1].name) is None:
        return None
    return next(iter(sorted(run.glob(f"*/{RECORD_FILE}"))), None)


def _refuse_edited(path: Path, recorded: Mapping[str, Any]) -> None:
    """The facts beside a record are those that it holds: they decide the step."""
    content = {name: value for name, value in read_json(path).items() if value is not None}
    odd = [
        f"{name} is {_shown(content, name)} and was {_shown(recorded, name)} in training"
        for name in sorted({*content, *recorded})
        if content.get(name) != recorded.get(name)
    ]
    if odd:
        raise ValueError(
            f"{path} is not the file that training wrote: {', '.join(odd)}, as {RECORD_FILE} says. "
            "Restore it. Another value belongs in the config, such as sampling.temperature or "
            "update.loss: the result then says that it differs from training's."
        )


def _shown(content: Mapping[str, Any], name: str) -> str:
    return shown(content[name]) if name in content else "missing"


def _own(path: Path, _earlier: tuple[str, ...]) -> dict[str, Any]:
    return _checked(path, read_json(path))


def check_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that a training loop hands over, held to the rules of the file."""
    try:
        return _checked(Path("facts"), facts)
    except ValueError as error:
        raise ValueError(str(error).removesuffix(" Repair the file.")) from error


def _checked(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Facts under this project's names, held to their rules."""
    unknown = [name for name in content if name not in KNOWN_FACTS]
    if unknown:
        near = get_close_matches(unknown[0], KNOWN_FACTS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        rest = f" ({len(unknown)} in all)" if len(unknown) > 5 else ""
        raise ValueError(
            f"{path} has unknown keys {unknown[:5]}{rest}.{hint} Known keys: "
            f"{', '.join(KNOWN_FACTS)}."
        )
    facts = {n: _valid(path, n, n, value) for n, value in content.items() if value is not None}
    _refuse_code(path, facts.get("reward_functions", ()))
    for name in facts.get("reward_functions", ()):
        if name not in REWARD_NAMES:
            raise _wrong(path, "reward_functions", name, f"one of {', '.join(REWARD_NAMES)}")
    dataset = facts.get("dataset_name")
    if dataset is not None and not _is_dataset(dataset):
        raise _wrong(path, "dataset_name", dataset, f"one of {', '.join(DATASETS)}, {GYM}<task>")
    if "reward_weights" in facts:
        functions, weights = facts.get("reward_functions", []), facts["reward_weights"]
        if len(functions) != len(weights):
            expected = f"one for each of the {len(functions)} reward_functions"
            raise _wrong(path, "reward_weights", weights, expected)
    return facts


GROUPS = (
    ("dataset_name", "dataset_path", "split", "E_split", "U_split", "dataset_absent"),
    ("reward_functions", "reward_weights", "reward_sources", "reward_absent"),
)
"""Facts that belong together: of two files that speak, all of a group come from one."""
LOST_PROMPTS = {"dataset_name": RECORDED, "dataset_absent": ""}
LOST_REWARDS = {"reward_absent": ""}
"""What is read where a record is gone; "" is filled with the reason."""


def _recorded(path: Path, earlier: tuple[str, ...]) -> dict[str, Any]:
    record = read_record((path.parent,))
    assert record is not None  # the caller has seen the file
    facts: dict[str, Any] = record.facts()
    stated: dict[str, Any] = {}
    if not earlier:  # entropy_probe.json is gone
        options = record.content["options"]
        own = record.content.get("facts")
        stated = _translated(path, options) if own is None else _checked(path, own)
    for group in GROUPS:
        if any(name in earlier or name in stated for name in group):
            facts = {name: value for name, value in facts.items() if name not in group}
    return {
        **facts,
        **stated,
        "unfollowed": list(record.unfollowed),
        "sampling": list(record.sampling),
    }


def _trl(path: Path, earlier: tuple[str, ...]) -> dict[str, Any]:
    """Its facts but for what is `known` already."""
    check_regular(path, most=LARGEST_FILE)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8. Repair or remove it.") from error
    content, _ = parse_text(text, source=str(path))
    facts = _translated(path, content)
    named, notes = _trl_task(path, content, earlier)
    if "unfollowed" in earlier:  # a record has seen what became of these
        return {**facts, **named, **({"note": tuple(notes)} if notes else {})}
    odd = [
        key
        for key, harmless in NOT_FOLLOWED.items()
        if content.get(key) is not None and content[key] not in harmless
    ]
    notes += [
        f"{path.name}: training had {key} = {shown(content[key])}, "
        "which this program does not follow"
        for key in odd
    ]
    of_loss = [f"{key} = {shown(content[key])}" for key in odd if key in CHANGE_THE_LOSS]
    return {
        **facts,
        **named,
        **({"note": tuple(notes)} if notes else {}),
        **({"unfollowed": of_loss} if of_loss else {}),
    }


def _translated(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """TRL's options under this project's names, but for the task."""
    facts: dict[str, Any] = {}
    for key, (name, convert) in FROM_TRL.items():
        if content.get(key) is None or name in (
            "dataset_name",
            "reward_functions",
            "reward_weights",
        ):
            continue
        try:
            value = convert(content[key])
        except (TypeError, ValueError, OverflowError) as error:
            what = "a whole number" if convert is _whole else "a number"
            raise _wrong(path, key, content[key], what) from error
        # Losses and ratios of TRL's that are not rebuilt are refused where they are used, unless
        # the config says otherwise; and its epsilon may exceed 1, which clips nothing below.
        free = name in ("loss", "advantage", "ratio", "clip_low")
        facts[name] = value if free else _valid(path, key, name, value)
    # TRL's own default: the upper bound is the lower one unless it is given.
    if "clip_low" in facts:
        facts.setdefault("clip_high", facts["clip_low"])
    if "bf16" in content or "fp16" in content:
        half = (
            "bfloat16" if content.get("bf16") else "float16" if content.get("fp16") else "float32"
        )
        facts["amp_dtype"] = half
    return facts


def _trl_task(
    path: Path, content: Mapping[str, Any], earlier: tuple[str, ...]
) -> tuple[dict[str, Any], list[str]]:
    """Its dataset and rewards if they are this program's too; others are left unread, and noted."""
    facts: dict[str, Any] = {}
    unread: list[str] = []
    dataset = content.get("dataset_name")
    dataset = "gsm8k" if dataset == "openai/gsm8k" else dataset
    if isinstance(dataset, str) and _is_dataset(dataset):
        facts["dataset_name"] = dataset
    elif dataset is not None and "dataset_name" not in earlier:
        unread.append(f"dataset_name = {short(dataset, 80)}")
    rewards = content.get("reward_funcs")
    names = [rewards] if isinstance(rewards, str) else rewards
    if "reward_functions" in earlier:
        pass  # Weights belong to functions: those of another file would be of others.
    elif isinstance(names, list) and names and all(name in REWARD_NAMES for name in names):
        facts["reward_functions"] = names
        weights = content.get("reward_weights")
        if weights is not None:
            facts["reward_weights"] = _valid(path, "reward_weights", "reward_weights", weights)
    elif rewards is not None:
        unread.append(f"reward_funcs = {short(rewards, 80)}")
    return facts, [f"{path.name}: {one} is none of this program's; left unread" for one in unread]


def _is_dataset(name: str) -> bool:
    return name in DATASETS or (name.startswith(GYM) and name != GYM)


def _refuse_code(path: Path, functions: Any) -> None:
    code = [name for name in functions if ":" in name]
    if code:
        raise ValueError(
            f"{path}: reward_functions has {code[0]!r}; expected names among "
            f"{', '.join(REWARD_NAMES)}. A checkpoint's file cannot have code imported, and none "
            "of it was: remove it there and set data.reward_functions in the config."
        )


def _valid(path: Path, key: str, name: str, value: Any) -> Any:
    """The value as the config would read it, lists as lists and notes as a tuple."""
    if name in OTHERS:
        kind = OTHERS[name]
    else:
        section, field_name = FIELDS.get(name, (Update, name))
        field = section.model_fields[field_name]
        kind = field.annotation
        for rule in field.metadata:
            kind = Annotated[kind, rule]
    rules = ConfigDict(strict=True, allow_inf_nan=False)
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=rules)  # type: ignore[arg-type]
    try:
        valid = adapter.validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].replace("a valid tuple", "a list")
        expected = re.sub(r"^(Input|Value|Tuple) should (be |have )", "", reason)
        raise _wrong(path, key, value, expected) from error
    return list(valid) if isinstance(valid, tuple) and name != "note" else valid


def _wrong(path: Path, key: str, got: Any, expected: str) -> ValueError:
    return ValueError(f"{path}: {key} is {shown(got)}; expected {expected}. Repair the file.")
