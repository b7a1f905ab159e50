"""Reward functions that are the user's own: imported by name, called as TRL calls them.

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
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from entropy_experiments.checkpoints.training_record import module_is_file
from entropy_experiments.input_errors import (
    TimeLimitError,
    can_interrupt,
    time_limit,
    users_code,
)
from entropy_experiments.sampling.datasets import Problem

SECONDS = 600.0


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnReward:
    name: str
    function: Callable[..., Any]
    seconds: float = SECONDS
    as_trl: bool = False
    """With every argument that TRL gives, and no other."""

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
    with users_code(f"Reward {name!r}: module {where!r}", hint, failed="cannot be imported"):
        module = _from_file(Path(where)) if where.endswith(".py") else _module(where)
    return OwnReward(name=name, function=_callable(module, function, name), seconds=seconds)


def import_recorded_reward(source: Mapping[str, Any], *, seconds: float = SECONDS) -> OwnReward:
    """A function of a training record, which was looked at before: `training_record`."""
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
        "trainer_state": None,
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
