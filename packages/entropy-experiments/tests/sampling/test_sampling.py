"""The sampler against the slow and obvious: exact laws, teacher forcing, one rollout at a time."""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.entropy import nucleus
from entropy_experiments.sampling.advantages import advantages_by_prompt, group_advantages
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.decode import inverse_cdf
from entropy_experiments.sampling.generate import SampleGenerator, end_tokens
from entropy_experiments.sampling.rewards import Reward
from oracles.tiny_models import EOS, VOCABULARY, tiny_lora, tiny_model, tiny_tokenizer
from tolerances import FALSE_ALARM, INVARIANT, SAMPLED_LOGPROB

pytestmark = pytest.mark.naive

TEXTS = ("1=", "1+2=", "(3+4)*5=", "1234567890+1=", "9:", "2-1=", "hi", "Q is 7 or 8 ")


def problems(count=8):
    return [
        Problem(id=f"p{i}", prompt=TEXTS[i % len(TEXTS)] + "0" * (i // len(TEXTS)), answer=str(i))
        for i in range(count)
    ]


def generator(model=None, *, temperature=1.0, top_p=1.0, length=16, **options):
    policy = SequenceProcessor(model or tiny_model(), temperature=temperature, top_p=top_p)
    return SampleGenerator(policy, tiny_tokenizer(), max_new_tokens=length, **options)


def first_law(generator, problem):
    """Exact probabilities of the first token, by a plain forward pass."""
    ids = torch.tensor([generator.prompt_ids(problem)])
    policy = generator.policy
    with torch.no_grad():
        z_V = policy.model(input_ids=ids).logits[0, -1].double() / policy.temperature
    if policy.top_p < 1:
        z_V = z_V.masked_fill(~nucleus(z_V[None], policy.top_p)[0], -torch.inf)
    return z_V.softmax(-1)


def p_value(tokens, p_V):
    """Chi-square of drawn tokens against a law, rare tokens taken together."""
    count_V = torch.bincount(torch.tensor(tokens), minlength=len(p_V)).double()
    assert not (count_V[p_V == 0] > 0).any(), "drew a token of probability 0"
    expected_V = p_V * len(tokens)
    common_V = expected_V >= 8
    observed = [*count_V[common_V].tolist(), float(count_V[~common_V].sum())]
    expected = [*expected_V[common_V].tolist(), float(expected_V[~common_V].sum())]
    if expected[-1] < 1e-9:
        observed.pop()
        expected.pop()
    return chisquare(observed, expected).pvalue


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7)])
def test_first_tokens_follow_the_exact_law(temperature, top_p):
    draw = generator(temperature=temperature, top_p=top_p, length=1, batch_size=4000)
    problem = problems()[1]
    rollouts = draw.generate([problem], group=4000, name="law")
    tokens = rollouts.tokens_NS[rollouts.response_NS].tolist()
    p_V = first_law(draw, problem)
    assert p_value(tokens, p_V) > FALSE_ALARM
    # Teeth: the same draws against a slightly warmer law.
    other = generator(temperature=temperature * 1.15, top_p=1.0, length=1)
    assert p_value(tokens, first_law(other, problem)) < FALSE_ALARM


def test_later_tokens_follow_the_exact_law():
    """Second tokens of rollouts that share their first: the cache's law is the model's."""
    draw = generator(length=2, batch_size=4000)
    problem = problems()[2]
    rollouts = draw.generate([problem], group=4000, name="law")
    drawn = [rollouts.tokens_NS[n][rollouts.response_NS[n]].tolist() for n in range(len(rollouts))]
    first, count = Counter(tokens[0] for tokens in drawn if len(tokens) == 2).most_common(1)[0]
    assert count > 200
    ids = torch.tensor([[*draw.prompt_ids(problem), first]])
    with torch.no_grad():
        p_V = draw.policy.model(input_ids=ids).logits[0, -1].double().softmax(-1)
    assert p_value([tokens[1] for tokens in drawn if tokens[0] == first], p_V) > FALSE_ALARM


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2", "gemma2", "granite", "qwen3"])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9)])
def test_recorded_log_probs_are_those_of_teacher_forcing(architecture, temperature, top_p):
    draw = generator(tiny_model(architecture), temperature=temperature, top_p=top_p, batch_size=5)
    rollouts = draw.generate(problems(), group=2, name="x")
    scores = draw.policy.score_all(rollouts)
    gap_NS = (scores.logprob_NS - rollouts.behaviour_logprob_NS).abs()
    assert float(gap_NS.max()) < SAMPLED_LOGPROB
    # Teeth: off by one position, or another temperature, is far outside.
    assert float((scores.logprob_NS - rollouts.behaviour_logprob_NS.roll(1, 1)).abs().max()) > 0.1


