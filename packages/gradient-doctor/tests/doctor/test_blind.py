"""Number 0: what the doctor cannot see is said, and does not break."""

import contextlib
import gc
import sys
import weakref

import torch
from torch import nn

from doctor.look import look
from gradient_doctor import Doctor

FUNCTION = """\
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient

first, last = nn.Linear(4, 4), nn.Linear(4, 1)
optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
for _ in range(3):
    h = Double.apply(first(torch.randn(6, 4)))  # HERE
    loss = last(h).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_custom_functions_are_named_once_with_what_is_behind_them(tmp_path):
    found = look(tmp_path, FUNCTION)
    found.clean()
    (note,) = found.of(0)
    assert note.parameters == ("first.weight", "first.bias")
    assert note.site.line == found.line


NUMPY = """\
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.from_numpy(torch.randn(6, 4).numpy())
    out = model(x)
    weight = {weight}  # HERE
    optimizer.zero_grad()
    (out * weight).square().mean().backward()
    optimizer.step()
"""


def test_what_numpy_computes_from_parameters_is_not_known(tmp_path):
    found = look(tmp_path, NUMPY.format(weight="torch.tensor(out.detach().numpy() ** 2)"))
    (note,) = found.of(0)
    assert note.site.line == found.line
    assert note.parameters == ("model.weight", "model.bias")
    assert not look(tmp_path, NUMPY.format(weight="float(out.detach().numpy().max())")).of(0)


def steps(model, call, doctor=None):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = call(torch.randn(6, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if doctor is not None:
            doctor.step()
    return losses


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def test_compiled_modules_train_as_without_the_doctor():
    plain = make()
    expected = steps(plain, torch.compile(plain, backend="eager"))
    torch._dynamo.reset()
    watched = make()
    compiled = torch.compile(watched, backend="eager")
    with Doctor(modules={"model": watched}) as doctor:
        found = steps(watched, compiled, doctor)
        from_inside = torch.compile(lambda x: watched(x) + 1, backend="eager")
        from_inside(torch.randn(6, 4)).sum().backward()
        doctor.step()
    assert found == expected
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters()))
    notes = [f for f in doctor.findings if f.number == 0]
    assert notes
    assert "compile" in notes[0].what
    assert set(notes[0].parameters) == {f"model.{n}" for n, _ in watched.named_parameters()}
    # everything is put back
    switch = sys.modules["torch._dynamo.eval_frame"]._maybe_set_eval_frame
    assert "gradient_doctor" not in getattr(switch, "__module__", "")
    torch._dynamo.reset()


def test_of_a_compiled_call_one_thing_is_said():
    """While it compiles, it calls autograd.grad on its own tensors: that is nobody's backward."""
    model = make()
    compiled = torch.compile(model, backend="aot_eager")
    with Doctor(modules={"model": model}) as doctor:
        steps(model, compiled, doctor)
    torch._dynamo.reset()
    assert [f.what for f in doctor.findings] == ["A call compiled by torch.compile is not traced."]


def test_nothing_of_a_step_outlives_it():
    """Zeros and failures are remembered, the tensors that had them are not."""
    model = make()
    with Doctor(modules={"model": model}, mode="trace") as doctor:
        held = []
        for _ in range(3):
            x = torch.randn(6, 4, requires_grad=True)
            hidden = torch.relu(model[0](x) - 99.0)
            loss = model[2](hidden).square().mean()
            held += [weakref.ref(x), weakref.ref(hidden), weakref.ref(loss)]
            loss.backward(retain_graph=True)
            with contextlib.suppress(RuntimeError):
                (loss * torch.ones(6)).backward()
            del x, hidden, loss
            doctor.step()
        gc.collect()
        assert [ref() for ref in held] == [None] * len(held)
