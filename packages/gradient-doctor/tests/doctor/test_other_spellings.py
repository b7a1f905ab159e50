"""Faults that are known in one spelling, in another; each beside a program that is right."""

from doctor.snippets import look, nothing, only

HEAD = """
net = nn.Linear(4, 3)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
"""

CLOSURE = (
    HEAD
    + """
def evaluate():
    {clear}
    loss = F.mse_loss(net(torch.randn(8, 4)), torch.zeros(8, 3))
    loss.backward()  # FAULT
    return loss
for _ in range(5):
    sgd.step(closure=evaluate)
"""
)


def test_a_closure_that_clears_nothing(tmp_path):
    only(tmp_path, CLOSURE.format(clear="pass"), 28)
    nothing(tmp_path, CLOSURE.format(clear="sgd.zero_grad()"))


LEFT_OVER = (
    HEAD
    + """
seen = 0
for epoch in range(12):
    {clear}
    for x in torch.randn({batches}, 8, 4):
        seen += 1
        loss = F.mse_loss(net(x), x[:, :3]) / 4
        loss.backward()
        if seen % 4 == 0:
            sgd.step()
            sgd.zero_grad()
"""
)


def test_gradients_left_over_at_the_end_of_an_epoch(tmp_path):
    only(tmp_path, LEFT_OVER.format(clear="net.zero_grad()  # FAULT", batches=7), 9)
    nothing(tmp_path, LEFT_OVER.format(clear="net.zero_grad()", batches=8))
    nothing(tmp_path, LEFT_OVER.format(clear="pass", batches=7))


FLOAT_IDS = (
    HEAD
    + """
def ids(x):
    classes = torch.ones(len(x)){dtype}  # FAULT
    classes[x[:, 0] > 0] = 2
    return classes
for _ in range(4):
    x = torch.randn(8, 4)
    loss = F.cross_entropy(net(x), ids(x))
    sgd.zero_grad()
    loss.backward()
    sgd.step()
"""
)


def test_ids_are_floats_where_they_are_made(tmp_path):
    only(tmp_path, FLOAT_IDS.format(dtype=""), 18)
    nothing(tmp_path, FLOAT_IDS.format(dtype=".long()"))


KEPT = """
class Kernel:
    def __init__(self):
        self.raw = torch.zeros(2, requires_grad=True)
        self.width = F.softplus(self.raw)  # FAULT
        self.adam = torch.optim.Adam([self.raw])
    def fit(self, x):
        {again}
        loss = (x / self.width).square().mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()
kernel = Kernel()
for _ in range(4):
    kernel.fit(torch.rand(6, 2))
"""


def test_what_a_constructor_has_computed_is_old(tmp_path):
    examination, (line,) = look(tmp_path, KEPT.format(again="pass"))
    assert [(f.number, f.site.line) for f in examination.findings] == [(14, line)]
    nothing(tmp_path, KEPT.format(again="self.width = F.softplus(self.raw)"))


FORMULA = """
class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u > 0).float()
    @staticmethod
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        {formula}
w = nn.Parameter(torch.randn(6, 16))
v = nn.Parameter(torch.randn(16, 1))
sgd = torch.optim.SGD([w, v], lr=0.01)
for _ in range(4):
    x = torch.randn(32, 6)
    loss = F.mse_loss((Step.apply(x @ w) @ v)[:, 0], x[:, 0])
    sgd.zero_grad()
    loss.backward()
    sgd.step()
"""


def test_the_formula_of_a_backward_overflows(tmp_path):
    lines = "e = (30 * u).exp()  # FAULT\n        return grad * 30 * e / (1 + e) ** 2"
    only(tmp_path, FORMULA.format(formula=lines), 27)
    nothing(tmp_path, FORMULA.format(formula="return grad / (1 + u.abs()) ** 2"))


