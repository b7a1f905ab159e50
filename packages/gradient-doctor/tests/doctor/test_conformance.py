"""The entropy conformance: right functions pass, each mistake fails its own case and is named.

The functions below are what people write. A broken one differs from its right twin in one place.
"""

import inspect
import json
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from gradient_doctor.conformance import TargetError, check_entropy, main_entropy
from gradient_doctor.conformance.cases import CASES, ROUNDING_AT_MOST, plain, varying
from gradient_doctor.conformance.golden import GoldenModel, Scene, batch, table, uneven
from gradient_doctor.conformance.mistakes import View
from gradient_doctor.conformance.outputs import Layout
from gradient_doctor.conformance.ranks import communicates
from gradient_doctor.conformance.signatures import forms_of


def h_of(logits):
    """Entropy of each row, in fp32, safe where a logit is -inf."""
    logp = logits.float().log_softmax(-1)
    p = logp.exp()
    return -torch.where(p > 0, p * logp, 0.0).sum(-1)


def l_of(logits, token):
    return logits.float().log_softmax(-1).gather(-1, token[..., None])[..., 0]


def mean_of(value, mask):
    return torch.where(mask.bool(), value, 0.0).sum() / mask.sum()


# Right functions, one per form


def entropies(logits):
    return h_of(logits)


def mean_entropy(logits, input_ids, mask, temperature=1.0):
    return mean_of(h_of(logits[:, :-1] / temperature), mask[:, 1:])


def mean_entropy_of_float(logits, input_ids, mask):
    return float(mean_entropy(logits, input_ids, mask))


def mean_entropy_of_selected(logits, input_ids, response_mask):
    """Boolean indexing: wrong with a mask of 0 and 1, which would pick rows 0 and 1."""
    return h_of(logits[:, :-1])[response_mask[:, 1:]].mean()


def entropy_without_ids(logits, mask):
    return mean_of(h_of(logits), mask)


def entropy_shifted_without_ids(logits, mask):
    return mean_of(h_of(logits[:, :-1]), mask[:, 1:])


def entropy_of_real_tokens(logits, input_ids, attention_mask):
    return mean_of(h_of(logits[:, :-1]), attention_mask[:, 1:] * attention_mask[:, :-1])


def entropy_by_row(logits, input_ids):
    return h_of(logits)


def entropy_by_token(logits, input_ids):
    return F.pad(h_of(logits)[:, :-1], (1, 0))


def logps_aligned(logits, labels):
    return l_of(logits, labels)


def logps_shifted(logits, labels):
    return l_of(logits[:, :-1], labels[:, 1:].clamp(min=0))


def sequence_logps(logits, labels):
    value, mask = logps_shifted(logits, labels), labels[:, 1:] != -100
    return torch.where(mask, value, 0.0).sum(1)


def loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def from_model(model, input_ids, attention_mask, logits_to_keep, temperature=1.0):
    out = model(input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1)
    z = out.logits[:, :-1] / temperature
    return l_of(z, input_ids[:, -logits_to_keep:]), h_of(z)


def from_batch(model, batch):
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"])[0]
    return {"mean_entropy": mean_of(h_of(logits[:, :-1]), batch["response_mask"][:, 1:])}


def over_shards(shards):
    total = count = 0.0
    for part in shards:
        mask = part["response_mask"][:, 1:]
        total += torch.where(mask.bool(), h_of(part["logits"][:, :-1]), 0.0).sum()
        count += mask.sum()
    return total / count


def top_k_entropy(logits, top_k=None, chunk_size=64):
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)
    # Over chunks of the vocabulary, with the running sums that make it exact.
    z = logits.float()
    top = z.max(-1, keepdim=True).values
    s = zs = torch.zeros_like(top[..., 0])
    for part in z.split(chunk_size, -1):
        d = part - top
        e = d.exp()
        s, zs = s + e.sum(-1), zs + torch.where(e > 0, e * d, 0.0).sum(-1)
    return s.log() - zs / s


