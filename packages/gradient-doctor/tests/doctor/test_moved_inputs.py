"""A phase that moves an input by its gradient, after a training, is looked at."""

from doctor.snippets import nothing, only

SCRIPT = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters())
for step in range(8):
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval().requires_grad_(False)
x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
moved = x.clone()
for step in range(12):
    moved.requires_grad_(True)
    size = (moved - x - 0.1).square().mean()
    loss = F.cross_entropy(model(moved), y) - {term}  # FAULT
    (slope,) = torch.autograd.grad(loss, moved)
    with torch.no_grad():
        moved = moved + 0.1 * slope.sign()
"""


def test_a_term_that_is_cut_off(tmp_path):
    only(tmp_path, SCRIPT.format(term="5 * size.item()"), 23)


def test_a_term_with_its_gradient(tmp_path):
    nothing(tmp_path, SCRIPT.format(term="5 * size"))