def test_adapters_take_part():
    model = tiny_lora()
    draw = generator(model)
    rollouts = draw.generate(problems(), group=1, name="x")
    gap_NS = draw.policy.score_all(rollouts).logprob_NS - rollouts.behaviour_logprob_NS
    assert float(gap_NS.abs().max()) < SAMPLED_LOGPROB
    with model.disable_adapter():
        bare_NS = draw.policy.score_all(rollouts).logprob_NS
    assert float((bare_NS - rollouts.behaviour_logprob_NS).abs().max()) > 0.05


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_double_precision_and_left_padding_give_no_nan(architecture):
    """Eager attention (gemma2) would give NaN for padded rows in fp64: lengths are not mixed."""
    draw = generator(tiny_model(architecture).double(), length=8)
    rollouts = draw.generate(problems(), group=1, name="x")
    assert torch.isfinite(rollouts.behaviour_logprob_NS).all()
    lengths = {len(draw.prompt_ids(problem)) for problem in problems()}
    seen = []
    draw.progress = lambda told: seen.append(told.finished_unit)
    draw.generate(problems(), group=1, name="x")
    assert sum(seen) == (len(lengths) if architecture == "gemma2" else 1)


def test_half_precision_draws_from_the_law_that_is_scored():
    draw = generator(tiny_model().bfloat16(), batch_size=1, length=6)
    rollouts = draw.generate(problems(4), group=1, name="x")
    gap_NS = draw.policy.score_all(rollouts, microbatch=1).logprob_NS
    gap_NS = (gap_NS - rollouts.behaviour_logprob_NS).abs()
    assert float(gap_NS.max()) < 0.1  # states in bf16, through another kernel shape


@pytest.mark.parametrize("size", [1, 3, 8])
def test_batch_size_does_not_change_the_tokens(size):
    one = generator(batch_size=64).generate(problems(), group=3, name="x")
    other = generator(batch_size=size).generate(problems(), group=3, name="x")
    assert one.fingerprint == other.fingerprint
    assert torch.allclose(
        one.behaviour_logprob_NS, other.behaviour_logprob_NS, atol=SAMPLED_LOGPROB, rtol=0
    )
    fewer = generator(batch_size=size).generate(problems()[2:4], group=3, name="x")
    kept_N = (one.prompt_N == 2) | (one.prompt_N == 3)
    for n, row in enumerate(kept_N.nonzero()[:, 0].tolist()):
        assert (
            fewer.tokens_NS[n][fewer.attention_NS[n]].tolist()
            == one.tokens_NS[row][one.attention_NS[row]].tolist()
        )


def test_seeds_names_and_samples_differ():
    base = generator().generate(problems(2), group=2, name="x")
    others = [
        generator().generate(problems(2), group=2, name="y"),
        generator(master_seed=1).generate(problems(2), group=2, name="x"),
    ]
    assert len({x.fingerprint for x in (base, *others)}) == 3
    twins = [Problem(id=name, prompt="1+2=", answer="") for name in ("a", "b")]
    drawn = generator().generate(twins, group=1, name="x")
    assert drawn.text is not None
    assert drawn.text[0] != drawn.text[1]
    rows = {tuple(base.tokens_NS[n][base.response_NS[n]].tolist()) for n in range(4)}
    assert len(rows) == 4


def test_the_end_is_counted_and_the_cut_is_flagged():
    rollouts = generator(length=10).generate(problems(), group=8, name="x")
    assert rollouts.truncated_N.any()
    assert not rollouts.truncated_N.all()
    for n in range(len(rollouts)):
        tokens = rollouts.tokens_NS[n][rollouts.response_NS[n]].tolist()
        assert EOS not in tokens[:-1]
        assert (tokens[-1] == EOS) == (not rollouts.truncated_N[n])
        assert len(tokens) == 10 or not rollouts.truncated_N[n]
    assert rollouts.text is not None
    assert not any("<eos>" in text for text in rollouts.text)
    assert torch.equal(rollouts.prompt_N, torch.arange(8).repeat_interleave(8))


def test_an_end_on_the_last_allowed_token_is_no_truncation():
    whole = generator(length=30).generate(problems(), group=8, name="x")
    lengths = whole.tokens_N[~whole.truncated_N]
    length = int(lengths[lengths > 1].min())
    short = generator(length=length).generate(problems(), group=8, name="x")
    assert torch.equal(short.truncated_N, whole.truncated_N | (whole.tokens_N > length))


