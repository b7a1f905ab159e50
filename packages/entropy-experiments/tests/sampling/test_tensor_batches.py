"""Tensors of a training loop become the update batch of its step, whatever their width."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entropy_experiments.sampling.tensor_batches import batch_from_tensors, concatenate

IDS = torch.tensor([[0, 5, 6, 7, 8, 1], [5, 6, 9, 9, 1, 0], [0, 4, 6, 7, 1, 0]])
ATTENTION = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0]])
RESPONSE = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0]])
LOGPROBS = -torch.arange(18.0).view(3, 6) / 10 - 0.1


def _given(**changes: Any) -> dict[str, Any]:
    tensors = {
        "input_ids": IDS,
        "attention_mask": ATTENTION,
        "response_mask": RESPONSE,
        "advantages": torch.tensor([1.0, -1.0, 0.5]),
        "old_logprobs": LOGPROBS,
    }
    return tensors | changes


@pytest.mark.parametrize("columns", [3, 5, 6])
def test_fewer_columns_are_the_last_ones(columns):
    """Responses alone, all tokens but the first, or every token: the same batch."""
    whole = batch_from_tensors(**_given())
    cut = {"response_mask": RESPONSE[:, -columns:], "old_logprobs": LOGPROBS[:, -columns:]}
    part = batch_from_tensors(**_given(**cut))
    assert torch.equal(part.rollouts.response_NS, whole.rollouts.response_NS)
    assert torch.equal(part.advantage_NS, whole.advantage_NS)
    assert part.old_logprob_NS is not None
    assert whole.old_logprob_NS is not None
    assert torch.equal(part.old_logprob_NS, whole.old_logprob_NS)


def test_nothing_is_kept_outside_the_response():
    batch = batch_from_tensors(**_given())
    assert batch.old_logprob_NS is not None
    outside_NS = ~batch.rollouts.response_NS
    assert not bool(batch.old_logprob_NS[outside_NS].any())
    assert not bool(batch.advantage_NS[outside_NS].any())
    assert torch.equal(batch.old_logprob_NS[RESPONSE.bool()], LOGPROBS[RESPONSE.bool()])


def test_prompts_are_told_apart_by_their_tokens_or_by_labels():
    same = _given(response_mask=RESPONSE[:, -3:])
    assert batch_from_tensors(**same).rollouts.prompt_N.tolist() == [0, 1, 2]
    labelled = batch_from_tensors(**same, prompt_index=["b", "a", "b"])
    assert labelled.rollouts.prompt_N.tolist() == [0, 1, 0]


def test_a_response_without_an_end_was_cut_off():
    batch = batch_from_tensors(**_given(), eos=1)
    assert batch.rollouts.truncated_N.tolist() == [False, True, False]


def test_a_loss_mask_that_counts_all_is_none():
    assert batch_from_tensors(**_given(loss_mask=RESPONSE)).loss_NS is None
    counted = RESPONSE.clone()
    counted[0, 5] = 0
    batch = batch_from_tensors(**_given(loss_mask=counted))
    assert batch.loss_NS is not None
    assert torch.equal(batch.loss_NS, counted.bool())


@pytest.mark.faults
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": IDS.float()}, r"input_ids is torch\.float32 of shape \(3, 6\); expected"),
        ({"input_ids": [[1]]}, r"input_ids is a list; expected a tensor"),
        ({"attention_mask": ATTENTION[:, 1:]}, r"attention_mask has 5 columns; expected those"),
        ({"response_mask": RESPONSE[:2]}, r"response_mask has shape \(2, 6\); expected \(3, 6\)"),
        ({"response_mask": RESPONSE * 0.5}, r"response_mask has values other than 0 and 1"),
        ({"response_mask": torch.ones(3, 3)}, r"marks padding as response"),
        ({"advantages": torch.tensor([1, 2, 3])}, r"advantages is torch\.int64 .*floating point"),
        ({"advantages": torch.ones(2)}, r"advantages has 2 entries; expected one for each of 3"),
        ({"old_logprobs": LOGPROBS.exp()}, r"old_logprobs is above 0 on 6 of 6 response tokens"),
        ({"old_logprobs": torch.zeros(3, 9)}, r"old_logprobs has shape \(3, 9\); expected"),
        (
            {"advantages": torch.ones(3, 1)},
            r"advantages has shape \(3, 1\), .* 5 of 6 response tokens are before them; expected "
            r"at least 3 columns, or one dimension",
        ),
        (
            {"response_mask": RESPONSE[:, -3:], "old_logprobs": LOGPROBS[:, -2:]},
            r"old_logprobs has shape \(3, 2\), .* 3 of 6 response tokens .* at least 3 columns\.",
        ),
        ({"ref_logprobs": LOGPROBS[:, -1:]}, r"ref_logprobs has shape \(3, 1\), the last 1 of 6"),
        ({"loss_mask": RESPONSE[:, -2:]}, r"loss_mask has shape \(3, 2\), .*at least 3 columns"),
        ({"prompt_index": [1, 2]}, r"prompt_index has 2 entries; expected one for each of 3"),
        ({"loss_mask": ATTENTION}, r"loss_NS counts tokens that are not in the response"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        batch_from_tensors(**_given(**changes))


def test_joined_parts_have_the_numbers_of_the_parts():
    first = batch_from_tensors(**_given())
    wider = {
        name: torch.nn.functional.pad(value, (0, 2)) if value.dim() == 2 else value
        for name, value in _given().items()
    }
    second = batch_from_tensors(**wider, microbatch=torch.tensor([7, 7, 9]))
    joined = concatenate([first, second])
    assert joined.microbatch_N is not None
    assert joined.microbatch_N.tolist() == [0, 0, 0, 1, 1, 2]
    assert joined.rollouts.prompt_N.tolist() == [0, 1, 2, 0, 1, 2]
    assert joined.rollouts.fingerprint == concatenate([first, first]).rollouts.fingerprint
    assert torch.equal(joined.advantage_NS[3:, :6], first.advantage_NS)


@pytest.mark.faults
def test_parts_that_do_not_fit_together_are_refused():
    whole = batch_from_tensors(**_given())
    without = batch_from_tensors(**_given(old_logprobs=None))
    with pytest.raises(ValueError, match=r"old_logprob_NS is in 1 of 2 parts of the step"):
        concatenate([whole, without])
    with pytest.raises(ValueError, match=r"A step has no batch; expected at least one"):
        concatenate([])
