"""The same fault at another place: behind a helper, in another spelling, in a call further out."""

import pytest

from doctor.snippets import nothing, only

FREEZER = """
def switch(module, learns=False):
    for parameter in module.parameters():
        parameter.requires_grad_(learns)

def body():
    layers = nn.Sequential(nn.Linear(3, 6), nn.Tanh())
    switch(layers{argument}){mark}
    return layers

net, head = body(), nn.Linear(6, 1)
optimizer = torch.optim.SGD([dict(params=net.parameters()), dict(params=head.parameters())], 0.1)
for step in range(5):
    x = torch.randn(8, 3)
    loss = F.mse_loss(head(net(x)), x[:, :1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_who_chose_to_freeze_is_named(tmp_path):
    only(tmp_path, FREEZER.format(argument="", mark="  # FAULT"), 4)
    nothing(tmp_path, FREEZER.format(argument=", True", mark=""))


HALF = """
def lower(module, kind):
    return module.to(kind)

net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
net = lower(net, {kind}){mark}
optimizer = torch.optim.Adam(net.parameters(), lr=1e-6)
x = torch.randn(16, 6).to(net[0].weight.dtype)
for step in range(6):
    loss = F.cross_entropy(net(x).float(), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_who_chose_a_dtype_is_named(tmp_path):
    only(tmp_path, HALF.format(kind="torch.bfloat16", mark="  # FAULT"), 21)
    nothing(tmp_path, HALF.format(kind="torch.float32", mark=""))


FACTORY = """
def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def ready():
    net = make()
    return net, torch.optim.SGD(net.parameters(), 0.1)

net, optimizer = ready()
{again}
for step in range(6):
    x = torch.randn(9, 4)
    loss = F.cross_entropy(net(x), (x[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_second_call_of_a_factory_is_named(tmp_path):
    only(tmp_path, FACTORY.format(again="net = make()  # FAULT"), 8)
    nothing(tmp_path, FACTORY.format(again="other = make()"))


CARRIED = """
rnn, head = nn.GRUCell(3, 5), nn.Linear(5, 1)
optimizer = torch.optim.SGD([*rnn.parameters(), *head.parameters()], 0.01)

def advance(x, state):
    state = rnn(x, state)
    return head(state), state

state = torch.zeros(4, 5)
for step in range(4):
    x = torch.randn(4, 3)
    guess, state = advance(x, state){mark}
    {cut}
    loss = guess.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_state_is_cut_where_its_helper_is_called(tmp_path):
    only(tmp_path, CARRIED.format(mark="  # FAULT", cut=""), 14)
    nothing(tmp_path, CARRIED.format(mark="", cut="state = state.detach()"))


WEIGHTS = """
class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(4, 4)
        self.start = {first}

    def forward(self, x):
        {own}
        return self.read(x) * self.start

net = nn.Sequential(nn.Linear(3, 4), Memory(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(5):
    x = torch.randn(8, 3)
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_parameter_made_anew_by_a_module_that_lasts(tmp_path):
    own = "self.start = nn.Parameter(torch.rand(4))"
    only(tmp_path, WEIGHTS.format(first="None", own=f"{own}  # FAULT"), 6)
    nothing(tmp_path, WEIGHTS.format(first="nn.Parameter(torch.rand(4))", own="x = x.tanh()"))


TWICE = """
encoder, head = nn.Linear(4, 6), nn.Linear(6, 2)
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], 0.1)

def encode(x):
    with {region}:  # FAULT
        return encoder(x).tanh()

