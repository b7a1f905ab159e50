"""Class 8: frozen in the middle of training, and moved all the same."""

import pytest

from doctor.look import look

SCRIPT = """\
def freeze(layer):
    for p in layer.parameters():
        p.requires_grad = False  # HERE
        {clear}

def train(steps):
    for _ in range(steps):
        {zero}
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = {optimizer}
train(6)
freeze(model[0])
train(6)
"""
OPTIMIZERS = {
    "momentum": "torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)",
    "decay": "torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.01)",
    "moments": "torch.optim.Adam(model.parameters(), 0.01)",
}
ZEROS = "optimizer.zero_grad(set_to_none=False)"


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_zeros_in_grad_are_a_gradient(tmp_path, optimizer):
    script = SCRIPT.format(clear="pass", zero=ZEROS, optimizer=optimizer)
    assert "2 parameters" in look(tmp_path, script).one(8).what


def test_the_last_gradient_again_and_again(tmp_path):
    only = "[setattr(p, 'grad', None) for p in model.parameters() if p.requires_grad]"
    plain = "torch.optim.SGD(model.parameters(), 0.1)"
    script = SCRIPT.format(clear="pass", zero=only, optimizer=plain)
    assert "still the last one" in look(tmp_path, script).one(8).why


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    ("clear", "zero"),
    [("p.grad = None", ZEROS), ("pass", "optimizer.zero_grad()")],
    ids=["cleared", "set to none"],
)
def test_what_has_no_grad_stays(tmp_path, clear, zero, optimizer):
    look(tmp_path, SCRIPT.format(clear=clear, zero=zero, optimizer=optimizer)).clean()


def test_in_the_middle_of_one_loop(tmp_path):
    look(
        tmp_path,
        """\
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for step in range(14):
            if step == 8:
                model[0].requires_grad_(False)  # HERE
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        """,
    ).one(8)


def test_networks_that_are_frozen_in_turns(tmp_path):
    """The judge is frozen while the maker learns, and steps after that with its own gradient."""
    look(
        tmp_path,
        """\
        maker, judge = nn.Linear(3, 4), nn.Linear(4, 1)
        slow = torch.optim.Adam(maker.parameters(), 1e-3)
        fast = torch.optim.Adam(judge.parameters(), 1e-3)
        for _ in range(8):
            slow.zero_grad(set_to_none=False)
            fast.zero_grad(set_to_none=False)
            fake = maker(torch.randn(8, 3))
            judge.requires_grad_(True)
            scores = judge(torch.randn(8, 4)), judge(fake.detach())
            (F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()).backward()
            judge.requires_grad_(False)
            F.softplus(-judge(fake)).mean().backward()
            slow.step()
            fast.step()
        """,
    ).clean()


def test_weights_that_a_strategy_moves(tmp_path):
    """They need no gradient: the program writes one, and the optimizer steps."""
    look(
        tmp_path,
        """\
        model = nn.Linear(4, 1).requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        x = torch.randn(16, 4)
        for _ in range(8):
            for p in model.parameters():
                noise = torch.randn_like(p)
                p.add_(noise, alpha=0.1)
                up = model(x).square().mean()
                p.sub_(noise, alpha=0.2)
                down = model(x).square().mean()
                p.add_(noise, alpha=0.1)
                p.grad = noise * (up - down)
            optimizer.step()
        """,
    ).clean()


def test_gradients_that_are_written_in_place(tmp_path):
    """An evolution strategy: no backward, and another gradient in each step."""
    seen = look(
        tmp_path,
        """\
        net = nn.Linear(4, 1)
        for p in net.parameters():
            p.requires_grad_(False)
            p.grad = torch.zeros_like(p)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for step in range(8):
            for p in net.parameters():
                p.grad.copy_(torch.randn_like(p) * net(torch.ones(4)).square())
            optimizer.step()
        """,
    )
    assert 8 not in [f.number for f in seen.findings]
