"""Reward functions of the user's own: called as TRL calls them; a failure is one sentence."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from entropy_experiments.checkpoints.training_record import code_refused
from entropy_experiments.online.record import recorded_rewards
from entropy_experiments.online.record_sources import reward_source
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.rewards import OwnReward, build_reward, import_recorded_reward
from oracles.tiny_grpo import reward as of_a_module

pytestmark = pytest.mark.faults

CODE = """
import asyncio, time
from helper import LENGTH

def trl(prompts, completions, completion_ids, colour, **kwargs):
    assert set(kwargs) == {"trainer_state", "log_extra", "log_metric"}, sorted(kwargs)
    kwargs["log_metric"]("seen", 1.0)
    return [len(i) + LENGTH * (c == "red") for i, c in zip(completion_ids, colour)]

def plain(completions, problems):
    return [float(p.answer == c) for c, p in zip(completions, problems)]

def column(completions, colour):
    return [float(c == "red") for c in colour]

async def later(completions, **_):
    await asyncio.sleep(0)
    return [1.0] * len(completions)

def silent(completions, **_):
    return [None, 2.0]

def fails(completions, **_):
    return 1 / 0

def hangs(completions, **_):
    try:
        time.sleep(60)
    except Exception:
        pass
    return [0.0] * len(completions)

def nan(completions, **_):
    return [0.0, float("nan")]

def short(completions, **_):
    return [0.0]

def number(completions, **_):
    return 3.0

def mapping(completions, **_):
    return {0: 1.0, 1: 0.5}

def by_step(completions, trainer_state, **_):
    return [float(trainer_state.global_step)] * len(completions)
"""
PROBLEMS = [
    Problem(
        id=str(i),
        prompt=f"{i}?",
        answer=str(i),
        facts={"ids": (1, 2), "columns": {"prompt": f"{i}?", "colour": colour}},
    )
    for i, colour in enumerate(("red", "blue"))
]
IDS = [[1, 2, 3], [4]]


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "helper.py").write_text("LENGTH = 10\n")
    path = tmp_path / "rewards.py"
    path.write_text(CODE)
    return path


@pytest.fixture(autouse=True)
def _modules():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("helper", "rewards"):
            del sys.modules[name]


def _scored(file: Path, name: str, **options: Any) -> Any:
    reward = build_reward([f"{file}:{name}"], **options)
    return reward(["0", "x"], PROBLEMS, completion_ids=IDS)


def _recorded(file: Path, name: str, **options: Any) -> OwnReward:
    source = {"name": name, "file": str(file), "function": name, "module": "rewards"}
    return import_recorded_reward(source, **options)


def test_every_way_of_calling(file):
    assert _recorded(file, "trl")(["0", "x"], PROBLEMS, IDS) == [13, 1]
    assert _scored(file, "plain").total_N.tolist() == [1, 0]
    assert _scored(file, "column").total_N.tolist() == [1, 0]
    assert _scored(file, "later").total_N.tolist() == [1, 1]


def test_a_conversation_is_handed_over_as_messages(file):
    seen: dict[str, Any] = {}

    def function(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0]

    talk = [{"role": "user", "content": "hello"}]
    problem = Problem(
        id="0", prompt="user: hello", answer="", facts={"messages": talk, "columns": {}}
    )
    OwnReward(name="x", function=function, as_trl=True)(["hi"], [problem], [[1]])
    assert seen["prompts"] == [talk]
    assert seen["completions"] == [[{"role": "assistant", "content": "hi"}]]


def test_none_is_no_opinion_and_somebody_must_have_one(file):
    with pytest.raises(
        ValueError,
        match=r"Every reward function returned None for completion 0 .* return 0",
    ):
        _scored(file, "silent")
    both = build_reward([f"{file}:silent", f"{file}:later"], [2.0, 1.0])
    found = both(["a", "b"], PROBLEMS, completion_ids=IDS)
    assert found.total_N.tolist() == [1, 5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", r"'.*fails' failed \(ZeroDivisionError: division by zero\)\. It was called"),
        ("nan", r"returned nan for completion 1; expected a finite number"),
        ("short", r"returned 1 values for 2 completions; expected one each"),
        ("number", r"returned float; expected a list, tuple, tensor or array of 2 numbers"),
        ("mapping", r"returned dict; expected a list, tuple, tensor or array of 2 numbers"),
    ],
)
def test_what_goes_wrong_is_one_sentence(file, name, message):
    with pytest.raises(ValueError, match=message):
        _scored(file, name)


@pytest.mark.parametrize("aside", [False, True], ids=["main thread", "another thread"])
def test_a_function_that_hangs_is_given_up(file, aside):
    caught: list[Exception] = []

    def work() -> None:
        try:
            _scored(file, "hangs", seconds=0.1)
        except ValueError as error:
            caught.append(error)

    if aside:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(10)
    else:
        work()
    assert len(caught) == 1
    assert "for 2 completions, takes more than 0.1 s. Is it waiting for something?" in str(
        caught[0]
    )


HANGS = {
    "a pool": """
from concurrent.futures import ThreadPoolExecutor
import threading
def reward(completions, **_):
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda c: threading.Event().wait(2) or 0.0, completions))
""",
    "an alarm of its own": """
