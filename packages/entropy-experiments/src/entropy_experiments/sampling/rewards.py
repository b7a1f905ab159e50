"""Rewards of a response: named reward functions, and weighted sums of them.

    math_verify     the final answer is mathematically the problem's (math-verify)
    answer_exact    the final answer is the same text, blanks aside
    format          <think>...</think><answer>...</answer>, each tag once and nothing around
    countdown       the expression uses every number once and makes the target
    reasoning_gym   reasoning-gym's own scorer of the task
    module:function your own, one number per completion; also path/to/file.py:function

The final answer is the content of the last <answer> tag; of "hash" problems what follows the last
####; of "free" problems (a JSONL file's own prompts) the tag if there is one, else everything.

A function of the user's own is imported by name and called as TRL calls it:

    function(prompts=..., completions=..., completion_ids=..., **columns)

where every column of the dataset comes under its own name, a list with one entry per completion.
A conversational prompt is a list of messages, and its completion too. A function without `**kwargs`
gets those of these arguments that it names, besides `problems` and `answers`; one whose parameters
are none of them gets (completions, problems) in this order. Coroutines are awaited.

A function of a *record* is called exactly as TRL did, with all arguments. Whatever fails, hangs
longer than the time limit, or returns something else than one number (or None: no opinion) per
completion becomes one sentence.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from entropy_experiments.checkpoints.layout import TRAINER_STATE, read_json
from entropy_experiments.checkpoints.training_record import RewardSource, module_is_file
from entropy_experiments.input_errors import (
    InputError,
    TimeLimitError,
    can_interrupt,
    library_errors,
    short,
    time_limit,
    users_code,
)
from entropy_experiments.sampling.countdown import Countdown, solved
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.reward_scripts import training_on_import

if TYPE_CHECKING:
    from torch import Tensor  # names are looked up, in a dry run, without it


RewardFunction = Callable[[list[str], list[Problem]], list[float]]
Ids = Sequence[Sequence[int]]

VERIFY_SECONDS = 5
LONGEST_ANSWER = 300
"""Characters; whatever is longer is an essay, not an answer, and may take sympy for ever."""
_RUNAWAY = re.compile(r"(\*\*|\^)[^*^]*(\*\*|\^)|\d{40}|(\*\*|\^)\s*[({]*\s*\d{4}|!\s*!")
"""Powers of powers, huge exponents and numbers: no answer to a problem, but a trap for sympy."""
SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardResult:
    total_N: Tensor
    by_function: Mapping[str, Tensor]
    """[N] of each function, before its weight."""

    def take(self, rows: slice) -> RewardResult:
        return RewardResult(
            total_N=self.total_N[rows],
            by_function={name: value_N[rows] for name, value_N in self.by_function.items()},
        )

    @staticmethod
    def join(parts: Sequence[RewardResult]) -> RewardResult:
        import torch

        return RewardResult(
            total_N=torch.cat([part.total_N for part in parts]),
            by_function={
                name: torch.cat([part.by_function[name] for part in parts])
                for name in parts[0].by_function
            },
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Reward:
    """A weighted sum of functions; calling it scores a list of completions."""

    functions: Mapping[str, RewardFunction | OwnReward]
    weights: tuple[float, ...]

    @property
    def own(self) -> bool:
        """Whether a function is the user's: it may cost, or need what a trial does not have."""
        return any(isinstance(function, OwnReward) for function in self.functions.values())

    def __call__(
        self,
        completions: Sequence[str],
        problems: Sequence[Problem],
        *,
        completion_ids: Ids | None = None,
    ) -> RewardResult:
        """`completion_ids`: the completions' tokens, for functions that read them."""
        if len(completions) != len(problems):
            raise ValueError(
                f"{len(completions)} completions for {len(problems)} problems; expected one "
                "problem per completion."
            )
        texts, answered = list(completions), list(problems)
        by_function = {
            name: _checked(
                name, function(texts, answered, completion_ids), len(texts), optional=True
            )
            if isinstance(function, OwnReward)
            else _checked(name, function(texts, answered), len(texts))
            for name, function in self.functions.items()
        }
        import torch

        total_N = torch.zeros(len(texts), dtype=torch.float64)
        for weight, value_N in zip(self.weights, by_function.values(), strict=True):
            total_N = total_N + torch.where(value_N.isnan(), 0.0, weight * value_N)
        silent_N = torch.stack(list(by_function.values())).isnan().all(0)
        if bool(silent_N.any()):
            raise ValueError(
                f"Every reward function returned None for completion {int(silent_N.int().argmax())}"
                f" ({', '.join(self.functions)}); expected a number from at least one. TRL counts "
                "such a completion as 0: to do the same, return 0 instead of None, or name a "
                "function that does: data.reward_functions (entropy-probe evaluate: --reward)."
            )
        return RewardResult(total_N=total_N, by_function=by_function)

    def at_checkpoint(self, folder: Path) -> Reward:
        """The same at this checkpoint's TrainerState, which TRL hands over as `trainer_state`."""
        file = folder / TRAINER_STATE
        if not self.own or not file.is_file():
            return self
        from transformers import TrainerState

        content = read_json(file)
        known = {field.name for field in fields(TrainerState)}  # other versions have others
        with library_errors(f"{file} is no state of a trainer", "Restore it, or delete it."):
            state = TrainerState(**{k: value for k, value in content.items() if k in known})
        functions = {
            name: replace(function, trainer_state=state)
            if isinstance(function, OwnReward)
            else function
            for name, function in self.functions.items()
        }
        return replace(self, functions=functions)


