"""Terms whose gradient cancels: a straight-through output taken away, a difference put back."""

import pytest

from doctor.snippets import loop, nothing, only

VQ = """
body, back = nn.Linear(4, 6), nn.Linear(6, 4)
books = [nn.Parameter(torch.randn(8, 6) * 0.5) for _ in range(2)]
optimizer = torch.optim.Adam([*body.parameters(), *back.parameters(), *books])
def code(rest, book):
    near = book[torch.cdist(rest, book).argmin(1)]
    passed = {passed}
    return passed, F.mse_loss(rest, near.detach()), F.mse_loss(near, rest.detach())
for step in range(4):
    x = torch.randn(16, 4)
    rest = body(x)
    total, commit = 0.0, 0.0
    for book in books:
        q, near_z, near_book = code(rest, book)
{rest}
        total = total + q
        commit = commit + near_z + near_book
    loss = F.mse_loss(back(total), x) + commit
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
THROUGH = "rest + (near - rest).detach()"


def vq(rest, passed=THROUGH):
    return VQ.format(rest="        " + rest, passed=passed)


@pytest.mark.parametrize(
    "rest", ["rest = rest - q", "rest = rest + -q", "rest = torch.sub(rest.clone(), q)"]
)
def test_a_straight_through_output_that_is_subtracted(rest, tmp_path):
    finding = only(tmp_path, vq(f"{rest}  # FAULT"), 23)
    assert set(finding.parameters) >= {"body.weight", "body.bias"}
    assert "cancels" in finding.what


@pytest.mark.parametrize("rest", ["rest = rest - q.detach()", "rest = (rest - q.detach()) * 1"])
def test_a_residual_without_it_is_clean(rest, tmp_path):
    nothing(tmp_path, vq(rest))


def test_a_difference_that_is_put_back(tmp_path):
    passed = "rest + (near - rest)  # FAULT"
    finding = only(tmp_path, vq("rest = rest - q.detach()", passed), 20)
    assert set(finding.parameters) == {"body.weight", "body.bias"}


CLEAN = {
    "a zero with a graph": "loss = F.cross_entropy(head(f), y) + (f - f).mean()",
    "what was added": "g = f + 0.1 * torch.tanh(f); loss = F.cross_entropy(head(g), y)"
    " + (g - f).square().mean()",
    "a residual of a detached input": "g = f + F.relu(f.detach() * head.weight[0]);"
    " loss = F.cross_entropy(head(g), y) + (g - f).square().mean()",
    "a mixture whose weight is 1": "a = 1.0; g = f + a * (x.repeat(1, 2) * head.weight[0] - f);"
    " loss = F.cross_entropy(head(g), y) + f.square().mean()",
    "noise that nobody penalises": "g = f + torch.randn(8, 8); size = (g - f).detach().norm();"
    " loss = F.cross_entropy(head(g), y)",
    "only a value": "size = (f + x.repeat(1, 2)) - f; rank = size.argmax(1);"
    " loss = F.cross_entropy(head(f), y)",
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_differences_that_are_meant(name, tmp_path):
    nothing(tmp_path, loop("f = body(x)", *CLEAN[name].split("; ")))
