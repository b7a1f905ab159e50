"""Dumps of other frameworks: their own files are read, every number comes back, damage is named.

tests/data/dumps has a file of each framework's own writer (README.md there says which). The round
trips write random batches, holes included, in the same layouts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entropy_experiments import load_checkpoint
from entropy_experiments.checkpoints.runs import default_checkpoint
from entropy_experiments.sampling.advantages import advantages_by_prompt
from entropy_experiments.sampling.dumps.formats import KNOWN, dump_files, read_dump
from entropy_experiments.sampling.rollout_files import (
    load_rollouts,
    load_update_batch,
    save_rollouts,
    save_update_batch,
)
from entropy_experiments.types import Rollouts, UpdateBatch
from oracles.dump_writers import (
    MILES,
    miles_rows,
    write_miles,
    write_nemo_rl,
    write_prime_rl,
    write_verl,
)
from oracles.tiny_models import EOS, VOCABULARY, tiny_tokenizer
from tolerances import INVARIANT

DUMPS = Path(__file__).parents[1] / "data" / "dumps"
STEP = "prime_rl/token_exports/step_12"
FILES = {
    "prime-rl": f"{STEP}/rank_0.jsonl",
    "nemo-rl": "nemo_rl/train_data_step12.jsonl",
    "miles": "miles/dashboard_columns/rollout_12.parquet",
    "verl": "verl/12.jsonl",
}
TINY = tiny_tokenizer()


@pytest.fixture(scope="module")
def tokenizer():
    return load_checkpoint(default_checkpoint()).tokenizer


@pytest.mark.contract
@pytest.mark.parametrize(
    "path",
    [
        "prime_rl",
        "prime_rl/token_exports",
        STEP,
        "nemo_rl",
        FILES["nemo-rl"],
        "miles",
        "miles/dashboard_columns",
        FILES["miles"],
        "verl",
        FILES["verl"],
    ],
)
def test_files_of_the_frameworks_own_writers(path, tokenizer):
    imported = read_dump(DUMPS / path, tokenizer, step=12)
    batch = imported.batch
    assert batch is not None
    assert imported.mismatched == 0
    assert imported.missing
    assert batch.rollouts.prompt_N.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    expected_N = [-1, -1, 1, 1, -1, -1, 1, 1]
    first_N1 = batch.rollouts.response_NS.int().argmax(1, keepdim=True)
    sign_N = batch.advantage_NS.gather(1, first_N1).squeeze(1).sign()
    assert sign_N.tolist() == expected_N
    if path.startswith("verl"):  # text: holes are lost, and what was cut off gets an EOS
        assert batch.rollouts.tokens_N.tolist() == [31, 31, 24, 24, 31, 31, 24, 24]
        assert batch.rollouts.uid is not None
        assert batch.rollouts.uid[5] == "c0ffee1_1_0"
        assert any("8 of 8 rollouts decode back" in note for note in imported.notes)
        assert any("assumed: group-relative" in note for note in imported.notes)
        return
    assert batch.rollouts.tokens_N.tolist() == [30, 29, 24, 24, 29, 30, 24, 23]  # three holes
    assert batch.rollouts.behaviour_logprob_NS is not None
    assert (batch.old_logprob_NS is None) == path.startswith("miles")
    names = {"p": "1/3", "n": "7", "m": "107"}
    assert batch.rollouts.uid is not None
    assert batch.rollouts.uid[7] == names[path[0]]
    if path.startswith("nemo"):
        assert batch.counted_NS.any(1).tolist() == [True] * 7 + [False]  # sample_loss_mask
        assert batch.reward_N is not None
    if path.startswith("miles"):
        assert batch.rollouts.truncated_N.tolist() == [n == 5 for n in range(8)]
        assert any("12.jsonl beside it" in note for note in imported.notes)
    if path.startswith("prime"):
        assert batch.reward_N is None
        assert batch.microbatch_N is not None
        assert batch.microbatch_N.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert torch.equal(batch.old_logprob_NS, batch.rollouts.behaviour_logprob_NS)
        assert any("denominators of the ratio" in note for note in imported.notes)
        assert any("rewards" in note and "not in the dump" in note for note in imported.notes)


def test_frameworks_agree_on_the_tokens(tokenizer):
    """The fixtures hold the same eight rollouts."""
    prime, nemo, miles = (
        read_dump(DUMPS / name, tokenizer).rollouts for name in ("prime_rl", "nemo_rl", "miles")
    )
    for other in (nemo, miles):
        assert torch.equal(prime.response_NS, other.response_NS)
        assert torch.equal(prime.attention_NS, other.attention_NS)
        inside_NS = prime.attention_NS
        assert torch.equal(prime.tokens_NS[inside_NS], other.tokens_NS[inside_NS])
        torch.testing.assert_close(prime.behaviour_logprob_NS, other.behaviour_logprob_NS)


@st.composite
def batches(draw, *, holes: bool = True, text: bool = False, whole_rollouts: bool = False):
    """A random batch as a trainer has it: prompts, holes, tokens out of the loss."""
    size = draw(st.integers(1, 6))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    prompts = draw(st.integers(1, 3))
    low = 3 if text else 0

    def tokens(count: int) -> list[int]:
        return torch.randint(low, VOCABULARY, (count,), generator=seed).tolist()

    starts = [[3 + p, *tokens(draw(st.integers(0, 4)))] for p in range(prompts)]
    rows = []
    for n in range(size):
        start = starts[n % prompts]
        length = draw(st.integers(1, 7))
        response = [True, *(draw(st.booleans()) or not holes for _ in range(length - 1))]
        ids = tokens(length)
        if text:
            ids, response = [*ids, EOS], [*response, True]
        rows.append((start + ids, [False] * len(start) + response))
    width = max(len(ids) for ids, _ in rows) + draw(st.integers(0, 2))

    def padded(lines: list[list[Any]], fill: Any) -> torch.Tensor:
        return torch.tensor([[*line, *[fill] * (width - len(line))] for line in lines])

    response_NS = padded([response for _, response in rows], False)

    def drawn(scale: float) -> torch.Tensor:
        x_NS = torch.randn(response_NS.shape, generator=seed).double() * scale
        return torch.where(response_NS, x_NS, 0.0)

    loss_NS = response_NS.clone()
    out = torch.rand(response_NS.shape, generator=seed) < 0.3
    if whole_rollouts:
        out = out[:, :1]
    loss_NS &= ~out
    numbers = [tuple(start) for start in starts]
    order: dict[Any, int] = {}
    index = [order.setdefault(numbers[n % prompts], len(order)) for n in range(size)]
    return UpdateBatch(
        rollouts=Rollouts(
            tokens_NS=padded([ids for ids, _ in rows], 0),
            attention_NS=padded([[True] * len(ids) for ids, _ in rows], False),
            response_NS=response_NS,
            prompt_N=torch.tensor(index),
            behaviour_logprob_NS=-drawn(1.0).abs(),
        ),
        advantage_NS=drawn(1.0),
        reward_N=torch.randint(0, 3, (size,), generator=seed).double() / 2,
        old_logprob_NS=-drawn(1.0).abs(),
        loss_NS=None if torch.equal(loss_NS, response_NS) else loss_NS,
    )


QUICK = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def assert_same(batch: UpdateBatch, again: UpdateBatch, *names: str) -> None:
    """Tokens and masks exactly, numbers to 1e-12, whatever the padding."""
    ours, theirs = batch.rollouts, again.rollouts
    width = min(ours.tokens_NS.shape[1], theirs.tokens_NS.shape[1])
    assert not ours.attention_NS[:, width:].any()
    assert not theirs.attention_NS[:, width:].any()

    def cut(x: torch.Tensor) -> torch.Tensor:
        return x[:, :width] if x.dim() == 2 else x

    inside_NS = cut(ours.attention_NS)
    for name in ("attention_NS", "response_NS"):
        assert torch.equal(cut(getattr(ours, name)), cut(getattr(theirs, name))), name
    assert torch.equal(cut(ours.tokens_NS)[inside_NS], cut(theirs.tokens_NS)[inside_NS])
    assert torch.equal(ours.prompt_N, theirs.prompt_N)
    for name in names:
        part = "rollouts" if name == "behaviour_logprob_NS" else None
        mine, other = (getattr(x.rollouts if part else x, name) for x in (batch, again))
        assert other is not None, name
        assert float((cut(mine).double() - cut(other).double()).abs().max()) <= INVARIANT, name


@pytest.mark.invariant
@QUICK
@given(batch=batches(), ranks=st.integers(1, 3))
def test_prime_rl_round_trip(tmp_path_factory, batch, ranks):
    path = write_prime_rl(tmp_path_factory.mktemp("prime"), batch, ranks=ranks)
    again = read_dump(path, TINY).batch
    # What the loss leaves out has weight 0, and no advantage either.
    batch = replace(batch, advantage_NS=torch.where(batch.counted_NS, batch.advantage_NS, 0.0))
    assert_same(batch, again, "advantage_NS", "behaviour_logprob_NS", "counted_NS")
    assert_same(replace(batch, old_logprob_NS=batch.rollouts.behaviour_logprob_NS), again)


@pytest.mark.invariant
@QUICK
@given(batch=batches(whole_rollouts=True))
def test_nemo_rl_round_trip(tmp_path_factory, batch):
    path = write_nemo_rl(tmp_path_factory.mktemp("nemo"), batch)
    again = read_dump(path, TINY).batch
    names = ("advantage_NS", "old_logprob_NS", "behaviour_logprob_NS", "counted_NS", "reward_N")
    assert_same(batch, again, *names)


@pytest.mark.invariant
@QUICK
@given(batch=batches())
def test_miles_round_trip(tmp_path_factory, batch):
    """Its log-probs are fp32 in the file: the batch's are, too."""
    fp32_NS = batch.rollouts.behaviour_logprob_NS.float().double()
    batch = replace(batch, rollouts=replace(batch.rollouts, behaviour_logprob_NS=fp32_NS))
    path = write_miles(tmp_path_factory.mktemp("miles"), batch)
    again = read_dump(path, TINY).batch
    advantage_N = advantages_by_prompt("group")(batch.reward_N, batch.rollouts.prompt_N)
    spread_NS = torch.where(batch.rollouts.response_NS, advantage_N[:, None], 0.0)
    batch = replace(batch, advantage_NS=spread_NS, loss_NS=None)
    assert_same(batch, again, "advantage_NS", "behaviour_logprob_NS", "reward_N", "counted_NS")