WRITTEN_OUT = """
emb = nn.Embedding(9, 8)
rnn = nn.GRU(8, 16, batch_first=True)
out = nn.Linear(16, 9)
adam = torch.optim.Adam([*emb.parameters(), *rnn.parameters(), *out.parameters()])
for _ in range(4):
    ids = torch.randint(0, 9, (8, 6))
    table = out(rnn(emb(ids))[0]).log_softmax(-1)
    loss = -table{rows}.gather(2, ids{ids}.unsqueeze(2)).mean()  # FAULT
    adam.zero_grad()
    loss.backward()
    adam.step()
"""


def test_a_likelihood_that_is_written_out(tmp_path):
    only(tmp_path, WRITTEN_OUT.format(rows="", ids=""), 18)
    nothing(tmp_path, WRITTEN_OUT.format(rows="[:, :-1]", ids="[:, 1:]"))


COUNTED = (
    HEAD
    + """
for i in range(60):
    x = torch.randn(8, 4)
    wrong = F.relu(1 - net(x)[:, 0] - (9 if i > 9 else 0))
    loss = wrong.sum() / {count}  # FAULT
    sgd.zero_grad()
    loss.backward()
    sgd.step()
"""
)


def test_a_count_that_may_be_zero_divides(tmp_path):
    only(tmp_path, COUNTED.format(count="(wrong > 0).sum()"), 27)
    nothing(tmp_path, COUNTED.format(count="(wrong > 0).sum().clamp(min=1)"))


THAW = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))
def switch(part, on):
    for p in {those}:  # FAULT
        p.requires_grad_(on)
net = Net()
def fit():
    sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(4):
        loss = F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
        sgd.zero_grad()
        loss.backward()
        sgd.step()
switch(net.body, False)
fit()
switch(net.body, {on})
fit()
"""


def test_a_switch_that_leaves_out_what_is_frozen(tmp_path):
    those = "filter(lambda p: p.requires_grad, part.parameters())"
    finding = only(tmp_path, THAW.format(those=those, on=True), 4)
    assert "net.body.weight" in finding.parameters
    nothing(tmp_path, THAW.format(those="part.parameters()", on=True))
    nothing(tmp_path, THAW.format(those=those, on=False))


ONTO_ITSELF = """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
old = copy.deepcopy(net)
adam = torch.optim.Adam(net.parameters())
def sync(source, target):
    for a, b in zip(source.parameters(), target.parameters()):
        b.data.copy_(a.data)
for _ in range(4):
    sync({source}, old)  # FAULT
    x = torch.randn(8, 4)
    with torch.no_grad():
        goal = 0.9 * old(x)
    loss = F.mse_loss(net(x), goal)
    adam.zero_grad()
    loss.backward()
    adam.step()
"""


def test_a_network_is_copied_onto_itself(tmp_path):
    only(tmp_path, ONTO_ITSELF.format(source="old"), 21)
    nothing(tmp_path, ONTO_ITSELF.format(source="net"))


DEAD_END = """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4)
    def forward(self, x):
        mixed = x * torch.sigmoid(self.gate(x))  # FAULT
        return {returned}
net = nn.Sequential(nn.Linear(4, 4), Gate(), nn.Linear(4, 3))
adam = torch.optim.Adam(net.parameters())
for _ in range(4):
    loss = F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    adam.zero_grad()
    loss.backward()
    adam.step()
"""


def test_a_value_that_the_function_never_reads(tmp_path):
    only(tmp_path, DEAD_END.format(returned="x"), 5)
    nothing(tmp_path, DEAD_END.format(returned="mixed"))


SQUASHED = """
net = nn.Linear(3, 4)
critic = nn.Linear(5, 1)
adam = torch.optim.Adam([*net.parameters(), *critic.parameters()])
for _ in range(4):
    s = torch.randn(8, 3)
    mean, log_std = net(s).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.tanh().exp())
    u = normal.rsample()
    a = u.tanh()
    log_prob = normal.log_prob(u)
    log_prob = log_prob - torch.log(1 - {value}.pow(2) + 1e-6)
    log_prob = log_prob{total}
    q = critic(torch.cat([s, a], -1))
    loss = (0.1 * log_prob - q).mean() + q.square().mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
