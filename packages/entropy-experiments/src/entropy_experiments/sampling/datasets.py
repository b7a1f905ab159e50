"""Problems to put to a policy: from files, from the hub, or made here.

    gsm8k_r1_template     GSM8K questions in the <think>/<answer> template
    gsm8k                 GSM8K questions, plainly, answers after ####
    jsonl                 any JSONL with "prompt" and "answer" (data.file), prompts as they are
    countdown             made from the seed, in the words of sampling/countdown.py
    countdown_r1_template the same in plain language and the <think>/<answer> template
    reasoning_gym:<task>  made by reasoning-gym (an extra), in the <think>/<answer> template
    recorded              the prompts of a run with their columns, as the callback kept them

The order depends on the seed alone, so asking for more gives the same ones first. A prompt never
appears twice: evaluation and update prompts, split from one list, are different questions.
`Problem.facts` holds what rewards need besides the answer: `style` ("tag", "hash" or "free": where
a response states its answer), `opening` (what the prompt already wrote of the response), `chat`;
of recorded prompts also `columns`, the tokens as `ids`, and a conversation's `messages`.

The R1-style prompt opens the first tag itself, so a response starts inside <think>. Rewards that
look at the whole exchange put `R1_OPENING` back in front of it (`Problem.facts["opening"]`). Chat
templates are applied only by `load_problems(..., chat=True)`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from entropy_experiments.checkpoints.training_record import RECORDED
from entropy_experiments.input_errors import library_errors, read_jsonl, time_limit
from entropy_experiments.sampling.countdown import Countdown
from entropy_experiments.sampling.countdown import problems as countdown_problems

R1_OPENING = "<think>"

_R1 = """\
Below, a user asks a question and an assistant solves it. The assistant first works through the \
problem between <think> and </think>, then writes its final answer, and nothing else, between \
<answer> and </answer>.

User: {question}
Assistant: {opening}"""

_PLAIN = """\
Question: {question}
Solve it step by step and write the final answer on its own line after ####.
Answer:"""

_COUNTDOWN = """\
Use each of the numbers {numbers} exactly once, with +, - and * and parentheses, to make {target}. \
Give the expression as the answer, for example <answer>(1 + 2) * 3</answer>."""
DATASETS = (
    "gsm8k_r1_template",
    "gsm8k",
    "jsonl",
    "countdown",
    "countdown_r1_template",
    "reasoning_gym:<task>",
)
MADE = ("countdown", "countdown_r1_template", "reasoning_gym:")
"""How the names of those begin that are made here, and read from no file."""
MADE_SPLITS = ("train", "test")
GSM8K_SPLITS = ("train", "test")
A_FILE = "data.file (of `entropy-probe train`: dataset_path)"
GSM8K_LINE = '{"question": "...", "answer": "... #### 42"}'
RECORDED_LINE = '{"prompt": "...", "_prompt_ids": [1, 2], ...}'
PROMPT_LINE = '{"prompt": "...", "answer": "..."}'
TEMPLATE_SECONDS = 2.0
LARGEST_COUNT = 100_000
"""No probe asks for more; a count with three zeros too many would keep generators busy."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    id: str
    prompt: str
    answer: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def load_problems(
    name: str,
    *,
    path: str | Path | None = None,
    split: str | None = None,
    count: int | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    chat: bool = False,
    conversation: bool = False,
) -> list[Problem]:
    """Up to `count` problems in an order given by `seed`; None: all there are in a file.

    `path`: a JSONL file, or a folder with one per split. `chat` wraps each prompt in the
    tokenizer's chat template, which prompts of messages need in any case; `conversation`: such
    prompts are messages to rewards, too.
    """
    if count is not None and not 0 < count <= LARGEST_COUNT:
        raise ValueError(f"count is {count}; expected 1 to {LARGEST_COUNT} problems.")
    if name in ("gsm8k", "gsm8k_r1_template"):
        problems = _shuffle(_gsm8k(name, path, split or "train"), seed, count)
    elif name == "jsonl":
        problems = _shuffle(_jsonl(path, split), seed, count)
    elif name == RECORDED:
        return _shuffle(_recorded(path, split), seed, count)  # in training's own words already
    elif name in ("countdown", "countdown_r1_template"):
        problems = _countdown(name, split or "train", seed, _needed(name, count))
    elif name.startswith("reasoning_gym:"):
        problems = _reasoning_gym(name, split or "train", seed, _needed(name, count))
    else:
        raise _unknown(name)
    return [
        _in_chat(problem, tokenizer, conversation=conversation)
        if chat or (tokenizer is not None and "messages" in problem.facts)
        else problem
        for problem in problems
    ]