def test_every_end_token_of_the_generation_config_ends():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [5, 7]
    assert end_tokens(model, tokenizer) == (EOS, 5, 7)
    rollouts = generator(model, length=30).generate(problems(), group=4, name="x")
    last = {
        int(rollouts.tokens_NS[n][rollouts.response_NS[n]][-1])
        for n in range(len(rollouts))
        if not rollouts.truncated_N[n]
    }
    assert last == {EOS, 5, 7}


def test_stop_strings_end_a_rollout_with_the_completing_token():
    free = generator(length=30).generate(problems(), group=8, name="x")
    stopped = generator(length=30, stop=["4", "1a"]).generate(problems(), group=8, name="x")
    ended = 0
    for n in range(len(free)):
        long = free.tokens_NS[n][free.response_NS[n]].tolist()
        short = stopped.tokens_NS[n][stopped.response_NS[n]].tolist()
        text = tiny_tokenizer().decode(long)
        places = [text.find(stop) + len(stop) for stop in ("4", "1a") if stop in text]
        if not places:
            assert short == long
            assert bool(stopped.truncated_N[n]) == bool(free.truncated_N[n])
            continue
        ended += 1
        said = tiny_tokenizer().decode(short)
        assert said == text[: min(places)]
        assert not stopped.truncated_N[n]
    assert ended > 5


def test_the_model_and_the_global_rng_are_left_as_they_were():
    model = tiny_model(attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    rollouts = generator(model).generate(problems(), group=2, name="x")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    assert generator(model).generate(problems(), group=2, name="x").fingerprint == (
        rollouts.fingerprint
    )


def test_inverse_cdf_at_the_edges():
    logits_NV = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]] * 4)
    uniform_N = torch.tensor([0.0, 0.5 - 1e-12, 0.5, 1 - 2**-53], dtype=torch.float64)
    token_N, logprob_N = inverse_cdf(logits_NV, uniform_N, temperature=1.0, top_p=1.0)
    assert token_N.tolist() == [1, 1, 2, 2]
    assert torch.allclose(logprob_N.exp(), torch.full((4,), 0.5).double(), atol=INVARIANT)
    wide_NV = torch.randn(1, 152_000, generator=torch.Generator().manual_seed(0))
    token_N, _ = inverse_cdf(wide_NV, uniform_N[-1:], temperature=0.3, top_p=0.9)
    assert 0 <= int(token_N) < 152_000
    with pytest.raises(ValueError, match="logits are not finite"):
        inverse_cdf(torch.full((1, 4), torch.nan), uniform_N[:1], temperature=1.0, top_p=1.0)


def parity(completions, problems):
    """1 for an even number of characters: about half of all responses."""
    return [float(len(text) % 2 == 0) for text in completions]


def only(*ids):
    """Rewards that differ within the groups of these problems alone."""
    seen = Counter()

    def score(completions, asked):
        values = []
        for problem in asked:
            seen[problem.id] += 1
            values.append(float(problem.id in ids and seen[problem.id] == 1))
        return values

    return Reward(functions={"only": score}, weights=(1.0,))


