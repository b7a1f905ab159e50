"""Mistakes in the arguments of the adapters are errors at once, not a probe that is off later."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from entropy_experiments.online.loop import LoopProbe
from entropy_experiments.online.record import _by_function as rewards_by_function
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.online.trl_trainer import EvaluationPrompts
from entropy_experiments.online.watch import Throttle
from entropy_experiments.sampling.importers import BY_FUNCTION
from entropy_experiments.update.live import live_direction
from oracles.tiny_grpo import reward
from oracles.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.faults

COUNT = "expected a whole number, at least"
LOOP: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"max_new_tokens": 0}, rf"max_new_tokens is 0; {COUNT} 1"),
    "no group": ({"group": 0}, rf"group is 0; {COUNT} 1"),
    "no uses": ({"uses": 0}, rf"uses is 0; {COUNT} 1"),
    "nothing drawn": ({"drawn": 0}, rf"drawn is 0; {COUNT} 1"),
    "no microbatch": ({"microbatch": 0}, rf"microbatch is 0; {COUNT} 1"),
    "half a step": ({"every": 2.5}, rf"every is 2\.5; {COUNT} 1"),
    "third order": ({"order": 3}, r"order is 3; expected 1 \(the straight line\) or 2"),
    "greedy": ({"temperature": 0}, r"temperature is 0; expected a number above 0"),
    "the callback's word": ({"evaluation": "half"}, r"evaluation is 'half'; expected Rollouts, or"),
    "one text": ({"prompts": "1+1="}, r"prompts is the text '1\+1='; expected a list"),
    "a share in words": ({"max_overhead": "10%"}, r"max_overhead is '10%'; expected above 0"),
}
CALLBACK: dict[str, tuple[dict[str, Any], str]] = {
    "few prompts": ({"prompts": 4}, rf"prompts is 4; {COUNT} 5"),
    "no group": ({"group": 0}, rf"group is 0; {COUNT} 1"),
    "no uses": ({"uses": 0}, rf"uses is 0; {COUNT} 1"),
    "third order": ({"order": 3}, r"order is 3; expected 1 \(the straight line\) or 2"),
    "an order that is a truth": ({"order": True}, r"order is True; expected 1"),
    "a word": ({"every": "5"}, rf"every is '5'; {COUNT} 1"),
    "a record that is no path": ({"record": 5}, r"record is 5; expected the path of a folder"),
    "facts in a word": ({"facts": "countdown"}, r"facts is 'countdown'; expected a mapping"),
}


def loop(**given: Any) -> LoopProbe:
    model = given.pop("model", None) or tiny_model()
    optimizer = torch.optim.AdamW(model.parameters())
    usual = {"prompts": ["1+1=", "2+2="], "max_new_tokens": 4}
    return LoopProbe(model, optimizer, tiny_tokenizer(), **(usual | given))


@pytest.mark.parametrize("mistake", LOOP)
def test_of_a_loop(mistake):
    given, said = LOOP[mistake]
    with pytest.raises(ValueError, match=said):
        loop(**given)


def test_a_wrapped_model_is_refused_by_its_wrapper():
    with pytest.raises(ValueError, match=r"model is a DataParallel; expected the bare model"):
        loop(model=nn.DataParallel(tiny_model()))


def test_rows_go_into_no_pipe(tmp_path):
    """To read one to its end, as a file that is resumed is, never ends."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a device, a pipe or a socket; expected a regular"):
        loop(out=tmp_path / "pipe")


def test_a_layer_that_is_unfrozen_in_training_is_named():
    model = nn.Linear(2, 1)
    params = {"weight": model.weight.detach()}
    gradient = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    with pytest.raises(ValueError, match=r"were frozen when the probe was set up: \['bias'\]"):
        live_direction(params, gradient, torch.optim.AdamW(model.parameters()))


class Trainer:
    """As much of TRL's as evaluation prompts need."""

    train_dataset = ({"prompt": "1"}, {"prompt": ""})

    def __init__(self, eval_dataset: Any) -> None:
        self.eval_dataset = eval_dataset

    def _tokenize_prompts(self, texts: list[str]) -> tuple[list[list[int]], None]:
        return [[ord(c) for c in text] for text in texts], None


def test_evaluation_prompts_that_are_none_name_the_dataset():
    with pytest.raises(ValueError, match=r"The trainer's eval_dataset has no rows; expected"):
        EvaluationPrompts(Trainer([]), 16, seed=0)
    with pytest.raises(ValueError, match=r"Row 1 of the trainer's train_dataset has the prompt ''"):
        EvaluationPrompts(Trainer(None), 16, seed=0)(step=0)


def test_an_infinite_reward_names_its_function():
    trainer = SimpleNamespace(reward_funcs=[reward], reward_func_names=["reward"])
    rewards = {BY_FUNCTION: torch.tensor([[1.0], [torch.inf]])}
    with pytest.raises(ValueError, match=r"reward function 'reward' gave an infinite reward; exp"):
        rewards_by_function([rewards], trainer)


def test_what_is_right_is_taken():
    assert loop().off is None
    assert Throttle(every=3, max_overhead=1).max_overhead == 1


@pytest.mark.parametrize("mistake", CALLBACK)
def test_of_the_callback(mistake):
    given, said = CALLBACK[mistake]
    with pytest.raises(ValueError, match=said):
        EntropyProbeCallback(**given)