def check_dataset(name: str) -> None:
    """Refuse a name that no dataset has."""
    if name not in DATASETS and not name.startswith("reasoning_gym:"):
        raise _unknown(name)


def _unknown(name: str) -> ValueError:
    near = get_close_matches(name, DATASETS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ValueError(
        f"Unknown dataset {name!r}; expected one of {', '.join(DATASETS)}.{hint} Questions of "
        "your own: data.dataset: jsonl with data.file (of `entropy-probe train`: dataset_name and "
        "dataset_path; of `entropy-probe evaluate`: --task questions.jsonl)."
    )


def without(problems: Iterable[Problem], used: Iterable[Problem]) -> list[Problem]:
    """Those whose prompt is in none of `used`: for E and U read from different splits."""
    ids, prompts = set(), set()
    for problem in used:
        ids.add(problem.id)
        prompts.add(problem.prompt)
    return [p for p in problems if p.id not in ids and p.prompt not in prompts]


def _shuffle(problems: Iterable[Problem], seed: int, count: int | None) -> list[Problem]:
    distinct = list(_distinct(problems))
    # By a hash rather than random.shuffle: a file that grows keeps the order of what it had.
    distinct.sort(key=lambda p: hashlib.sha256(f"{seed} {p.id} {p.prompt}".encode()).digest())
    return distinct[:count]


def _distinct(problems: Iterable[Problem]) -> Iterator[Problem]:
    seen: set[str] = set()
    for problem in problems:
        if problem.prompt not in seen:
            seen.add(problem.prompt)
            yield problem


def _needed(name: str, count: int | None) -> int:
    if count is None:
        raise ValueError(f"Problems of {name!r} are made without end: say how many as count=...")
    return count


def _gsm8k(name: str, path: str | Path | None, split: str) -> Iterator[Problem]:
    template = r1_prompt if name == "gsm8k_r1_template" else plain_prompt
    facts = {"style": "tag", "opening": R1_OPENING} if template is r1_prompt else {"style": "hash"}
    rows = _gsm8k_hub(split) if path is None else _gsm8k_file(_file(path, split), split)
    for where, question, answer in rows:
        yield Problem(
            id=where,
            prompt=template(question),
            answer=gsm8k_answer(answer, where),
            facts={**facts, "question": question},
        )


def _gsm8k_file(path: Path, split: str) -> Iterator[tuple[str, str, str]]:
    for number, record in read_jsonl(path, GSM8K_LINE):
        where = f"{path}:{number}"
        question, answer = (_text(record, key, where, GSM8K_LINE) for key in ("question", "answer"))
        if "####" not in answer:
            raise ValueError(
                f"{where}: the answer does not end in '#### <number>'; expected GSM8K's own format "
                f'{GSM8K_LINE}. Plain answers: use dataset "jsonl" with {PROMPT_LINE}.'
            )
        yield f"gsm8k/{split}/{number}", question, answer


def _gsm8k_hub(split: str) -> Iterator[tuple[str, str, str]]:
    if any(part.split("[")[0].strip() not in GSM8K_SPLITS for part in split.split("+")):
        raise ValueError(
            f"GSM8K has no split {split!r}; expected {' or '.join(GSM8K_SPLITS)}. Set "
            "data.split (or data.evaluation_split, data.update_split; of `entropy-probe train`: "
            "split) to one of them."
        )
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            "GSM8K from the hub needs the `datasets` package: pip install datasets. Or set "
            f"{A_FILE} to a local JSONL file."
        ) from error
    try:
        rows = datasets.load_dataset("openai/gsm8k", "main", split=split)
    except Exception as error:  # the hub's libraries raise their own, and the advice is one
        raise ValueError(
            f"GSM8K ({split}) could not be loaded from the hub: {type(error).__name__}: {error}. "
            f"Without a connection, set {A_FILE} to a local JSONL file with lines "
            f"like {GSM8K_LINE}."
        ) from error
    row: Any
    for number, row in enumerate(rows, start=1):
        yield f"gsm8k/{split}/{number}", row["question"], row["answer"]