RIGHT = {
    entropies: ("aligned", "entropy per token"),
    mean_entropy: ("sequence", "entropy, mean over tokens"),
    mean_entropy_of_float: ("sequence", "entropy, mean over tokens"),
    mean_entropy_of_selected: ("sequence", "entropy, mean over tokens"),
    entropy_without_ids: ("aligned", "entropy, mean over tokens"),
    entropy_shifted_without_ids: ("sequence", "entropy, mean over tokens"),
    entropy_of_real_tokens: ("sequence", "entropy, mean over tokens"),
    entropy_by_row: ("sequence", "entropy per token"),
    entropy_by_token: ("sequence", "entropy per token"),
    logps_aligned: ("aligned", "log-prob per token"),
    logps_shifted: ("sequence", "log-prob per token"),
    sequence_logps: ("sequence", "log-prob, sum over each sequence"),
    loss: ("sequence", "-log-prob, mean over tokens"),
    from_model: ("sequence", "log-prob per token; entropy per token"),
    from_batch: ("sequence", "entropy, mean over tokens"),
    over_shards: ("sequence", "entropy, mean over tokens"),
    top_k_entropy: ("aligned", "entropy per token"),
}


@pytest.mark.parametrize("function", RIGHT, ids=lambda f: f.__name__)
def test_right_functions_pass(function):
    found = check_entropy(function)
    assert found.passed, found.text()
    assert (found.convention, "; ".join(found.returns)) == RIGHT[function]
    right = [case for case in found.cases if case.verdict == "right"]
    assert len(right) >= 5
    assert max(case.error_nats for case in right) < 1e-3


# Broken functions: (the only cases that fail, the mistake)


def unshifted(logits, input_ids, mask):
    return mean_of(h_of(logits), mask)


def unshifted_labels(logits, input_ids):
    return l_of(logits, input_ids)[:, 1:]


def shifted_twice(logits, input_ids, mask):
    return mean_of(h_of(logits[:, :-2]), mask[:, 2:])


def first_token_lost(logits, input_ids, mask):
    return mean_of(h_of(logits[:, :-1]), mask[:, 1:] * mask[:, :-1])


def last_row_counted(logits, input_ids, attention_mask):
    return mean_of(h_of(logits), attention_mask)


def padding_counted(logits, input_ids, mask):
    pad = input_ids[:, 1:] == 0
    return mean_of(h_of(logits[:, :-1]), mask[:, 1:].bool() | pad)


def padding_in_the_denominator(logits, input_ids, mask):
    value = torch.where(mask[:, 1:].bool(), h_of(logits[:, :-1]), 0.0)
    return value.mean()


def first_token_counted(logits, input_ids, attention_mask):
    return mean_of(h_of(logits[:, :-1]), attention_mask[:, 1:])


def prompt_counted(logits, input_ids, mask):
    return mean_of(h_of(logits[:, :-1]), input_ids[:, 1:] != 0)


def no_attention_mask(model, input_ids, attention_mask, logits_to_keep):
    out = model(input_ids, logits_to_keep=logits_to_keep + 1)
    return h_of(out.logits[:, :-1])


def temperature_ignored(logits, input_ids, mask, temperature=1.0):
    return mean_entropy(logits, input_ids, mask)


def temperature_inverted(logits, input_ids, mask, temperature=1.0):
    return mean_entropy(logits, input_ids, mask, 1 / temperature)


def temperature_twice(logits, input_ids, mask, temperature=1.0):
    return mean_entropy(logits / temperature, input_ids, mask, temperature)


def mean_of_means(logits, input_ids, mask):
    m = mask[:, 1:].bool()
    return (torch.where(m, h_of(logits[:, :-1]), 0.0).sum(1) / m.sum(1)).mean()


def mask_of_the_first_row(logits, input_ids, mask):
    start = int(mask[0].long().argmax())
    return h_of(logits[:, start - 1 : -1]).mean()


