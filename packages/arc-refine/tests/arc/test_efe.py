"""Every term by its formula, written out naively here; bounds; what `observe` may do."""

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import cosine_similarity, softmax

from arc.grids import episodes
from arc_refine.agent import AgentOutput, BackwardOutput
from arc_refine.batch import collate
from arc_refine.data import IGNORE
from arc_refine.efe import (
    EFE,
    SMOOTH,
    EfeWeights,
    hard_cell_ce,
    hard_cell_weights,
    jensen_shannon,
    kl,
)

ALL = EfeWeights(ce=1.0, risk=0.3, z=0.2, bi=0.7, back=0.4, prompt=0.6, size=0.5, hard=1.5)
T, E, W = 3, 6, 5


@pytest.fixture
def case():
    torch.manual_seed(0)
    batch = collate(episodes())
    B, H, W_ = batch.inputs.query_BHW.shape
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    output = AgentOutput(
        logits_TBCHW=make(T, B, 10, H, W_),
        size_logits_h_BS=make(B, 30),
        size_logits_w_BS=make(B, 30),
        pooled_BW=make(B, W),
    )
    back = BackwardOutput(
        logits_TBCHW=make(T, B, 10, H, W_),
        query_logits_BCHW=make(B, 10, H, W_),
        query_BHW=batch.inputs.query_BHW,
        valid_query_BHW=batch.inputs.valid_query_BHW,
    )
    efe = EFE(E, W, weights=ALL).double()
    efe.observe(batch.targets)
    return efe, output, back, batch.targets, make(B, E)


def cells(targets):
    return [tuple(i) for i in targets.valid_BHW.nonzero().tolist()]


def naive(efe, output, back, targets, prompt):
    """Cell by cell, with probabilities instead of log-probabilities."""
    where = cells(targets)
    N = len(where)
    Q, Qb = softmax(output.logits_TBCHW, 2), softmax(back.logits_TBCHW, 2)
    C = softmax(efe.preference(prompt), -1)
    raw = [1 + ALL.hard * float(Q[-1, b, :, i, j].argmax() != targets.target_BHW[b, i, j])
           for b, i, j in where]  # fmt: skip
    ce = sum(
        -w * N / sum(raw) * Q[-1, b, targets.target_BHW[b, i, j], i, j].log()
        for w, (b, i, j) in zip(raw, where)
    )
    risk = bi = 0
    for t in range(T):
        for b, i, j in where:
            q, qb = Q[t, b, :, i, j], Qb[t, b, :, i, j]
            risk += (q * (q / C[b]).log()).sum()
            m = (q + qb) / 2
            bi += ((q * (q / m).log()).sum() + (qb * (qb / m).log()).sum()) / 2
    counts = torch.zeros(10, dtype=torch.float64)
    for b, i, j in where:
        counts[targets.target_BHW[b, i, j]] += 1
    frequencies = (counts / N + SMOOTH) / (1 + 10 * SMOOTH)
    asked = back.valid_query_BHW.nonzero().tolist()
    Qx = softmax(back.query_logits_BCHW, 1)
    sides = [softmax(x, -1) for x in (output.size_logits_h_BS, output.size_logits_w_BS)]
    B = prompt.shape[0]
    return {
        "ce": ce / N,
        "risk": risk / (T * N),
        "z": (C * (C / frequencies).log()).sum(-1).mean(),
        "bi": bi / (T * N),
        "back": -sum(Qx[b, back.query_BHW[b, i, j], i, j].log() for b, i, j in asked) / len(asked),
        "prompt": (1 - cosine_similarity(prompt @ efe.match.weight.T, output.pooled_BW)).mean(),
        "size": -sum(
            sides[axis][b, targets.size_B2[b, axis] - 1].log() for b in range(B) for axis in (0, 1)
        )
        / B,
    }