def gsm8k_answer(solution: str, where: str) -> str:
    """The number after the last ####, without thousands separators and currency."""
    final = solution.rsplit("####", 1)[-1].strip().replace(",", "").lstrip("$")
    if not final:
        raise ValueError(f"{where}: nothing follows '####'; expected the final answer.")
    return final


def _jsonl(path: str | Path | None, split: str | None) -> Iterator[Problem]:
    if path is None:
        raise ValueError(f'dataset "jsonl" needs {A_FILE}: a file with lines like {PROMPT_LINE}.')
    file = _file(path, split)
    for number, record in read_jsonl(file, PROMPT_LINE):
        where = f"{file}:{number}"
        messages = record.get("prompt")
        if isinstance(messages, list):
            prompt = _conversation(_messages(messages, where))
        else:
            prompt, messages = _text(record, "prompt", where, PROMPT_LINE), None
        answer = record.get("answer")
        if isinstance(answer, (int, float)) and not isinstance(answer, bool):
            answer = str(answer)
        if not isinstance(answer, str):
            raise ValueError(
                f'{where}: "answer" is {type(answer).__name__}; expected text or a number, as in '
                f"{PROMPT_LINE}."
            )
        others = {key: x for key, x in record.items() if key not in ("id", "prompt", "answer")}
        facts: dict[str, Any] = {**others, "style": others.get("style", "free")}
        if messages is not None:
            facts |= {"messages": messages, "columns": {"answer": answer, **others}}
        elif "messages" in facts:  # a column of the user's, for rewards alone
            facts["columns"] = {"answer": answer, **facts}
            del facts["messages"]
        yield Problem(
            id=str(record.get("id", f"{file.name}/{number}")),
            prompt=prompt,
            answer=answer,
            facts=facts,
        )


def _recorded(path: str | Path | None, split: str | None) -> Iterator[Problem]:
    if path is None:
        raise ValueError(
            f"dataset {RECORDED!r} is what a run recorded, and no record names its prompts. Name "
            "a dataset: data.dataset."
        )
    file = _file(path, split)
    for number, record in read_jsonl(file, RECORDED_LINE):
        where = f"{file}:{number}"
        ids = record.pop("_prompt_ids", None)
        if not isinstance(ids, list) or "prompt" not in record:
            raise ValueError(f"{where}: expected a line like {RECORDED_LINE}.")
        prompt, answer = record["prompt"], record.get("answer", "")
        facts = {"style": "free", "ids": tuple(ids), "columns": record}
        if not isinstance(prompt, str):
            facts["messages"] = prompt
        yield Problem(
            id=f"{file.stem}/{number}",
            prompt=prompt if isinstance(prompt, str) else _conversation(prompt),
            answer=answer if isinstance(answer, str) else str(answer),
            facts=facts,
        )


def _messages(prompt: list[Any], where: str) -> list[Any]:
    if not prompt or not all(
        isinstance(one, dict) and {"role", "content"} <= set(one) for one in prompt
    ):
        raise ValueError(
            f'{where}: "prompt" is a list; expected text, or messages such as '
            '[{"role": "user", "content": "..."}].'
        )
    return prompt


def _conversation(messages: Any) -> str:
    """A prompt of messages, as its reader sees it."""
    return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages)


def _countdown(name: str, split: str, seed: int, count: int) -> list[Problem]:
    def problem(task: Countdown) -> Problem:
        facts: dict[str, Any] = {"style": "tag", "numbers": task.numbers, "target": task.target}
        prompt = task.prompt
        if name == "countdown_r1_template":
            prompt = r1_prompt(countdown_question(task.numbers, task.target))
            facts["opening"] = R1_OPENING
        return Problem(
            id=f"{name}/{'-'.join(map(str, (*task.numbers, task.target)))}",
            prompt=prompt,
            answer=str(task.target),
            facts=facts,
        )

    return _take_distinct(map(problem, countdown_problems(f"{split} {seed}")), name, count)