"""
TOTAL = ".sum(-1, keepdim=True)"


def marked(source, part):
    return "".join(
        f"{line}  # FAULT\n" if part in line else f"{line}\n" for line in source.splitlines()
    )


def test_densities_of_a_squashed_policy(tmp_path):
    twice = marked(SQUASHED.format(value="a.tanh()", total=TOTAL), "log_prob - torch.log")
    only(tmp_path, twice, 24)
    each = marked(SQUASHED.format(value="a", total=""), "normal.log_prob(u)")
    only(tmp_path, each, 18)
    nothing(tmp_path, SQUASHED.format(value="a", total=TOTAL))


RETURNS = """
body, value = nn.Linear(4, 16), nn.Linear(16, 1)
adam = torch.optim.Adam([*body.parameters(), *value.parameters()])
for _ in range(4):
    s, rewards = torch.randn(7, 4), torch.randn(6)
    values = value(torch.tanh(body(s)))[:, 0]
    series, last = [], values[-1]
    for t in reversed(range(6)):
        last = rewards[t] + 0.9 * last  # FAULT
        series.insert(0, last)
    gap = torch.stack(series){cut} - values[:-1]
    loss = gap.square().mean()
    adam.zero_grad()
    loss.backward()
    adam.step()
"""


def test_returns_step_by_step_that_have_a_gradient(tmp_path):
    only(tmp_path, RETURNS.format(cut=""), 30)
    nothing(tmp_path, RETURNS.format(cut=".detach()"))


ZEROS = """
left, right = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.{start}(2, 4))
line = nn.Linear(4, 1)
sgd = torch.optim.SGD([left, right, *line.parameters()], lr=0.1)
for _ in range(4):
    x = torch.randn(8, 4)
    form = torch.einsum("bi,ik,kj,bj->b", x, left, right, x)
    loss = F.mse_loss(line(x)[:, 0] + form, x[:, 0] * x[:, 1])
    sgd.zero_grad()
    loss.backward()
    sgd.step()
"""


def test_two_factors_of_zeros_in_einsum(tmp_path):
    only(tmp_path, marked(ZEROS.format(start="zeros"), "left, right ="), 20)
    nothing(tmp_path, ZEROS.format(start="randn"))


EMPTY_SOMETIMES = (
    HEAD
    + """
for i in range(40):
    x = torch.randn(8, 4)
    chosen = torch.arange(8) < (0 if i in (0, 20) else 4)
    error = (net(x) - 1).square().mean(1)
    loss = {mean} + error.mean()  # FAULT
    sgd.zero_grad()
    loss.backward()
    sgd.step()
"""
)


def test_a_mean_over_nothing_in_a_few_steps(tmp_path):
    only(tmp_path, EMPTY_SOMETIMES.format(mean="error[chosen].mean()"), 27)
    mean = "(error * chosen).sum() / chosen.sum().clamp(min=1)"
    nothing(tmp_path, EMPTY_SOMETIMES.format(mean=mean))


ONE_HELPER = """
G, D = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
adams = {{"g": torch.optim.Adam(G.parameters()), "d": torch.optim.Adam(D.parameters())}}
def apply(loss, who):
    {before}
    loss.backward()
    adams[who].step()
    adams[who].zero_grad()
for _ in range(4):
    fake = G(torch.randn(8, 3))
    apply(-D(fake).mean(), "g")  # FAULT
    apply(D(fake.detach()).mean() - D(torch.randn(8, 2)).mean(), "d")
"""


def test_one_helper_goes_back_for_two_networks(tmp_path):
    only(tmp_path, ONE_HELPER.format(before="pass"), 30)
    nothing(tmp_path, ONE_HELPER.format(before="adams[who].zero_grad()"))
