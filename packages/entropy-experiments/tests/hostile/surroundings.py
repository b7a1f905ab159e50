"""Hostile surroundings: the environment, the command line, code of the user's, the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.harness import SMALL, Box, Cases, probe
from hostile.mutations import ESCAPES

ENVIRONMENT = Cases("environment")
ARGUMENTS = Cases("arguments")
USERS_CODE = Cases("user's code")
FAULTS = Cases("faults")


# --- environment --------------------------------------------------------------------------------


def environment(*command: str, **variables: str) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        for name, value in variables.items():
            box.patch.setenv(name, value)
        return list(command) or probe(box, sets=("update.batch=drawn",))

    return make


for name, variables in {
    "RANK=x": {"RANK": "x", "WORLD_SIZE": "2"},
    "RANK empty": {"RANK": "", "WORLD_SIZE": "2"},
    "RANK negative": {"RANK": "-1", "WORLD_SIZE": "2"},
    "RANK beyond": {"RANK": "5", "WORLD_SIZE": "2"},
    "RANK a fraction": {"RANK": "0.5", "WORLD_SIZE": "2"},
    "RANK of escapes": {"RANK": ESCAPES.replace("\0", ""), "WORLD_SIZE": "2"},
    "WORLD_SIZE=x": {"RANK": "0", "WORLD_SIZE": "x"},
    "WORLD_SIZE negative": {"RANK": "0", "WORLD_SIZE": "-2"},
    "WORLD_SIZE zero": {"RANK": "0", "WORLD_SIZE": "0"},
    "WORLD_SIZE huge": {"RANK": "0", "WORLD_SIZE": "9" * 5000},
}.items():
    word = "RANK" if name.startswith("RANK") else "WORLD_SIZE"
    for verb in (("run",), ("train", "--dry-run")):
        ENVIRONMENT.add(
            f"{name}, {verb[0]}",
            environment(*verb, **variables),
            ends=(2,),
            names=(word,),
            quick=name == "RANK=x" and verb[0] == "train",
        )
ENVIRONMENT.add(
    "LOCAL_RANK=x",
    environment("run", RANK="0", WORLD_SIZE="2", LOCAL_RANK="x"),
    ends=(2,),
    names=("LOCAL_RANK",),
)
ENVIRONMENT.add(
    "no MASTER_ADDR", environment("run", RANK="0", WORLD_SIZE="2"), ends=(2,), names=("MASTER",)
)
ENVIRONMENT.add(
    "MASTER_PORT=x",
    environment("run", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="x"),
    ends=(2,),
    names=("MASTER_PORT",),
)
for name, variables in {
    "OMP_NUM_THREADS=-1": {"OMP_NUM_THREADS": "-1"},
    "OMP_NUM_THREADS=x": {"OMP_NUM_THREADS": "x"},
    "CUDA_VISIBLE_DEVICES=7": {"CUDA_VISIBLE_DEVICES": "7"},
    "HF_HOME not a folder": {"HF_HOME": "/dev/null"},
    "no home": {"HOME": "/nowhere", "XDG_CACHE_HOME": "/dev/null/x"},
    "columns=x": {"COLUMNS": "x", "LINES": "-1"},
    "a language of nobody": {"LANG": "nobody", "LC_ALL": "nobody"},
    "TMPDIR not there": {"TMPDIR": "/nowhere"},
    "no PATH": {"PATH": ""},
    "a git of nobody": {"GIT_DIR": "/dev/null"},
}.items():
    ENVIRONMENT.add(name, environment(**variables), ends=(0,))


# --- arguments ----------------------------------------------------------------------------------


def arguments(*words: str) -> Callable[[Box], list[str]]:
    return lambda box: list(words)


for name, words in {
    "checkpoint with a zero byte": ("run", "--checkpoint", "a\0b"),
    "unknown verb": ("nobody",),
    "unknown option": ("run", "--nobody"),
    "option without a value": ("run", "--checkpoint"),
    "a verb of escapes": (ESCAPES,),
    "a verb of nobody": ("nobody",),
    "an option of escapes": ("run", f"--{ESCAPES}"),
    "a budget of text": ("influence", "--entropy-budget", "x"),
    "steps of text": ("train", "--steps", "x"),
    "prompts of text": ("evaluate", "--prompts", "x"),
    "one word too many": ("run", "x", "y"),
    "columns of text": ("report", "x", "--columns", "x"),
    "threshold of text": ("evaluate", "--threshold", ESCAPES),
}.items():
    ARGUMENTS.add(
        name, arguments(*words), ends=(2,), usage=True, quick=name.startswith("checkpoint")
    )
for name, words, named in (
    ("set without a value", ("run", "--set", "x"), "--set"),
    ("set without a key", ("run", "--set", "=5"), "--set"),
    ("set unknown", ("run", "--set", "batch_config.nobody=5"), "nobody"),
    ("set a section", ("run", "--set", "batch_config=5"), "batch_config"),
    ("set below a value", ("run", "--set", "batch_config.B_E.x=5"), "B_E"),
    ("set text for a number", ("run", "--set", "batch_config.B_E=x"), "B_E"),
    ("set a list", ("run", "--set", "batch_config.B_E=[1, 2"), "B_E"),
    ("set an object", ("run", "--set", "batch_config.B_E=!!python/name:os.system"), "B_E"),
    ("set escapes", ("run", "--set", f"{ESCAPES}={ESCAPES}"), "red"),
    ("set deeply", ("run", "--set", "a" + ".a" * 5000 + "=1"), "a.a"),
    ("set nested deeply", ("run", "--set", "batch_config.B_E=" + "[" * 20_000), "B_E"),
    ("set a long number", ("run", "--set", "batch_config.B_E=" + "9" * 5000), "B_E"),
    ("checkpoint not there", ("run", "--checkpoint", "nowhere"), "nowhere"),
    ("checkpoint embedded, not there", ("run", "--checkpoint", "embedded/checkpoint-99"), "99"),
    ("checkpoint a device", ("run", "--checkpoint", "/dev/null"), "/dev"),
    ("checkpoint empty", ("run", "--checkpoint", ""), "heckpoint"),
    ("checkpoint of a long name", ("run", "--checkpoint", "x" * 5000), "heckpoint"),
    ("checkpoint of escapes", ("run", "--checkpoint", ESCAPES), "heckpoint"),
    ("checkpoint of nobody's home", ("run", "--checkpoint", "~nobody_here/x"), "nobody_here"),
    ("config not there", ("run", "--config", "nowhere.yaml"), "nowhere"),
    ("config a folder", ("run", "--config", "."), "folder"),
    ("config with a zero byte", ("run", "--config", "a\0b"), "a"),
    ("config of a long name", ("run", "--config", "x" * 5000), "x"),
    ("config of nobody's home", ("run", "--config", "~nobody_here/x"), "nobody_here"),
    ("config of a training", ("run", "--config", "train_tiny"), "train_tiny"),
    ("template unknown", ("config", "template", "nobody"), "nobody"),
    ("two configurations", ("train", "--config", "a", "--preset", "tiny"), "--preset"),
    ("preset unknown", ("train", "--preset", "nobody"), "nobody"),
    ("no steps", ("train", "--steps", "0"), "--steps"),
    ("1e8 steps", ("train", "--dry-run", "--steps", "100000000"), "steps"),
    ("resume nothing", ("train", "--resume", "--out", "nowhere", "--dry-run"), "nowhere"),
    ("evaluate nowhere", ("evaluate", "nowhere"), "nowhere"),
    ("evaluate no prompts", ("evaluate", "--prompts", "0"), "prompts"),
    ("evaluate 1e9 prompts", ("evaluate", "--prompts", "1000000000"), "prompts"),
    ("evaluate 1e9 samples", ("evaluate", "--samples", "1000000000"), "samples"),
    ("evaluate k of text", ("evaluate", "--k", "a,b"), "--k"),
    ("evaluate k huge", ("evaluate", "--k", "9" * 5000), "--k"),
    ("evaluate a threshold of NaN", ("evaluate", "--threshold", "nan"), "threshold"),
    ("evaluate a seed negative", ("evaluate", "--seed", "-1"), "seed"),
    ("evaluate a reward unknown", ("evaluate", "--reward", "nobody"), "nobody"),
    ("what if what", ("influence", "--what-if", "nobody=5"), "nobody"),
    ("what if NaN", ("influence", "--what-if", "lr=nan"), "lr"),
    ("what if nested", ("influence", "--what-if", "(" * 20_000), "hat"),
    ("what if of escapes", ("influence", "--what-if", ESCAPES), "what-if"),
    ("confirm nothing", ("influence", "--confirm"), "--confirm"),
    ("a budget of NaN", ("influence", "--entropy-budget", "nan"), "entropy_budget"),
    ("a budget infinite", ("influence", "--entropy-budget", "inf"), "entropy_budget"),
    ("from nowhere", ("influence", "--from", "nowhere", "--what-if", "drop=negative"), "nowhere"),
    ("report nowhere", ("report", "nowhere"), "nowhere"),
    ("report too many options", ("report", "a", "b", "--linearity"), "--linearity"),
):
    ARGUMENTS.add(
        name,
        arguments(*words),
        ends=(2,),
        names=(named,),
        quick=name == "1e8 steps",
    )


# --- code of the user's -------------------------------------------------------------------------


def reward(source: str, name: str = "reward") -> Callable[[Box], list[str]]:
    """A reward of one's own, in a module beside the command."""

    def make(box: Box) -> list[str]:
        module = box.module(source)
        sets = (f"reward.functions=['{module}:{name}']", "update.batch=drawn")
        return probe(box, sets=(*sets, "update.lr=0.003"))

    return make


