"""What the trace leaves alone: repeated forwards without gradients, warnings, others' kernels."""

import warnings

import pytest
import torch
from torch import nn

from doctor.snippets import HEAD, look, nothing, only
from gradient_doctor import Doctor
from gradient_doctor.script import examine

SAMPLING = """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.body = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 9)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids))[0])

policy = Policy()
optimizer = torch.optim.Adam(policy.parameters())
for step in range(4):
    ids = torch.randint(9, (4, 3))
    with torch.no_grad():{mark}
        for _ in range(20):
            probs = policy(ids)[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
{loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LEARNS = """
    logp = policy(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -(logp * torch.randn(4, 1)).mean()
"""
CUT = """
    with torch.no_grad():
        for _ in range(5):
            logits = policy(ids[:, :-1])
    scale = nn.Parameter(torch.ones(()))
    loss = F.cross_entropy((logits * scale).transpose(1, 2), ids[:, 1:])
"""


class Counting(nn.Module):
    """Counts what the trace sees of its forwards."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def heard(grad, calls=5):
    """How many of the forwards' `tanh` the detectors hear of."""
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = []
    with Doctor({"model": model}, {"sgd": optimizer}) as doctor:
        tell = doctor.session.tell
        doctor.session.tell = lambda name, *facts, **options: (
            names.append(facts[0].short) if name == "op" else None,
            tell(name, *facts, **options),
        )[1]
        with torch.set_grad_enabled(grad):
            for _ in range(calls):
                model(torch.randn(2, 3))
        seen = names.count("tanh")
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        doctor.step()
        del doctor.session.tell
    assert names.count("tanh") == seen + 1  # the forward that is learnt from is traced
    return seen


def test_forwards_without_gradients_are_traced_once():
    assert heard(grad=False) == 1
    assert heard(grad=True) == 5


def test_sampling_is_clean(tmp_path):
    nothing(tmp_path, SAMPLING.format(mark="", loss=LEARNS))


def test_a_cut_is_found_behind_a_forward_that_was_not_traced(tmp_path):
    source = SAMPLING.format(mark="", loss=CUT.replace("no_grad():", "no_grad():  # FAULT", 1))
    examination, lines = look(tmp_path, source)
    cut = [f for f in examination.findings if f.number == 2]
    assert cut, "\n".join(map(str, examination.findings))
    assert cut[0].site.line in lines
    assert "policy.head.weight" in cut[0].parameters


def test_a_long_rollout_of_plain_operations_keeps_its_cut(tmp_path):
    """After many calls of one name detectors hear no more; what depends on what is kept."""
    source = """
    weight = nn.Parameter(torch.eye(3))
    head = nn.Linear(3, 1)
    optimizer = torch.optim.SGD([weight, *head.parameters()], lr=0.1)
    for step in range(4):
        state = torch.randn(5, 3)
        with torch.no_grad():  # FAULT
            for _ in range(120):
                state = torch.tanh(state @ weight)
        loss = head(state).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """
    finding = only(tmp_path, "\n".join(line[4:] for line in source.splitlines()), 2)
    assert len(finding.parameters) == 1


def test_draws_inside_of_a_forward_are_always_traced(tmp_path):
    source = """
    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Linear(4, 2)
        def forward(self, x):
            law = Normal(self.mean(x), 0.5)
            return law, torch.tanh(law.sample())
    actor = Actor()
    optimizer = torch.optim.Adam(actor.parameters())
    for step in range(4):
        x = torch.randn(16, 4)
        with torch.no_grad():
            for _ in range(2):
                _, action = actor(x)
        law, _ = actor(x)
        loss = -(law.log_prob(action).sum(-1) * torch.randn(16)).mean()  # FAULT
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """
    only(tmp_path, "\n".join(line[4:] for line in source.splitlines()), 24)


WARNS = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    x, y = torch.randn(8, 4), torch.randn(8)
    loss = F.mse_loss(model(x), y)
    copied = torch.tensor(model(x))
    hidden = model(x)
    hidden.grad
    loss = loss + nn.MSELoss()(model(x), y)
    F.softmax(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def locations(path, run):
    """Where each warning stands, once for each line as Python shows them by default."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        run(path)
    return sorted((str(w.message)[:40], w.filename, w.lineno) for w in caught)


def test_torchs_warnings_keep_their_line(tmp_path):
    path = tmp_path / "warns.py"
    path.write_text(HEAD + WARNS)
    space = {"__name__": "__main__"}
    plain = locations(path, lambda p: exec(compile(p.read_text(), str(p), "exec"), space))
    assert len(plain) >= 4
    assert locations(path, examine) == plain


def test_an_error_shows_no_line_twice(tmp_path):
    examination, _ = look(tmp_path, "layer = nn.Linear(3, 2)\nlayer(torch.randn(2, 4))\n")
    with pytest.raises(RuntimeError):
        raise examination.error
    from gradient_doctor.command import _forget_our_frames

    _forget_our_frames(examination.error)
    lines, frame = [], examination.error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.endswith("snippet.py"):
            lines.append(frame.tb_lineno)
        frame = frame.tb_next
    assert len(lines) == 1


def test_trls_chunked_log_probs_are_named(tmp_path):
    """Their forward and backward are TRL's own: the report says that it did not look inside."""
    pytest.importorskip("trl.kernels.chunked_logprob")
    source = """
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
body, head = nn.Linear(4, 8), nn.Linear(8, 16)
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
for step in range(4):
    hidden, ids = body(torch.randn(6, 4)), torch.randint(0, 16, (6,))
    logps, *_ = ChunkedLogProbFunction.apply(hidden, head.weight, head.bias, ids, 1.0, 8)
    loss = -(logps * torch.randn(6)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    examination, _ = look(tmp_path, source)
    assert examination.error is None, examination.error
    notes = [f for f in examination.findings if f.number == 0]
    assert any("ChunkedLogProbFunction" in note.what for note in notes), notes


# loops that sample: the first round is followed, then the doctor sleeps


class Rollout:
    """A policy, and how many calls of torch the doctor sees in a loop of it."""

    def __init__(self):
        self.policy = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)
        self.seen = 0

    def examine(self, loop):
        with Doctor({"policy": self.policy}, {"sgd": self.optimizer}) as doctor:
            trace = doctor._trace
            call = trace._call
            vars(trace)["_call"] = lambda *facts: (
                vars(self).update(seen=self.seen + 1),
                call(*facts),
            )[1]
            self.seen = 0
            loop()
            sampling = self.seen
            self.optimizer.zero_grad()
            self.policy(torch.randn(4, 3)).square().mean().backward()
            self.optimizer.step()
            doctor.step()
            assert self.seen > sampling  # awake when something is learnt
            assert not doctor.session.findings
        return sampling


def draw(policy, state):
    law = torch.distributions.Categorical(logits=policy(state))
    return law.log_prob(law.sample())


def one_region(rounds):
    rollout = Rollout()

    def loop():
        with torch.no_grad():
            kept = [draw(rollout.policy, torch.randn(3)) for _ in range(rounds)]
        return torch.stack(kept)

    return rollout.examine(loop)


def region_a_round(rounds):
    rollout = Rollout()

    def loop():
        kept = torch.zeros(rounds)
        for k in range(rounds):
            state = torch.randn(3) + 1
            with torch.no_grad():
                value = draw(rollout.policy, state)
            kept[k] = value * 2
        return kept

    return rollout.examine(loop)


def what_follows(rounds):
    """The returns are computed in the region, after its loop."""
    rollout = Rollout()

    def loop():
        with torch.no_grad():
            kept = []
            for _ in range(rounds):
                kept.append(draw(rollout.policy, torch.randn(3)))
            returns = torch.stack(kept).cumsum(0)
            for _ in range(5):
                returns = returns / returns.std()
        return returns

    return rollout.examine(loop)


@pytest.mark.parametrize("loop", [one_region, region_a_round, what_follows])
def test_more_rounds_are_not_more_calls(loop):
    assert loop(40) == loop(12) < 60


def test_what_follows_the_loop_is_seen(tmp_path):
    assert what_follows(12) >= one_region(12) + 5


LAST = """
policy, head = nn.Linear(3, 3), nn.Linear(3, 1)
optimizer = torch.optim.SGD([*policy.parameters(), *head.parameters()], lr=0.1)
{function}
for step in range(4):
    state = torch.randn(5, 3)
    loss = head(unrolled(state)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
REGION = """
def unrolled(state):
    with torch.no_grad():  # FAULT
        for _ in range(30):
            state = policy(state)
        return state
"""
DECORATED = """
@torch.no_grad()  # FAULT
def unrolled(state):
    for _ in range(30):
        state = policy(state)
    return state
"""


@pytest.mark.parametrize("function", [REGION, DECORATED])
def test_a_variable_of_a_sleeping_loop_keeps_its_cut(tmp_path, function):
    finding = only(tmp_path, LAST.format(function=function), 2)
    assert set(finding.parameters) == {"policy.weight", "policy.bias"}


def test_a_squashed_sample_of_a_long_rollout_is_found(tmp_path):
    """The first round speaks for all that are stacked."""
    source = """
    mean = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(mean.parameters())
    for step in range(4):
        xs, actions = [], []
        for _ in range(30):
            x = torch.randn(4)
            with torch.no_grad():
                action = torch.tanh(Normal(mean(x), 0.5).sample())
            xs.append(x)
            actions.append(action)
        law = Normal(mean(torch.stack(xs)), 0.5)
        loss = -(law.log_prob(torch.stack(actions)).sum(-1) * torch.randn(30)).mean()  # FAULT
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """
    only(tmp_path, "\n".join(line[4:] for line in source.splitlines()), 24)


def test_modes_of_the_users_keep_their_place_around_a_sleep():
    from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack

    rollout = Rollout()
    stacks = []

    def loop():
        with BaseTorchFunctionMode(), torch.no_grad():
            for _ in range(6):
                draw(rollout.policy, torch.randn(3))
                stacks.append(len(_get_current_function_mode_stack()))
        stacks.append(len(_get_current_function_mode_stack()))

    rollout.examine(loop)
    assert stacks == [2, 1, 1, 1, 1, 1, 1]