def build_reward(
    functions: Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    sources: Sequence[RewardSource] | None = None,
    seconds: float = SECONDS,
) -> Reward:
    """A reward from names (see the module's docstring); weights are 1 unless given.

    `sources`: where a training record says that the functions of these names are.
    """
    if isinstance(functions, str) or not functions:
        raise ValueError(
            f"data.reward_functions is {functions!r}; expected a list with at least one of "
            f"{', '.join(NAMED)} or module:function."
        )
    if len(set(functions)) < len(functions):
        raise ValueError(
            f"data.reward_functions {list(functions)} names one twice; use its weight."
        )
    chosen = tuple(1.0 for _ in functions) if weights is None else tuple(map(float, weights))
    if len(chosen) != len(functions):
        raise ValueError(
            f"data.reward_weights has {len(chosen)} entries for {len(functions)} functions; "
            "expected one each."
        )
    if not all(map(math.isfinite, chosen)):
        raise ValueError(f"data.reward_weights is {list(chosen)}; expected finite numbers.")
    by_name: dict[str, RewardFunction | OwnReward] = {}
    for i, name in enumerate(functions):
        if sources is not None:
            by_name[name] = import_recorded_reward(sources[i], seconds=seconds)
        else:
            by_name[name] = _function(name, seconds)
    return Reward(functions=by_name, weights=chosen)


def default_functions(dataset: str) -> tuple[str, ...]:
    """What a dataset is usually rewarded by, when neither config nor checkpoint says."""
    if dataset.startswith("countdown"):
        return ("countdown",)
    if dataset.startswith("reasoning_gym:"):
        return ("reasoning_gym",)
    return ("math_verify",)


def final_answer(completion: str, problem: Problem) -> str | None:
    """The text a response gives as its answer, None if it gives none."""
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, flags=re.DOTALL)
    style = problem.facts.get("style", "tag")
    if tagged:
        return tagged[-1].strip()
    if style == "hash" and "####" in completion:
        lines = completion.rsplit("####", 1)[1].strip().splitlines()
        return lines[0].strip() if lines else None
    return completion.strip() if style == "free" else None


