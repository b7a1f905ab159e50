"""Class 25: failures of autograd that were caught or papered over."""

import textwrap

import pytest

from doctor.look import look, names

LOOP = """\
model, other = nn.Linear(4, 1), nn.Linear(4, 1)
model.other = other
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(6, 4)
    loss = model(x).square().mean()
    optimizer.zero_grad()
{body}
    optimizer.step()
"""


def loop(tmp_path, body):
    lines = "\n".join("    " + line for line in body.strip("\n").splitlines())
    return look(tmp_path, LOOP.format(body=lines))


CAUGHT = """
loss.backward()
try:
    loss.backward()  # HERE
except RuntimeError:
    pass
"""


def test_a_caught_backward(tmp_path):
    found = loop(tmp_path, CAUGHT)
    (finding,) = found.of(25)
    assert finding.site.line == found.line
    assert "second time" in finding.why or "freed" in finding.why
    assert names(finding) == {"weight", "bias"}


def test_an_error_that_ends_the_run_is_not_swallowed(tmp_path):
    for handler in ("raise", "raise ValueError('later') from None", "optimizer.zero_grad(); raise"):
        found = loop(tmp_path, CAUGHT.replace("pass", handler))
        assert found.error is not None
        assert not found.of(25), handler


def test_a_caught_operation_on_live_tensors(tmp_path):
    body = """
    try:
        loss = loss + (model(x) - torch.zeros(6, 5, 3)).sum()  # HERE
    except RuntimeError:
        pass
    loss.backward()
    """
    found = loop(tmp_path, textwrap.dedent(body))
    assert [f.site.line for f in found.of(25)] == [found.line]


FILLERS = {
    "zeros": "torch.zeros_like(p) if g is None else g",
    "noise": "torch.randn_like(p) if g is None else g",
    "shape": "torch.zeros(p.shape) if g is None else g",
}


@pytest.mark.parametrize("filler", FILLERS.values(), ids=FILLERS)
def test_none_that_becomes_a_number(tmp_path, filler):
    body = f"""
weights = list(model.parameters())
grads = torch.autograd.grad(loss, weights, allow_unused=True)  # HERE
for p, g in zip(weights, grads):
    p.grad = {filler}
"""
    found = loop(tmp_path, body)
    (finding,) = found.of(25)
    assert finding.site.line == found.line
    assert names(finding) == {"other.weight", "other.bias"}
    assert ("noise" in finding.why) == ("randn" in filler)


def test_none_that_stays_none_and_zeros_for_other_ends(tmp_path):
    body = """
weights = list(model.parameters())
momenta = [torch.zeros_like(p) for p in weights]
grads = torch.autograd.grad(loss + other(x).sum(), weights, allow_unused=True)
momenta = [torch.zeros_like(p) for p in weights]
for p, g in zip(weights, grads):
    p.grad = g
"""
    assert not loop(tmp_path, body).of(25)


def test_a_batch_that_did_not_fit_may_be_tried_again(tmp_path):
    body = """
def full(gradient):
    raise torch.OutOfMemoryError("no memory left")

try:
    (loss + model(x).sum()).register_hook(full)
    big = loss * 2
    big.register_hook(full)
    big.backward()
except torch.OutOfMemoryError:
    loss = model(x).square().mean()
    loss.backward()
"""
    assert not loop(tmp_path, body).of(25)