@pytest.mark.invariant
@QUICK
@given(batch=batches(holes=False, text=True))
def test_verl_round_trip(tmp_path_factory, batch):
    """Rollouts of one prompt are put side by side; the uid says which is which."""
    path = write_verl(tmp_path_factory.mktemp("verl"), batch, TINY)
    imported = read_dump(path, TINY)
    again = imported.batch
    order = [int(uid.split("_")[1]) for uid in again.rollouts.uid]
    advantage_N = advantages_by_prompt("group")(batch.reward_N, batch.rollouts.prompt_N)
    spread_NS = torch.where(batch.rollouts.response_NS, advantage_N[:, None], 0.0)
    batch = replace(batch, advantage_NS=spread_NS, loss_NS=None)
    rows_N = torch.tensor(order)
    assert_same(batch.take(rows_N, slice(None)), again, "advantage_NS", "reward_N", "counted_NS")
    assert imported.mismatched == 0


def test_the_round_trip_has_teeth(tmp_path):
    """A mask that is off by one, or advantages of another row, must not pass for the same."""
    batch = _two()
    again = read_dump(write_prime_rl(tmp_path, batch), TINY).batch
    assert_same(batch, again, "advantage_NS")
    shifted = replace(batch, advantage_NS=batch.advantage_NS.roll(1, 0))
    with pytest.raises(AssertionError):
        assert_same(shifted, again, "advantage_NS")
    with pytest.raises(AssertionError):
        assert_same(batch, replace(again, advantage_NS=again.advantage_NS + 1e-11), "advantage_NS")