RAISES = "def reward(completions, problems):\n    "
for name, source in {
    "raises": RAISES + "raise RuntimeError('mine')",
    "raises a ValueError": RAISES + "raise ValueError('mine')",
    "raises escapes": RAISES + "raise KeyError('\\x1b[31m')",
    "raises an OSError": RAISES + "open('/nowhere/at/all')",
    "raises what has no text": RAISES + "raise type('E', (Exception,), {'__str__': lambda s: 1/0})",
    "asserts": RAISES + "assert False",
    "recurses": RAISES + "return reward(completions, problems)",
    "exits": "import sys\n" + RAISES + "sys.exit(0)",
    "exits with words": "import sys\n" + RAISES + "sys.exit('bye')",
    "stops a generator": RAISES + "raise StopIteration",
    "interrupts as if by hand": RAISES + "raise SystemExit",
    "changes directory": "import os\n" + RAISES + "os.chdir('/'); return [1.0] * len(completions)",
    "NaN": RAISES + "return [float('nan')] * len(completions)",
    "infinite": RAISES + "return [float('inf')] * len(completions)",
    "too few": RAISES + "return [1.0]",
    "none": RAISES + "return None",
    "a number": RAISES + "return 1.0",
    "text": RAISES + "return 'x' * len(completions)",
    "lists": RAISES + "return [[1.0]] * len(completions)",
    "without end": "import itertools\n" + RAISES + "return itertools.count()",
    "huge integers": RAISES + "return [10 ** 400] * len(completions)",
    "out of memory": RAISES + "raise MemoryError",
    "wants other arguments": "def reward(nobody, of, these, at, all):\n    return []",
    "wants none": "def reward():\n    return []",
    "no function": "reward = 5",
    "a class": "class reward:\n    pass",
    "a generator": RAISES + "yield 1.0",
    "a coroutine": "async def reward(completions, problems):\n    return [1.0]",
    "another name": "x = 1",
    "module raises": "raise RuntimeError('mine')",
    "module exits": "import sys\nsys.exit(0)",
    "module changes directory": "import os\nos.chdir('/')\n" + RAISES + "return [1.0, 0.0]",
    "module no Python": "def (",
    "module of zero bytes": "\0",
    "module imports nobody": "import nobody_at_all",
    "module imports itself in a circle": "import sys\nfrom sys import nobody_here",
    "module raises escapes": "raise RuntimeError('\\x1b[31m\\u202e')",
    "module interrupts": "raise SystemExit(3)",
}.items():
    USERS_CODE.add(
        name,
        reward(source),
        ends=(2,),
        names=("users_",),
        quick=name in ("exits", "changes directory", "module exits"),
    )
