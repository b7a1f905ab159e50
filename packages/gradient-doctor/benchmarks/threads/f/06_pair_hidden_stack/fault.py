import torch
import torch.nn as nn
import torch.optim as optim

options = dict(n_words=40, n_emb=6, n_hid=10, n_layers=3, act="Tanh", lr=0.01, steps=400)


class PairNet(nn.Module):
    """Premise and hypothesis as mean word vectors, a stack of hidden layers, three classes."""

    def __init__(self, options):
        super().__init__()
        self.emb = nn.Embedding(options["n_words"], options["n_emb"])
        self.emb.weight.requires_grad = False  # given word vectors
        indim = 2 * options["n_emb"]
        self.hids = []
        for li in range(options["n_layers"]):
            self.hids.append(nn.Sequential(nn.Linear(indim, options["n_hid"]), getattr(nn, options["act"])()))
            indim = options["n_hid"]
        self.classifier = nn.Linear(options["n_hid"], 3)

    def forward(self, prem, hypo):
        x = torch.cat([self.emb(prem).mean(1), self.emb(hypo).mean(1)], 1)
        for hid in self.hids:
            x = hid(x)
        return self.classifier(x)


def pairs(n, options):
    """Two words each; the class says how the first coordinates of the two sides relate."""
    prem = torch.randint(0, options["n_words"], (n, 2))
    hypo = torch.randint(0, options["n_words"], (n, 2))
    return prem, hypo


def relation(model, prem, hypo):
    a, b = model.emb(prem).mean(1)[:, 0], model.emb(hypo).mean(1)[:, 0]
    return torch.where((a - b).abs() < 0.5, 0, torch.where(a * b > 0, 1, 2))


def main():
    torch.manual_seed(11)
    model = PairNet(options)
    print(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.Adam([p for p in model.parameters() if p.requires_grad], lr=options["lr"])
    for step in range(options["steps"]):
        prem, hypo = pairs(128, options)
        label = relation(model, prem, hypo)
        optimizer.zero_grad()
        out = model(prem, hypo)
        cost = criterion(out, label)
        cost.backward()
        optimizer.step()
        if step % 80 == 79:
            acc = (out.argmax(1) == label).float().mean().item()
            print("step %d cost %.3f accuracy %.2f" % (step + 1, cost.item(), acc))


if __name__ == "__main__":
    main()
