"""Rollouts of one prompt in one row give the numbers of one rollout at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from entropy_experiments.models import scoring, shared_prompts
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.shared_prompts import KNOWN_MODELS, Segments, shared_rows
from entropy_experiments.numerics.derivatives import pullback, pushforward, pushforwards
from entropy_experiments.types import Rollouts, Scores
from models.test_scoring import MODELS, assert_scores, direction, made, one_at_a_time
from oracles.tiny_models import tiny_model
from tolerances import SCORES_FP32, SLOPES_FP32

pytestmark = pytest.mark.naive

ALONE = ("gemma2",)
"""Layers that look at a window only."""
LENGTHS = {6: (3, 1, 9, 4), 2: (7, 7), 11: (5,)}
"""Responses by the length of their prompt."""


def groups(left: int = 0, sizes: dict[int, tuple[int, ...]] = LENGTHS) -> Rollouts:
    """Rollouts of several prompts in mixed order, padded on both sides."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for prompt, lengths in sizes.items():
        asked = torch.randint(1, 30, (prompt,), generator=generator)
        for length in lengths:
            said = torch.randint(1, 30, (length,), generator=generator)
            rows.append((prompt, torch.cat([asked, said])))
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    width = left + max(len(tokens) for _, tokens in rows)
    tokens_NS = torch.full((len(rows), width), 31)
    attention_NS = torch.zeros(len(rows), width, dtype=torch.bool)
    response_NS = attention_NS.clone()
    for i, (prompt, tokens) in enumerate(rows):
        end = width if left else len(tokens)
        tokens_NS[i, end - len(tokens) : end] = tokens
        attention_NS[i, end - len(tokens) : end] = True
        response_NS[i, end - len(tokens) + prompt : end] = True
    return Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=attention_NS,
        response_NS=response_NS,
        prompt_N=torch.tensor([prompt for prompt, _ in rows]),
    )


@pytest.mark.parametrize("left", [0, 4])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_one_rollout_at_a_time(name, left):
    policy = SequenceProcessor(made(name))
    assert policy.shares_prompts == (name not in ALONE)
    got = policy.score(policy.params, groups(left))
    assert_scores(got, one_at_a_time(policy.model, groups(left)), SCORES_FP32)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "lora", "dora"])
def test_every_derivative_is_that_of_rows_of_their_own(name):
    policy, rollouts = SequenceProcessor(made(name)), groups()
    alone, v = policy.without_sharing(), direction(policy)

    def forward(of, how):
        return pushforward(lambda p: of.score(p, rollouts), policy.params, v, how=how)[1]

    for how in ("jvp", "double_backward"):
        for ours, theirs in zip(forward(policy, how), forward(alone, how), strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) <= SLOPES_FP32

    def gradient(of):
        return pullback(lambda p: sum(x.square().sum() for x in of.score(p, rollouts)), of.params)

    (value, ours), (expected, theirs) = gradient(policy), gradient(alone)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    for name, grad in theirs.items():
        assert float((ours[name] - grad).norm()) <= SLOPES_FP32 * float(grad.norm())


def test_gradients_by_rollout_stay_each_rollouts_own():
    """A shared prompt's states belong to all of its rollouts, so these go alone."""
    policy, rollouts = SequenceProcessor(made("lora")), groups()
    cotangent = Scores(*(torch.ones(rollouts.tokens_NS.shape) for _ in range(2)))
    (found,) = policy.gradients_by_rollout(policy.params, rollouts, [cotangent])
    for i in range(len(rollouts)):
        one = rollouts.take(torch.tensor([i]))
        _, own = pullback(
            lambda p: sum(x.sum() for x in policy.score(p, one)),
            policy.params,
        )
        for name, grad in own.items():
            assert float((found[name][i] - grad).norm()) <= SLOPES_FP32 * (1 + float(grad.norm()))


def test_eager_attention_adds_its_mask():
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    policy = SequenceProcessor(model)
    assert policy.shares_prompts
    got = policy.score(policy.params, groups())
    assert_scores(got, one_at_a_time(model, groups()), SCORES_FP32)


def test_a_prompt_is_computed_once():
    rows = shared_rows(groups())
    assert rows is not None
    # Of every response all but the last token, from which nothing is drawn.
    total = sum(prompt + sum(n - 1 for n in lengths) for prompt, lengths in LENGTHS.items())
    used_RS = torch.zeros_like(rows.tokens_RS, dtype=torch.bool)
    for i, length in enumerate((groups().attention_NS.sum(1) - 1).tolist()):
        used_RS[rows.row_NS[i, :length], rows.column_NS[i, :length]] = True
    assert int(used_RS.sum()) == total
    assert len(rows.tokens_RS) == len(LENGTHS)


def test_who_looks_at_whom():
    rollouts = groups()
    rows = shared_rows(rollouts)
    assert rows is not None
    for i, length in enumerate((rollouts.attention_NS.sum(1) - 1).tolist()):
        for s in range(length):
            r, at = int(rows.row_NS[i, s]), int(rows.column_NS[i, s])
            seen = rows.looks_R1SS[r, 0, at].nonzero().flatten().tolist()
            assert seen == rows.column_NS[i, : s + 1].tolist()
            assert int(rows.position_RS[r, at]) == s
    assert bool(rows.looks_R1SS.any(-1).all())  # padding looks at something: no NaN


