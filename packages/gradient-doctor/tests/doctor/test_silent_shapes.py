"""Class 33 and its neighbours: softmax over the samples, and data that was reshaped, not moved."""

import pytest

from doctor.look import look

LOOP = """\
net = nn.Linear(8, 4)
{setup}
optimizer = torch.optim.Adam(net.parameters())
for step in range(4):
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def loop(tmp_path, loss, setup=""):
    return look(tmp_path, LOOP.format(loss=loss.replace("\n", "\n    "), setup=setup))


OVER_SAMPLES = {
    "nll": ("loss = F.nll_loss(F.log_softmax(net(x), 0), y)  # HERE", ""),
    "module": (
        "loss = F.nll_loss(soft(net(x)).log(), y)",
        "soft = nn.Sequential(nn.Softmax(dim=0))  # HERE",
    ),
    "three-axes": (
        "out = soft(net(x.view(4, 4, 8)))\nloss = F.nll_loss(out.view(-1, 4), y)",
        "soft = nn.Sequential(nn.LogSoftmax())  # HERE",
    ),
    "attention": (
        "h = net(x.view(4, 4, 8))\n"
        "w = F.softmax(h.mean(-1, keepdim=True), dim=0)  # HERE\n"
        "loss = F.cross_entropy((w * h).sum(1), y[:4])",
        "",
    ),
    "distillation": (
        "s, t = net(x), torch.randn(16, 4)\n"
        "both = F.log_softmax(s / 2, 0), F.softmax(t / 2, 0)  # HERE\n"
        "loss = F.cross_entropy(s, y) + F.kl_div(*both)",
        "",
    ),
}


@pytest.mark.parametrize(("loss", "setup"), OVER_SAMPLES.values(), ids=OVER_SAMPLES)
@pytest.mark.filterwarnings("ignore")
def test_a_softmax_over_the_samples(tmp_path, loss, setup):
    found = loop(tmp_path, loss, setup)
    assert "over axis 0" in found.one(33).what


MEANT = {
    "columns-of-pairs": (
        "s = net(x) @ net(x).detach().T\n"
        "loss = -(F.log_softmax(s, 1).diag() + F.log_softmax(s, 0).diag()).mean()"
    ),
    "columns-as-rows": (
        "s = net(x) @ net(x).detach().T\nloss = F.nll_loss(F.log_softmax(s, 0).T, torch.arange(16))"
    ),
    "one-bag": (
        "h = net(x)\nbag = (F.softmax(h[:, :1], 0) * h).sum(0)\n"
        "loss = F.cross_entropy(bag[None], y[:1])"
    ),
    "steps-first": (
        "h = net(x.view(4, 4, 8))\npooled = (F.softmax(h[..., :1], 0) * h).sum(0)\n"
        "loss = F.cross_entropy(pooled, y[:4])"
    ),
    "dispatch": (
        "s = net(x)\nslots = F.softmax(s, 0).T @ x\n"
        "loss = F.cross_entropy(s, y) + slots.square().mean()"
    ),
}


@pytest.mark.parametrize("loss", MEANT.values(), ids=MEANT)
def test_a_softmax_over_axis_0_that_is_meant(tmp_path, loss):
    loop(tmp_path, loss).clean()


IMAGES = """\
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
optimizer = torch.optim.Adam(net.parameters())
data = torch.rand({size})
for step in range(4):
    x = data{moved}
    loss = F.cross_entropy(net(x / 2), torch.randint(0, 2, (6,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_images_with_channels_last_are_viewed_as_channels_first(tmp_path):
    moved = ".view(6, 3, 8, 8)  # HERE"
    assert (
        "cannot exchange"
        in look(tmp_path, IMAGES.format(size="6, 8, 8, 3", moved=moved)).one(33).what
    )


@pytest.mark.parametrize(
    ("size", "moved"), [("6, 8, 8, 3", ".permute(0, 3, 1, 2)"), ("6, 192", ".view(6, 3, 8, 8)")]
)
def test_images_in_their_order(tmp_path, size, moved):
    look(tmp_path, IMAGES.format(size=size, moved=moved)).clean()


ENCODER = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16{first})  # HERE
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))

net = Net()
optimizer = torch.optim.Adam(net.parameters())
for step in range(4):
    loss = F.cross_entropy(net(torch.randn(6, 5, 8)), torch.randint(0, 2, (6,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_copied_layer_is_named_where_it_was_made(tmp_path):
    look(tmp_path, ENCODER.format(first="")).one(33)
    look(tmp_path, ENCODER.format(first=", batch_first=True")).clean()


CTC = """\
rnn, head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 5)
optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()])
for step in range(4):
    h, _ = rnn(torch.randn(6, 6, 4))
    lengths = torch.full((6,), 6), torch.full((6,), 2)
    loss = F.ctc_loss({scores}, torch.randint(1, 5, (6, 2)), *lengths)  # HERE
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_ctc_takes_time_first_and_log_probabilities(tmp_path):
    look(tmp_path, CTC.format(scores="head(h).log_softmax(-1)")).one(33)
    look(tmp_path, CTC.format(scores="head(h).transpose(0, 1)")).one(18)
    look(tmp_path, CTC.format(scores="head(h).log_softmax(-1).transpose(0, 1)")).clean()
