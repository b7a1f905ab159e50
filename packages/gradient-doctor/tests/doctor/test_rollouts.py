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