USERS_CODE.add(
    "equal rewards",
    reward(RAISES + "return [1.0] * len(completions)"),
    ends=(0,),
)
USERS_CODE.add(
    "prints escapes",
    reward(RAISES + "return [float(len(c)) for c in completions]"),
    ends=(0,),
)


def _training(source: str, steps: int = 1) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        module = box.module(source)
        sizes = "buffer_size: 2\nmicrobatch_size: 2\nnum_generations: 2\nmax_completion_length: 4\n"
        text = f"{sizes}reward_functions: ['{module}:reward']\nmax_steps: {steps}\n"
        file = box.write("train.yaml", text + "eval_prompts: 5\nprobe: {enabled: false}\n")
        return ["train", "--config", str(file), "--out", str(box.out), "--quiet"]

    return make


for name, source in {
    "raises": RAISES + "raise RuntimeError('mine')",
    "exits": "import sys\n" + RAISES + "sys.exit(0)",
    "NaN": RAISES + "return [float('nan')] * len(completions)",
    "too few": RAISES + "return [1.0]",
    "changes directory": "import os\n" + RAISES + "os.chdir('/'); return [1.0] * len(completions)",
}.items():
    USERS_CODE.add(f"training: {name}", _training(source), ends=(2,), names=("users_",))

EQUAL = RAISES + "return [1.0] * len(completions)"
USERS_CODE.add(
    "training: equal rewards", _training(EQUAL, steps=8), ends=(3,), names=("users_", "equal")
)


# --- faults -------------------------------------------------------------------------------------


