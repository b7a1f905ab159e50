"""What the doctor cannot read must not end the user's training."""

import pytest
import torch
from torch import nn

from gradient_doctor import Doctor
from gradient_doctor.session import STRICT


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch):
    monkeypatch.delenv(STRICT, raising=False)


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, parameters, **rate):
        super().__init__(parameters, rate)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 0.1 * parameter.grad


def trained(model, optimizer, loss, mode):
    """Three steps, and the weights after them."""
    with Doctor({"model": model}, {"optimizer": optimizer}, mode=mode) as doctor:
        for _ in range(3):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
            doctor.step()
    return doctor.findings


@pytest.mark.parametrize("mode", ["auto", "light"])
def test_sparse_gradients(mode):
    table = nn.Embedding(10, 4, sparse=True)
    before = table.weight.detach().clone()
    chosen = torch.tensor([1, 2])
    optimizer = torch.optim.SparseAdam(table.parameters())
    findings = trained(table, optimizer, lambda: table(chosen).square().mean(), mode)
    assert not torch.equal(before, table.weight)
    assert all(f.number == 0 for f in findings)


@pytest.mark.parametrize("mode", ["auto", "light"])
def test_gradients_of_single_samples(mode):
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def one(weights, row):
        return torch.func.functional_call(model, weights, (row,)).square().sum()

    def loss():
        each = torch.vmap(torch.func.grad(one), (None, 0))(dict(model.named_parameters()), x)
        assert each["weight"].shape == (5, 1, 3)
        return model(x).square().mean()

    findings = trained(model, optimizer, loss, mode)
    assert all(f.number == 0 for f in findings)


@pytest.mark.parametrize("rate", [{}, {"lr": None}])
@pytest.mark.parametrize("mode", ["auto", "light"])
def test_optimizers_without_a_rate(mode, rate):
    model = nn.Linear(3, 1)
    optimizer = WithoutRate(model.parameters(), **rate)
    x = torch.randn(5, 3)
    assert trained(model, optimizer, lambda: model(x).square().mean(), mode) == []


def test_a_function_with_an_attribute_of_that_name():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.variable = 2
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return ctx.variable * gradient

    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    findings = trained(model, optimizer, lambda: Double.apply(model(x)).square().mean(), "auto")
    assert all(f.number == 0 for f in findings)


def test_checkpoints_hold_plain_floats(tmp_path):
    """A loss that was kept in a traced step must load again with weights_only."""
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    with Doctor({"model": model}, {}):
        best = min(9.0, 0.5 * model(x).square().mean().item())
        kept = {"model": model.state_dict(), "best": [best, {"loss": best}]}
        torch.save(kept, tmp_path / "last.pt")
    assert torch.load(tmp_path / "last.pt", weights_only=True)["best"] == [best, {"loss": best}]
    assert kept["best"][0] is best  # what the user holds is left as it is