def _reasoning_gym(name: str, split: str, seed: int, count: int) -> list[Problem]:
    try:
        reasoning_gym = import_module("reasoning_gym")
    except ImportError as error:
        raise ValueError(
            f"{name} needs reasoning-gym, which is an extra: pip install "
            "'entropy-experiments[reasoning-gym]' (or pip install reasoning-gym)."
        ) from error
    task = name.split(":", 1)[1]
    rng = random.Random(f"{split} {seed}")
    try:
        # Twice as many as asked for: some tasks repeat their questions.
        entries = reasoning_gym.create_dataset(task, size=2 * count, seed=rng.randrange(2**31))
    except ValueError as error:
        raise ValueError(
            f"reasoning-gym does not know the task {task!r} ({error}). Its names are the keys of "
            "reasoning_gym.factory.DATASETS."
        ) from error

    def problem(entry: Mapping[str, Any]) -> Problem:
        return Problem(
            id=f"{name}/{hashlib.sha256(entry['question'].encode()).hexdigest()[:16]}",
            prompt=r1_prompt(entry["question"]),
            answer=str(entry["answer"]),
            facts={"style": "tag", "opening": R1_OPENING, "task": task, "entry": dict(entry)},
        )

    return _take_distinct(map(problem, entries), name, count)


def _take_distinct(problems: Iterable[Problem], name: str, count: int) -> list[Problem]:
    # A generator that has run out of different problems would repeat itself for ever.
    distinct = list(islice(_distinct(islice(problems, 200 * count)), count))
    if not distinct:
        raise ValueError(f"{name} made no problems.")
    return distinct


def _in_chat(problem: Problem, tokenizer: Any, *, conversation: bool = False) -> Problem:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "chat=True needs a tokenizer with a chat template; got "
            f"{'none' if tokenizer is None else type(tokenizer).__name__ + ' without one'}."
        )
    # What the plain prompt had opened for the assistant is opened again after the template.
    opening = problem.facts.get("opening", "")
    question = problem.prompt.removesuffix(f"\nAssistant: {opening}") if opening else problem.prompt
    messages = problem.facts.get("messages") or [{"role": "user", "content": question}]
    where = f"The chat template of the tokenizer at {tokenizer.name_or_path}"
    advice = "Repair it, or set data.chat_template: false."
    with (
        library_errors(f"{where} fails on a prompt", advice),
        time_limit(TEMPLATE_SECONDS, f"{where}, for one prompt,", advice),
    ):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where} makes nothing of a prompt; expected text. {advice}")
    facts = {**problem.facts, "chat": True, **({"messages": messages} if conversation else {})}
    return replace(problem, prompt=text + opening, facts=facts)


def _file(path: str | Path, split: str | None) -> Path:
    """The file itself, or the split's file inside a folder."""
    path = Path(path)
    if not path.is_dir():
        return path
    names: list[Callable[[str], str]] = [lambda s: f"{s}.jsonl", lambda s: f"{s}_*.jsonl"]
    split = split or "train"
    # A split is a name: as a path, glob would refuse it or leave the folder.
    named = Path(split).name == split
    files = [file for name in names if named for file in sorted(path.glob(name(split)))]
    if not files:
        raise FileNotFoundError(
            f"{path} has no {split}.jsonl; it has "
            f"{sorted(file.name for file in path.iterdir())[:8]}. Give the file itself."
        )
    return files[0]


def _text(record: Mapping[str, Any], key: str, where: str, line: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'{where}: "{key}" is {value!r}; expected text, as in {line}.')
    return value


def r1_prompt(question: str) -> str:
    return _R1.format(question=question.strip(), opening=R1_OPENING)


def plain_prompt(question: str) -> str:
    return _PLAIN.format(question=question.strip())


def countdown_question(numbers: tuple[int, ...], target: int) -> str:
    return _COUNTDOWN.format(numbers=", ".join(map(str, numbers)), target=target)
