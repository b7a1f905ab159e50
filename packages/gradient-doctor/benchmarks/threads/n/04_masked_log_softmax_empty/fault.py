import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
MAX_SPANS = 8


def masked_log_softmax(scores, mask):
    scores = scores + mask.log()
    return F.log_softmax(scores, dim=-1)


class SpanSelector(nn.Module):
    """Scores candidate spans of a passage against a question."""

    def __init__(self, dim=16):
        super().__init__()
        self.question = nn.Linear(dim, 32)
        self.span = nn.Linear(dim, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, question, spans, mask):
        hidden = torch.tanh(self.question(question)[:, None] + self.span(spans))
        return masked_log_softmax(self.out(hidden).squeeze(-1), mask)


def make_batch(n=32, dim=16):
    question = torch.randn(n, dim)
    spans = torch.randn(n, MAX_SPANS, dim)
    counts = torch.randint(0, MAX_SPANS + 1, (n,))
    mask = (torch.arange(MAX_SPANS)[None] < counts[:, None]).float()
    match = (question[:, None, :4] * spans[..., :4]).sum(-1) + 2 * spans[..., 5]
    answer = match.masked_fill(mask == 0, -1e4).argmax(-1)
    return question, spans, mask, answer


def answer_loss(log_probs, answer, mask):
    has_answer = mask.sum(-1) > 0
    picked = log_probs.gather(1, answer[:, None]).squeeze(1)
    return -(picked * has_answer).sum() / has_answer.sum()


model = SpanSelector()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(301):
    question, spans, mask, answer = make_batch()
    log_probs = model(question, spans, mask)
    loss = answer_loss(log_probs, answer, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 75 == 0:
        print(f"step {step:3d}  nll {loss.item():.3f}")
