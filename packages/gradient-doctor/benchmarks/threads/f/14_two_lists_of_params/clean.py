import torch
import torch.nn as nn


class TagModel(nn.Module):
    """Text encoder with a visual prefix, tag scores, and a transition table between tags."""

    def __init__(self, vocab=60, dim=24, tags=5):
        super().__init__()
        self.bert = nn.ModuleDict({
            "emb": nn.Embedding(vocab, dim),
            "enc": nn.GRU(dim, dim, batch_first=True, bidirectional=True),
        })
        self.prompt = nn.Linear(8, dim)
        self.fc = nn.Linear(2 * dim, tags)
        self.crf = nn.Parameter(torch.zeros(tags, tags))

    def forward(self, words, picture):
        x = self.bert["emb"](words) + self.prompt(picture)[:, None]
        h, _ = self.bert["enc"](x)
        return self.fc(h)

    def nll(self, scores, tags):
        """Linear chain: path score minus log partition."""
        gold = scores.gather(2, tags[..., None]).squeeze(-1).sum(1) + self.crf[tags[:, :-1], tags[:, 1:]].sum(1)
        alpha = scores[:, 0]
        for t in range(1, scores.size(1)):
            alpha = torch.logsumexp(alpha[:, :, None] + self.crf, 1) + scores[:, t]
        return (torch.logsumexp(alpha, 1) - gold).mean()


class Trainer:
    def __init__(self, model, lr=1e-3, head_lr=3e-2):
        self.model = model
        self.lr, self.head_lr = lr, head_lr

    def before_train(self):
        parameters = []
        params = {"lr": self.lr, "weight_decay": 1e-2, "params": []}
        for name, param in self.model.named_parameters():
            if "bert" in name or "prompt" in name:
                params["params"].append(param)
        parameters.append(params)

        params = {"lr": self.head_lr, "weight_decay": 1e-2, "params": []}
        for name, param in self.model.named_parameters():
            if "crf" in name or name.startswith("fc"):
                params["params"].append(param)
        parameters.append(params)
        self.optimizer = torch.optim.AdamW(parameters)

    def train(self, data, steps=150):
        self.before_train()
        for step in range(steps):
            words, picture, tags = data(32)
            scores = self.model(words, picture)
            loss = self.model.nll(scores, tags)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step % 30 == 29:
                hit = (scores.argmax(-1) == tags).float().mean().item()
                print(f"step {step + 1} nll {loss.item():.2f} tags right {hit:.2f}")


def sentences(n, length=9):
    words = torch.randint(0, 60, (n, length))
    return words, torch.randn(n, 8), words % 5


if __name__ == "__main__":
    torch.manual_seed(1234)
    Trainer(TagModel()).train(sentences)