for step in range(5):
    x = torch.randn(8, 4)
    loss = head(encode(x).clone() - encode(x.flip(0)).clone()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("region", ["torch.no_grad()", "torch.inference_mode()"])
def test_two_views_are_no_rollout(tmp_path, region):
    only(tmp_path, TWICE.format(region=region), 2)


def test_two_views_with_gradients(tmp_path):
    nothing(tmp_path, TWICE.format(region="torch.enable_grad()"))


SLOPE = """
net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(4):
    x = torch.rand(16, 1, requires_grad=True)
    u = net(x)
    {slope}
    loss = (u - x.sin()).square().mean() + (du - x.cos()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_derivative_without_a_graph_frees_the_rest(tmp_path):
    only(tmp_path, SLOPE.format(slope="du = torch.autograd.grad(u.sum(), x)[0]  # FAULT"), 3)
    nothing(
        tmp_path, SLOPE.format(slope="du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]")
    )


VOTES = """
members = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
optimizer = torch.optim.SGD(members.parameters(), 0.1)
for step in range(4):
    x = torch.randn(12, 5)
    votes = torch.stack([member(x).softmax(-1) for member in members]).mean(0)
    loss = {loss}  # FAULT
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_averaged_probabilities_are_no_scores(tmp_path):
    target = "x[:, :3].argmax(1)"
    only(tmp_path, VOTES.format(loss=f"F.cross_entropy(votes, {target})"), 29)
    nothing(tmp_path, VOTES.format(loss=f"F.nll_loss(votes.log(), {target})"))
    # gates of experts weigh scores, which need not sum to 1
    gates = "F.cross_entropy(votes * members[0](x), x[:, :3].argmax(1))"
    nothing(tmp_path, VOTES.format(loss=gates))


SPARSE = """
edge = nn.Parameter(torch.zeros(6))
head = nn.Linear(3, 2)
optimizer = torch.optim.SGD([edge, *head.parameters()], 0.1)
places = torch.tensor([[0, 1, 2, 3, 0, 1], [1, 2, 3, 0, 2, 3]])
x = torch.randn(4, 3)
for step in range(4):
    graph = torch.sparse_coo_tensor(places, edge.sigmoid(), (4, 4)).coalesce()
    weight = graph.{values}()  # FAULT
    i, j = graph.indices()
    mixed = torch.zeros(4, 3).index_add(0, i, weight[:, None] * x[j])
    loss = F.cross_entropy(head(mixed), torch.tensor([0, 1, 0, 1]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_places_of_a_sparse_tensor_are_no_cut(tmp_path):
    only(tmp_path, SPARSE.format(values="_values"), 3)
    nothing(tmp_path, SPARSE.format(values="values"))


BAG = """
table, head = nn.Embedding(20, 6, padding_idx=0), nn.Linear(6, 1)
optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], 0.1)
for step in range(5):
    length = torch.randint(2, 9, (12, 1))
    ids = torch.randint(1, 20, (12, 9)) * (torch.arange(9) < length)
    words = table(ids).tanh()
    text = {mean}  # FAULT
    loss = (head(text) - length / 9).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "mean",
    [
        "words.sum(1) / words.shape[1]",
        "F.adaptive_avg_pool1d(words.transpose(1, 2), 1).squeeze(-1)",
        "words.permute(0, 2, 1).mean(-1)",
    ],
)
def test_means_over_padding_in_other_words(tmp_path, mean):
    only(tmp_path, BAG.format(mean=mean), 19)


@pytest.mark.parametrize(
    "mean",
    ["(words * (ids != 0)[..., None]).sum(1) / length", "words.transpose(1, 2).amax(-1)"],
)
def test_means_over_words(tmp_path, mean):
    nothing(tmp_path, BAG.format(mean=mean))


