import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)

N_SYMBOLS = 5            # 0 is the blank
FRAMES, FEATS = 48, 10
patterns = torch.randn(N_SYMBOLS, FEATS)


def utterance():
    n = int(torch.randint(3, 9, (1,)))
    label = torch.randint(1, N_SYMBOLS, (n,))
    slot = torch.arange(FRAMES) * n // FRAMES
    return patterns[label[slot]] + 0.1 * torch.randn(FRAMES, FEATS), label


def batch(size):
    waves, labels = zip(*[utterance() for _ in range(size)])
    lengths = torch.tensor([len(l) for l in labels])
    return torch.stack(waves).transpose(1, 2), torch.cat(labels), lengths


class Acoustic(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.conv1 = nn.Conv1d(FEATS, width, 5, stride=2, padding=2)
        self.conv2 = nn.Conv1d(width, width, 5, stride=4, padding=2)
        self.out = nn.Linear(width, N_SYMBOLS)

    def forward(self, x):
        h = F.relu(self.conv1(x))
        h = F.relu(self.conv2(h))
        return F.log_softmax(self.out(h.transpose(1, 2)), dim=-1)


model = Acoustic()
ctc = nn.CTCLoss(blank=0)
opt = torch.optim.Adam(model.parameters(), lr=5e-3)

for step in range(120):
    x, labels, label_lens = batch(16)
    logp = model(x)
    frame_lens = torch.full((x.size(0),), logp.size(1), dtype=torch.long)
    loss = ctc(logp.transpose(0, 1), labels, frame_lens, label_lens)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0 or step == 119:
        print("step", step, "ctc", round(loss.item(), 4))