def mean_of_shard_means(shards):
    parts = [mean_of(h_of(s["logits"][:, :-1]), s["response_mask"][:, 1:]) for s in shards]
    return torch.stack(parts).mean()


def sorted_by_length(logits, input_ids, attention_mask):
    order = attention_mask.sum(1).argsort(descending=True, stable=True)
    return h_of(logits[order][:, :-1])


def cast_to_bf16(logits, input_ids, mask):
    return mean_entropy(logits.bfloat16().float(), input_ids, mask)


def in_the_dtype_given(logits, temperature=1.0):
    logp = (logits / temperature).log_softmax(-1)
    p = logp.exp()
    return -torch.where(p > 0, p * logp, 0.0).sum(-1)


def softmax_per_chunk(logits):
    return sum(h_of(part) for part in logits.split(8192, -1))


def softmax_per_chunk_of_its_size(logits, chunk_size=65536):
    return torch.stack([h_of(part) for part in logits.split(chunk_size, -1)]).mean(0)


def logp_per_chunk(logits, index):
    parts = [part.float().log_softmax(-1) for part in logits.split(16384, -1)]
    return torch.cat(parts, -1).gather(-1, index[..., None])[..., 0]


def hidden_top_20(logits):
    return h_of(logits.topk(20).values)


def hidden_top_20_not_renormalised(logits):
    logp = logits.float().log_softmax(-1).topk(20).values
    return -torch.where(logp.exp() > 0, logp.exp() * logp, 0.0).sum(-1)


def top_k_ignored(logits, top_k=None):
    return h_of(logits)


def top_k_not_renormalised(logits, top_k=None):
    logp = logits.float().log_softmax(-1)
    logp = logp.topk(top_k).values if top_k else logp
    return -(logp.exp() * logp).sum(-1)


def zero_times_infinity(logits):
    logp = logits.float().log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


BROKEN = [
    (unshifted, {"shift by one"}, "shift by one"),
    (unshifted_labels, {"shift by one"}, "shift by one"),
    # A token less in each response also changes a mean over responses of different lengths.
    (first_token_lost, {"shift by one", "token mean"}, "first token lost"),
    (padding_counted, {"padding side"}, "padding counted"),
    (first_token_counted, {"padding side"}, "first token counted"),
    (no_attention_mask, {"attention mask"}, "attention mask not passed"),
    (temperature_ignored, {"temperature"}, "temperature ignored"),
    (temperature_inverted, {"temperature"}, "temperature inverted"),
    (temperature_twice, {"temperature"}, "temperature applied twice"),
    (mean_of_means, {"token mean"}, "mean of means"),
    (mask_of_the_first_row, {"token mean", "padding side"}, "first row's mask"),
    (mean_of_shard_means, {"mean over ranks"}, "mean of means"),
    (sorted_by_length, {"batch reorder"}, "batch order lost"),
    (cast_to_bf16, {"fp32"}, "logits cast to bfloat16"),
    (in_the_dtype_given, {"bf16"}, "computed in bfloat16"),
    (softmax_per_chunk, {"chunk axis"}, "softmax per chunk"),
    (softmax_per_chunk_of_its_size, {"chunk axis"}, "softmax per chunk"),
    (logp_per_chunk, {"chunk axis"}, "softmax per chunk"),
    (hidden_top_20, {"whole vocabulary"}, "top-k renormalised"),
    (hidden_top_20_not_renormalised, {"whole vocabulary"}, "top-k not renormalised"),
    (top_k_ignored, {"top-k"}, "top-k ignored"),
    (top_k_not_renormalised, {"top-k"}, "top-k not renormalised"),
    (zero_times_infinity, {"top-k"}, "not a number"),
]


