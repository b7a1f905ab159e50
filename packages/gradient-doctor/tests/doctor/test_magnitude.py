"""Class 22 while training; the doubling test is in test_preflight.py."""

import pytest

from doctor.look import look
from doctor.snippets import nothing, only

LOOP = """\
model = nn.Linear(4, 1)
optimizer = torch.optim.{optimizer}(model.parameters(), lr=1e-4)
for _ in range(4):
    x = torch.randn(512, 4)
    error = (model(x).squeeze(-1) - 50.0).square()
    loss = {loss}
    optimizer.zero_grad()
    loss.backward()
    {clip}
    optimizer.step()
"""
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def loop(tmp_path, loss, clip=CLIP, optimizer="SGD"):
    return look(tmp_path, LOOP.format(loss=loss, clip=clip, optimizer=optimizer))


def test_a_sum_that_clipping_undoes_in_every_step(tmp_path):
    finding = loop(tmp_path, "2 * error.sum()  # HERE").one(22)
    assert "512" in finding.what


def test_sums_that_are_a_choice_and_means(tmp_path):
    loop(tmp_path, "error.mean()").clean()
    loop(tmp_path, "error.sum() / 512").clean()
    loop(tmp_path, "error.sum()", clip="pass", optimizer="Adam").clean()


def test_a_division_by_almost_nothing(tmp_path):
    loss = "(model(x) / (x[:, :1].abs() * 1e-9)).mean()  # HERE"
    assert "division" in loop(tmp_path, loss, clip="pass").one(22).why
    loop(tmp_path, "(model(x) / (x[:, :1].abs() + 1.0)).mean()", clip="pass").clean()


VARIATIONAL = """
encode, decode = nn.Linear(6, 4), nn.Linear(2, 6)
optimizer = torch.optim.Adam([*encode.parameters(), *decode.parameters()])
for step in range(4):
    x = torch.randn(32, 6)
    mean, logvar = encode(x).chunk(2, -1)
    z = mean + (0.5 * logvar).exp() * torch.randn(32, 2)
    terms = 1 + logvar - mean.square() - logvar.exp()
    recon = F.mse_loss(decode(z), x)
{body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_sum_beside_a_mean(tmp_path):
    body = "    kl = -0.5 * terms.sum()  # FAULT\n    loss = recon + kl"
    finding = only(tmp_path, VARIATIONAL.format(body=body), 22)
    assert "is added to a mean" in finding.what


@pytest.mark.parametrize(
    "body",
    [
        "    loss = recon - 0.5 * terms.sum(-1).mean()",
        "    loss = recon - 0.5 * terms.sum() / len(x)",
        "    loss = recon + 1e-3 * -0.5 * terms.sum()",
        "    loss = F.mse_loss(decode(z), x, reduction='sum') - 0.5 * terms.sum()",
        "    loss = recon + encode.weight.square().sum()",
    ],
)
def test_terms_of_one_measure(tmp_path, body):
    nothing(tmp_path, VARIATIONAL.format(body=body))


EARLY = """\
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for _ in range(4):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad({kept})
    {before}
    loss.backward()
    {after}
    optimizer.step()
"""


@pytest.mark.parametrize("kept", ["", "set_to_none=False"])
def test_clipping_before_there_is_anything_to_clip(tmp_path, kept):
    clip = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    early = EARLY.format(kept=kept, before=f"{clip}  # HERE", after="pass")
    assert "between backward() and step()" in look(tmp_path, early).one(22).fix
    look(tmp_path, EARLY.format(kept=kept, before="pass", after=clip)).clean()
    look(tmp_path, EARLY.format(kept=kept, before=clip, after=clip)).clean()


TWO_OPTIMIZERS = """\
actor, critic = nn.Linear(4, 2), nn.Linear(4, 1)
first = torch.optim.SGD(actor.parameters(), lr=0.1)
second = torch.optim.SGD(critic.parameters(), lr=0.1)
for step in range(4):
    first.zero_grad(), second.zero_grad()
    for part in torch.randn(4, 8, 4):
        (actor(part).square().mean() * 8 / 32).backward()
        loss = F.mse_loss(critic(part), part[:, :1]){share}
        loss.backward()  # HERE
    first.step(), second.step()
    print(float(critic.weight.grad.norm()))
"""


def test_micro_batches_of_the_second_of_two_optimizers_are_counted(tmp_path):
    found = look(tmp_path, TWO_OPTIMIZERS.format(share=""))
    assert "4 micro batches" in found.one(22).what
    look(tmp_path, TWO_OPTIMIZERS.format(share=" * 8 / 32")).clean()


def test_a_penalty_on_weights_with_as_many_rows_as_the_batch(tmp_path):
    source = """
net = nn.Linear(6, 32)
sgd = torch.optim.SGD(net.parameters(), lr=0.01)
before = {name: p.detach().clone() for name, p in net.named_parameters()}
for step in range(5):
    loss = F.cross_entropy(net(torch.randn(32, 6)), torch.arange(32))
    loss = loss + 50 * sum((p - before[name]).pow(2).sum() for name, p in net.named_parameters())
    sgd.zero_grad()
    loss.backward()
    sgd.step()
"""
    nothing(tmp_path, source)