def test_long_groups_go_into_several_rows(monkeypatch):
    monkeypatch.setattr(shared_prompts, "PAIR", 10.0)
    rows = shared_rows(groups(), square=True)
    assert rows is not None
    assert len(rows.tokens_RS) > len(LENGTHS)  # looking is all that costs
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    policy = SequenceProcessor(model)
    got = policy.score(policy.params, groups())
    assert_scores(got, one_at_a_time(policy.model, groups()), SCORES_FP32)


def test_rollouts_without_a_common_prompt_are_left_as_they_are():
    rollouts = groups()
    first_N = torch.tensor([(rollouts.prompt_N == p).nonzero()[0, 0] for p in LENGTHS])
    assert shared_rows(rollouts.take(first_N)) is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_self_check_has_teeth(monkeypatch, attention):
    """Rows in which responses see each other are noticed, and not used."""

    def all_before(segment_RS):
        return torch.ones(segment_RS.shape[1], segment_RS.shape[1]).tril().bool()[None, None]

    def causal(self, query, key, value, *, scale=None, enable_gqa=False):
        del self, enable_gqa
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True, scale=scale)

    monkeypatch.setattr(shared_prompts, "_looks", all_before)
    monkeypatch.setattr(Segments, "attended", causal)
    model = tiny_model("llama")
    model.set_attn_implementation(attention)
    policy = SequenceProcessor(model)
    assert not policy.shares_prompts
    got = policy.score(policy.params, groups())
    assert_scores(got, one_at_a_time(policy.model, groups()), SCORES_FP32)
    policy._shares = True
    wrong = policy.score(policy.params, groups())
    assert float((wrong.logprob_NS - got.logprob_NS).abs().max()) > 100 * SCORES_FP32


def test_a_model_that_refuses_the_mask_goes_without(monkeypatch):
    call = SequenceProcessor._call

    def refusing(self, module, params, tokens_NS, rows=None):
        if rows is not None:
            raise ValueError("a flat mask, please")
        return call(self, module, params, tokens_NS)

    monkeypatch.setattr(scoring.SequenceProcessor, "_call", refusing)
    policy = SequenceProcessor(made("llama"))
    assert not policy.shares_prompts
    assert_scores(
        policy.score(policy.params, groups()), one_at_a_time(policy.model, groups()), SCORES_FP32
    )


TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
OTHERWISE = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "xglm": {"ffn_dim": 48, "d_model": 32, "attention_heads": 4, "num_layers": 2},
    "deepseek_v3": {
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "gemma": {"head_dim": 8},
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 8},
}


def architecture(kind, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**TINY, **OTHERWISE.get(kind, {}), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()


def long_groups() -> Rollouts:
    """Rows of hundreds of tokens, beyond any usual small window."""
    generator = torch.Generator().manual_seed(5)
    asked = torch.randint(1, 30, (70,), generator=generator)
    said_NS = torch.randint(1, 30, (6, 12), generator=generator)
    tokens_NS = torch.cat([asked.expand(6, 70), said_NS], 1)
    response_NS = torch.arange(82).expand(6, 82) >= 70
    return Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=torch.ones_like(response_NS),
        response_NS=response_NS,
        prompt_N=torch.zeros(6, dtype=torch.int64),
    )


@pytest.mark.parametrize("kind", sorted(KNOWN_MODELS))
def test_every_known_architecture_shares_and_stays_right(kind):
    policy = SequenceProcessor(architecture(kind))
    assert policy.shares_prompts
    rows = shared_rows(long_groups())
    assert rows is not None
    assert rows.tokens_RS.shape[1] > 100
    got = policy.score(policy.params, long_groups())
    assert_scores(got, one_at_a_time(policy.model, long_groups()), SCORES_FP32)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 32}),
        ("mistral", {"sliding_window": 32}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}),
    ],
)
def test_windows_are_not_shared(kind, changes):
    """A short trial cannot see them, so nothing unknown is shared."""
    policy = SequenceProcessor(architecture(kind, **changes))
    assert not policy.shares_prompts
    got = policy.score(policy.params, long_groups())
    assert_scores(got, one_at_a_time(policy.model, long_groups()), SCORES_FP32)


def test_rows_are_no_longer_than_the_models_positions():
    policy = SequenceProcessor(architecture("gpt2", max_position_embeddings=90, n_positions=90))
    rows = shared_rows(long_groups(), 90)
    assert rows is None or rows.tokens_RS.shape[1] <= 90
    rows = shared_rows(long_groups(), 110)
    assert rows is not None
    assert rows.tokens_RS.shape[1] <= 110
    got = policy.score(policy.params, long_groups())
    assert_scores(got, one_at_a_time(policy.model, long_groups()), SCORES_FP32)


