import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)
N_MELS, PAD_VALUE = 16, -11.5


def pad_mask(lens, max_len):
    return torch.arange(max_len).expand(len(lens), max_len) < lens.unsqueeze(1)


class MaskedL1(nn.Module):
    def forward(self, x, target, lens):
        max_len = target.size(1)
        mask = pad_mask(lens, max_len)
        mask = mask.unsqueeze(2).expand_as(x).float()
        loss = F.l1_loss(x * mask, target * mask, reduction="sum")
        return loss / mask.sum()


class Aligner(nn.Module):
    def __init__(self, vocab=20, hidden=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.lin = nn.Linear(2 * hidden, N_MELS)

    def forward(self, tokens, repeat=4):
        h = self.emb(tokens).repeat_interleave(repeat, dim=1)
        h, _ = self.rnn(h)
        return self.lin(h).transpose(1, 2)


speaker = torch.randn(20, N_MELS)


def make_batch(batch=12):
    tokens = [torch.randint(1, 20, (int(n),)) for n in torch.randint(5, 16, (batch,))]
    mels = [speaker[t].repeat_interleave(4, dim=0) for t in tokens]
    lens = torch.tensor([m.size(0) for m in mels])
    mel = pad_sequence(mels, batch_first=True, padding_value=PAD_VALUE).transpose(1, 2)
    return pad_sequence(tokens, batch_first=True), mel, lens


model, criterion = Aligner(), MaskedL1()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(150):
    tokens, mel, lens = make_batch()
    pred = model(tokens)
    loss = criterion(pred, mel, lens)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 30 == 29:
        speech = torch.cat([(pred - mel)[i, :, :n].abs().flatten() for i, n in enumerate(lens)]).mean()
        print(f"step {step + 1}: loss {loss.item():.3f}  L1 on speech frames {speech.item():.3f}")
