"""Sampling stops computing what has ended: rows leave the batch, and the last one ends the loop."""

import pytest
import torch

from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.sampling.decode import Draw, LastLogits, decode
from oracles.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.naive


class Counted(LastLogits):
    """Counts the rows of each pass, in the input and in the cache."""

    def __init__(self, policy):
        super().__init__(policy)
        self.rows, self.cached = [], []
        with torch.no_grad():
            assert self.cache_is_right  # whose trial takes passes of its own
        self.rows, self.cached = [], []

    def __call__(self, **inputs):
        logits_NV = super().__call__(**inputs)
        self.rows.append(len(inputs["input_ids"]))
        assert len(inputs["attention_mask"]) == self.rows[-1]
        self.cached.append(len(inputs["past_key_values"].layers[0].keys))
        return logits_NV


def test_a_pass_has_the_rollouts_still_alive_and_after_the_last_there_is_none():
    encode = tiny_tokenizer()
    asked = [tuple(encode(text)["input_ids"]) for text in ("1=", "(3+4)*5=", "9:", "12345+1=")]
    draws = [Draw(prompt=ids, seed=10 * p + g) for p, ids in enumerate(asked) for g in range(5)]
    passes, most = Counted(SequenceProcessor(tiny_model())), 60
    with torch.no_grad():
        found = decode(
            passes,
            draws,
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=most,
            ends=range(12),  # of 38 tokens: most rollouts are short
            stops=None,
            report=lambda tokens: None,
        )
    lengths = [len(drawn.tokens) for drawn in found]
    assert not any(drawn.truncated for drawn in found)
    assert max(lengths) < most
    # The prompts' pass draws token 1; the k-th pass after it is for those with more than k tokens.
    alive = [sum(length > k for length in lengths) for k in range(1, max(lengths))]
    assert passes.rows == passes.cached == [4, *alive]
    assert len(set(alive)) > 3
    assert sum(alive) == sum(lengths) - len(draws)  # no row is computed for nothing