def test_sharing_that_costs_more_is_left():
    """One group of nine beside seven single rollouts: rows as wide as nine responses."""
    n, prompt, response = 16, 20, 100
    generator = torch.Generator().manual_seed(1)
    tokens_NS = torch.randint(1, 30, (n, prompt + response), generator=generator)
    tokens_NS[:9, :prompt] = tokens_NS[0, :prompt]
    response_NS = torch.arange(prompt + response).expand(n, -1) >= prompt
    rollouts = Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=torch.ones_like(response_NS),
        response_NS=response_NS,
        prompt_N=torch.tensor([0] * 9 + list(range(1, 8))),
    )
    assert shared_rows(rollouts) is None


def holes() -> Rollouts:
    """Two turns: what the environment says in between is seen and not drawn. A prompt of one."""
    rollouts = long_groups()
    response_NS = rollouts.response_NS.clone()
    response_NS[:, 74:78] = False
    short = rollouts.take(torch.arange(6), slice(69, None))
    response_NS = response_NS[:, 69:]
    return replace(short, response_NS=response_NS)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_several_turns_and_a_prompt_of_one_token(top_p):
    policy = SequenceProcessor(made("llama"), top_p=top_p)
    rows = shared_rows(holes())
    assert rows is not None
    got = policy.score(policy.params, holes())
    expected = one_at_a_time(policy.model, holes(), top_p=top_p)
    assert_scores(got, expected, SCORES_FP32)
    if top_p < 1:
        alone = policy.without_sharing()
        assert torch.equal(
            policy.support(policy.params, holes()), alone.support(policy.params, holes())
        )


@pytest.mark.parametrize("name", ["qwen2", "lora"])
def test_recomputation_and_many_directions_at_once(name):
    policy, rollouts = SequenceProcessor(made(name), checkpointing=True), long_groups()
    plain = SequenceProcessor(made(name)).without_sharing()

    def gradient(of):
        return pullback(lambda p: of.score(p, rollouts).entropy_NS.sum(), of.params)[1]

    ours, theirs = gradient(policy), gradient(plain)
    for key, grad in theirs.items():
        assert float((ours[key] - grad).norm()) <= SLOPES_FP32 * (1 + float(grad.norm()))
    v = direction(policy)
    many = [v, {key: 2 * x for key, x in v.items()}]
    _, (one, two) = pushforwards(lambda p: policy.score(p, rollouts), policy.params, many)
    _, expected = pushforward(lambda p: plain.score(p, rollouts), policy.params, v)
    for a, b, c in zip(one, two, expected, strict=True):
        assert float((a - c).norm()) <= SLOPES_FP32 * float(c.norm())
        assert float((b - 2 * c).norm()) <= SLOPES_FP32 * 2 * float(c.norm())


def test_parts_keep_prompts_together():
    rollouts, policy = groups(), SequenceProcessor(made("llama"))
    for microbatch in (1, 3, 7):
        order = [int(i) for part in rollouts.split(microbatch, policy) for i in part.rows_N]
        assert sorted(order) == list(range(7))
        prompts = [int(rollouts.prompt_N[i]) for i in order]
        runs = [p for at, p in enumerate(prompts) if at == 0 or prompts[at - 1] != p]
        assert sorted(runs) == sorted(LENGTHS)


def test_parts_of_a_policy_that_does_not_share_are_by_length():
    rollouts = groups()
    for policy in (None, SequenceProcessor(made("gemma2"))):
        order = [int(i) for part in rollouts.split(2, policy) for i in part.rows_N]
        lengths = rollouts.attention_NS.sum(1)[order].tolist()
        assert lengths == sorted(lengths)


@pytest.mark.parametrize("group", [1, 4])
def test_parts_have_little_padding(group):
    """Lengths as responses have them, log-normal: under a tenth is padding."""
    draw = torch.Generator().manual_seed(0)
    n = 128
    said_N = (40 * torch.exp(0.6 * torch.randn(n, generator=draw))).int().clamp(4, 200)
    asked_N = torch.randint(20, 60, (n // group,), generator=draw).repeat_interleave(group)
    width = int((asked_N + said_N).max())
    column_S = torch.arange(width)
    tokens_NS = torch.randint(1, 30, (n, width), generator=draw)
    prompt_N = torch.arange(n // group).repeat_interleave(group)
    tokens_NS = torch.where(column_S < asked_N[:, None], tokens_NS[prompt_N * group], tokens_NS)
    attention_NS = column_S < (asked_N + said_N)[:, None]
    rollouts = Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=attention_NS,
        response_NS=attention_NS & (column_S >= asked_N[:, None]),
        prompt_N=prompt_N,
    )
    policy = SequenceProcessor(made("llama")) if group > 1 else None
    used = computed = 0
    for part in rollouts.split(8, policy):
        rows = shared_rows(part.rollouts) if group > 1 else None
        if rows is None:
            used += int(part.rollouts.attention_NS.sum())
            computed += part.rollouts.tokens_NS.numel()
        else:
            used += int(rows.looks_R1SS[:, 0].diagonal(dim1=1, dim2=2).sum())
            used -= int((rows.tokens_RS == 0).sum())  # padding looks at itself
            computed += rows.tokens_RS.numel()
    assert used > 0.9 * computed
