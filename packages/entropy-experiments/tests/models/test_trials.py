"""Scores are those of the model's own call on one sequence, or the model is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from entropy_experiments.models.positions import count_tokens, next_position_ids, position_ids
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.trials import UnsupportedModelError
from entropy_experiments.numerics.derivatives import dot, pullback, pushforward
from entropy_experiments.sampling.decode import Draw, LastLogits, decode
from entropy_experiments.types import Rollouts
from oracles.every_causal_lm import small_config, small_model
from oracles.plain_loop import scored
from oracles.sweep import direction_of, sweep_rollouts
from oracles.tiny_models import tiny_model, tiny_rollouts
from tolerances import SAMPLED_LOGPROB, SCORES_FP32, SWEEP

pytestmark = pytest.mark.naive


def gap(policy: SequenceProcessor, rollouts: Rollouts) -> float:
    got = policy.score(policy.params, rollouts)
    with torch.no_grad():
        expected = scored(policy.model, rollouts)
    return max(
        float((ours_NS[n, rollouts.response_NS[n]].double() - torch.stack(row)).abs().max())
        for ours_NS, rows in zip(got, (expected.logprob, expected.entropy), strict=True)
        for n, row in enumerate(rows)
    )


@pytest.mark.parametrize("kind", ["roberta", "rembert"])
def test_decoders_that_were_bert(kind):
    """RoBERTa counts positions from padding; RemBERT's head is not all that makes logits."""
    policy, rollouts = SequenceProcessor(small_model(kind)), sweep_rollouts()
    assert policy.logits_path == "model"
    assert not policy.shares_prompts
    assert gap(policy, rollouts) <= SCORES_FP32


def test_positions_have_teeth():
    policy = SequenceProcessor(small_model("roberta"))
    assert policy.padding_index == 1
    policy.padding_index = None
    assert gap(policy, sweep_rollouts()) > 0.1


def test_positions_are_counted_as_roberta_does():
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    tokens_NS = torch.tensor([[5, 1, 7, 8], [1, 4, 4, 1]])
    own_NS = RobertaEmbeddings.create_position_ids_from_input_ids(tokens_NS, 1)
    assert position_ids(tokens_NS, 1).tolist() == own_NS.tolist()
    assert position_ids(tokens_NS, None).tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("padding", [None, 1])
def test_positions_one_after_the_other(padding):
    tokens_NS = torch.tensor([[5, 1, 7, 8, 1, 3], [1, 4, 4, 1, 1, 9]])
    real_NS = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    whole_NS = position_ids(tokens_NS, padding, real_NS)
    count_N = count_tokens(tokens_NS[:, :3], padding, real_NS[:, :3])
    for s in range(3, 6):
        position_N, count_N = next_position_ids(tokens_NS[:, s], count_N, padding)
        assert position_N.tolist() == whole_NS[:, s].tolist()


def test_roberta_draws_what_it_scores():
    """Prompts of different lengths, padded on the left, with a cache."""
    policy = SequenceProcessor(small_model("roberta"))
    draws = [
        Draw(prompt=tuple(range(4, 4 + length)), seed=seed)
        for seed, length in enumerate((3, 9, 9, 5))
    ]
    with torch.no_grad():
        drawn = decode(
            LastLogits(policy),
            draws,
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=12,
            ends=(),
            stops=None,
            report=lambda count: None,
        )
    for draw, one in zip(draws, drawn, strict=True):
        tokens_1S = torch.tensor([[*draw.prompt, *one.tokens]])
        with torch.no_grad():
            logp_SV = policy.model(input_ids=tokens_1S).logits[0].double().log_softmax(-1)
        at = len(draw.prompt)
        own = [float(logp_SV[at + k - 1, token]) for k, token in enumerate(one.tokens)]
        assert one.logprobs == pytest.approx(own, abs=SAMPLED_LOGPROB)


def tiny_logits() -> nn.Module:
    """A Gemma-2 just made: its logits are far below the cap, which cannot be seen in them."""
    model = tiny_model("gemma2", final_logit_softcapping=30.0)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-3)
        assert float(model(input_ids=torch.arange(5)[None]).logits.abs().max()) < 0.1
    return model


