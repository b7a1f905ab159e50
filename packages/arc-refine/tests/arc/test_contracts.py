"""G1 to G14 hold on the real training, and each fails on a training that breaks it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from arc_refine.contracts import (
    ContractError,
    GradientWindow,
    moved,
    no_gradient,
    owners,
    right_dtype,
    same_parameters,
    stuck,
    two_steps,
)
from arc_refine.evaluate import predict
from arc_refine.live import ORDER, LiveContracts
from arc_refine.probes import (
    evaluation_is_gradless,
    finite_differences,
    leak,
    same_embedding,
    score_is_zero,
    sensitivity,
    term_gradients,
)

from .small import Small, same


def names(breaches):
    return [b.contract for b in breaches]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="rl"),
        pytest.param({"refine": "pathwise"}, id="pathwise", marks=pytest.mark.slow),
        pytest.param({"refine": "off"}, id="off", marks=pytest.mark.slow),
        pytest.param({"lm_train": "none"}, id="frozen", marks=pytest.mark.slow),
        pytest.param({"lm_train": "lora"}, id="lora", marks=pytest.mark.slow),
        pytest.param({"lm": "none"}, id="no-lm", marks=pytest.mark.slow),
    ],
)
def test_all_hold_live_and_change_nothing(tasks, changes):
    """Modules in train() mode; weights are those of a training that nobody watched."""
    watched, plain = Small(tasks, **changes), Small(tasks, **changes)
    live = LiveContracts(watched.training, 2, watched.data.batch)
    live.before(watched.episodes())
    for number in range(2):
        live.run(lambda observer: watched.step(number, observer))
        plain.step(number)
    live.after(watched.episodes(2))
    expected = [g for g in ORDER if g != "G2" or watched.config.refine == "rl"]
    assert live.report()["held"] == expected
    assert [f for f in live.findings if f.severity.name != "NOTE"] == []
    assert same(watched.weights(), plain.weights())
    assert all(module.training for module in watched.networks.modules().values())
    assert all(norm > 0 for norm in live.term_norms.values())
    assert set(live.term_norms) == {"ce", "risk", "z", "bi", "back", "prompt", "size"}


def graded(**values):
    found = {}
    for name, value in values.items():
        found[name] = nn.Parameter(torch.ones(2))
        found[name].grad = None if value is None else torch.full((2,), value)
    return found


def test_g1_wants_every_gradient_within_the_window():
    window = GradientWindow("G1")
    (none,) = window.see(graded(a=1.0, b=0.0, c=None))
    assert (none.contract, none.parameters) == ("G1", ("c",))
    assert window.verdict() == []  # one step does not tell
    assert window.see(graded(a=0.0, b=0.0, c=0.5)) == []
    (zero,) = window.verdict()
    assert zero.parameters == ("b",)
    window.see(graded(a=0.0, b=1e-30, c=1.0))
    assert window.verdict() == []


def test_g1_refuses_what_is_not_finite_at_once():
    (breach,) = GradientWindow("G1").see(graded(a=float("nan"), b=1.0))
    assert breach.parameters == ("a",)


def test_g1_g2_a_loss_reaches_only_its_own():
    assert no_gradient("G1", graded(a=None), "L") == []
    assert names(no_gradient("G2", graded(a=0.0), "L")) == ["G2"]


def test_g2_sees_a_detached_density(tasks, monkeypatch):
    small = Small(tasks)
    policy = small.networks.policy
    true = type(policy).log_prob
    monkeypatch.setattr(policy, "log_prob", lambda s, u: true(policy, s, u).detach())
    live = LiveContracts(small.training, 2, small.data.batch)
    with pytest.raises(ContractError) as caught:
        small.step(0, live)  # the doctor aside: the contract alone
    # the entropy bonus still reaches what makes sigma; the mean gets nothing
    (breach,) = caught.value.breaches
    assert breach.contract == "G2"
    assert set(breach.parameters) == {"policy.mean.weight", "policy.mean.bias"}
    assert names(score_is_zero(small.training, small.batch().inputs)) == ["G11"]


def test_g3_one_owner_each(tasks):
    small = Small(tasks)
    optimizers = small.training.optimizers
    assert owners(small.named, optimizers) == []
    (orphan,) = owners(small.named, {"main": optimizers["main"]})
    assert all(n.startswith("policy.") for n in orphan.parameters)
    again = torch.optim.SGD(small.networks.efe.parameters(), lr=0.1)
    (twice,) = owners(small.named, {**optimizers, "again": again})
    assert "more than one" in twice.what
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    (foreign,) = owners(small.named, {**optimizers, "stranger": stranger})
    assert "hold 2 parameters" in foreign.what
    small.networks.agent.head.weight.requires_grad_(False)
    (frozen,) = owners(small.named, optimizers)
    assert frozen.parameters == ("agent.head.weight",)


def test_g4_a_step_must_change_bits_and_not_too_much():
    p = {"w": nn.Parameter(torch.ones(4))}
    assert "not one bit" in moved("agent", p, [torch.ones(4)])[0].what
    assert moved("agent", p, [torch.full((4,), 0.999)]) == []
    assert "by 1.0e+00" in moved("agent", p, [torch.full((4,), 0.5)])[0].what
    assert names(moved("agent", p, [torch.zeros(4)])) == ["G4"]


def test_g4_catches_steps_below_half_an_ulp_of_bf16():
    """An Adam step of 5e-5 on weights near 1 vanishes in bf16; in fp32 it does not."""
    for dtype, breaches in ((torch.bfloat16, ["G4"]), (torch.float32, [])):
        p = nn.Parameter(torch.ones(8, dtype=dtype))
        optimizer = torch.optim.AdamW([p], lr=5e-5, weight_decay=0.0)
        p.grad = torch.ones_like(p)
        before = p.detach().clone()
        optimizer.step()
        assert names(moved("lm", {"w": p}, [before])) == breaches
        assert names(stuck({"w": p}, {"w": before}, {"w": True})) == breaches


def test_g5_sees_late_lost_and_replaced_parameters(tasks):
    small = Small(tasks)
    known = small.named
    assert same_parameters(small.named, known) == []
    small.networks.agent.extra = nn.Linear(2, 2)
    (late,) = same_parameters(small.named, known)
    assert set(late.parameters) == {"agent.extra.weight", "agent.extra.bias"}
    del small.networks.agent.extra
    small.networks.agent.head = nn.Conv2d(8, 10, 1)
    (replaced,) = same_parameters(small.named, known)
    assert "replaced" in replaced.what


def test_g6_names_what_is_half():
    named = {"a": nn.Parameter(torch.ones(1)), "b": nn.Parameter(torch.ones(1).half())}
    (breach,) = right_dtype(named)
    assert breach.parameters == ("b",)
    assert "float16, expected float32" in breach.what


def test_g7_true_slopes_pass_and_a_scaled_gradient_fails(tasks):
    small = Small(tasks)
    small.step()
    assert finite_differences(small.training, small.batch()) == []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            return 1.001 * slope

    head = small.networks.agent.head
    head.register_forward_hook(lambda m, x, y: Doubled.apply(y))
    (breach, *_) = finite_differences(small.training, small.batch())
    assert breach.contract == "G7"


def test_g8_finds_a_term_without_gradient(tasks):
    small = Small(tasks)
    small.networks.efe.observe(small.batch().targets)
    efe, true = small.networks.efe, type(small.networks.efe).forward

    def silent(*arguments):
        terms = true(efe, *arguments)
        return replace(terms, weighted={**terms.weighted, "risk": terms.weighted["risk"].detach()})

    efe.forward = silent
    norms, (breach,) = term_gradients(small.training, small.batch())
    assert norms["risk"] == 0
    assert "terms risk of" in breach.what


def test_g9_changing_the_target_changes_no_logit(tasks):
    small = Small(tasks)
    assert leak(small.training, small.episodes(), small.data.batch) == []


def test_g9_catches_a_target_in_the_prompt_or_in_the_canvas(tasks):
    small = Small(tasks)

    def in_prompt(episodes):
        batch = small.data.batch(episodes)
        texts = tuple(f"{t} answer {e.target[0, 0]}" for t, e in zip(batch.inputs.texts, episodes))
        return replace(batch, inputs=replace(batch.inputs, texts=texts))

    def in_canvas(episodes):
        batch = small.data.batch(episodes)
        height = max(e.target.shape[0] for e in episodes)
        canvas = batch.inputs.canvas_BHW.clone()
        canvas[:, height:] = False
        return replace(batch, inputs=replace(batch.inputs, canvas_BHW=canvas))

    (colours,) = leak(small.training, small.episodes(), in_prompt)
    assert "colours" in colours.what
    (size,) = leak(small.training, small.episodes(), in_canvas)
    assert "size" in size.what


def test_g10_every_input_is_read(tasks, monkeypatch):
    small = Small(tasks)
    inputs = small.batch().inputs
    assert sensitivity(small.training, inputs) == []
    stale = small.networks.encoder.pooled(inputs.texts)
    monkeypatch.setattr(small.networks.encoder, "pooled", lambda texts: stale)
    (breach,) = sensitivity(small.training, inputs)
    assert "changing the text changes no logit" in breach.what


def test_g11_density_and_samples_belong_together(tasks, monkeypatch):
    small = Small(tasks)
    inputs, policy = small.batch().inputs, small.networks.policy
    assert score_is_zero(small.training, inputs, draws=256) == []
    true = type(policy).log_prob
    # of the squashed action instead of the raw sample
    monkeypatch.setattr(policy, "log_prob", lambda s, u: true(policy, s, policy.squash(u)))
    assert names(score_is_zero(small.training, inputs, draws=256)) == ["G11"]


def test_g12_a_throwaway_projection_is_seen_although_seeds_are_equal(tasks):
    small = Small(tasks)
    inputs, encoder = small.batch().inputs, small.networks.encoder
    assert same_embedding(small.training, inputs) == []
    true = type(encoder).forward
    encoder.forward = lambda x: nn.Linear(16, 16)(true(encoder, x))
    assert names(same_embedding(small.training, inputs)) == ["G12"]


def test_g13_validation_keeps_no_graph(tasks):
    small = Small(tasks)
    inputs = small.batch().inputs
    assert evaluation_is_gradless(lambda x: predict(small.training, x), inputs) == []
    careless = predict.__wrapped__
    assert names(evaluation_is_gradless(lambda x: careless(small.training, x), inputs)) == ["G13"]


def test_g14_two_steps_in_a_row(tasks):
    small = Small(tasks)
    assert two_steps(small.step) == []
    kept = small.networks.encoder(small.batch().inputs)
    small.networks.encoder.forward = lambda inputs: kept  # a cached embedding with its graph
    (breach,) = two_steps(small.step)
    assert breach.contract == "G14"
    assert "step 2" in breach.what