def test_groups_without_advantage_are_replaced_from_the_pool():
    draw = generator(length=4)
    made = draw.generate_update_batch(
        problems(20), prompts=3, group=4, reward=only("p1", "p4", "p9"), tol=1e-8, max_attempts=5
    )
    # p0 and p2 move nothing: p3, p4 stand in; then p5; then p6, ... p8 (the fifth attempt).
    assert [problem.id for problem in made.problems][1] == "p1"
    assert {problem.id for problem in made.problems} >= {"p1", "p4"}
    assert made.retries == 2 + 4
    assert made.equal_groups == 1
    assert not made.all_equal
    more = generator(length=4).generate_update_batch(
        problems(20), prompts=3, group=4, reward=only("p1", "p4", "p9"), max_attempts=6
    )
    assert {problem.id for problem in more.problems} == {"p1", "p4", "p9"}
    assert (more.equal_groups, more.notes) == (0, ())
    advantage_PG = more.batch.advantage_NS.amax(1).view(3, 4)
    assert (advantage_PG.amax(1) > 1).all()
    assert torch.equal(more.batch.rollouts.prompt_N, torch.arange(3).repeat_interleave(4))
    asked = [draw.prompt_ids(problem) for problem in more.problems]
    for n in range(12):
        rollouts = more.batch.rollouts
        prompt_S = rollouts.tokens_NS[n][rollouts.attention_NS[n] & ~rollouts.response_NS[n]]
        assert tuple(prompt_S.tolist()) == asked[n // 4]


def test_equal_rewards_everywhere_are_told_not_raised():
    made = generator(length=4).generate_update_batch(
        problems(5), prompts=3, group=2, reward=only(), max_attempts=9
    )
    assert made.all_equal
    assert made.retries == 2
    assert (made.batch.advantage_NS == 0).all()
    assert [problem.id for problem in made.problems] == ["p0", "p1", "p2"]
    assert "pool of problems ran out" in made.notes[0]
    assert "momentum and decay alone" in made.notes[1]


def test_without_the_filter_the_first_groups_stand():
    made = generator(length=4).generate_update_batch(
        problems(9), prompts=3, group=2, reward=only("p7"), filter_zero_advantage=False
    )
    assert made.retries == 0
    assert made.all_equal


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_and_advantages_belong_to_their_rollouts(scale):
    made = generator(length=8).generate_update_batch(
        problems(12),
        prompts=3,
        group=4,
        reward=Reward(functions={"parity": parity}, weights=(2.0,)),
        scale=scale,
    )
    batch, rollouts = made.batch, made.batch.rollouts
    assert batch.reward_N is not None
    assert rollouts.text is not None
    assert batch.reward_N.tolist() == [2.0 * (len(text) % 2 == 0) for text in rollouts.text]
    assert torch.equal(made.rewards.by_function["parity"] * 2, batch.reward_N)
    for p in range(3):
        rows = slice(4 * p, 4 * p + 4)
        reward_G = batch.reward_N[rows]
        spread = {"group": reward_G.std() + 1e-4, "batch": batch.reward_N.std() + 1e-4, "none": 1.0}
        expected_G = (reward_G - reward_G.mean()) / spread[scale]
        for g, n in enumerate(range(4 * p, 4 * p + 4)):
            mine = batch.advantage_NS[n][rollouts.response_NS[n]]
            assert torch.allclose(mine, expected_G[g].expand_as(mine), atol=INVARIANT, rtol=0)


def test_what_cannot_be_sampled_is_refused():
    with pytest.raises(ValueError, match=r"needs 3 problems, the pool has 2"):
        generator().generate_update_batch(problems(2), prompts=3, group=2, reward=only())
    with pytest.raises(ValueError, match=r"group is 1; expected at least 2"):
        generator().generate_update_batch(problems(3), prompts=3, group=1, reward=only())
    with pytest.raises(ValueError, match=r"\['p0'\] appear twice"):
        generator().generate(problems(1) * 2, group=1, name="x")
    with pytest.raises(ValueError, match=r"prompt of 2 tokens; with 300 new ones .* 256 positions"):
        generator(length=300).generate(problems(1), group=1, name="x")
    with pytest.raises(ValueError, match=r"max_new_tokens is 0"):
        generator(length=0)
    with pytest.raises(ValueError, match=r"expected a list of non-empty strings"):
        generator(stop="###")
    with pytest.raises(ValueError, match=r"has the prompt '', which is no token; expected"):
        generator().generate([Problem(id="x", prompt="", answer="")], group=1, name="x")
    assert len(tiny_tokenizer()) == VOCABULARY


def test_the_progress_bar_is_for_terminals_only(capsys, monkeypatch):
    seen = []
    generator(progress=seen.append, batch_size=4).generate(problems(), group=1, name="x")
    assert [told.rollouts for told in seen if told.finished_unit] == [4, 8]
    assert seen[-1].tokens_per_second > 0
    generator(progress=True).generate(problems(), group=1, name="evaluation")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    generator(progress=True).generate(problems(), group=1, name="evaluation")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "drawing evaluation" in shown.err
    assert "8/8" in shown.err


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_by_prompt_are_group_advantages_in_any_order(scale):
    """Also where a rollout has no reward: it is left out of every mean and spread."""
    reward_N = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, torch.nan, 2.0, 1.0], dtype=torch.float64)
    prompt_N = torch.arange(8) // 4
    order_N = torch.tensor([5, 0, 3, 7, 2, 6, 1, 4])
    expected_N = group_advantages(reward_N, 4, scale)
    assert bool(torch.isfinite(expected_N).all())
    found_N = advantages_by_prompt(scale)(reward_N[order_N], prompt_N[order_N])
    torch.testing.assert_close(found_N, expected_N[order_N], rtol=0, atol=1e-15)