def test_a_soft_cap_is_seen_though_logits_are_tiny():
    model = tiny_logits()
    policy = SequenceProcessor(model)
    assert policy.logits_path == "model"
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3e4)  # training goes on, in place
    assert gap(policy, tiny_rollouts()) <= 10 * SCORES_FP32  # at logits of 30


def test_the_cap_matters_so_the_test_above_has_teeth(monkeypatch):
    monkeypatch.setattr("entropy_experiments.models.scoring.HIGH", 1e-2)
    model = tiny_logits()
    policy = SequenceProcessor(model)
    assert policy.logits_path == "head"
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3e4)
    assert gap(policy, tiny_rollouts()) > 0.1


def test_weights_that_show_more_than_before_are_tried_again():
    """Positions that cannot be seen while their embeddings are 0."""
    model = small_model("roberta")
    positions = model.roberta.embeddings.position_embeddings.weight
    own = positions.detach().clone()
    with torch.no_grad():
        positions.zero_()
        policy = SequenceProcessor(model)
        assert policy.padding_index is None
        positions.copy_(own)
    assert gap(policy, sweep_rollouts()) > 0.1
    assert policy.repeatable  # every estimate begins so
    assert policy.padding_index == 1
    assert gap(policy, sweep_rollouts()) <= SCORES_FP32


def test_an_encoder_is_refused():
    from transformers import AutoModelForCausalLM

    config = small_config("bert")
    config.is_decoder = False
    with pytest.raises(
        UnsupportedModelError,
        match=r"BertLMHeadModel \(model_type 'bert'\) is not causal: .* has is_decoder=False",
    ):
        SequenceProcessor(AutoModelForCausalLM.from_config(config))


class Changed(nn.Module):
    """A llama whose logits are changed on the way out."""

    def __init__(self, change) -> None:
        super().__init__()
        self.inner, self.change = tiny_model("llama"), change

    def get_base_model(self) -> nn.Module:
        return self.inner

    def forward(self, **inputs):
        output = self.inner(**inputs)
        output.logits = self.change(output.logits, **inputs)
        return output


def of_the_rest_of_the_batch(logits_NSV, *, input_ids, **_):
    return logits_NSV + input_ids.double().std(correction=0).to(logits_NSV) * (len(input_ids) > 1)


def broken(logits_NSV, **_):
    raise TypeError("an image, please")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, **_: x + torch.rand(()), "gives two answers for the same tokens"),
        (lambda x, **_: x.flatten(0, 1), r"logits of shape \(12, 38\) for 12 tokens"),
        (lambda x, **_: x / 0, "not finite"),
        (broken, "cannot be called with input_ids alone: TypeError: an image, please"),
        (of_the_rest_of_the_batch, "other logits in a batch .* nats apart"),
    ],
)
def test_refusals_name_model_and_reason(change, match):
    with pytest.raises(UnsupportedModelError, match=rf"LlamaForCausalLM .*{match}"):
        SequenceProcessor(Changed(change))


def test_layers_that_run_without_gradients():
    """HRM's early cycles: training leaves them out of its gradient, a slope cannot."""
    policy = SequenceProcessor(small_model("hrm_text"))
    rollouts, v = sweep_rollouts().take(torch.tensor([0])), direction_of(policy.model)

    def entropy_of(scored: SequenceProcessor):
        return lambda params: scored.score(params, rollouts).entropy_NS.sum()

    _, slope = pushforward(entropy_of(policy), policy.params, v)
    _, gradient = pullback(entropy_of(policy), policy.params)
    _, trained = pullback(entropy_of(policy.as_trained()), policy.params)
    assert dot(gradient, v) == pytest.approx(float(slope), rel=SWEEP["slope"])
    assert abs(dot(trained, v) - float(slope)) > 0.1 * abs(float(slope))  # teeth


def test_parameters_without_effect_have_a_gradient_of_zero():
    """Attention to an encoder that a decoder alone never runs."""
    policy, rollouts = SequenceProcessor(small_model("bart")), sweep_rollouts()
    _, gradient = pullback(lambda p: policy.score(p, rollouts).entropy_NS.sum(), policy.params)
    idle = {name for name, value in gradient.items() if not value.any()}
    assert idle >= set(policy._without_effect)
    assert {name for name in policy.params if "encoder_attn." in name} <= idle
    assert len(idle) < len(gradient)
