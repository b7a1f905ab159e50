import torch
import torch.nn as nn

torch.manual_seed(3)


class PrefixTagger(nn.Module):
    def __init__(self, vocab=60, dim=32, tags=5):
        super().__init__()
        self.bert_embed = nn.Embedding(vocab, dim)
        self.bert_rnn = nn.GRU(dim, dim // 2, batch_first=True, bidirectional=True)
        self.encoder_conv = nn.Linear(16, dim)
        self.gates = nn.Linear(dim, dim)
        self.fc = nn.Linear(dim, tags)
        self.crf_transitions = nn.Parameter(torch.zeros(tags, tags))

    def forward(self, words, image, tags):
        prompt = self.encoder_conv(image)
        hidden, _ = self.bert_rnn(self.bert_embed(words))
        hidden = hidden * torch.sigmoid(self.gates(prompt)).unsqueeze(1)
        emission = self.fc(hidden)
        before = self.crf_transitions[tags[:, :-1]]
        score = torch.cat([emission[:, :1], emission[:, 1:] + before], dim=1)
        return nn.functional.cross_entropy(score.flatten(0, 1), tags.flatten()), score


class Trainer:
    def __init__(self, model, lr=3e-5, epochs=8, steps=25):
        self.model, self.lr, self.epochs, self.steps = model, lr, epochs, steps
        self.multimodal_before_train()

    def multimodal_before_train(self):
        parameters = []
        params = {"lr": self.lr, "weight_decay": 1e-2, "params": []}
        for name, param in self.model.named_parameters():
            if "bert" in name:
                params["params"].append(param)
        parameters.append(params)

        params = {"lr": self.lr, "weight_decay": 1e-2, "params": []}
        for name, param in self.model.named_parameters():
            if "encoder_conv" in name or "gates" in name:
                params["params"].append(param)
        parameters.append(params)

        params = {"lr": 5e-2, "weight_decay": 1e-2, "params": []}
        for name, param in self.model.named_parameters():
            if "crf" in name or name.startswith("fc"):
                params["params"].append(param)
        parameters.append(params)
        self.optimizer = torch.optim.AdamW(parameters)

    def train(self):
        for epoch in range(self.epochs):
            total, hits = 0.0, 0.0
            for _ in range(self.steps):
                words = torch.randint(0, 60, (32, 12))
                image, tags = torch.randn(32, 16), words % 5
                loss, score = self.model(words, image, tags)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += loss.item() / self.steps
                hits += (score.argmax(-1) == tags).float().mean().item() / self.steps
            print(f"epoch {epoch} loss {total:.4f} accuracy {hits:.3f}")


Trainer(PrefixTagger()).train()