FLOW = """
net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.001)
for step in range(5):
    x = torch.randn(16, 2)
    scale, shift = net(x[:, :1]).unbind(1)
    z = x[:, 1] * scale.exp() + shift
    stretch = {stretch}  # FAULT
    loss = (0.5 * z.square() - stretch).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_sum_over_all_samples_for_each_of_them(tmp_path):
    only(tmp_path, FLOW.format(stretch="scale.sum()"), 22)
    nothing(tmp_path, FLOW.format(stretch="scale"))
    # the size of weights has nothing to do with the samples
    nothing(tmp_path, FLOW.format(stretch="net[0].bias.square().sum()"))


HIDDEN = """
x = torch.randn(30, 3{asks})
{data}
w = torch.zeros(3, requires_grad=True){cast}  # FAULT
b = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([t for t in (w, b) if t.is_leaf], 0.1)
for step in range(6):
    loss = ({x} @ w + b - {x}.detach().sum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
"""


def test_a_weight_whose_leaf_nobody_knows(tmp_path):
    only(tmp_path, HIDDEN.format(cast=".double().float()", asks="", data="", x="x"), 7)
    nothing(tmp_path, HIDDEN.format(cast="", asks="", data="", x="x"))
    # data that ask for a gradient, and still have a name
    data = "features = x * 2"
    wanted = HIDDEN.format(cast="", asks=", requires_grad=True", data=data, x="features")
    nothing(tmp_path, wanted)


JUDGED = """
maker = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
judge = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
of_maker = torch.optim.SGD(maker.parameters(), 0.01)
of_judge = torch.optim.SGD(judge.parameters(), 0.01)

def opinion(sample):
    return judge(sample{cut}).mean(){mark}

for step in range(6):
    x = torch.randn(12, 3)
    made = maker(x)
    of_judge.zero_grad()
    (F.softplus(-judge(x + 1)).mean() + F.softplus(judge(made.detach())).mean()).backward()
    of_judge.step()
    loss = F.l1_loss(made, x) - 0.2 * opinion(made)
    of_maker.zero_grad()
    loss.backward()
    of_maker.step()
"""


def test_a_judge_that_is_asked_about_a_detached_sample(tmp_path):
    only(tmp_path, JUDGED.format(cut=".detach()", mark="  # FAULT"), 3)
    nothing(tmp_path, JUDGED.format(cut="", mark=""))


def test_a_judge_that_is_asked_about_a_sample_without_gradients(tmp_path):
    again = "with torch.no_grad():  # FAULT\n        again = maker(x)\n    loss = F.l1"
    script = JUDGED.format(cut="", mark="").replace("loss = F.l1", again, 1)
    only(tmp_path, script.replace("opinion(made)", "opinion(again)"), 2)


SPARED = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.shift = nn.Linear(5, 5), nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return self.base(x).tanh() + self.shift

net, head = nn.Sequential(Part(), Part()), nn.Linear(5, 2)
net.requires_grad_(False)
for name, p in net.named_parameters():
{loop}
wanted = [p for m in (net, head) for p in m.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(wanted, 0.1)
for step in range(5):
    x = torch.randn(9, 5)
    loss = F.cross_entropy(head(net(x)), (x[:, 0] > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "lines",
    [
        ['if "shift" not in name:  # FAULT', "    p.requires_grad = False"],
        ['if not name.endswith("shift"):  # FAULT', "    p.requires_grad_(False)"],
        ['if "shift" in name:  # FAULT', "    continue", "p.requires_grad = False"],
    ],
)
def test_what_a_loop_spares_was_frozen_before(tmp_path, lines):
    only(tmp_path, SPARED.format(loop="\n".join(f"    {line}" for line in lines)), 4)


@pytest.mark.parametrize(
    "lines",
    [
        ['p.requires_grad = "shift" in name'],
        ['if "base" in name:', "    p.requires_grad = False"],
        ['if "norm" not in name:', "    p.requires_grad = False"],
    ],
)
def test_what_a_loop_freezes_on_purpose(tmp_path, lines):
    nothing(tmp_path, SPARED.format(loop="\n".join(f"    {line}" for line in lines)))


SCALED = """
net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
nn.init.zeros_(net[2].weight)
optimizer = torch.optim.SGD(net.parameters(), 0.01)

def of_length_one(g):
    return g / {length}  # FAULT

for step in range(5):
    x = torch.randn(8, 4)
    loss = (net(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in net.parameters():
        p.grad = of_length_one(p.grad)
    optimizer.step()
"""


def test_the_line_that_spoils_the_gradients(tmp_path):
    only(tmp_path, SCALED.format(length="g.norm()"), 27)
    nothing(tmp_path, SCALED.format(length="(g.norm() + 1e-6)"))