@pytest.mark.parametrize(
    ("function", "cases", "mistake"), BROKEN, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_mistake_fails_its_case_and_is_named(function, cases, mistake):
    found = check_entropy(function)
    assert {case.name: case.mistake for case in found.wrong} == dict.fromkeys(cases, mistake), (
        found.text()
    )
    assert not found.passed


# Mistakes that no batch hides: every case that fails must name the same one


def in_bits(logits, input_ids, mask):
    return mean_entropy(logits, input_ids, mask) / math.log(2)


def negative(logits):
    return -h_of(logits)


def entropy_of_drawn_tokens(logits, input_ids, mask):
    return -mean_of(l_of(logits[:, :-1], input_ids[:, 1:]), mask[:, 1:])


def perplexity_as_entropy(logits, input_ids, mask):
    return mean_entropy(logits, input_ids, mask).exp()


def over_positions(logits, input_ids, mask):
    logp = logits.log_softmax(1)
    return mean_of(-(logp.exp() * logp).sum(-1)[:, :-1], mask[:, 1:])


def normalised(logits):
    return h_of(logits) / math.log(logits.shape[-1])


def probabilities_as_logps(logits, index):
    return l_of(logits, index).exp()


EVERYWHERE = [
    (in_bits, "bits"),
    (negative, "wrong sign"),
    (entropy_of_drawn_tokens, "surprisal of the drawn token"),
    (perplexity_as_entropy, "exponential of it"),
    (normalised, "divided by log V"),
    (shifted_twice, "shifted twice"),
    (prompt_counted, "prompt counted"),
    (padding_in_the_denominator, "padding in the denominator"),
    (last_row_counted, "shift by one"),
    (over_positions, "softmax over the wrong axis"),
]


@pytest.mark.parametrize(
    ("function", "mistake"), EVERYWHERE, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_mistake_of_every_case_has_one_name(function, mistake):
    found = check_entropy(function)
    assert len(found.wrong) >= 3
    # Where a logit is -inf, some of them have no number at all.
    assert {case.mistake for case in found.wrong} - {"not a number"} == {mistake}, found.text()


# The truth


def test_golden_values_by_enumeration():
    """Against sums over the vocabulary in plain Python, and a law whose entropy is known."""
    for scene in (plain(), varying(), uneven()):
        h_NS, l_NS = scene.values("entropy"), scene.values("logprob")
        for n, s in scene.response_NS.nonzero().tolist():
            row = scene.logits_NSV[n, s - 1].tolist()
            total = math.fsum(math.exp(z) for z in row)
            p = [math.exp(z) / total for z in row]
            assert h_NS[n, s].item() == pytest.approx(
                -math.fsum(q * math.log(q) for q in p), abs=1e-12
            )
            assert l_NS[n, s].item() == pytest.approx(math.log(p[scene.ids_NS[n, s]]), abs=1e-12)
    ids = torch.tensor([[1, 2, 0]])
    halves = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0]).log().expand(24, 5)
    real = torch.ones(1, 3, dtype=torch.bool)
    scene = Scene(label="", table_RV=halves, ids_NS=ids, attention_NS=real, response_NS=real)
    assert scene.values("entropy")[0, 1].item() == pytest.approx(1.75 * math.log(2), abs=1e-7)


@pytest.mark.parametrize("function", [mean_entropy, entropies, logps_aligned, sequence_logps, loss])
def test_mistakes_are_far_from_the_truth(function):
    """Each case shows each of its mistakes, beyond what rounding in bf16 could hide."""
    found = check_entropy(function)
    form = next(f for f in forms_of(function) if f.sequence == (found.convention == "sequence"))
    quantity, kind, reduction = {
        mean_entropy: ("entropy", "scalar", "mean"),
        entropies: ("entropy", "token", "mean"),
        logps_aligned: ("logprob", "token", "mean"),
        sequence_logps: ("logprob", "sequence", "sum"),
        loss: ("surprisal", "scalar", "mean"),
    }[function]
    layout = Layout(None, quantity, kind, reduction)
    checked = 0
    for golden in CASES:
        if golden.tolerance is not None or golden.reason(form, layout):
            continue
        distance: dict[str, float] = {}
        for scene in golden.scenes(form, layout):
            view = View(scene, form, layout)
            truth = view.truth
            for mistake in golden.mistakes(view):
                if mistake.value.shape == truth.shape and not mistake.value.isnan().any():
                    away = float((mistake.value - truth).abs().max())
                    distance[mistake.name] = max(away, distance.get(mistake.name, 0.0))
        # A padded row has the values of an unpadded one: only sums and means can show it.
        if kind == "token" and golden.name == "padding side":
            continue
        # A banned token has probability 0: log-probs of the others are the same with it or not.
        checked += len(distance)
        assert all(d > 1.5 * ROUNDING_AT_MOST for d in distance.values()), (golden.name, distance)
    assert checked >= 3