def test_every_term_is_its_formula(case):
    efe, output, back, targets, prompt = case
    terms = efe(output, back, targets, prompt)
    expected = naive(efe, output, back, targets, prompt)
    assert set(terms.parts) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(terms.parts[name], value, rtol=1e-9, atol=1e-12, msg=name)
        assert getattr(terms, name) is terms.parts[name]
    total = sum(getattr(ALL, name) * value for name, value in expected.items())
    torch.testing.assert_close(terms.total, total, rtol=1e-9, atol=1e-12)
    wrong = sum(
        int(output.logits_TBCHW[-1, b, :, i, j].argmax() != targets.target_BHW[b, i, j])
        for b, i, j in cells(targets)
    )
    assert terms.mask_ratio.item() == pytest.approx(wrong / int(targets.cells_B.sum()))
    assert terms.cell_accuracy.item() == pytest.approx(1 - terms.mask_ratio.item())
    assert terms.uncovered.item() == 0


def test_the_formulas_have_teeth(case):
    """Terms that differ only in direction or weighting differ far more than the tolerance."""
    _, output, back, targets, _ = case
    log_Q, log_Qb = (torch.log_softmax(x.logits_TBCHW, 2) for x in (output, back))
    assert (kl(log_Q, log_Qb, dim=2).mean() - kl(log_Qb, log_Q, dim=2).mean()).abs() > 1e-4
    wrong = log_Q[-1].argmax(1) != targets.target_BHW
    plain, hard = (hard_cell_ce(log_Q[-1], targets.target_BHW, wrong, b) for b in (0.0, 1.5))
    assert (plain - hard).abs() > 1e-3


def test_each_enabled_term_has_a_gradient_of_its_own(case):
    efe, output, back, targets, prompt = case
    leaves = [output.logits_TBCHW, back.logits_TBCHW, back.query_logits_BCHW, prompt,
              output.pooled_BW, output.size_logits_h_BS, *efe.parameters()]  # fmt: skip
    terms = efe(output, back, targets, prompt)
    for name, value in terms.weighted.items():
        grads = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
        assert sum(float(g.norm()) for g in grads if g is not None) > 1e-6, name


def test_no_gradient_outside_the_target(case):
    efe, output, back, targets, prompt = case
    terms = efe(output, back, targets, prompt)
    (grad,) = torch.autograd.grad(terms.total, output.logits_TBCHW)
    outside = ~targets.valid_BHW[None, :, None].expand_as(grad)
    assert outside.any()
    assert not grad[outside].any()


@pytest.mark.parametrize("name", ["ce", "risk", "z", "bi", "back", "prompt", "size"])
def test_a_term_of_weight_0_is_not_computed(case, name):
    _, output, back, targets, prompt = case
    efe = EFE(E, W, weights=dataclasses.replace(ALL, **{name: 0.0})).double()
    efe.observe(targets)
    terms = efe(output, back, targets, prompt)
    assert name not in terms.parts
    assert getattr(terms, name) is None
    used = torch.autograd.grad(terms.total, list(efe.parameters()), allow_unused=True)
    assert all(g is not None for g in used)  # and it leaves no idle parameter


def test_only_ce_needs_no_parameters():
    off = {f.name: 0.0 for f in dataclasses.fields(EfeWeights)}
    efe = EFE(E, W, weights=EfeWeights(**{**off, "ce": 1.0}))
    assert list(efe.parameters()) == []
    assert not efe.weights.needs_backward_agent
    with pytest.raises(ValueError, match=r"weight risk is -1; expected 0 or more"):
        EfeWeights(risk=-1)


def test_all_off_is_refused(case):
    _, output, back, targets, prompt = case
    off = {f.name: 0.0 for f in dataclasses.fields(EfeWeights)}
    with pytest.raises(ValueError, match="every term of the loss is off"):
        EFE(E, W, weights=EfeWeights(**off))(output, back, targets, prompt)


def test_the_backward_agent_is_asked_for(case):
    efe, output, _, targets, prompt = case
    with pytest.raises(ValueError, match=r"bi 0\.7 and back 0\.4 need the backward agent's"):
        efe(output, None, targets, prompt)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_jensen_shannon_bounds(scale):
    torch.manual_seed(1)
    log_P, log_Q = torch.log_softmax(scale * torch.randn(2, 500, 10, dtype=torch.float64), -1)
    value = jensen_shannon(log_P, log_Q, dim=-1)
    assert value.min() >= -1e-15
    assert value.max() <= math.log(2) + 1e-12
    torch.testing.assert_close(value, jensen_shannon(log_Q, log_P, dim=-1), rtol=0, atol=1e-14)
    assert jensen_shannon(log_P, log_P, dim=-1).abs().max() < 1e-14
    assert kl(log_P, log_Q, dim=-1).min() >= -1e-15
    if scale == 30.0:
        assert value.max() > 0.999 * math.log(2)  # the bound is reached
        assert kl(log_P, log_Q, dim=-1).max() > math.log(2)  # which KL does not keep