def _math_verify(completions: list[str], problems: list[Problem]) -> list[float]:
    return [
        float(_same_mathematics(final_answer(completion, problem), problem))
        for completion, problem in zip(completions, problems, strict=True)
    ]


def _same_mathematics(answer: str | None, problem: Problem) -> bool:
    if not answer or len(answer) > LONGEST_ANSWER or _RUNAWAY.search(answer):
        return False
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError(
            "The reward 'math_verify' needs the package math-verify: pip install "
            "'math-verify[antlr4_13_2]'."
        ) from error

    # The timeout is a signal, which only the main thread may set: elsewhere the guards above
    # must do.
    main = threading.current_thread() is threading.main_thread()
    seconds = VERIFY_SECONDS if main else None

    def expressions(text: str) -> list[Any]:
        # LaTeX outside of an environment would be read as the bare numbers in it.
        text = f"\\boxed{{{text}}}" if "\\" in text and "boxed" not in text else text
        return parse(text, parsing_timeout=seconds)  # type: ignore[arg-type]

    gold = expressions(problem.answer)
    if not gold:
        raise ValueError(
            f"math-verify cannot read the answer {problem.answer!r} of problem {problem.id!r}; "
            'expected a mathematical expression. For other answers use the reward "answer_exact".'
        )
    parsed = expressions(answer)
    return bool(parsed) and bool(verify(gold, parsed, timeout_seconds=seconds))


def _answer_exact(completions: list[str], problems: list[Problem]) -> list[float]:
    def same(completion: str, problem: Problem) -> bool:
        answer = final_answer(completion, problem)
        return answer is not None and answer.split() == problem.answer.split()

    return [float(same(c, p)) for c, p in zip(completions, problems, strict=True)]


def _format(completions: list[str], problems: list[Problem]) -> list[float]:
    def well_formed(completion: str, problem: Problem) -> bool:
        text = problem.facts.get("opening", "") + completion
        once = all(text.count(t) == 1 for t in ("<think>", "</think>", "<answer>", "</answer>"))
        pattern = r"\s*<think>.*</think>\s*<answer>.*</answer>\s*"
        return once and re.fullmatch(pattern, text, flags=re.DOTALL) is not None

    return [float(well_formed(c, p)) for c, p in zip(completions, problems, strict=True)]


def _countdown(completions: list[str], problems: list[Problem]) -> list[float]:
    def score(completion: str, problem: Problem) -> float:
        if not {"numbers", "target"} <= problem.facts.keys():
            raise ValueError(
                f"Problem {problem.id!r} has no numbers and target, which the reward 'countdown' "
                "needs. Use it with the dataset countdown or countdown_r1_template."
            )
        facts = problem.facts
        task = Countdown(numbers=tuple(facts["numbers"]), target=int(facts["target"]))
        return float(solved(completion, task))

    return [score(c, p) for c, p in zip(completions, problems, strict=True)]


def _reasoning_gym(completions: list[str], problems: list[Problem]) -> list[float]:
    def score(completion: str, problem: Problem) -> float:
        if "task" not in problem.facts:
            raise ValueError(
                f"Problem {problem.id!r} is not of reasoning-gym, whose scorer the reward "
                "'reasoning_gym' asks. Use it with the dataset reasoning_gym:<task>."
            )
        try:
            get_score_answer_fn = importlib.import_module("reasoning_gym").get_score_answer_fn
        except ImportError as error:
            raise ValueError(
                "The reward 'reasoning_gym' needs reasoning-gym, which is an extra: pip install "
                "'entropy-experiments[reasoning-gym]' (or pip install reasoning-gym)."
            ) from error

        scorer: Any = get_score_answer_fn(problem.facts["task"])
        answer = final_answer(completion, problem)
        return float(scorer(answer=answer, entry=problem.facts["entry"]))

    return [score(c, p) for c, p in zip(completions, problems, strict=True)]