def _two() -> UpdateBatch:
    response_NS = torch.tensor([[False, True, False, True], [False, True, True, True]])
    value_NS = torch.where(response_NS, torch.tensor([[-0.5], [-0.25]], dtype=torch.float64), 0.0)
    return UpdateBatch(
        rollouts=Rollouts(
            tokens_NS=torch.tensor([[5, 6, 7, 8], [5, 9, 10, 11]]),
            attention_NS=torch.ones(2, 4, dtype=torch.bool),
            response_NS=response_NS,
            prompt_N=torch.tensor([0, 0]),
            behaviour_logprob_NS=value_NS,
        ),
        advantage_NS=-value_NS,
        reward_N=torch.tensor([0.0, 1.0], dtype=torch.float64),
        old_logprob_NS=value_NS.clone(),
    )


# What prime-rl's loss multiplies into a token's policy term.


def prime(tmp_path: Path, **changes: Any) -> Path:
    folder = write_prime_rl(tmp_path, _two(), ranks=1)
    edit(folder / "rank_0.jsonl", 0, **changes)
    return folder


def test_what_the_trust_region_dropped_has_no_advantage(tmp_path):
    imported = read_dump(prime(tmp_path, is_masked=[False, True, False, False]), TINY)
    assert imported.batch.advantage_NS[0].tolist() == [0, 0, 0, 0.5]
    assert imported.batch.loss_NS is None  # the token still counts in the mean
    assert any("dropped 1 of 5 tokens" in note for note in imported.notes)
    assert imported.used["advantages"].startswith("of each token; 0 where is_masked dropped it")


@pytest.mark.parametrize("mask", [None, [None] * 4])
def test_another_loss_s_trust_region_is_not_known(tmp_path, mask):
    folder = prime(tmp_path, is_masked=mask)
    imported = read_dump(folder, TINY)
    assert imported.used["advantages"] == "of each token, times rl_weights"
    assert imported.missing[0].startswith("is_masked of 2 of 2 rollouts")
    edit(folder / "rank_0.jsonl", 1, is_masked=[False] * 4)
    assert read_dump(folder, TINY).missing[0].startswith("is_masked of 1 of 2 rollouts")


def test_which_checkpoint_a_step_was_made_from(tokenizer):
    origins = {}
    for framework in ("prime_rl", "nemo_rl", "verl", "miles"):
        imported = read_dump(DUMPS / framework, tokenizer, step=12)
        origins[framework] = imported.made_from
        note = "step 12 led from checkpoint 11 to checkpoint 12"
        assert (note in imported.notes) == (framework != "miles")
    assert origins == {"prime_rl": 11, "nemo_rl": 11, "verl": 11, "miles": None}


def write_outputs(tmp_path: Path, *rows: tuple[str, str, float], **more: Any) -> Path:
    """(uid, output, score) of each row, to one prompt."""
    path = tmp_path / "3.jsonl"
    lines = [
        {"input": "12+3", "output": output, "gts": "15", "score": score, "step": 3, "uid": uid}
        for uid, output, score in rows
    ]
    path.write_text("".join(json.dumps({**line, **more}) + "\n" for line in lines))
    return path


def test_rows_that_fill_up_verl_s_batch_are_left_out(tmp_path):
    path = write_outputs(tmp_path, ("a_0_0", "15", 1.0), ("a_1_0", "16", 0.0))
    genuine = read_dump(path, TINY)
    pad = {"input": "", "output": "", "gts": "15", "score": 0.0, "step": 3}
    with path.open("a") as file:
        for at in (0, 1):
            file.write(json.dumps({**pad, "uid": f"pad{'0f' * 16}_{at}_0"}) + "\n")
    imported = read_dump(path, TINY)
    assert_same(genuine.batch, imported.batch, "advantage_NS", "reward_N")
    assert imported.mismatched == 0
    assert "2 rows that only fill up verl's batch are left out" in imported.notes


def test_of_several_outputs_the_last_is_compared_and_all_get_its_advantage(tmp_path):
    """As verl's v1 trainer does; the outputs before have scores that nothing reads."""
    path = write_outputs(
        tmp_path,
        ("a_0_0", "15", 0.25),
        ("a_0_1", "16", 1.0),
        ("a_1_0", "17", 0.0),
        ("b_0_0", "18", 1.0),
        ("b_1_0", "19", 3.0),
    )
    batch = read_dump(path, TINY, scale="none").batch
    advantage_N = batch.advantage_NS.max(1).values + batch.advantage_NS.min(1).values
    assert dict(zip(batch.rollouts.uid, advantage_N.tolist(), strict=True)) == {
        "a_0_0": 0.5, "a_0_1": 0.5, "a_1_0": -0.5, "b_0_0": -1.0, "b_1_0": 1.0,
    }  # fmt: skip


def test_a_penalty_beside_the_score_is_refused(tmp_path):
    rows = [("a_0_0", "15", 1.0), ("a_1_0", "16", 0.0)]
    read_dump(write_outputs(tmp_path, *rows, overlong_reward=0), TINY)
    with pytest.raises(ValueError, match=r"overlong_reward is -0.8, and score may be the reward"):
        read_dump(write_outputs(tmp_path, *rows, overlong_reward=-0.8), TINY)


