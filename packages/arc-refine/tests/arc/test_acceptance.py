"""What the trainer has to be able to do: learn four tasks by heart, find a bandit's best arm, and
go through a hundred batches of real tasks. Slow, but for the bandit."""

import os
import statistics
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from arc_refine.config import TrainConfig
from arc_refine.data import Curriculum, leave_one_out, load_tasks
from arc_refine.episodes import RunData, generator
from arc_refine.evaluate import evaluate, summary
from arc_refine.metrics import read_rows
from arc_refine.policy import RefinePolicy
from arc_refine.step import Precision, Refinements, Training, _policy_step, train_step
from arc_refine.train import begin

FOUR = ("007bbfb7", "017c7c7b", "05269061", "08ed6ac7")
BEST = torch.tensor([0.3, -0.3, 0.2, -0.1])


# a bandit with a known best refinement


def play(policy, *, rounds=300, seed=0):
    """(mean reward at first, at last, the policy's centre): the trainer's own policy update."""
    config = TrainConfig(lr_policy=1e-2, refinements=8)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.lr_policy, weight_decay=0.0)
    training = Training(
        config=config,
        networks=SimpleNamespace(policy=policy),
        optimizers={"policy": optimizer},
        precision=Precision(config),
    )
    state = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))
    draw = torch.Generator().manual_seed(seed + 1)
    means = []
    for _ in range(rounds):
        u, a = policy.sample(state, config.refinements, draw)
        reward = 1 - (a - BEST).square().sum(-1)
        drawn = Refinements(state_BS=state, u_KBE=u, a_KBE=a)
        _policy_step(training, drawn, reward, dict(policy.named_parameters()), None)
        means.append(float(reward.mean()))
    with torch.no_grad():
        centre = policy.squash(policy.moments(state)[0])
    return statistics.mean(means[:10]), statistics.mean(means[-10:]), centre


def check_bandit(policy):
    before = [p.detach().clone() for p in policy.parameters()]
    first, last, centre = play(policy)
    assert all(not torch.equal(p, b) for p, b in zip(policy.parameters(), before))
    assert last > first + 0.5 * (1 - first)  # more than half of what there was to gain
    assert float((centre - BEST).abs().max()) < 0.1


def bandit_policy():
    torch.manual_seed(0)
    return RefinePolicy(prompt_width=4, feature_dim=3)


def test_the_bandits_best_refinement_is_found():
    check_bandit(bandit_policy())


def test_with_the_detach_of_document_003_it_is_not():
    """The same check has to fail: the policy's loss is then its entropy bonus alone."""
    policy = bandit_policy()
    true = policy.log_prob
    policy.log_prob = lambda s, u: true(s, u).detach()
    with pytest.raises(AssertionError):
        check_bandit(policy)


# real tasks


@pytest.mark.slow
def test_four_tasks_are_learnt_by_heart():
    tasks = tuple(task for task in load_tasks("training") if task.id in FOUR)
    episodes = tuple(episode for task in tasks for episode in leave_one_out(task))
    config = TrainConfig(batch_size=len(episodes), augment=False, lr_agent=2e-3)
    data = RunData(
        config=config,
        training=tasks,
        held_out=(),
        curriculum=Curriculum(episodes=episodes, max_areas=(900,)),
    )
    training = begin(config)
    training.networks.train()
    batch = data.batch(episodes)
    for number in range(150):
        row = train_step(training, batch, generator("refine", 0, 0, number))
    assert row["qwen_grad"] > 0
    outcomes = evaluate(training, episodes, data.batch)
    found = summary(outcomes)
    assert found["cell_accuracy_before"] >= 0.95
    assert found["cell_accuracy_after"] >= 0.95
    assert sum(o.exact_after for o in outcomes) >= 1
    assert sum(o.exact_before for o in outcomes) >= 1


@pytest.mark.slow
def test_a_hundred_batches(tmp_path):
    """Document 003's full validation, as it spells it but for the CPU; a process of its own."""
    run = tmp_path / "run"
    command = [sys.executable, "-W", "error", "-m", "arc_refine", "train", "--epochs", "1"]
    command += ["--agent_lr", "1e-5", "--qwen_lr", "5e-5", "--device", "cpu"]
    command += ["--max_batches", "100", "--log-every", "1", "--out", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    memory = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout:
            if " batch " in line:
                memory.append(psutil.Process(process.pid).memory_info().rss)
    assert process.returncode == 0
    rows = read_rows(run / "metrics.jsonl")
    assert [row["batch"] for row in rows] == list(range(100))
    assert all(row["qwen_grad"] > 0 for row in rows)
    losses = [row["loss"] for row in rows]
    assert statistics.median(losses[-20:]) < statistics.median(losses[:20])
    assert len(memory) == 100
    growth = statistics.median(memory[-20:]) - statistics.median(memory[40:60])
    assert growth < 60e6, f"{growth / 1e6:.0f} MB more at the end"
    assert not (run / "errors.jsonl").exists()
