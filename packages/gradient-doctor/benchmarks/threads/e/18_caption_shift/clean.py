import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
VOCAB, IMAGE_TOKENS = 23, 4


def causal_lm_loss(logits, labels, vocab_size, ignore_index=-100):
    """shared loss of all causal models: position t is scored against token t + 1"""
    labels = F.pad(labels, (0, 1), value=ignore_index)
    shift_labels = labels[..., 1:].contiguous()
    return F.cross_entropy(logits.reshape(-1, vocab_size).float(), shift_labels.reshape(-1), ignore_index=ignore_index)


class GitLikeLM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.visual = nn.Linear(8, dim)
        self.embed = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(32, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerEncoder(layer, 2)
        self.output = nn.Linear(dim, VOCAB)

    def forward(self, pixels, input_ids, labels=None):
        hidden = torch.cat([self.visual(pixels), self.embed(input_ids)], 1)
        hidden = hidden + self.pos[: hidden.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.size(1))
        logits = self.output(self.decoder(hidden, mask=mask, is_causal=True))
        loss = None
        if labels is not None:
            loss = causal_lm_loss(logits[:, IMAGE_TOKENS:], labels, VOCAB)
        return loss, logits


def captions(n=32, length=10):
    """count upwards from a random start; the picture gives the stride"""
    stride = torch.randint(1, 5, (n,))
    start = torch.randint(0, VOCAB, (n,))
    ids = (start[:, None] + stride[:, None] * torch.arange(length)) % VOCAB
    return F.one_hot(stride, 8).float()[:, None].expand(-1, IMAGE_TOKENS, -1), ids


def main(steps=160):
    model = GitLikeLM()
    optim = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, steps + 1):
        pixels, ids = captions()
        loss, _ = model(pixels, ids, labels=ids)
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step % 40 == 0:
            with torch.no_grad():
                pixels, ids = captions(128)
                guess = model(pixels, ids)[1][:, IMAGE_TOKENS:-1].argmax(-1)
            print(f"step {step} loss {loss.item():.3f} next token right {(guess == ids[:, 1:]).float().mean().item():.2f}")


main()
