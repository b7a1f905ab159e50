import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
VOCAB, LEN, PIX = 10, 4, 30


class Encoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv1d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv1d(16, d, 3, stride=2), nn.ReLU())

    def forward(self, img):
        return self.cnn(img.unsqueeze(1)).transpose(1, 2)


class Decoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB + 1, d)
        self.cell = nn.GRUCell(2 * d, d)
        self.query = nn.Linear(d, d)
        self.out = nn.Linear(2 * d, VOCAB)
        self.pos = nn.Parameter(0.1 * torch.randn(1, 6, d))

    def forward(self, feats, tokens):
        keys = feats + self.pos[:, :feats.shape[1]]
        h = feats.mean(1)
        prev, logits = torch.full((len(tokens),), VOCAB), []
        for t in range(tokens.shape[1]):
            att = torch.softmax((keys @ self.query(h).unsqueeze(2)).squeeze(2), dim=1)
            ctx = (att.unsqueeze(2) * feats).sum(1)
            h = self.cell(torch.cat([self.embed(prev), ctx], dim=1), h)
            logits.append(self.out(torch.cat([h, ctx], dim=1)))
            prev = tokens[:, t]
        return torch.stack(logits, 1)


glyphs = torch.randn(VOCAB, PIX // LEN)


def batch(n=64):
    tokens = torch.randint(0, VOCAB, (n, LEN))
    img = F.pad(glyphs[tokens].flatten(1), (0, PIX - LEN * (PIX // LEN)))
    return img + 0.1 * torch.randn_like(img), tokens


def train(encoder, decoder, criterion, encoder_optimizer, decoder_optimizer, epoch, steps=60):
    total = hits = 0.0
    for _ in range(steps):
        imgs, tokens = batch()
        scores = decoder(encoder(imgs), tokens)
        loss = criterion(scores.flatten(0, 1), tokens.flatten())
        decoder_optimizer.zero_grad()
        if encoder_optimizer is not None:
            encoder_optimizer.zero_grad()
        loss.backward()
        decoder_optimizer.step()
        if encoder_optimizer is not None:
            encoder_optimizer.step()
        total, hits = total + loss.item() / steps, hits + (scores.argmax(-1) == tokens).float().mean().item() / steps
    print(f"epoch {epoch}  loss {total:.4f}  token accuracy {hits:.3f}  first filter {encoder.cnn[0].weight[0, 0, 0].item():.4f}")


encoder, decoder = Encoder(), Decoder()
encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=2e-3)
for epoch in range(1, 6):
    train(encoder=encoder, decoder=decoder, criterion=nn.CrossEntropyLoss(),
          encoder_optimizer=decoder_optimizer,
          decoder_optimizer=decoder_optimizer, epoch=epoch)