def test_both_sides_of_padding_have_one_truth():
    left, right = (batch("", table(varying=True), side=s, prompts="own") for s in ("left", "right"))
    for quantity in ("entropy", "logprob"):
        a, b = (scene.values(quantity)[scene.response_NS] for scene in (left, right))
        assert torch.equal(a, b)
    assert not torch.equal(left.attention_NS, right.attention_NS)


def test_the_golden_model_returns_the_scenes_logits():
    scene = batch("", table(varying=True), prompts="own")
    logits = GoldenModel(scene)(scene.ids_NS, attention_mask=scene.attention_NS.long()).logits
    assert torch.equal(logits, scene.logits_NSV)
    kept = GoldenModel(scene)(scene.ids_NS, scene.attention_NS, logits_to_keep=2)["logits"]
    assert torch.equal(kept, scene.logits_NSV[:, -2:])


# Ranks: real processes

DISTRIBUTED = """
    import torch
    import torch.distributed as dist

    def local(logits, input_ids, mask):
        logp = logits[:, :-1].log_softmax(-1)
        h = -(logp.exp() * logp).sum(-1)
        return (h * mask[:, 1:]).sum(), mask[:, 1:].sum()

    def reduced_sums(logits, input_ids, mask):
        total = torch.stack([x.double() for x in local(logits, input_ids, mask)])
        if dist.is_initialized():
            dist.all_reduce(total)
        return total[0] / total[1]

    def reduced_means(logits, input_ids, mask):
        total, count = local(logits, input_ids, mask)
        mean = total / count
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return mean

    def not_reduced(logits, input_ids, mask):
        total, count = local(logits, input_ids, mask)
        return total / count if dist.is_initialized() else total / count

    def breaks_on_ranks(logits, input_ids, mask):
        total, count = local(logits, input_ids, mask)
        if dist.is_initialized():
            raise RuntimeError("no ranks, please")
        return total / count
"""


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "reductions.py"
    path.write_text(textwrap.dedent(DISTRIBUTED))
    return path


@pytest.mark.parametrize(
    ("function", "verdict", "mistake", "words"),
    [
        pytest.param("reduced_sums", "right", "", "", marks=pytest.mark.slow),
        ("reduced_means", "wrong", "mean of means", "ranks with few tokens"),
        pytest.param("not_reduced", "not applicable", "", "own tokens", marks=pytest.mark.slow),
        pytest.param(
            "breaks_on_ranks", "wrong", "raised", "no ranks, please", marks=pytest.mark.slow
        ),
    ],
)
def test_two_ranks(distributed, function, verdict, mistake, words):
    found = check_entropy(f"{distributed}:{function}")
    case = next(case for case in found.cases if case.name == "mean over ranks")
    assert (case.verdict, case.mistake) == (verdict, mistake), found.text()
    assert words in case.meaning
    if function == "reduced_means":
        assert case.error_nats == pytest.approx(0.163, abs=0.001)


def test_only_functions_that_communicate_are_run_on_ranks():
    assert not communicates(mean_entropy)

    def outer(x):
        import torch.distributed as dist

        return dist.all_reduce(x)

    assert communicates(outer)
    assert communicates(lambda x: outer(x))


# TRL as it is installed: what was measured, whatever it is


