"""What is listened to on the way to a step passes through untouched, whatever it is."""

from types import SimpleNamespace

import pytest
import torch

from entropy_experiments.online.trl_trainer import Captures

pytestmark = pytest.mark.faults


class Trainer:
    """As much of TRL's as is listened to, giving whatever it is told to."""

    args = SimpleNamespace(gradient_accumulation_steps=2)
    accelerator = SimpleNamespace(process_index=0)
    reward_weights = None

    def __init__(self, rewards, batch, mask=None):
        self.rewards, self.batch, self.mask = rewards, batch, mask

    def _calculate_rewards(self, inputs, prompts):
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        self._calculate_rewards(inputs, [1, 2])
        return self.batch

    def get_high_entropy_mask(self):
        return self.mask


def test_rewards_join_the_batch():
    trainer = Trainer(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), {"prompt_ids": [[1], [2]]})
    captures = Captures(trainer)
    batch = trainer._generate_and_score_completions(None)
    assert batch["prompt_ids"] is trainer.batch["prompt_ids"]
    assert sorted(batch) != sorted(trainer.batch)
    captures.restore()
    assert trainer._generate_and_score_completions(None) is trainer.batch


@pytest.mark.parametrize(
    ("rewards", "batch"),
    [
        ("no tensor", {"prompt_ids": [[1], [2]]}),
        (None, {"prompt_ids": [[1], [2]]}),
        (torch.ones(2, 1), {"other": 1}),
        (torch.ones(2, 1), ["no mapping"]),
        (torch.ones(2), {"prompt_ids": [[1], [2]]}),
    ],
)
def test_what_is_unknown_is_told_once_and_passes(rewards, batch, caplog):
    trainer = Trainer(rewards, batch, mask="no tensor either")
    Captures(trainer)
    for _ in range(2):
        assert trainer._generate_and_score_completions(None) is batch
        assert trainer.get_high_entropy_mask() == "no tensor either"
    told = [r for r in caplog.records if "could not be recorded; training goes on" in r.message]
    assert sum(record.levelname == "WARNING" for record in told) == 1
