"""Where gradients stop on their way: defaults that freeze, draws, averages, custom Functions."""

import pytest

from doctor.snippets import loop, nothing, only

STEPS = """
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

# a layer with inplace=True: the line with the flag

IN_PLACE = (
    """
parts = [nn.Linear(4, 8), nn.Tanh()]
parts.append(nn.Dropout(0.5, {flag}))  # FAULT
parts.append(nn.Linear(8, 3))
model = nn.Sequential(*parts)
"""
    + STEPS
)


def test_a_layer_in_place(tmp_path):
    assert "Dropout" in only(tmp_path, IN_PLACE.format(flag="inplace=True"), 13).what
    nothing(tmp_path, IN_PLACE.format(flag="inplace=False"))


# a network that its constructor freezes by default

DEFAULT = (
    """
class Encoder(nn.Module):
    def __init__(self, width, freeze=True):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 6))
        {load}
        if freeze:
            for p in self.body.parameters():
                p.requires_grad = False
    def forward(self, x):
        return self.body(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder({arguments})  # FAULT
        self.head = nn.Linear(6, 3)
    def forward(self, x):
        return self.head(self.encoder(x))
model = Model()
"""
    + STEPS
)
LOAD = "self.body.load_state_dict({k: v + 1 for k, v in self.body.state_dict().items()})"


def test_frozen_by_a_default(tmp_path):
    finding = only(tmp_path, DEFAULT.format(load="", arguments="width=8"), 4)
    assert "`freeze`" in finding.why
    assert finding.parameters == ("model.encoder.body.0.weight", "model.encoder.body.2.weight")


@pytest.mark.parametrize(
    ("load", "arguments"), [("", "8, True"), ("", "8, freeze=True"), (LOAD, "8"), ("", "8, False")]
)
def test_frozen_on_purpose(tmp_path, load, arguments):
    nothing(tmp_path, DEFAULT.format(load=load, arguments=arguments))


# names that no parameter has

NAMES = (
    """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
for name, p in model.named_parameters():
    if {test}:  # FAULT
        p.requires_grad = False
"""
    + STEPS
)


@pytest.mark.parametrize(
    "test",
    [
        'name.startswith("backbone")',
        '"layer1" in name or "layer2" in name',
        'name in ["fc.weight", "fc.bias"]',
    ],
)
def test_a_name_that_nobody_has(tmp_path, test):
    assert "No parameter is called" in only(tmp_path, NAMES.format(test=test), 4).what


@pytest.mark.parametrize(
    "test",
    [
        'name.startswith("0.")',
        '"norm" in name',
        "any(part in name for part in ())",
        'name.startswith(("backbone", "0"))',
    ],
)
def test_names_that_are_there_or_not_in_the_source(tmp_path, test):
    nothing(tmp_path, NAMES.format(test=test))


GROUPS = """
class Bag(nn.Module):
    def __init__(self, vectors):
        super().__init__()
        self.words = nn.Embedding.from_pretrained(vectors{freeze})  # FAULT
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        return self.head(self.words((x > 0).long()).mean(1))
model = Bag(torch.randn(2, 4))
groups = [dict(params=model.words.parameters(), lr=1e-4), dict(params=model.head.parameters())]
""" + STEPS.replace("model.parameters()", "groups")


def test_a_group_of_frozen_parameters(tmp_path):
    assert "a group of their own" in only(tmp_path, GROUPS.format(freeze=""), 4).why
    nothing(tmp_path, GROUPS.format(freeze=", freeze=False"))
    nothing(tmp_path, GROUPS.replace("groups, ", "model.parameters(), ").format(freeze=""))


# autograd.grad without create_graph

PENALTY = """x.requires_grad_()
out = head(body(x))
slope = torch.autograd.grad(out.sum(), x{graph})[0]  # FAULT
loss = F.cross_entropy(out, y) + 0.1 * slope.square().sum(1).mean()"""


def test_a_penalty_without_its_graph(tmp_path):
    finding = only(tmp_path, loop(*PENALTY.format(graph=", retain_graph=True").splitlines()), 23)
    assert "create_graph" in finding.fix
    nothing(tmp_path, loop(*PENALTY.format(graph=", create_graph=True").splitlines()))


def test_a_loss_of_slopes_alone(tmp_path):
    lines = (
        "x.requires_grad_()",
        "slope = torch.autograd.grad(head(torch.tanh(body(x))).sum(), x)[0]  # FAULT",
        "loss = (slope - x.cos()).square().mean()",
    )
    assert "create_graph" in only(tmp_path, loop(*lines), 3).fix


INNER = """
model = nn.Linear(4, 3)
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    weights = list(model.parameters())
    inner = F.cross_entropy(F.linear(x, *weights), y)
    slopes = torch.autograd.grad(inner, weights, create_graph=True)
    weights = [{update} for p, g in zip(weights, slopes)]  # FAULT
    loss = F.cross_entropy(F.linear(x, *weights), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_inner_steps_that_forget_the_start(tmp_path):
    only(tmp_path, INNER.format(update="(p - 0.1 * g).detach().requires_grad_()"), 3)
    nothing(tmp_path, INNER.format(update="p - 0.1 * g"))


# draws

LATENT = """
encoder, spread, decoder = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(2, 4)
parts = [*encoder.parameters(), *spread.parameters(), *decoder.parameters()]
optimizer = torch.optim.Adam(parts, lr=1e-3)
for step in range(4):
    x = torch.randn(8, 4)
    mu, std = encoder(x), spread(x).exp()
    z = {draw}  # FAULT
    loss = F.mse_loss(decoder(z), x) + (mu.square() + std.square() - 2 * std.log()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("draw", ["torch.normal(mu, std)", "Normal(mu, std).sample()"])
def test_a_draw_before_a_decoder(tmp_path, draw):
    only(tmp_path, LATENT.format(draw=draw), 3)


DRAWN_WEIGHTS = """rho = head.weight.exp()
weights = {draw}  # FAULT
fit = F.cross_entropy(F.linear(x.repeat(1, 2), weights), y)
loss = fit + 1e-3 * (rho.square() - 2 * rho.log()).sum() + head(body(x)).square().mean()"""


def test_weights_that_are_drawn(tmp_path):
    from doctor.snippets import look, serious

    source = loop(*DRAWN_WEIGHTS.format(draw="Normal(head.weight, rho).sample()").splitlines())
    examination, lines = look(tmp_path, source)
    assert (3, lines[0]) in [(f.number, f.site.line) for f in serious(examination)]
    nothing(tmp_path, source.replace("sample()", "rsample()"))


@pytest.mark.parametrize("draw", ["Normal(mu, std).rsample()", "mu + std * torch.randn_like(std)"])
def test_a_draw_with_a_path(tmp_path, draw):
    nothing(tmp_path, LATENT.format(draw=draw))


def test_draws_that_are_scored_or_fed_back(tmp_path):
    scored = """policy = Normal(body(x), 1.0)
action = policy.sample()
gain = -(head(action) - 1).square().mean(1)
score = policy.log_prob(action).sum(1) * gain.detach()
loss = -score.mean() - gain.mean()"""
    nothing(tmp_path, loop(*scored.splitlines()))
    fed_back = """first = Normal(head(body(x)), 1.0)
again = Normal(head(body(F.pad(first.sample(), (0, 1)))), 1.0)
loss = -first.log_prob(x[:, :3]).mean() - again.log_prob(x[:, 1:]).mean()"""
    nothing(tmp_path, loop(*fed_back.splitlines()))


# moving averages

TARGET = """
online = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
target = copy.deepcopy(online){frozen}
optimizer = torch.optim.Adam([*online.parameters(), *target.parameters()], lr=1e-2)
for step in range(4):
    x = torch.randn(8, 4)
    goal = target(x + 0.1 * torch.randn(8, 4))  # FAULT
    loss = -F.cosine_similarity(online(x), goal{cut}).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for p, tp in zip(online.parameters(), target.parameters()):
        {update}
"""


@pytest.mark.parametrize(
    "update",
    ["tp.data.mul_(0.9).add_(p.data, alpha=0.1)", "tp.data = 0.9 * tp.data + 0.1 * p.data"],
)
def test_a_target_that_is_trained_as_well(tmp_path, update):
    only(tmp_path, TARGET.format(frozen="", cut="", update=update), 30)
    nothing(tmp_path, TARGET.format(frozen=".requires_grad_(False)", cut="", update=update))


def test_an_average_that_nobody_keeps(tmp_path):
    frozen = ".requires_grad_(False)"
    only(
        tmp_path,
        TARGET.replace("  # FAULT", "").format(
            frozen=frozen, cut=".detach()", update="tp = 0.9 * tp + 0.1 * p  # FAULT"
        ),
        21,
    )
    kept = "tp.data.copy_(0.9 * tp + 0.1 * p)"
    nothing(tmp_path, TARGET.format(frozen=frozen, cut=".detach()", update=kept))


# custom Functions and hooks

FUNCTION = """
class Steps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 8).round() / 8
    @staticmethod
    def backward(ctx, gradient):
        return {gives}  # FAULT
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(model[1](Steps.apply(torch.tanh(model[0](x)))), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("gives", ["None", "gradient * 0"])
def test_a_function_that_gives_nothing(tmp_path, gives):
    finding = only(tmp_path, FUNCTION.format(gives=gives), 20)
    assert finding.parameters == ("model.0.weight", "model.0.bias")


def test_a_function_that_passes_on(tmp_path):
    nothing(tmp_path, FUNCTION.format(gives="gradient"))


HOOKED = "mask = torch.{mask}\nbody.weight.register_hook(lambda g: g * mask)  # FAULT\n"


def test_a_hook_that_gives_zeros(tmp_path):
    script = loop("loss = F.cross_entropy(head(torch.relu(body(x))), y)")
    head = "head = nn.Linear(8, 3)\n"
    for mask, examine in (("zeros(8, 4)", only), ("eye(8, 4)", nothing)):
        source = script.replace(head, head + HOOKED.format(mask=mask))
        examine(tmp_path, source, *([20] if examine is only else []))
    freeze = "body.weight.register_hook(torch.zeros_like)\n"
    nothing(tmp_path, script.replace(head, head + freeze))


# a list that keeps graphs

QUEUE = """
body = nn.Linear(4, 8)
optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
queue = []
for step in range(4):
    x = torch.randn(8, 4)
    key = F.normalize(torch.tanh(body(x)), dim=1)
    logits = F.normalize(body(x), dim=1) @ torch.cat([key, *queue]).T
    loss = F.cross_entropy(logits, torch.arange(8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    queue.append({key})  # FAULT
"""


def test_a_list_that_keeps_graphs(tmp_path):
    only(tmp_path, QUEUE.format(key="key"), 14)
    nothing(tmp_path, QUEUE.format(key="key.detach()"))


# `.data` in a new tensor, as old code has it

WRAPPED = """
from torch.autograd import Variable
encoder, decoder = nn.Linear(4, 2), nn.Linear(2, 4)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
for step in range(4):
    x = torch.randn(8, 4)
    z = encoder(x)
    z = {z}  # FAULT
    loss = F.mse_loss(decoder(z), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("z", ["Variable(z.data)", "Variable(z.data, requires_grad=True)"])
def test_data_in_a_variable(tmp_path, z):
    finding = only(tmp_path, WRAPPED.format(z=z), 3)
    assert finding.parameters == ("encoder.weight", "encoder.bias")


def test_the_tensor_itself(tmp_path):
    nothing(tmp_path, WRAPPED.format(z="z.clone()"))