def wrong_in(target):
    found = check_entropy(target)
    return found, {(case.quantity, case.name): case for case in found.wrong}


def test_trl_entropy_from_logits():
    found, wrong = wrong_in("trl.trainer.utils:entropy_from_logits")
    assert {k[1]: c.mistake for k, c in wrong.items()} == {
        "bf16": "computed in bfloat16",
        "top-k": "not a number",
    }
    assert sum(case.verdict == "right" for case in found.cases) == 5
    assert wrong["entropy", "bf16"].error_nats > 0.05  # 0.187 where this was written


def test_trl_selective_log_softmax():
    found, wrong = wrong_in("trl.trainer.utils:selective_log_softmax")
    assert {k[1]: c.mistake for k, c in wrong.items()} == {"bf16": "computed in bfloat16"}
    assert sum(case.verdict == "right" for case in found.cases) == 8


@pytest.mark.parametrize("trainer", ["grpo_trainer:GRPOTrainer", "rloo_trainer:RLOOTrainer"])
def test_trl_trainers_are_right_everywhere(trainer):
    """The fused head works in fp32 tiles; the helpers that get bf16 wrong are not on its path."""
    target = f"trl.trainer.{trainer}._get_per_token_logps_and_entropies"
    found, wrong = wrong_in(target)
    assert not wrong, found.text()
    assert found.passed
    assert sum(case.verdict == "right" for case in found.cases) == 20


@pytest.mark.parametrize("cast_lm_head_to_fp32", [False, True])
def test_trl_trainer_under_autocast(cast_lm_head_to_fp32):
    """The GRPO default is bf16 autocast, and then the head multiplies in bf16."""
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    method = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
    accelerator = SimpleNamespace(autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))

    def grpo(model, input_ids, attention_mask, logits_to_keep, temperature):
        add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, ("log_probs", "entropy"))
        trainer = SimpleNamespace(accelerator=accelerator)
        given = (model, input_ids, attention_mask, logits_to_keep)
        return method(trainer, *given, compute_entropy=True)[:2]

    found, wrong = wrong_in(grpo)
    cast = {("logprob", "fp32"), ("entropy", "fp32")}
    assert set(wrong) == (set() if cast_lm_head_to_fp32 else cast), found.text()
    assert all(case.mistake == "logits cast to bfloat16" for case in wrong.values())
    assert all(case.error_nats > 0.01 for case in wrong.values())


def test_trl_orpo_sequence_logps():
    target = "trl.experimental.orpo.orpo_trainer:ORPOTrainer.get_batch_logps"
    _, wrong = wrong_in(target)
    assert set(wrong) == {("logprob", "bf16"), ("logprob", "top-k")}
    assert "a mask of 0 does not hide it" in wrong["logprob", "top-k"].meaning


# What people read, and what they did wrong


def raises_in_bf16(logits):
    if logits.dtype == torch.bfloat16:
        raise NotImplementedError("half precision")
    return h_of(logits)


def test_a_case_in_which_the_function_raises_is_wrong():
    found = check_entropy(raises_in_bf16)
    (case,) = found.wrong
    assert (case.name, case.mistake, case.got) == ("bf16", "raised", None)
    assert "NotImplementedError: half precision" in case.meaning
    assert json.loads(found.to_json())["cases"][2]["error_nats"] == "inf"


def test_text_and_dict():
    found = check_entropy(temperature_twice)
    text = found.text()
    assert "wrong: temperature applied twice" in text
    assert "fix   logits / temperature, once, before log_softmax" in text
    assert "FAILED: 10 right, 1 wrong, 2 not applicable." in text
    entry = next(c for c in found.to_dict()["cases"] if c["name"] == "temperature")
    assert entry["verdict"] == "wrong"
    assert abs(entry["got"] - entry["expected"]) == pytest.approx(entry["error_nats"])