def out_at(make_path: Callable[[Box], Path], *verb: str) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        path = make_path(box)
        options = [word for one in SMALL for word in ("--set", one)]
        return [*(verb or ("run",)), "--out", str(path), "--quiet", *options]

    return make


def _file(box: Box) -> Path:
    return box.write("a_file", "x")


def _below_a_file(box: Box) -> Path:
    return box.write("a_file", "x") / "deeper"


def _read_only(box: Box) -> Path:
    """A folder into which nothing can be written; root may write anywhere, so it is simulated."""
    _refuse(box, errno.EROFS, "locked")
    return box.folder / "locked" / "out"


def _refuse(box: Box, number: int, part: str, *, after: int = 0) -> None:
    """Opening for writing and making folders fail below a path that contains `part`."""
    import builtins

    true_open, true_mkdir, count = builtins.open, os.mkdir, [0]

    def fails(path: Any) -> bool:
        if part not in os.fspath(path) if isinstance(path, str | os.PathLike) else True:
            return False
        count[0] += 1
        return count[0] > after

    def failing_open(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if set(mode) & set("wax+") and isinstance(file, str | os.PathLike) and fails(file):
            raise OSError(number, os.strerror(number), os.fspath(file))
        return true_open(file, mode, *more, **options)

    def failing_mkdir(path: Any, *more: Any, **options: Any) -> None:
        if fails(path):
            raise OSError(number, os.strerror(number), os.fspath(path))
        true_mkdir(path, *more, **options)

    box.patch.setattr(builtins, "open", failing_open)
    box.patch.setattr("io.open", failing_open)
    box.patch.setattr(os, "mkdir", failing_mkdir)


def full_disk(after: int, *verb: str) -> Callable[[Box], list[str]]:
    def make(box: Box) -> list[str]:
        _refuse(box, errno.ENOSPC, str(box.out), after=after)
        options = [word for one in SMALL for word in ("--set", one)]
        return [*(verb or ("run",)), "--out", str(box.out), "--quiet", *options]

    return make


for name, path, named in (
    ("out a file", _file, "a_file"),
    ("out below a file", _below_a_file, "a_file"),
    ("out read-only", _read_only, "locked"),
    ("out a device", lambda box: Path("/dev/null"), "/dev/null"),
    ("out of a long name", lambda box: box.folder / ("x" * 300), "xxx"),
    ("out below /proc", lambda box: Path("/proc/nobody/out"), "/proc/nobody"),
):
    for verb in ("run", "influence", "measure"):
        FAULTS.add(
            f"{name}, {verb}",
            out_at(path, verb),
            ends=(2,),
            names=(named,),
            quick=verb == "run" and name in ("out a file", "out read-only"),
        )
    FAULTS.add(
        f"{name}, train",
        lambda box, path=path: ["train", "--out", str(path(box)), "--steps", "1", "--quiet"],
        ends=(2,),
        names=(named,),
    )
    FAULTS.add(
        f"{name}, evaluate",
        lambda box, path=path: [
            *("evaluate", "--prompts", "1", "--samples", "1"),
            *("--k", "1", "--out", str(path(box)), "--quiet"),
        ],
        ends=(2,),
        names=(named,),
    )
for after in (0, 6, 9, 12, 16, 24):
    FAULTS.add(
        f"disk full at the {after + 1}th write",
        full_disk(after),
        ends=(0, 2),
        quick=after == 9,
    )
    FAULTS.add(f"disk full at the {after + 1}th write, influence", full_disk(after, "influence"))


def file_option(*words: str) -> Callable[[Box], list[str]]:
    return lambda box: [*words, str(_below_a_file(box))]


FAULTS.add("template below a file", file_option("config", "template", "--out"), ends=(2,))
FAULTS.add(
    "template over a file", lambda b: ["config", "template", "--out", str(_file(b))], ends=(2,)
)


def results_below_a_file(box: Box) -> list[str]:
    return probe(box, sets=(f"output.results_path={_below_a_file(box)}",))


def logs_below_a_file(box: Box) -> list[str]:
    sets = (f"detailed_logging.output_directory={_below_a_file(box)}",)
    return probe(box, sets=(*sets, "detailed_logging.enabled=true"))


def rollouts_below_a_file(box: Box) -> list[str]:
    return probe(box, sets=(f"rollouts.save={_below_a_file(box)}",))


FAULTS.add("results below a file", results_below_a_file, ends=(2,), names=("a_file",), quick=True)
FAULTS.add("logs below a file", logs_below_a_file, ends=(2,), names=("a_file",))
FAULTS.add("rollouts below a file", rollouts_below_a_file, ends=(2,), names=("a_file",))

FAMILIES = (ENVIRONMENT, ARGUMENTS, USERS_CODE, FAULTS)