NAMED: dict[str, RewardFunction] = {
    "math_verify": _math_verify,
    "answer_exact": _answer_exact,
    "format": _format,
    "countdown": _countdown,
    "reasoning_gym": _reasoning_gym,
}


def _function(name: str, seconds: float) -> RewardFunction | OwnReward:
    if name in NAMED:
        return NAMED[name]
    if ":" not in name:
        near = difflib.get_close_matches(name, NAMED, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"Unknown reward {name!r}; expected one of {', '.join(NAMED)}, or module:function of "
            f"your own.{hint}"
        )
    return import_reward(name, seconds=seconds)


def _shown(value: Any) -> str:
    try:
        return short(repr(value), 80)
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(value).__name__} too long to write"


def _checked(name: str, values: Any, count: int, *, optional: bool = False) -> Tensor:
    """[N] of finite numbers, whatever the function returned them in; `optional`: None is NaN."""
    import torch

    if hasattr(values, "tolist"):  # of torch and of numpy, and what pandas has of it
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ValueError(
            f"Reward {name!r} returned {type(values).__name__}; expected a list, tuple, tensor or "
            f"array of {count} numbers, one per completion."
        )
    if len(values) != count:
        raise ValueError(
            f"Reward {name!r} returned {len(values)} values for {count} completions; expected one "
            "each."
        )
    for row, value in enumerate(values):
        if optional and value is None:
            continue
        try:
            number = float(value) if not isinstance(value, str) else math.nan
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(
                f"Reward {name!r} returned {_shown(value)} for completion {row}; expected a finite "
                "number."
            )
    numbers = [math.nan if value is None else float(value) for value in values]
    return torch.tensor(numbers, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnReward:
    name: str
    function: Callable[..., Any]
    seconds: float = SECONDS
    as_trl: bool = False
    """With every argument that TRL gives, and no other."""
    trainer_state: Any = None
    """transformers' TrainerState of the checkpoint; None: it has none."""

    def __call__(
        self,
        completions: list[str],
        problems: list[Problem],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[Any]:
        arguments, keywords = self._arguments(completions, problems, completion_ids)

        def call() -> Any:
            rewards = self.function(*arguments, **keywords)
            rewards = asyncio.run(rewards) if inspect.iscoroutine(rewards) else rewards
            # A generator runs, and may fail, only when it is read.
            return list(islice(rewards, len(completions) + 1)) if _unread(rewards) else rewards

        advice = (
            f"It was called with {', '.join(keywords) or 'completions, problems'} for "
            f"{len(completions)} completions; expected a list with one number for each."
        )
        with users_code(f"Reward {self.name!r}", advice):
            return self._in_time(call, len(completions))

    def _in_time(self, call: Callable[[], Any], count: int) -> Any:
        what = f"Reward {self.name!r}, for {count} completions,"
        advice = "Is it waiting for something? Raise data.reward_seconds if it needs longer."
        if can_interrupt():
            with time_limit(self.seconds, what, advice):
                return call()
        return _in_a_thread(
            call, self.seconds, late=f"{what} takes more than {self.seconds:g} s. {advice}"
        )

    def _arguments(
        self,
        completions: list[str],
        problems: list[Problem],
        completion_ids: Sequence[Sequence[int]] | None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        offered = _of_trl(completions, problems, completion_ids)
        offered["trainer_state"] = self.trainer_state
        if self.as_trl:
            return (), offered
        others = {"problems": problems, "answers": [problem.answer for problem in problems]}
        offered = {**others, **offered}
        parameters = inspect.signature(self.function).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return (), offered
        needed = {name for name, p in parameters.items() if p.default is p.empty}
        if needed <= offered.keys():
            return (), {name: offered[name] for name in parameters if name in offered}
        return (completions, problems), {}


def import_reward(name: str, *, seconds: float = SECONDS) -> OwnReward:
    """`module:function` or `path/to/file.py:function`."""
    where, _, function = name.rpartition(":")
    hint = "Is the path right?" if where.endswith(".py") else "Is its folder on PYTHONPATH?"
    what = f"Reward {name!r}: module {where!r}"
    with users_code(what, hint, failed="cannot be imported"):
        file = Path(where) if where.endswith(".py") else _file_of(where)
        is_source = file is not None and file.suffix == ".py" and file.is_file()
        training = training_on_import(file) if file is not None and is_source else None
    if training is not None:
        raise InputError(
            f"Reward {name!r}: to import {file} would train: its line {training.line} calls "
            f"{training.call}. Move the function to a file of its own and name that one, or put "
            "the rest of the script under `if __name__ == '__main__':`."
        )
    with users_code(what, hint, failed="cannot be imported"):
        module = _from_file(Path(where)) if where.endswith(".py") else _module(where)
    return OwnReward(name=name, function=_callable(module, function, name), seconds=seconds)


def import_recorded_reward(source: RewardSource, *, seconds: float = SECONDS) -> OwnReward:
    """A function of a training record, which was looked at before: `training_record`."""
    assert "file" in source  # one without file and function is refused there
    assert "function" in source
    name, file, module = source["name"], Path(source["file"]), source.get("module")
    with users_code(
        f"The run's reward {name!r} in {file}",
        "Run from the folder that training ran in, or name another: data.reward_functions.",
        failed="cannot be imported",
    ):
        same = module is not None and module_is_file(module, file)
        imported_module = _module(module) if same and module is not None else _from_file(file)
    function = _callable(imported_module, source["function"], f"{file}:{source['function']}")
    return OwnReward(name=name, function=function, seconds=seconds, as_trl=True)


def _file_of(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _unread(values: Any) -> bool:
    return isinstance(values, Iterator)


def _callable(module: ModuleType, function: str, name: str) -> Callable[..., Any]:
    function_object = getattr(module, function, None)
    if not callable(function_object):
        what = "no such name" if function_object is None else f"a {type(function_object).__name__}"
        raise ValueError(
            f"Reward {name!r}: {module.__name__} has {what} under {function!r}; expected a "
            "function (completions, problems) -> list of numbers."
        )
    return function_object


def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _from_file(file: Path) -> ModuleType:
    """Under a name of its own; what it imports from its own folder is found."""
    file = file.resolve()
    spec = importlib.util.spec_from_file_location(f"_reward_of_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


def _of_trl(
    completions: list[str],
    problems: list[Problem],
    completion_ids: Sequence[Sequence[int]] | None,
) -> dict[str, Any]:
    talks = [problem.facts.get("messages") is not None for problem in problems]
    columns = [
        problem.facts.get("columns", {"answer": problem.answer, **problem.facts})
        for problem in problems
    ]
    shared = set.intersection(*(set(column) for column in columns)) if columns else set()
    fixed = {"prompt", "completion", "completion_ids", "prompts", "completions"}
    keywords: dict[str, Any] = {
        "prompts": [
            problem.facts["messages"] if talk else problem.prompt
            for problem, talk in zip(problems, talks, strict=True)
        ],
        "completions": [
            [{"role": "assistant", "content": text}] if talk else text
            for text, talk in zip(completions, talks, strict=True)
        ],
        **{
            name: [column[name] for column in columns]
            for name in (columns[0] if columns else ())
            if name in shared - fixed
        },
        "log_extra": _nothing,
        "log_metric": _nothing,
    }
    if completion_ids is not None:
        keywords["completion_ids"] = [list(ids) for ids in completion_ids]
    return keywords


def _nothing(*_: Any, **__: Any) -> None:
    """TRL's log_extra and log_metric: there is no table here."""


def _in_a_thread(call: Callable[[], Any], seconds: float, *, late: str) -> Any:
    """Where nothing interrupts it, it can only be waited for no longer."""
    results: list[Any] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed on to whoever waits
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeLimitError(late)
    if failed:
        raise failed[0]
    return results[0]