def test_what_a_dump_does_not_say_is_listed(tokenizer):
    """Several optimizer steps of one dump, tools' text, samples left out of the loss."""
    expected = {
        "verl": ("ppo_mini_batch_size", "which tokens of the output the policy drew"),
        "nemo_rl": ("train_global_batch_size",),
        "miles": ("num_steps_per_rollout", "remove_sample"),
    }
    for framework, words in expected.items():
        missing = " ".join(read_dump(DUMPS / framework, tokenizer, step=12).missing)
        assert [word for word in words if word not in missing] == []


def test_weights_of_the_rl_component(tmp_path):
    imported = read_dump(prime(tmp_path, rl_weights=[1.0, 2.0, 1.0, 0.0]), TINY)
    assert imported.batch.advantage_NS[0].tolist() == [0, 1.0, 0, 0]
    assert imported.batch.loss_NS[0].tolist() == [False, True, False, False]


def test_context_parallel_ranks_and_idle_ones(tmp_path):
    folder = write_prime_rl(tmp_path, _two(), ranks=2)
    (folder / "rank_1.jsonl").rename(folder / "rank_2.jsonl")
    edit(folder / "rank_2.jsonl", 0, rank=2)
    assert len(read_dump(folder, TINY).rollouts) == 2  # every second rank writes
    (folder / "rank_2.jsonl").rename(folder / "rank_5.jsonl")
    (folder / "rank_0.jsonl").rename(folder / "rank_1.jsonl")
    edit(folder / "rank_5.jsonl", 0, rank=5)
    edit(folder / "rank_1.jsonl", 0, rank=1)
    with pytest.raises(ValueError, match=r"say so by ranks: 2"):
        read_dump(folder, TINY)
    assert read_dump(folder, TINY, ranks=2).rollouts.uid == ("1/0", "5/0")
    with pytest.raises(ValueError, match=r"has the files of 2 ranks; expected 4"):
        read_dump(folder, TINY, ranks=4)


def test_ranks_that_end_at_different_micro_steps_are_noted(tmp_path):
    folder = write_prime_rl(tmp_path, _two(), ranks=2)
    assert not any("micro steps" in note for note in read_dump(folder, TINY).notes)
    edit(folder / "rank_1.jsonl", 0, micro_step=3)
    said = r"different micro steps \(rank 0 at 0, rank 1 at 3\)"
    assert any(re.search(said, note) for note in read_dump(folder, TINY).notes)


def test_one_advantage_for_a_whole_rollout(tmp_path):
    path = write_nemo_rl(tmp_path, _two())
    edit(path, 0, advantages=[[0.5]])
    edit(path, 1, advantages=[0.25])
    advantage_NS = read_dump(path, TINY).batch.advantage_NS
    assert advantage_NS.tolist() == [[0, 0.5, 0, 0.5], [0, 0.25, 0.25, 0.25]]


def test_one_of_several_steps(tmp_path):
    for step in (3, 4):
        write_prime_rl(tmp_path, _two(), step=step)
        write_nemo_rl(tmp_path / "logs", _two(), step=step)
    assert len(read_dump(tmp_path, TINY, step=4).rollouts) == 2
    with pytest.raises(ValueError, match=r"exports of the steps 3, 4; one is needed: set step"):
        read_dump(tmp_path, TINY)
    with pytest.raises(ValueError, match=r"dumps of the steps 3, 4; step 9 is not there"):
        read_dump(tmp_path / "logs", TINY, step=9)
    with pytest.raises(ValueError, match=r"is of step 3; step 4 was asked for"):
        read_dump(tmp_path / "logs" / "train_data_step3.jsonl", TINY, step=4)


def test_scores_that_nemo_rl_did_not_compute(tmp_path):
    """force_on_policy_ratio leaves zeros: as log-probs they would say that every token was sure."""
    batch = replace(_two(), old_logprob_NS=torch.zeros(2, 4, dtype=torch.float64))
    imported = read_dump(write_nemo_rl(tmp_path, batch), TINY)
    assert imported.batch.old_logprob_NS is None
    assert any("force_on_policy_ratio" in note for note in imported.notes)


def test_filtered_rewards_are_those_of_the_rows(tmp_path):
    path = write_nemo_rl(tmp_path, _two())
    for line in (0, 1):
        edit(path, line, filtered_rewards=[0.5], rewards=[9.0])
    assert read_dump(path, TINY).batch.reward_N.tolist() == [0.5, 0.5]


def test_rollouts_without_a_token_in_the_loss_are_left_out_and_counted(tmp_path):
    path = write_nemo_rl(tmp_path, _two())
    edit(path, 0, token_loss_mask=[[0] * 6])
    imported = read_dump(path, TINY)
    assert imported.rollouts.uid == ("1",)
    assert any("1 rollouts without a token in the loss are left out" in n for n in imported.notes)


def test_miles_without_conversations_is_for_evaluation(tmp_path):
    path = write_miles(tmp_path, _two())
    shutil.rmtree(tmp_path / "trajectory")
    imported = read_dump(path, TINY)
    assert imported.batch is None
    assert imported.rollouts.behaviour_logprob_NS is not None
    assert any("rewards (no trajectory/N.jsonl" in what for what in imported.missing)


def test_miles_without_masks_and_scores(tmp_path):
    rows = [{**row, "loss_mask": None, "rollout_log_probs": None} for row in miles_rows(_two())]
    path = tmp_path / "rollout_3.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=MILES), path)
    imported = read_dump(path, TINY)
    assert imported.rollouts.tokens_N.tolist() == [3, 3]
    assert imported.rollouts.behaviour_logprob_NS is None
    assert any("2 of 2 rollouts have no loss_mask" in note for note in imported.notes)
    assert "rollout_log_probs of 2 of 2 rollouts" in imported.missing


