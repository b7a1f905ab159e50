"""One batch before training; nothing is left changed."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doctor.harness import serious
from gradient_doctor import preflight


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.norm(self.first(x))))).squeeze(-1)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids))[0])


def made(kind=Model):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, {"modules": {"model": model}, "optimizers": {"adam": optimizer}}


def batch():
    x = torch.randn(12, 4)
    return {"x": x, "y": x.sum(-1), "scale": torch.tensor(2.0), "name": "train"}


def numbers(findings):
    return [f.number for f in serious(findings)]


def test_a_healthy_loss_has_no_findings_and_nothing_is_left_changed():
    model, given = made()
    data = batch()
    model.drop.eval()
    (3 * model(data["x"]).sum()).backward()
    model.first.bias.grad = None
    before = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = {n: p.grad for n, p in model.named_parameters()}
    values = {n: None if g is None else g.clone() for n, g in gradients.items()}
    modes = [m.training for m in model.modules()]
    versions = [p._version for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate()

    def loss_fn(given):
        torch.rand(3)
        random.random()
        model.train()
        return F.mse_loss(model(given["x"]), given["y"])

    assert not serious(preflight(loss_fn, **given, batch=data))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert parameter.grad is gradients[name]
        assert values[name] is None or torch.equal(parameter.grad, values[name])
    assert [m.training for m in model.modules()] == modes
    assert [p._version for p in model.parameters()] == versions
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert not given["optimizers"]["adam"].state


def test_also_when_the_loss_fails():
    model, given = made()
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def fails(given):
        model.eval()
        model(given["x"])
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        preflight(fails, **given, batch=batch())
    assert model.training
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_faults_of_one_step_are_found_without_a_batch():
    model, given = made()
    x = torch.randn(12, 4)
    found = preflight(lambda: F.mse_loss(model(x)[:, None], x.sum(-1)), **given)
    assert 18 in numbers(found)
    cut = preflight(lambda: model(x).detach().mean(), **given)
    assert set(numbers(cut)) & {1, 2, 3}
    unused = preflight(lambda: model.last(torch.randn(5, 8)).square().mean(), **given)
    assert 5 in numbers(unused)


LOSSES = {
    "mean": (lambda e: e.mean(), False),
    "sum": (lambda e: e.sum(), True),
    "mean-of-twice-divided": (lambda e: e.mean() / len(e), True),
    "root-of-mean": (lambda e: e.mean().sqrt(), False),
    "half-sum": (lambda e: e.mean() + 0.02 * e.sum(), False),
}


@pytest.mark.parametrize(("reduce", "alarm"), LOSSES.values(), ids=LOSSES)
def test_the_batch_twice_over(reduce, alarm):
    model, given = made()
    model.drop.p = 0.0
    found = preflight(lambda b: reduce((model(b["x"]) - b["y"]).square()), **given, batch=batch())
    assert numbers(found) == ([22] if alarm else [])


def test_only_the_parameters_of_the_summed_term_are_named():
    torch.manual_seed(0)
    heads = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    (finding,) = preflight(
        lambda x: heads["a"](x).square().sum() + heads["b"](x).square().mean() * 9,
        {"heads": heads},
        {"sgd": torch.optim.SGD(heads.parameters(), lr=0.1)},
        batch=torch.randn(8, 4),
    )
    assert set(finding.parameters) == {"heads.a.weight", "heads.a.bias"}


def test_a_loss_that_fits_one_batch_size_only():
    model, given = made()
    found = preflight(
        lambda b: (model(b[0]) * torch.ones(12)).mean(), **given, batch=(torch.randn(12, 4),)
    )
    assert not serious(found)
    assert "12 rows only" in next(f for f in found if f.number == 18).what


def tokens():
    ids = torch.randint(1, 11, (4, 9))
    return torch.where(torch.arange(9) < torch.tensor([9, 7, 6, 4])[:, None], ids, 0)


def lm_loss(model, **options):
    def loss_fn(given):
        ids = given["ids"]
        logits = model(ids)[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, ids[:, 1:], **options)

    return loss_fn


def test_other_tokens_in_padded_places():
    model, given = made(LM)
    data = {"ids": tokens()}
    # the targets follow the ids: a loss that ignores padding by its id sees other targets too,
    # so the batch must carry labels of its own to be judged
    labels = torch.where(data["ids"] == 0, -100, data["ids"])

    def masked(given):
        logits = model(given["ids"])[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, given["labels"][:, 1:])

    assert not serious(preflight(masked, **given, batch={**data, "labels": labels}, pad_id=0))
    (finding,) = serious(preflight(lm_loss(model), **given, batch=data, pad_id=0))
    assert finding.number == 19
    assert "10 padded places" in finding.what


def test_rows_that_a_mask_of_the_batch_excludes():
    model, given = made()
    model.norm = nn.Identity()
    data = batch()
    data["real"] = torch.arange(12) < 9
    data["x"] = data["x"] * data["real"][:, None]

    def loss_fn(b, keep):
        error = (model(b["x"]) - b["y"]).square()
        return (error * b["real"]).sum() / b["real"].sum() if keep else error.mean()

    assert not serious(preflight(lambda b: loss_fn(b, True), **given, batch=data))
    assert numbers(preflight(lambda b: loss_fn(b, False), **given, batch=data)) == [19]


def test_what_is_no_loss_is_said():
    model, given = made()
    with pytest.raises(TypeError, match="one value"):
        preflight(lambda: model(torch.randn(5, 4)), **given)
    with pytest.raises(TypeError, match="one value"):
        preflight(lambda: 3.0, **given)

    def steps():
        loss = model(torch.randn(5, 4)).square().mean()
        with torch.no_grad():
            model.first.weight.mul_(0.9)
        return loss

    with pytest.raises(ValueError, match="must only compute the loss"):
        preflight(steps, **given)
