"""Programs that replace functions of torch: their wrappers run as often as without the doctor."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from doctor.snippets import look, nothing, only
from gradient_doctor import Doctor

PLACES = {
    "Tensor.backward": (torch.Tensor, "backward"),
    "Tensor.mean": (torch.Tensor, "mean"),
    "Tensor.__mul__": (torch.Tensor, "__mul__"),
    "Tensor.norm": (torch.Tensor, "norm"),
    "Tensor.detach": (torch.Tensor, "detach"),
    "F.cross_entropy": (F, "cross_entropy"),
    "F.softmax": (F, "softmax"),
    "F.linear": (F, "linear"),
    "torch.tanh": (torch, "tanh"),
    "torch.einsum": (torch, "einsum"),
    "torch.norm": (torch, "norm"),
    "autograd.grad": (torch.autograd, "grad"),
    "autograd.backward": (torch.autograd, "backward"),
    "nn.init": (nn.init, "normal_"),
    "zero_grad": (torch.optim.Optimizer, "zero_grad"),
    "clip": (nn.utils, "clip_grad_norm_"),
}


def train(doctor=None):
    torch.manual_seed(0)
    net, head = nn.Linear(4, 8), nn.Linear(8, 3)
    sgd = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    for _ in range(5):
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        sgd.zero_grad()
        hidden = torch.tanh(net(x))
        hidden = torch.einsum("bi,bi->bi", hidden, hidden) * 2.0
        weight = F.softmax(head(hidden), -1).mean() + hidden.norm() + torch.norm(hidden)
        loss = F.cross_entropy(head(hidden), y) + weight.detach() * hidden.mean()
        torch.autograd.grad(loss, [net.weight], retain_graph=True)
        nn.init.normal_(torch.empty(2))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        sgd.step()
        if doctor is not None:
            doctor.step()
    return [p.detach().clone() for p in (*net.parameters(), *head.parameters())]


def wrapper(original, calls):
    """It counts, and changes the result: applied twice, it would be seen in the weights."""

    def replaced(*args, **kwargs):
        calls.append(1)
        result = original(*args, **kwargs)
        floating = isinstance(result, torch.Tensor) and result.is_floating_point()
        return torch.mul(result, 1.5) if floating and result.grad_fn is not None else result

    return replaced


OF_THE_DOCTORS = ("Tensor.detach", "Tensor.norm", "Tensor.__mul__", "torch.norm")  # it calls them


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("place", PLACES)
def test_a_wrapper_runs_as_often_as_without_the_doctor(monkeypatch, place, when):
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), []
    theirs = wrapper(original, calls)
    monkeypatch.setattr(owner, name, theirs)
    plain, count = train(), len(calls)
    calls.clear()
    assert count >= 5
    if when == "inside":
        monkeypatch.setattr(owner, name, original)
    with Doctor(mode="trace", discover=True) as doctor:
        monkeypatch.setattr(owner, name, theirs if when == "inside" else getattr(owner, name))
        watched = train(doctor)
    assert len(calls) == count or place in OF_THE_DOCTORS
    assert all(map(torch.equal, watched, plain))
    assert doctor.session.step == 5


def test_a_cut_through_a_wrapped_function_is_found(tmp_path):
    """The doctor still sees what torch does below the wrapper, under torch's own name."""
    source = """
plain = torch.Tensor.detach
torch.Tensor.detach = lambda self: plain(self)
plain_loss = F.cross_entropy
F.cross_entropy = lambda *args, **kwargs: plain_loss(*args, **kwargs)
try:
    body, head = nn.Linear(4, 8), nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for step in range(4):
        hidden = body(torch.randn(8, 4)){cut}
        loss = F.cross_entropy(head(hidden), torch.randint(0, 3, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
finally:
    torch.Tensor.detach, F.cross_entropy = plain, plain_loss
"""
    nothing(tmp_path, source.format(cut=""))
    examination, _ = look(tmp_path, source.format(cut=".detach()  # FAULT"))
    assert [f.number for f in examination.findings if f.severity >= 2] == [3]
    only(tmp_path, source.format(cut=".data  # FAULT"), 3)
