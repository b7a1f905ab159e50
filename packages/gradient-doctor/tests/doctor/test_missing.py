"""Classes 1, 2, 3, 5 and 11: each rule with its fault and with the code that only looks like it."""

import pytest
import torch
from torch import nn

from doctor.snippets import look, loop, nothing, only, serious
from gradient_doctor import Doctor, Severity

BODY = {"body.weight", "body.bias"}
ALL = BODY | {"head.weight", "head.bias"}
LOSS = "loss = F.cross_entropy(head(f), y)"

# class, lines of the step, parameters
CUTS = {
    "detach": (3, ["f = torch.tanh(body(x)).detach()  # FAULT", LOSS], BODY),
    "data": (3, ["f = body(x).data  # FAULT", LOSS], BODY),
    "numpy": (3, ["f = torch.from_numpy(body(x).detach().numpy())  # FAULT", LOSS], BODY),
    "round": (3, ["f = (4 * body(x)).round() / 4  # FAULT", LOSS], BODY),
    "sample": (3, ["f = Normal(body(x), 0.3).sample()  # FAULT", LOSS], BODY),
    "no_grad": (2, ["with torch.no_grad():  # FAULT", "    f = torch.tanh(body(x))", LOSS], BODY),
    "no_grad-view": (
        2,
        ["f = body(x)", "with torch.no_grad():  # FAULT", "    f = f.view(8, 8)", LOSS],
        BODY,
    ),
    "switched-off": (
        2,
        [
            "torch.set_grad_enabled(False)  # FAULT",
            "f = body(x)",
            "torch.set_grad_enabled(True)",
            LOSS,
        ],
        BODY,
    ),
    "inference": (2, ["with torch.inference_mode():  # FAULT", "    f = body(x)", LOSS], BODY),
    "checkpoint": (11, ["f = checkpoint(body, x, use_reentrant=True)  # FAULT", LOSS], BODY),
    # the whole loss is gone: backward fails, and the cause is still the cut
    "all-no_grad": (
        2,
        ["with torch.no_grad():  # FAULT", "    loss = F.cross_entropy(head(body(x)), y)"],
        ALL,
    ),
    "all-off": (
        2,
        ["torch.set_grad_enabled(False)  # FAULT", "loss = F.cross_entropy(head(body(x)), y)"],
        ALL,
    ),
    "all-checkpoint": (
        11,
        [
            "o = checkpoint(lambda x: head(body(x)), x, use_reentrant=True)  # FAULT",
            "loss = F.cross_entropy(o, y)",
        ],
        ALL,
    ),
    "accuracy": (3, ["loss = (head(body(x)).argmax(-1) == y).float().mean()  # FAULT"], ALL),
    "logits": (3, ["o = head(body(x)).detach()  # FAULT", "loss = F.cross_entropy(o, y)"], ALL),
    "loss-detached": (1, ["loss = F.cross_entropy(head(body(x)), y).detach()  # FAULT"], ALL),
    "loss-patched": (
        1,
        [
            "loss = F.cross_entropy(head(body(x)), y)",
            "loss = torch.tensor(loss.item(), requires_grad=True)  # FAULT",
        ],
        ALL,
    ),
    "loss-leaf": (
        1,
        [
            "loss = F.cross_entropy(head(body(x)), y)",
            "loss = loss.detach().requires_grad_()  # FAULT",
        ],
        ALL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_is_named_with_its_line_and_parameters(name, tmp_path):
    number, lines, parameters = CUTS[name]
    finding = only(tmp_path, loop(*lines), number)
    assert finding.severity is Severity.ERROR
    assert set(finding.parameters) == parameters


def test_the_loop_itself_is_clean(tmp_path):
    nothing(tmp_path, loop("f = torch.tanh(body(x))", LOSS))


def test_a_loss_that_became_a_python_number(tmp_path):
    finding = only(tmp_path, loop("loss = F.cross_entropy(head(body(x)), y).item()  # FAULT"), 1)
    assert len(finding.parameters) == 4


def test_the_sum_of_an_empty_list(tmp_path):
    source = loop("loss = sum([])").replace("loss.backward()", "loss.backward()  # FAULT")
    only(tmp_path, source, 1)


def test_a_batch_that_adds_nothing_names_the_line_of_the_zeros(tmp_path):
    source = loop(
        "total = torch.zeros(())  # FAULT",
        "for _ in range(0 if step == 2 else 2):",
        "    total = total + F.cross_entropy(head(body(x)), y)",
        "loss = total / 2",
    )
    finding = only(tmp_path, source, 1)
    assert set(finding.parameters) == ALL
    assert "In earlier steps the same loss reached 4 parameters" in finding.why


def test_the_note_is_on_the_error(tmp_path):
    examination, _ = look(tmp_path, loop("loss = F.cross_entropy(head(body(x)), y).detach()"))
    assert "gradient_doctor: ERROR [1 constant-loss]" in examination.error.__notes__[0]


ACTOR = """
policy = nn.Linear(4, 3)
critic = nn.Linear(4, 1)
optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()])
for step in range(4):
    x, reward = torch.randn(8, 4), torch.randn(8)
    value = critic(x).squeeze(-1)
    law = Categorical(logits=policy(x))
    action = law.sample()
    critic_loss = F.mse_loss(value, reward)  # FAULT
    loss = -(law.log_prob(action) * (reward - value).detach()).mean(){rest}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(critic_loss.item())
"""


def test_a_loss_without_backward_is_not_blamed_on_the_advantage(tmp_path):
    finding = only(tmp_path, ACTOR.replace("{rest}", ""), 5)
    assert set(finding.parameters) == {"critic.weight", "critic.bias"}
    assert "no backward starts from it" in finding.why


def test_detached_advantages_are_clean(tmp_path):
    nothing(tmp_path, ACTOR.replace("{rest}", " + critic_loss"))


ROLLOUT = """
policy = nn.Linear(4, 3)
optimizer = torch.optim.Adam(policy.parameters())
for step in range(4):
    x = torch.randn(8, 4)
    with torch.no_grad():
        old = policy(x).log_softmax(-1)
        action = torch.multinomial(old.exp(), 1)
    new = policy(x).log_softmax(-1){cut}
    ratio = (new - old).gather(1, action).exp()
    loss = -(ratio * torch.randn(8, 1)).mean()
    if not loss.requires_grad:
        loss = loss + 0.0 * nn.Linear(1, 1)(torch.ones(1)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_cut_through_the_graph_is_blamed_not_the_rollout(tmp_path):
    examination, lines = look(tmp_path, ROLLOUT.replace("{cut}", ".detach()  # FAULT"))
    found = [f for f in serious(examination) if f.number == 3]
    assert [f.site.line for f in found] == list(lines)
    assert set(found[0].parameters) == {"policy.weight", "policy.bias"}
    assert not [f for f in serious(examination) if f.number == 2]


def test_rollouts_without_gradient_are_clean(tmp_path):
    nothing(tmp_path, ROLLOUT.replace("{cut}", ""))


IDLE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])  # FAULT
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks{part}:
            x = torch.tanh(block(x))
        return self.head(x)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_unused_block_is_a_warning(tmp_path):
    finding = only(tmp_path, IDLE.replace("{part}", "[:-1]"), 5)
    assert finding.severity is Severity.WARNING
    assert finding.parameters == ("model.blocks.2.weight", "model.blocks.2.bias")
    assert "20 numbers" in finding.why
    assert "no operation" in finding.why


def test_an_unused_block_that_the_contract_names_is_an_error(tmp_path):
    source = IDLE.replace("{part}", "[:-1]")
    finding = only(tmp_path, source, 5, contract={"trainable": ["blocks.*"]})
    assert finding.severity is Severity.ERROR


@pytest.mark.parametrize("part", ["", "[step % 2 :]"])
def test_used_blocks_and_blocks_that_take_turns_are_clean(part, tmp_path):
    nothing(tmp_path, IDLE.replace("{part}", part))


def test_turns_that_never_come_are_a_note(tmp_path):
    examination, _ = look(tmp_path, IDLE.replace("{part}", "[step % 2 : 2]"))
    assert not serious(examination)
    assert [f.severity for f in examination.findings if f.number == 5] == [Severity.NOTE]


MIXTURE = """
class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)  # FAULT

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleList([Expert() for _ in range(4)])  # FAULT

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            {route}
        return out

model = Mixture()
with torch.no_grad():
    model.router.weight.mul_(9.0)
    model.router.bias.copy_(torch.tensor([0.0, 0.0, 0.0, -100.0]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
fixed = torch.randn(32, 4)
for step in range(5):
    loss = (model(torch.randn(32, 4)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
ROUTE = """mine = chosen == k
            if mine.any():
                out[mine] = weight[mine, None] * expert(x[mine])"""
ROW_BY_ROW = """for row in (chosen == k).nonzero()[:, 0]:
                out[row] = weight[row] * expert(x[row : row + 1])[0]"""
NOT_ROUTED = """if k < 3: out = out + weight[:, None] * expert(x)"""
LAST = {f"model.experts.3.{m}.{n}" for m in ("up", "down") for n in ("weight", "bias")}


@pytest.mark.parametrize(
    ("route", "data"),
    [(ROUTE, "torch.randn(32, 4)"), (ROUTE, "fixed"), (ROW_BY_ROW, "torch.randn(32, 4)")],
    ids=["rows", "the-same-rows", "calls"],
)
def test_an_expert_that_no_data_chose_is_a_note(route, data, tmp_path):
    source = MIXTURE.replace("{route}", route).replace(
        "(model(torch.randn(32, 4))", f"(model({data})"
    )
    examination, _ = look(tmp_path, source)
    assert examination.error is None
    assert not serious(examination), "\n".join(map(str, examination.findings))
    (note,) = [f for f in examination.findings if f.number == 5]
    assert set(note.parameters) == LAST
    assert "their turn may come" in note.why


def test_an_expert_that_nothing_calls_is_a_warning(tmp_path):
    source = MIXTURE.replace("{route}", NOT_ROUTED)
    finding = only(tmp_path, source, 5)
    assert finding.severity is Severity.WARNING
    assert set(finding.parameters) == LAST


def test_an_idle_block_beside_blocks_with_experts_is_a_warning(tmp_path):
    source = MIXTURE.replace("{route}", ROUTE)
    source = source.replace("  # FAULT", "").replace(
        "model = Mixture()",
        "model = nn.ModuleList([Mixture() for _ in range(2)])  # FAULT\nmodel, mixtures = "
        "model[0], nn.ModuleDict({'all': model})",
    )
    source = source.replace("SGD(model.p", "SGD(mixtures.p")
    examination, _ = look(tmp_path, source)
    (finding,) = serious(examination)
    assert finding.number == 5
    assert any(".1.router.weight" in name for name in finding.parameters)


GAN = """
maker = nn.Linear(2, 4)
judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
makes = torch.optim.Adam(maker.parameters())
judges = torch.optim.Adam(judge.parameters())
for step in range(6):
    fake = maker(torch.randn(8, 2))
    loss = judge(fake.detach()).mean() - judge(torch.randn(8, 4)).mean()
    judges.zero_grad()
    loss.backward()
    judges.step()
    if step % 2:
        loss = -judge(fake).mean()
        makes.zero_grad()
        loss.backward()
        makes.step()
"""
BACKBONE = """
body, head = nn.Linear(4, 8), nn.Linear(8, 3)
optimizer = torch.optim.Adam(head.parameters())
for step in range(4):
    with torch.no_grad():
        features = body(torch.randn(8, 4))
    loss = head(features).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LBFGS = """
model = nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
x = torch.randn(8, 4)
def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss
for step in range(4):
    optimizer.step(closure)
"""
BOOK = """
body, head, book = nn.Linear(6, 4), nn.Linear(4, 6), nn.Embedding(5, 4)
optimizer = torch.optim.Adam([p for m in (body, head, book) for p in m.parameters()])
for step in range(4):
    x = torch.randn(8, 6)
    z = body(x)
    q = book(torch.cdist(z, book.weight).argmin(-1))
    commitment = F.mse_loss(z, q.detach()) + F.mse_loss(q, z.detach())
    q = z + (q - z).detach()
    loss = F.mse_loss(head(q), x) + 0.25 * commitment
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


CLEAN = {"gan": GAN, "backbone": BACKBONE, "lbfgs": LBFGS, "vq": BOOK}


@pytest.mark.parametrize("name", CLEAN)
def test_deliberate_cuts_are_clean(name, tmp_path):
    nothing(tmp_path, CLEAN[name])


def test_the_loss_that_its_own_optimizer_steps_on_counts(tmp_path):
    """The judge's loss detaches on purpose; what stops the maker is in the maker's own loss."""
    source = GAN.replace("if step % 2:", "if True:").replace(
        "        loss = -judge(fake).mean()\n",
        "        with torch.no_grad():  # FAULT\n"
        "            fake = maker(torch.randn(8, 2))\n"
        "        loss = -judge(fake).mean()\n",
    )
    examination, lines = look(tmp_path, source)
    (finding,) = [f for f in serious(examination) if f.number in (2, 3)]
    assert (finding.number, finding.site.line) == (2, lines[0])


def test_without_a_trace_a_missing_gradient_is_still_seen(tmp_path):
    source = loop("f = body(x).detach()", LOSS)
    source = source.replace("nn.Linear(4, 8)", "nn.Linear(4, 8)  # FAULT")
    finding = only(tmp_path, source, 5, mode="light")
    assert "no step was traced" in finding.why


def test_one_backward_is_no_verdict_while_the_optimizer_waits():
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    slow, fast = torch.optim.SGD(body.parameters(), 0.1), torch.optim.SGD(head.parameters(), 0.1)
    modules, optimizers = {"body": body, "head": head}, {"slow": slow, "fast": fast}
    with Doctor(modules, optimizers) as doctor:
        for step in range(6):
            hidden = body(torch.randn(3, 4))
            if step < 4:
                hidden = hidden.detach()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            head(hidden).sum().backward()
            fast.step()
            if step >= 4:
                slow.step()
            doctor.step()
            assert not [f for f in doctor.findings if f.number == 3]
    assert not [f for f in doctor.findings if f.severity >= Severity.WARNING and f.number != 22]


def test_what_is_added_late_has_missed_nothing_yet():
    body, head, late = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.1)
    modules = {"body": body, "head": head, "late": late}
    with Doctor(modules, {"sgd": optimizer}, mode="trace") as doctor:
        for step in range(6):
            hidden = body(torch.randn(3, 4))
            optimizer.zero_grad()
            (head(hidden) + (late(hidden) if step > 4 else 0.0)).square().mean().backward()
            if step == 4:
                optimizer.add_param_group({"params": late.parameters()})
            optimizer.step()
            doctor.step()
    assert not [f for f in doctor.findings if f.number == 5]


def test_a_constant_loss_that_is_wrapped_again(tmp_path):
    """`Variable` makes a tensor out of sight: the cut before it is the cause."""
    lines = (
        "scores = head(body(x)).data  # FAULT",
        "loss = F.cross_entropy(scores, y)",
        "loss = torch.autograd.Variable(loss, requires_grad=True)",
    )
    finding = only(tmp_path, loop(*lines), 3)
    assert "`data` at" in finding.why


def test_a_leaf_of_its_own_is_not_taken_for_a_loss(tmp_path):
    """A leaf in memory that a loss has left is made of nothing."""
    lines = (
        "first = F.cross_entropy(head(body(x)), y)",
        "loss = torch.autograd.Variable(torch.zeros(()), requires_grad=True)  # FAULT",
    )
    finding = only(tmp_path, loop(*lines), 1)
    assert "constant" in finding.what


SKIPPED = """
def counts(mask):
    wide = mask.shape[1]
    kept = (mask.sum(1) - wide).clamp(min=0)  # FAULT
    return kept
def total(scores, kept):
    loss = torch.zeros(())
    for row, count in zip(scores, kept.tolist()):
        if count:
            loss = loss + row[:count].square().mean()
    return loss
net = nn.Linear(4, 3)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    kept = counts(torch.ones(6, 4, dtype=torch.long))
    loss = total(net(torch.randn(6, 4)), kept)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
"""


def test_lengths_of_zero_are_followed_to_their_arithmetic(tmp_path):
    examination, lines = look(tmp_path, SKIPPED)
    (finding,) = serious(examination)
    assert (finding.number, finding.site.line) == (1, lines[0])
    assert "`kept` is 0 for every sample" in finding.why
    assert "Skip a batch" not in finding.fix


@pytest.mark.parametrize("moved", ['.to("cpu")', ".float()", ".share_memory()"])
def test_a_layer_that_is_moved_is_not_used(tmp_path, moved):
    """The line that calls it and drops the result is named, not the one that moves all layers."""
    source = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.side, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
    def forward(self, x):
        h = torch.tanh(self.body(x))
        dropped = h + self.side(h)  # FAULT
        return self.head(h)
net = Net(){moved}
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    loss = F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    assert set(only(tmp_path, source, 5).parameters) == {"net.side.weight", "net.side.bias"}


COUPLING = """
class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        left, right = x.chunk(2, 1)
        right = right * self.scale(left).tanh().exp() + self.shift(left)
        {joined}
        return x


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(Coupling() for _ in range(2))

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


flow, head = Flow(), nn.Linear(8, 3)
optimizer = torch.optim.Adam([*flow.parameters(), *head.parameters()])
for step in range(4):
    x, y = torch.randn(8, 8), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(head(flow(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_what_a_module_computes_and_does_not_return(tmp_path):
    lost = "joined = torch.cat([left, right], 1)  # FAULT"
    finding = only(tmp_path, COUPLING.format(joined=lost), 5)
    assert len(finding.parameters) == 8
    nothing(tmp_path, COUPLING.format(joined="x = torch.cat([left, right], 1)"))


def test_a_detached_target_is_not_the_cut_that_matters(tmp_path):
    source = """
body, book, back = nn.Linear(4, 6), nn.Embedding(8, 6), nn.Linear(6, 4)
optimizer = torch.optim.Adam([*body.parameters(), *book.parameters(), *back.parameters()])
for step in range(4):
    x = torch.randn(16, 4)
    z = body(x)
    near = book(torch.cdist(z, book.weight).argmin(1))
    q = z + (near - z).detach()  # FAULT
    loss = F.mse_loss(back(q), x) + F.mse_loss(q, z.detach())
    loss = loss + 0.25 * F.mse_loss(z, near.detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    assert only(tmp_path, source, 3).parameters == ("book.weight",)