import signal, time
def reward(completions, **_):
    signal.alarm(3); signal.alarm(0)
    time.sleep(5)
    return [0.0] * len(completions)
""",
    "a bare except": """
import time
def reward(completions, **_):
    for _ in range(10):
        try:
            time.sleep(0.1)
        except:
            pass
    return [0.0] * len(completions)
""",
}


@pytest.mark.parametrize("kind", HANGS)
def test_a_function_cannot_lose_its_time_limit(kind, tmp_path):
    file = tmp_path / "hangs.py"
    file.write_text(HANGS[kind])
    reward = build_reward([f"{file}:reward"], seconds=0.3)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"takes more than 0.3 s"):
        reward(["0", "x"], PROBLEMS, completion_ids=IDS)
    assert time.monotonic() - began < 1.9  # what it would take by itself, but for the last one


def test_a_file_that_cannot_be_imported(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be imported \(FileNotFoundError"):
        build_reward([f"{tmp_path / 'no.py'}:f"])
    (tmp_path / "bad.py").write_text("raise RuntimeError('no licence')")
    with pytest.raises(ValueError, match=r"cannot be imported \(RuntimeError: no licence\)"):
        build_reward([f"{tmp_path / 'bad.py'}:f"])


# where the callback says that a function is


def test_a_function_of_a_module_can_be_found_again():
    found = reward_source("reward", of_a_module)
    assert found["module"] == "oracles.tiny_grpo"
    assert found["function"] == "reward"
    assert Path(found["file"]).name == "tiny_grpo.py"
    assert code_refused(found, ()) == ""
    assert "has changed since training" in code_refused({**found, "sha256": "0"}, ())
    inside = (Path(found["file"]).parent,)
    assert "lies in the run's own folder" in code_refused(found, inside)
    gone = {**found, "file": "/no/such.py"}
    assert "is not on this machine" in code_refused(gone, ())


def test_what_cannot_be_imported_says_why():
    def inner() -> None:
        """Nobody can import it."""

    for function, why in (
        (lambda completions, **_: [0.0], "not defined at the top of a module"),
        (inner, "not defined at the top of a module"),
        (partial(of_a_module, extra=1), "is a partial"),
        (torch.nn.Linear(1, 1), "is a Linear"),
    ):
        found = reward_source("f", function)
        assert why in found["why_not"]
        assert why in code_refused(found, ())


def _of_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, Any]:
    """As if the reward were defined in a script that is running."""
    script = tmp_path / "train.py"
    script.write_text(text)
    space: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    exec(compile(text.partition("# end")[0], str(script), "exec"), space)
    monkeypatch.setattr(sys.modules["__main__"], "score", space["score"], raising=False)
    return reward_source("score", space["score"])


def test_a_script_that_would_train_again_is_not_imported(tmp_path, monkeypatch):
    head = "def score(completions, **_):\n    return [0.0]\nSEED = 3\n# end\n"
    found = _of_script(tmp_path, monkeypatch, head + "trainer = print()\n")
    assert "importing that would run its line 5" in found["why_not"]
    guarded = head + "if __name__ == '__main__':\n    print()\n"
    assert _of_script(tmp_path, monkeypatch, guarded)["function"] == "score"


def test_a_script_that_trains_is_no_file_for_a_reward(tmp_path):
    """`--reward train.py:score` trained again while it was imported."""
    head = "import re\nWORD = re.compile('a')\ndef score(completions):\n    return [1.0, 2.0]\n"
    script = tmp_path / "train.py"
    for trains, call in (
        ("trainer.train(resume=None)\n", r"its line 5 calls trainer\.train\(\.\.\.\)"),
        ("for _ in range(3):\n    loss(_).backward()\n", r"line 5 calls loss\(_\)\.backward"),
        ("def main():\n    x.train()\nmain()\n", r"line 7 calls x\.train"),
    ):
        script.write_text(head + trains)
        with pytest.raises(ValueError, match=rf"would train: .*{call}.* a file of its own"):
            _scored(script, "score")
    script.write_text(head + "if '__main__' == __name__:\n    trainer.train()\n")
    assert _scored(script, "score").total_N.tolist() == [1, 2]


def test_a_function_gets_the_checkpoints_own_trainer_state(file, tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"global_step": 7, "of_another_version": 1}')
    reward = build_reward([f"{file}:by_step"])
    assert reward.at_checkpoint(tmp_path)(["0", "x"], PROBLEMS).total_N.tolist() == [7, 7]
    (tmp_path / "trainer_state.json").write_text("[7]")
    with pytest.raises(
        ValueError, match=r"trainer_state.json holds a list; expected a JSON object"
    ):
        reward.at_checkpoint(tmp_path)


def test_two_functions_of_one_name_are_told_apart():
    class Trainer:
        reward_funcs = (of_a_module, of_a_module)
        reward_func_names = ("reward", "reward")
        reward_weights = torch.tensor([1.0, 0.5])

    found = recorded_rewards(Trainer())
    assert [one["name"] for one in found["functions"]] == ["reward_0", "reward_1"]
    assert found["weights"] == [1.0, 0.5]
