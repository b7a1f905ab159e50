import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
VOCAB, SOS, EOS, PAD = 14, 11, 12, 13
MAX_LEN = 10


def make_batch(n):
    lengths = torch.randint(3, 7, (n,))
    words = torch.randint(0, 11, (n, 6))
    gt = torch.full((n, MAX_LEN), PAD)
    gt[:, 0] = SOS
    for i, k in enumerate(lengths):
        gt[i, 1:k + 1] = words[i, :k]
        gt[i, k + 1] = EOS
    strips = F.one_hot(gt[:, 1:], VOCAB).float() + 0.1 * torch.randn(n, MAX_LEN - 1, VOCAB)
    return strips, gt, lengths + 1


class Recognizer(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.visual = nn.Linear(VOCAB, d)
        self.embed = nn.Embedding(VOCAB, d)
        self.decoder = nn.GRU(2 * d, d, batch_first=True)
        self.head = nn.Linear(d, VOCAB)

    def forward(self, strips, gt):
        feats = self.visual(strips)
        tokens = self.embed(gt[:, :-1])
        h, _ = self.decoder(torch.cat([feats, tokens], dim=-1))
        return self.head(h)

    @staticmethod
    def compute_loss(model_output, gt, seq_len):
        input_len = model_output.shape[1]
        cce = F.cross_entropy(model_output.permute(0, 2, 1), gt[:, 1:], reduction="none")
        mask_2d = torch.arange(input_len)[None, :] >= seq_len[:, None]
        cce[mask_2d] = 0
        ce_loss = cce.sum(1) / seq_len.to(model_output.dtype)
        return ce_loss.mean()


def exact_chars(model, strips, gt, seq_len):
    with torch.no_grad():
        pred = model(strips, gt).argmax(-1)
    valid = torch.arange(pred.shape[1])[None, :] < seq_len[:, None]
    return (pred == gt[:, 1:])[valid].float().mean().item()


model = Recognizer()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
val = make_batch(256)
for step in range(300):
    strips, gt, seq_len = make_batch(32)
    loss = model.compute_loss(model(strips, gt), gt, seq_len)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 49:
        print(f"step {step + 1}  loss {loss.item():.4f}  val char accuracy {exact_chars(model, *val):.3f}")