# verl: texts that come back, and texts that do not.

NAMED = "<|mark|>{{ {'user': 'ask', 'system': 'rank', 'assistant': 'answer'}[m.role] }}"
"""Of a role nothing but a special token would be lost without a trace."""


def chat_tokenizer(role: str = NAMED):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        f"{{% for m in messages %}}{role}\n{{{{ m.content }}}}<eos>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|mark|>answer\n{% endif %}"
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|mark|>", "<|user|>", "<|system|>"]}
    )
    return tokenizer


def verl_lines(*lines: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"gts": None, "step": 1, "score": float(i % 2), **one} for i, one in enumerate(lines)]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("system", [None, "answer"])
def test_role_marks_of_a_chat_prompt_come_back(tmp_path, system):
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "1+1="}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    ids = tokenizer(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    )["input_ids"]
    dumped = tokenizer.decode(ids, skip_special_tokens=True)
    assert "<|mark|>" not in dumped
    path = write_lines(
        tmp_path / "1.jsonl", verl_lines(*({"input": dumped, "output": str(i)} for i in range(2)))
    )
    imported = read_dump(path, tokenizer)
    rollouts = imported.rollouts
    before_S = rollouts.attention_NS[0] & ~rollouts.response_NS[0]
    assert rollouts.tokens_NS[0][before_S].tolist() == ids
    assert imported.mismatched == 0
    assert any("2 of 2 prompts were rendered through" in note for note in imported.notes)


def test_a_prompt_with_two_readings_is_read_as_it_stands(tmp_path):
    """Where roles are special tokens alone, one message and two may leave the same text."""
    tokenizer = chat_tokenizer("<|{{ m.role }}|>")
    lines = verl_lines(*({"input": "\n1\n\n2\nanswer\n", "output": str(i)} for i in range(2)))
    imported = read_dump(write_lines(tmp_path / "1.jsonl", lines), tokenizer)
    assert any("0 of 2 prompts were rendered through" in note for note in imported.notes)
    assert any("2 have two readings" in note for note in imported.notes)


def test_texts_that_do_not_come_back_are_counted(tmp_path):
    lines = verl_lines(
        {"input": "1+1=", "output": "2"},
        {"input": "1+1=", "output": "é"},
        {"input": "1+1=", "output": "3"},
    )
    imported = read_dump(write_lines(tmp_path / "1.jsonl", lines), TINY)
    assert imported.mismatched == 1
    said = (
        r"round trip: 2 of 3 rollouts decode back .*, 1 could not be verified \(the first: .*:2\)"
    )
    assert any(re.search(said, note) for note in imported.notes)


