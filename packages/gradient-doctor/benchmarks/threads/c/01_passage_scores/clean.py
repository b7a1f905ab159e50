import torch
import torch.nn as nn

torch.manual_seed(0)


class RegressionHead(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(width, 1)
        self.loss_fct = nn.MSELoss()

    def forward(self, pooled):
        return self.dense(pooled)

    def logits_to_loss(self, logits, labels):
        return self.loss_fct(logits, labels)


class PassageModel(nn.Module):
    def __init__(self, vocab=40, width=24):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, width, mode="mean")
        self.mix = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.head = RegressionHead(width)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)))


def make_passages(n=256, length=10, vocab=40):
    value = torch.linspace(0, 16, vocab)
    topic = torch.randint(0, vocab - 8, (n, 1))
    tokens = topic + torch.randint(0, 8, (n, length))
    return tokens, value[tokens].mean(1, keepdim=True)


def main(epochs=30, batch=32):
    tokens, labels = make_passages()
    model = PassageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        order = torch.randperm(len(tokens))
        total = 0.0
        for i in range(0, len(tokens), batch):
            pick = order[i : i + batch]
            loss = model.head.logits_to_loss(model(tokens[pick]), labels[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(pick)
        if epoch % 5 == 0 or epoch == epochs - 1:
            with torch.no_grad():
                spread = model(tokens).std().item()
            print(f"epoch {epoch:2d} loss {total / len(tokens):7.3f} spread {spread:.3f}")


main()
