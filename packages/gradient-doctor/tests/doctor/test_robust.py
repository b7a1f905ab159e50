"""What the doctor cannot read must not end the user's training."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from gradient_doctor import Doctor
from gradient_doctor.calls import _unbound
from gradient_doctor.readable import checksum, unreadable, values_of
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


def names_of_failed_parts(findings):
    return [f.what for f in findings if "switched off" in f.what]


def blind_spots(findings):
    return [f for f in findings if f.number == 0]


# values that cannot be read


def test_a_freed_storage_is_not_read():
    """FSDP keeps parameters whose storage it has freed: reading one ends the process."""
    kept = torch.ones(4)
    assert unreadable(kept) is None
    assert checksum(kept) == 4.0
    kept.untyped_storage().resize_(0)
    assert unreadable(kept) == "freed"
    assert values_of(kept) is None
    assert checksum(kept) != checksum(kept)


def test_a_view_beyond_its_storage_is_not_read():
    kept = torch.ones(4, 2)
    row = kept[3]
    kept.untyped_storage().resize_(7 * kept.element_size())
    assert (unreadable(row), unreadable(kept[0])) == ("freed", None)


def test_sparse_values_are_those_that_are_stored():
    twice = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([2.0, -2.0]), (3,), check_invariants=True
    )
    values = values_of(twice)
    assert values is not None
    assert values.tolist() == [0.0]  # the sum, not the two parts: coalesced


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: nn.UninitializedParameter(), "lazy"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(2)), "fake"),
    ],
)
def test_what_has_no_numbers_is_told_apart(make, kind):
    assert unreadable(make()) == kind


def test_inside_of_vmap_nothing_is_read():
    seen = []
    torch.vmap(lambda row: seen.append(unreadable(row)) or row.sum())(torch.ones(2, 3))
    assert seen == ["functorch"]


@pytest.mark.parametrize("mode", ["auto", "light"])
def test_sparse_gradients_are_examined(mode):
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    chosen = torch.tensor([1, 2, 1])
    assert trained(table, optimizer, lambda: table(chosen).square().mean(), mode) == []


def test_sparse_gradients_that_are_not_finite_are_found():
    """It is read, not skipped."""
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    nn.init.zeros_(table.weight)
    findings = trained(table, optimizer, lambda: table(torch.tensor([1])).sqrt().mean(), "auto")
    assert 27 in [f.number for f in findings]


def test_sparse_adjacency():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: sparse CSR is in beta
        graph = torch.eye(4).to_sparse_csr()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    loss = lambda: (graph @ layer(x)).square().mean()  # noqa: E731
    assert trained(layer, optimizer, loss, "auto") == []


@pytest.mark.parametrize("mode", ["auto", "light"])
def test_gradients_per_sample_put_in_by_hand(mode):
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def one(weights, row):
        return torch.func.functional_call(model, weights, (row,)).square().sum()

    with Doctor({"model": model}, {"optimizer": optimizer}, mode=mode) as doctor:
        for _ in range(3):
            weights = {name: p.detach() for name, p in model.named_parameters()}
            each = torch.vmap(torch.func.grad(one), (None, 0))(weights, x)
            for name, parameter in model.named_parameters():
                parameter.grad = each[name].mean(0)
            optimizer.step()
            doctor.step()
    assert [f.number for f in doctor.findings] == [0]
    assert "torch.func" in doctor.findings[0].what
    assert not names_of_failed_parts(doctor.findings)


def test_a_jacobian_by_batched_gradients():
    model, x = nn.Linear(3, 2), torch.randn(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss():
        torch.autograd.functional.jacobian(model, x, vectorize=True)
        return model(x).square().mean()

    findings = trained(model, optimizer, loss, "auto")
    assert not names_of_failed_parts(findings)
    assert [f.number for f in findings] == [0]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout):
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    rows = [torch.randn(2, 3), torch.randn(1, 3)]

    def loss():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: nested tensors are a prototype
            nested = torch.nested.nested_tensor(rows, layout=layout)
            return layer(nested).to_padded_tensor(0.0).square().mean()

    findings = trained(layer, optimizer, loss, "auto")
    assert not names_of_failed_parts(findings)
    assert ["nested" in f.what for f in findings] == [True]


def test_a_backward_on_meta():
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss():
        nn.Linear(3, 1, device="meta")(x.to("meta")).sum().backward()
        return model(x).square().mean()

    findings = trained(model, optimizer, loss, "auto")
    assert not names_of_failed_parts(findings)
    assert [f.number for f in findings] == [0]  # a plan is no layer that is thrown away
    assert "meta" in findings[0].what


def test_lazy_layers_are_traced():
    model, x = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1)), torch.randn(5, 3)
    optimizers = {}
    with Doctor({"model": model}, {}) as doctor:
        for _ in range(3):
            loss = model(x).detach().square().mean() + 0 * model.get_parameter("2.bias").sum()
            if not optimizers:
                optimizers["sgd"] = torch.optim.SGD(model.parameters(), lr=0.1)
                doctor.session.registry.add_optimizer(optimizers["sgd"], "sgd")
            loss.backward()
            optimizers["sgd"].step()
            doctor.step()
    assert not names_of_failed_parts(doctor.findings)
    cut = [f for f in doctor.findings if f.number == 3]  # the trace is on: it sees the detach
    assert cut
    assert "model.0.weight" in cut[0].parameters


def test_a_tensor_that_is_resized():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss():
        return model(torch.randn(32).unsqueeze_(0).resize_(8, 4)).square().mean()

    assert trained(model, optimizer, loss, "auto") == []


RECORDERS = {
    "jit.trace": lambda model, x: str(torch.jit.trace(model, x).graph),
    "fx": lambda model, x: torch.fx.symbolic_trace(model).code,
    "make_fx": lambda model, x: make_fx(lambda x: model(x))(x).code,
    "export": lambda model, x: str(torch.export.export(model, (x,)).graph),
}


@pytest.mark.parametrize("mode", ["auto", "trace"])
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("recorder", RECORDERS)
def test_what_records_operations_does_not_record_ours(recorder, mode):
    record = RECORDERS[recorder]
    names = re.compile(r"%[\w.]+|___torch_mangle_\d+\.|(?<=# ).*torch|\d+")

    def recorded(mode):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graphs = []
        with Doctor({"model": model}, {"sgd": optimizer}, mode=mode) as doctor:
            for _ in range(2):
                text = record(model, torch.randn(5, 4))
                graphs.append(names.sub("#", text))
                optimizer.zero_grad()
                model(torch.randn(5, 4)).square().mean().backward()
                optimizer.step()
                doctor.step()
        return graphs, doctor.findings

    recorded("off")
    graphs, findings = recorded(mode)
    assert graphs == recorded("off")[0]
    assert not [f for f in findings if f.severity > 1 or "failed" in f.what]


def test_dispatch_modes_of_the_user_do_not_see_us():
    """A counter of operations counts the same with and without the doctor."""

    class Count(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def calls(mode):
        model, x = nn.Linear(4, 1), torch.randn(5, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Doctor({"model": model}, {"sgd": optimizer}, mode=mode), Count() as count:
            model(x).tanh().square().mean().backward()
            optimizer.step()
        return count.calls

    assert calls("trace") == calls("off") > 5


class _Base:
    @classmethod
    def named(cls, *args, **kwargs):
        return cls, args, kwargs


class _Child(_Base):
    pass


class _Keys(dict):
    pass


def test_class_methods_of_python_and_of_c_are_called_with_any_class():
    """torch 2.15 made `Function.apply` one of C, which has no `__func__`."""
    assert _unbound(vars(_Base)["named"])(_Child, 1, x=2) == (_Child, (1,), {"x": 2})
    found = _unbound(vars(dict)["fromkeys"])(_Keys, [1], 2)
    assert (type(found), found) == (_Keys, {1: 2})


def test_what_the_doctor_reads_gives_no_warnings():
    """A cast of complex values would warn, and so would `.grad` of what is no leaf any more."""
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
    net = nn.Linear(4, 1)
    adam, sgd = torch.optim.Adam([weight]), torch.optim.SGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Doctor({"net": net}, {"adam": adam, "sgd": sgd}, mode="trace") as doctor:
            for _ in range(3):
                adam.zero_grad()
                (torch.randn(3, 4, dtype=torch.cfloat) @ weight).abs().mean().backward()
                adam.step()
                x = torch.randn(4, requires_grad=True)
                torch.autograd.functional.hessian(lambda z: net(z).square().sum(), x.detach())
                net(x).square().mean().backward()
                x.detach_().requires_grad_()
                x = x.mul_(1.0) if not x.requires_grad else x * 1.0
                sgd.step()
                sgd.zero_grad()
                doctor.step()
    assert not [f for f in doctor.findings if f.number == 0 and "failed" in f.what]