def test_groups_of_a_plain_uid(tmp_path):
    """The older trainer's uid is the group's own; the same prompt may be drawn twice in a batch."""
    lines = [
        {"input": "1+1=", "output": str(i), "uid": "ab"[i // 2], "score": s}
        for i, s in enumerate((0.0, 1.0, 5.0, 5.0))
    ]
    imported = read_dump(write_lines(tmp_path / "1.jsonl", verl_lines(*lines)), TINY)
    first_N = imported.batch.advantage_NS[:, 4]
    assert first_N.sign().tolist() == [-1, 1, 0, 0]
    assert any("grouped by uid" in note for note in imported.notes)
    for line in lines:
        del line["uid"]
    by_prompt = read_dump(write_lines(tmp_path / "2.jsonl", verl_lines(*lines)), TINY)
    assert by_prompt.batch.advantage_NS[2, 4] > 0
    assert any("grouped by prompt" in note for note in by_prompt.notes)


# Storage: the framework's names survive.


def test_names_are_saved_and_loaded(tmp_path):
    batch = read_dump(write_prime_rl(tmp_path, _two()), TINY).batch
    save_update_batch(tmp_path / "saved", batch)
    again, _ = load_update_batch(tmp_path / "saved")
    assert again.rollouts.uid == ("0/0", "1/0")
    assert again.rollouts.take(torch.tensor([1])).uid == ("1/0",)
    save_rollouts(tmp_path / "saved", replace(batch.rollouts, uid=None))
    assert load_rollouts(tmp_path / "saved")[0].uid is None
    assert not (tmp_path / "saved" / "uid.json").exists()
    save_rollouts(tmp_path / "odd", replace(batch.rollouts, uid=("a", None)))
    assert load_rollouts(tmp_path / "odd")[0].uid == ("a", None)
    with pytest.raises(ValueError, match=r"uid has 1 entries; expected one per rollout \(2\)"):
        replace(batch.rollouts, uid=("a",))


def test_uid_of_a_plain_jsonl(tmp_path):
    line = {"prompt": "1+1=", "completion": "2", "reward": 1.0}
    path = write_lines(tmp_path / "d.jsonl", [{**line, "uid": 7}, {**line, "reward": 0.0}])
    assert read_dump(path, TINY).rollouts.uid == ("7", None)


# Damage.


def edit(path: Path, line: int, **changes: Any) -> None:
    lines = path.read_text().splitlines()
    record = json.loads(lines[line])
    for name, value in changes.items():
        if value is DELETE:
            del record[name]
        else:
            record[name] = value(record[name]) if callable(value) else value
    lines[line] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


DELETE = object()
Damage = Callable[[Path], None]


def change(format: str, line: int = 0, **changes: Any) -> Damage:
    return lambda folder: edit(folder / FILES[format], line, **changes)


def text(format: str, damage: Callable[[str], str]) -> Damage:
    def apply(folder: Path) -> None:
        path = folder / FILES[format]
        path.write_text(damage(path.read_text()))

    return apply


def columns(damage: Callable[[dict[str, Any]], Any]) -> Damage:
    """Another parquet in place of miles'."""

    def apply(folder: Path) -> None:
        path = folder / FILES["miles"]
        table = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(damage(table), path)

    return apply


def cast(name: str, kind: pyarrow.DataType) -> Damage:
    def damage(table):
        at = table.schema.get_field_index(name)
        return table.set_column(at, name, pyarrow.array([None] * len(table), kind))

    return columns(damage)


def cell(name: str, row: int, value: Callable[[Any], Any]) -> Damage:
    def damage(table):
        values = table[name].to_pylist()
        values[row] = value(values[row])
        at = table.schema.get_field_index(name)
        return table.set_column(at, name, pyarrow.array(values, table.schema.field(name).type))

    return columns(damage)


def one(at: int, value: Any) -> Callable[[list[Any]], list[Any]]:
    """The same list with another entry; of NeMo-RL's lists of one, the inner list's."""

    def damage(values: list[Any]) -> list[Any]:
        inner = values[0] if isinstance(values[0], list) else values
        inner[at] = value
        return [inner] if isinstance(values[0], list) else inner

    return damage


def shorter(values: list[Any]) -> list[Any]:
    return [values[0][:-1]] if isinstance(values[0], list) else values[:-1]


def twice(content: str) -> str:
    return content + content.splitlines()[0] + "\n"


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def move(name: str, to: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / to)


NAN = float("nan")
P, N, M, V = "prime-rl", "nemo-rl", "miles", "verl"
DAMAGED: dict[str, tuple[str, Damage, str]] = {
    # prime-rl
    "truncated line": (P, text(P, lambda s: s[:-100]), r"rank_0.jsonl:4: not JSON"),
    "no STABLE": (P, remove(f"{STEP}/STABLE"), r"has no STABLE: prime-rl writes it when every"),
    "rank 0 is gone": (P, remove(f"{STEP}/rank_0.jsonl"), r"has the ranks 1; expected every rank"),
    "all ranks are gone": (
        P,
        lambda folder: [(folder / STEP / f"rank_{r}.jsonl").unlink() for r in (0, 1)],
        r"cannot tell what .*step_12 is",
    ),
    "file of another rank": (P, change(P, rank=1), r"rank is 1 in the file of rank 0"),
    "mixed steps": (P, change(P, 1, step=13), r"step_12 mixes the steps \[12, 13\]"),
    "another step than the folder's": (
        P,
        lambda folder: [
            edit(folder / STEP / f"rank_{r}.jsonl", line, step=9)
            for r in (0, 1)
            for line in range(4)
        ],
        r"named after step 12 and holds step 9",
    ),
    "step is text": (P, change(P, step="12"), r"step is '12'; expected a whole number"),
    "later schema": (P, change(P, schema_version=2), r"schema_version is 2; this version reads 1"),
    "advantages too short": (
        P,
        change(P, advantages=shorter),
        r":1: advantages has \d+ entries for \d+ tokens; expected one for each",
    ),
    "mask too short": (P, change(P, loss_mask=shorter), r"loss_mask has \d+ entries for \d+"),
    "log-probs too short": (P, change(P, inference_logprobs=shorter), r"inference_logprobs has"),
    "NaN advantage": (
        P,
        change(P, advantages=one(-1, NAN)),
        r"advantages\[\d+\] is nan on a token",
    ),
    "infinite advantage": (P, change(P, advantages=one(-1, float("inf"))), r"is inf on a token"),
    "null log-prob": (P, change(P, inference_logprobs=one(-1, None)), r"is None on a token of the"),
    "probabilities as log-probs": (
        P,
        change(P, inference_logprobs=one(-1, 0.7)),
        r"inference_logprobs\[\d+\] is 0.7; expected log-probs, which are never above 0",
    ),
    "mask of two": (P, change(P, loss_mask=one(-1, 2)), r"loss_mask\[\d+\] is 2; expected 0 or 1"),
    "mask of text": (
        P,
        change(P, loss_mask=one(-1, "x")),
        r"loss_mask\[\d+\] is 'x'; expected 0 or",
    ),
    "token is text": (
        P,
        change(P, token_ids=one(3, "7")),
        r"token_ids\[3\] is '7'; expected token",
    ),
    "token is a fraction": (
        P,
        change(P, token_ids=one(3, 7.5)),
        r"token_ids\[3\] is 7.5; expected",
    ),
    "token is negative": (P, change(P, token_ids=one(3, -1)), r"token_ids\[3\] is -1; expected"),
    "token is true": (P, change(P, token_ids=one(3, True)), r"token_ids\[3\] is True; expected"),
    "token out of the vocabulary": (
        P,
        change(P, token_ids=one(3, 10**6)),
        r":1: token id 1000000 is out of the vocabulary, which has \d+ tokens",
    ),
    "no tokens": (P, change(P, token_ids=[]), r"token_ids is \[\]; expected a list of token ids"),
    "column is gone": (P, change(P, advantages=DELETE), r"lacks \['advantages'\]; expected every"),
    "line is doubled": (P, text(P, twice), r"export_sequence_idx 0 stands twice"),
    "line is gone": (
        P,
        text(P, lambda s: "\n".join(s.splitlines()[1:])),
        r"export_sequence_idx 1 comes where 0 should",
    ),
    "packed positions": (
        P,
        change(P, position_ids=one(-1, 0)),
        r"position_ids do not count from 0",
    ),
    "another loss": (
        P,
        change(P, ce_weights=lambda x: [1.0] * len(x)),
        r"ce_weights is not 0: this step also learned by another loss",
    ),
    "first token in the loss": (
        P,
        change(P, loss_mask=one(0, True), inference_logprobs=one(0, -1.0)),
        r"the first token is in the loss; expected at least one token of a prompt",
    ),
    "nothing in the loss": (
        P,
        lambda folder: [
            edit(folder / STEP / f"rank_{r}.jsonl", n, loss_mask=lambda x: [False] * len(x))
            for r in (0, 1)
            for n in range(4)
        ],
        r"no rollout of the dump has a token in the loss \(8 rollouts\)",
    ),
    "a list instead of an object": (
        P,
        text(P, lambda s: "[1]\n" + s),
        r"got a JSON list; expected",
    ),
    "nothing at all": (P, text(P, lambda s: ""), r"rank_0.jsonl has no lines"),
    "advantage beyond every float": (
        P,
        change(P, advantages=one(-1, 10**400)),
        r"advantages\[\d+\] is 10+\.\.\. on a token",
    ),
    "micro step is a list": (
        P,
        change(P, micro_step=[1]),
        r"micro_step is \[1\]; expected a whole",
    ),
    # NeMo-RL
    "nemo: truncated line": (N, text(N, lambda s: s[:-50]), r"step12.jsonl:8: not JSON"),
    "nemo: column is gone": (N, change(N, token_ids=DELETE), r":1: lacks \['token_ids'\]"),
    "nemo: row is doubled": (N, text(N, twice), r"idx 0 stands twice"),
    "nemo: row is gone": (
        N,
        text(N, lambda s: "\n".join(s.splitlines()[:3] + s.splitlines()[4:])),
        r"idx 4 comes where 3 should; expected 0 to 6 in order",
    ),
    "nemo: lengths disagree": (
        N,
        change(N, prev_logprobs=shorter),
        r"prev_logprobs has \d+ entries",
    ),
    "nemo: mask of a half": (
        N,
        change(N, token_loss_mask=one(-1, 0.5)),
        r"token_loss_mask\[\d+\] is 0.5; expected 0 or 1",
    ),
    "nemo: half a sample": (N, change(N, sample_loss_mask=[0.5]), r"sample_loss_mask\[0\] is 0.5"),
    "nemo: NaN advantage": (
        N,
        change(N, advantages=lambda x: [[NAN] * len(x[0])]),
        r"advantages\[\d+\] is nan on a token of the response",
    ),
    "nemo: padding in the loss": (
        N,
        change(N, input_lengths=[12]),
        r"token_loss_mask counts token \d+, which is padding \(input_lengths is 12\)",
    ),
    "nemo: length beyond the row": (
        N,
        change(N, input_lengths=[999]),
        r"input_lengths is 999; exp",
    ),
    "nemo: reward is text": (
        N,
        change(N, rewards=["good"]),
        r"rewards is 'good'; expected a finite",
    ),
    "nemo: reward beyond every float": (
        N,
        change(N, rewards=[10**400]),
        r"rewards is 10+\.\.\.; expected a finite",
    ),
    "nemo: token out of the vocabulary": (
        N,
        change(N, token_ids=one(2, 99_999)),
        r"token id 99999 is out of the vocabulary",
    ),
    # miles
    "miles: tokens are text": (
        M,
        cast("tokens", pyarrow.list_(pyarrow.string())),
        r"column tokens has type list<.*string>; expected lists of whole numbers",
    ),
    "miles: mask of floats": (
        M,
        cast("loss_mask", pyarrow.list_(pyarrow.float32())),
        r"column loss_mask has type list<.*float>; expected lists of whole",
    ),
    "miles: log-probs are whole": (
        M,
        cast("rollout_log_probs", pyarrow.list_(pyarrow.int8())),
        r"column rollout_log_probs has type list<.*int8>; expected lists of numbers",
    ),
    "miles: index is text": (
        M,
        cast("sample_index", pyarrow.string()),
        r"column sample_index has type string; expected whole numbers",
    ),
    "miles: column is gone": (
        M,
        columns(lambda table: table.drop_columns(["loss_mask"])),
        r"lacks the columns \['loss_mask'\]",
    ),
    "miles: no parquet": (
        M,
        lambda folder: (folder / FILES[M]).write_bytes(b"PAR1 no"),
        r"cannot be read as parquet",
    ),
    "miles: no rows": (M, columns(lambda table: table.slice(0, 0)), r"has no rows"),
    "miles: sample twice": (
        M,
        cell("sample_index", 1, lambda x: 100),
        r"sample_index 100 stands twice.*or these are compact rollouts",
    ),
    "miles: mask too short": (
        M,
        cell("loss_mask", 0, lambda x: x[:-1]),
        r"loss_mask has \d+ entries",
    ),
    "miles: mask of two": (
        M,
        cell("loss_mask", 0, lambda x: [2, *x[1:]]),
        r"row 0: loss_mask\[0\] is 2; expected 0 or 1",
    ),
    "miles: tokens cut": (
        M,
        cell("tokens", 0, lambda x: x[:-1]),
        r"tokens has \d+ entries, total_len",
    ),
    "miles: response longer than all": (
        M,
        cell("response_length", 0, lambda x: 999),
        r"response_length is 999; expected 0 to",
    ),
    "miles: NaN log-prob": (
        M,
        cell("rollout_log_probs", 0, lambda x: [NAN, *x[1:]]),
        r"rollout_log_probs\[\d+\] is nan on a token",
    ),
    "miles: trajectory names a sample twice": (
        M,
        lambda folder: edit(folder / "miles/trajectory/12.jsonl", 1, sample_index=100),
        r"12.jsonl:2: sample_index is 100; expected a whole number that no other line has",
    ),
    "miles: group is a list": (
        M,
        lambda folder: edit(folder / "miles/trajectory/12.jsonl", 1, group_index=[0]),
        r"group_index is \[0\]; expected a whole number",
    ),
    # verl
    "verl: score beyond every float": (
        V,
        change(V, score=10**400),
        r"score is 10+\.\.\.; expected a finite number",
    ),
    "verl: half a surrogate": (
        V,
        change(V, output="a\ud800"),
        r"output has half a surrogate pair \('\\ud800'\) at character 1",
    ),
    "verl: truncated line": (V, text(V, lambda s: s[:-20]), r"12.jsonl:8: not JSON"),
    "verl: score is gone": (V, change(V, 2, score=DELETE), r"12.jsonl:3: lacks \['score'\]"),
    "verl: score is NaN": (V, change(V, score=NAN), r":1: score is nan; expected a finite number"),
    "verl: score is text": (V, change(V, score="1.0"), r"score is '1.0'; expected a finite number"),
    "verl: mixed steps": (V, change(V, 3, step=13), r"mixes the steps \[12, 13\]"),
    "verl: step is text": (V, change(V, 3, step="a"), r"step is 'a'; expected a whole number"),
    "verl: output is a list": (V, change(V, output=["x"]), r"output is \['x'\]; expected text"),
    "verl: uid is a number": (V, change(V, uid=3), r"uid is 3; expected text"),
    "verl: line is doubled": (
        V,
        text(V, twice),
        r":9: uid 'c0ffee0_0_0' stands twice \(also .*:1\)",
    ),
    "verl: empty prompt": (V, change(V, input=""), r"the prompt has no tokens"),
}


@pytest.mark.faults
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_dumps_are_refused(name, tmp_path, tokenizer):
    format, damage, match = DAMAGED[name]
    folder = tmp_path / "dumps"
    shutil.copytree(DUMPS, folder)
    damage(folder)
    path = folder / STEP if format == P else folder / FILES[format]
    with pytest.raises(ValueError, match=match):
        read_dump(path, tokenizer)


def test_enough_kinds_of_damage():
    assert len(DAMAGED) >= 40


# What this is, and what it is not.


@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("0.pt", b"x", r"is a pickle, as slime and miles write their samples.*dashboard_columns"),
        ("dump.pkl", b"x", r"opening one runs what is in it, so it is not opened"),
        ("rank_0.bin", b"x", r"a message between prime-rl's processes.*enable_token_export"),
        ("1.jsonl.gz", b"x", r"is compressed. Unpack it"),
        ("dump.txt", b"x", r"cannot tell what .*dump.txt is; expected a folder of save_rollouts"),
        ("d.jsonl", b'{"a": 1}\n', r"its first line has the keys \['a'\]\); expected a folder of"),
        ("train_data_step1.jsonl", b'{"a": 1}\n', r"lacks \['token_ids', .*NeMo-RL's dump"),
        ("rank_0.jsonl", b'{"a": 1}\n', r"has no STABLE"),
    ],
)
def test_unknown_files_are_refused_by_name(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        read_dump(tmp_path / name, TINY)


def test_every_known_format_is_in_the_message(tmp_path):
    (tmp_path / "dump.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="cannot tell what") as caught:
        read_dump(tmp_path / "dump.csv", TINY)
    for known in KNOWN:
        assert known in str(caught.value)


def test_unknown_parquet_and_folders(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"its columns are \['a'\]"):
        read_dump(tmp_path / "a.parquet", TINY)
    with pytest.raises(
        FileNotFoundError, match=r"No such file: .*none.jsonl. Expected a folder of"
    ):
        read_dump(tmp_path / "none.jsonl", TINY)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "0.pt").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"0.pt is a pickle"):
        read_dump(tmp_path / "samples", TINY)
    save_update_batch(tmp_path / "own", _two())
    with pytest.raises(
        ValueError, match=r"is a folder of this program. Read it with load_rollouts"
    ):
        read_dump(tmp_path / "own", TINY)
    path = write_nemo_rl(tmp_path / "nemo", _two())
    with pytest.raises(ValueError, match=r"ranks is about prime-rl's token exports"):
        read_dump(path, TINY, ranks=2)


