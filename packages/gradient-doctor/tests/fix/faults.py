"""Small faulty scripts, one for each class with a recipe, and lines of the diff that mends it."""

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
x, y = torch.randn(32, 4), torch.randint(0, 3, (32,))
"""
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
{forward}

net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
for step in range(8):
{loop}
"""
FORWARD = ("h = torch.tanh(self.body(x))", "return self.head(h)")
LOOP = (
    "loss = F.cross_entropy(net(x), y)",
    "optimizer.zero_grad()",
    "loss.backward()",
    "optimizer.step()",
)


def script(forward=FORWARD, loop=LOOP):
    """The network above with these lines."""
    return HEAD + NET.format(
        forward="\n".join(f"        {line}" for line in forward),
        loop="\n".join(f"    {line}" for line in loop),
    )


STALE = """
net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
net[2] = nn.Linear(16, 3)  # three classes here
for step in range(8):
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCALER = """
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(8):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
"""
REGRESSION = """
target = x.sum(1)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(8):
    loss = F.mse_loss(net(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
# class, script, lines of the diff, a parameter that stood still and moves now
FAULTS = {
    "no_grad block": (
        2,
        script(("with torch.no_grad():", "    # features", "    h = self.body(x)", FORWARD[1])),
        ["-        with torch.no_grad():", "+        # features", "+        h = self.body(x)"],
        "net.body.weight",
    ),
    "no_grad decorator": (
        2,
        script().replace("    def forward", "    @torch.no_grad()\n    def features(self, x):\n"
        "        return torch.tanh(self.body(x))\n\n    def forward").replace(
            "h = torch.tanh(self.body(x))\n        return", "h = self.features(x)\n        return"
        ),
        ["-    @torch.no_grad()"],
        "net.body.weight",
    ),
    "detach": (
        3,
        script(("h = torch.tanh(self.body(x)).detach()  # why", FORWARD[1])),
        ["+        h = torch.tanh(self.body(x))  # why"],
        "net.body.weight",
    ),
    "data and a new leaf": (
        3,
        script((FORWARD[0], "return self.head(h).data"), (
            LOOP[0], "loss.requires_grad = True", *LOOP[1:]
        )),
        ["+        return self.head(h)", "-    loss.requires_grad = True"],
        "net.body.weight",
    ),
    "layer in forward": (
        6,
        script((FORWARD[0], "mix = nn.Linear(16, 16)", "return self.head(torch.tanh(mix(h)))")),
        [
            "+        self.mix = nn.Linear(16, 16)",
            "+        return self.head(torch.tanh(self.mix(h)))",
        ],
        "net.mix.weight",
    ),
    "plain list of layers": (
        7,
        script(("for layer in self.more:", "    x = layer(x)", *FORWARD)).replace(
            "self.head = ", "self.more = [nn.Linear(4, 4) for _ in range(2)]\n        self.head = "
        ),
        ["+        self.more = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])"],
        "net.more.0.weight",
    ),
    "head replaced": (
        8,
        HEAD + STALE,
        ["+net[2] = nn.Linear(16, 3)  # three classes here"],  # before the optimizer now
        "net.2.weight",
    ),
    "reentrant checkpoint": (
        11,
        script(("h = checkpoint(self.body, x, use_reentrant=True)", FORWARD[1])),
        ["+        h = checkpoint(self.body, x, use_reentrant=False)"],
        "net.body.weight",
    ),
    "in-place": (
        13,
        script(("h = torch.tanh(self.body(x))", "h += 1", "return self.head(h)")),
        ["+        h = h + 1"],
        None,
    ),
    "clip before unscale": (
        17,
        HEAD + SCALER,
        ["-    scaler.unscale_(optimizer)", "+    scaler.unscale_(optimizer)"],
        None,
    ),
    "target shape": (
        18,
        HEAD + REGRESSION,
        ["+    loss = F.mse_loss(net(x), target.unsqueeze(-1))"],
        None,
    ),
    "never steps": (
        21,
        script(loop=LOOP[:3]),
        ["+    optimizer.step()"],
        "net.body.weight",
    ),
    "never cleared": (
        28,
        script(loop=(LOOP[0], *LOOP[2:])),
        ["+    optimizer.zero_grad()"],
        None,
    ),
    "softmax twice": (
        29,
        script((FORWARD[0], "return torch.softmax(self.head(h), dim=-1)")),
        ["+        return self.head(h)"],
        None,
    ),
}  # fmt: skip