def test_not_applicable_is_not_passed():
    found = check_entropy(entropies)
    skipped = [case for case in found.cases if case.verdict == "not applicable"]
    assert {case.name for case in skipped} >= {"padding side", "shift by one", "temperature"}
    assert all(case.meaning and case.error_nats is None for case in skipped)
    assert f"{len(skipped)} not applicable" in found.text()


def test_inputs_are_fresh_for_every_case():
    def greedy(logits, temperature=1.0):
        return h_of(logits.div_(temperature))

    assert check_entropy(greedy).passed


def odd_names(x, where):
    return mean_of(h_of(x[:, :-1]), where[:, 1:])


def test_roles_say_what_names_do_not():
    with pytest.raises(TargetError, match=r"has the required \['x', 'where'\]"):
        check_entropy(odd_names)
    found = check_entropy(odd_names, roles={"x": "logits", "where": "response_mask"})
    assert found.passed
    with pytest.raises(TargetError, match="Role 'scores' of 'x': expected one of logits"):
        check_entropy(odd_names, roles={"x": "scores"})


def test_returns_says_what_a_number_is():
    def mine(logits, input_ids, mask):
        return entropy_of_drawn_tokens(logits, input_ids, mask)

    assert check_entropy(mine).returns == ("-log-prob, mean over tokens",)
    assert {c.mistake for c in check_entropy(mine, returns="entropy").wrong} == {
        "surprisal of the drawn token"
    }
    with pytest.raises(TargetError, match="returns='nats', expected one of entropy"):
        check_entropy(mine, returns="nats")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("entropy_from_logits", "expected module:function or file.py:function"),
        ("no_such_package.deep:f", "no_such_package.deep of .* cannot be imported"),
        ("no_such_file.py:f", "No file no_such_file.py"),
        ("math:entropy", "math has no 'entropy'. It has acos"),
        ("math:pi", "math:pi is a float, expected a function"),
        ("math:pow", "has the required \\['x', 'y'\\]"),
        ("json:dumps", "has the required \\['obj'\\]"),
    ],
)
def test_bad_targets_are_refused(target, message, capsys):
    with pytest.raises(TargetError, match=message):
        check_entropy(target)
    assert main_entropy(target, None) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logits, mask, beta: logits, "the required \\['beta'\\].*Write an adapter"),
        (lambda mask: mask, "nothing to take logits from"),
        (lambda logits: "high", "returned str, expected a float tensor"),
        (lambda logits: logits, "returned shape \\[3, 6, 128\\].*expected \\[N, S\\]"),
        (lambda logits: h_of(logits).flatten(), "returned shape \\[18\\]"),
        (lambda logits: (h_of(logits), h_of(logits)), "cannot be told apart"),
        (lambda logits: logits.nothing, "could not be called .*has no attribute 'nothing'"),
    ],
)
def test_functions_that_cannot_be_used_are_refused(function, message):
    with pytest.raises(TargetError, match=f"(?s){message}"):
        check_entropy(function)


def test_a_file_that_does_not_run_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(TargetError, match="cannot be imported \\(ZeroDivisionError"):
        check_entropy(f"{tmp_path}/broken.py:f")


def test_exit_codes_and_json(tmp_path, capsys, monkeypatch):
    (tmp_path / "scoring.py").write_text(
        "def good(logits):\n"
        "    z = logits.float()\n"
        "    d = (z - z.max(-1, keepdim=True).values).clamp(min=-1e4)\n"
        "    e = d.exp()\n"
        "    s = e.sum(-1)\n"
        "    return s.log() - (e * d).sum(-1) / s\n"
        "def bits(logits):\n"
        "    return good(logits) / 0.6931471805599453\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main_entropy("scoring:good", "out.json") == 0
    assert "PASSED: 7 right, 0 wrong" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["passed"] is True
    assert main_entropy("scoring.py:bits", None) == 3
    assert "wrong: bits" in capsys.readouterr().out
    assert main_entropy("scoring:good", "no/such/folder.json") == 2
    assert "cannot write no/such/folder.json" in capsys.readouterr().err