def test_one_rank_of_several_is_not_the_batch(tmp_path):
    folder = write_prime_rl(tmp_path, _two(), ranks=2)
    with pytest.raises(ValueError, match=r"is one of 2 ranks' files; .* Give the folder"):
        read_dump(folder / "rank_0.jsonl", TINY)


def test_files_that_a_result_depends_on(tmp_path):
    folder = write_prime_rl(tmp_path, _two(), ranks=2)
    assert [file.name for file in dump_files(tmp_path)] == ["rank_0.jsonl", "rank_1.jsonl"]
    assert dump_files(folder) == [folder / "rank_0.jsonl", folder / "rank_1.jsonl"]
    path = write_miles(tmp_path / "miles", _two())
    assert [file.name for file in dump_files(path)] == ["rollout_3.parquet", "3.jsonl"]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"reward": 10**400}, r":1: reward is 10+\.\.\.; expected a finite number"),
        ({"completion": "a\ud800"}, r"the response has half a surrogate pair"),
        ({"prompt": "\udfff"}, r"the prompt has half a surrogate pair"),
        ({"prompt": [{"role": "user", "content": "\ud800"}]}, r"a message has half a surrogate"),
        ({"uid": "\ud800"}, r"the uid has half a surrogate pair"),
        ({"logprobs": [-1.0, "x"]}, r"logprobs\[1\] is 'x'; expected a list of numbers"),
        ({"logprobs": 10**400}, r"logprobs\[0\] is 10+\.\.\.; expected a list of numbers"),
    ],
)
def test_values_of_a_jsonl_that_nothing_can_read(tmp_path, changes, match):
    path = tmp_path / "dump.jsonl"
    row = {"prompt": "12+3", "completion": "15", "reward": 1.0, **changes}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=match):
        read_dump(path, TINY)
