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