def test_hard_cell_weights_average_one():
    torch.manual_seed(2)
    valid = torch.rand(4, 5, 6) > 0.3
    wrong = (torch.rand(4, 5, 6) > 0.6) & valid
    weights = hard_cell_weights(wrong, valid, 2.0)
    assert weights[valid].mean().item() == pytest.approx(1, abs=1e-6)
    assert not weights[~valid].any()
    ratio = weights[wrong].mean() / weights[valid & ~wrong].mean()
    assert ratio.item() == pytest.approx(3, rel=1e-5)
    everything = hard_cell_weights(valid, valid, 2.0)
    torch.testing.assert_close(everything, valid.float())  # all wrong: no factor on the loss


def test_float_targets_are_refused(case):
    efe, output, back, targets, prompt = case
    soft = dataclasses.replace(targets, target_BHW=targets.target_BHW.float())
    with pytest.raises(TypeError, match=r"targets are torch.float32; expected torch.int64 class"):
        efe(output, back, soft, prompt)
    with pytest.raises(TypeError, match=r"Use \.long\(\)"):
        efe.observe(soft)


def test_the_frequencies_come_from_training_alone(case):
    efe, output, back, targets, prompt = case
    before = efe.ema.clone()
    for mode in (True, False):
        efe.train(mode)
        efe(output, back, targets, prompt)
        assert torch.equal(efe.ema, before)  # a forward changes nothing
    with pytest.raises(RuntimeError, match=r"observe in eval mode; expected train\(\)"):
        efe.observe(targets)
    efe.train()
    assert efe.frequencies.sum().item() == pytest.approx(1, abs=1e-6)
    constant = dataclasses.replace(
        targets, target_BHW=targets.target_BHW.masked_fill(targets.valid_BHW, 7)
    )
    rising = [efe.frequencies[7].item()]
    for _ in range(5):
        efe.observe(constant)
        rising.append(efe.frequencies[7].item())
    assert rising == sorted(rising)
    assert rising[-1] > rising[0] + 0.5  # unbiased from the start: five of six batches are sevens
    assert {"ema", "ema_weight"} <= set(efe.state_dict())  # they travel with checkpoints


def test_before_any_target_there_is_no_risk(case):
    _, output, back, targets, prompt = case
    efe = EFE(E, W, weights=ALL).double()
    assert {"risk", "z"}.isdisjoint(efe(output, back, targets, prompt).parts)
    with pytest.raises(RuntimeError, match="EFE has seen no training target"):
        _ = efe.frequencies


def test_cells_beyond_the_canvas_are_wrong_and_without_loss(case):
    efe, output, back, targets, prompt = case
    full = efe(output, back, targets, prompt)
    cut = dataclasses.replace(targets, cells_B=targets.cells_B * 2)
    terms = efe(output, back, cut, prompt)
    torch.testing.assert_close(terms.total, full.total)
    assert terms.uncovered.item() == pytest.approx(0.5)
    assert terms.cell_accuracy.item() == pytest.approx(full.cell_accuracy.item() / 2)
    assert (targets.target_BHW == IGNORE).any()


def test_half_precision_logits_give_a_float32_loss(case):
    efe, output, back, targets, prompt = case
    efe = efe.float()
    half = AgentOutput(**{k: v.detach().bfloat16() for k, v in vars(output).items()})
    b = dataclasses.replace(
        back,
        logits_TBCHW=back.logits_TBCHW.detach().bfloat16(),
        query_logits_BCHW=back.query_logits_BCHW.detach().bfloat16(),
    )
    assert efe(half, b, targets, prompt.detach().float()).total.dtype == torch.float32
