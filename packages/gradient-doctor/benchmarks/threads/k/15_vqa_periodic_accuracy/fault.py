import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)


class AnswerModel(nn.Module):
    def __init__(self, words=30, answers=6):
        super().__init__()
        self.question = nn.Embedding(words, 24)
        self.image = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.classifier = nn.Sequential(
            nn.Linear(24 + 16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, answers),
        )

    def forward(self, question, image):
        q = self.question(question).mean(dim=1)
        v = self.image(image).mean(dim=(2, 3))
        return self.classifier(torch.cat([q, v], dim=1))


def make_split(n):
    question = torch.randint(0, 30, (n, 3))
    colour = torch.randint(0, 3, (n,))
    image = 110 + 30 * torch.randn(n, 3, 10, 10)
    image[torch.arange(n), colour] += 12
    asked = (question >= 15).sum(dim=1).ge(2).long()
    answer = colour + 3 * asked
    return question, image, answer


def check_accuracy(model, split, batch=50):
    model.eval()
    correct = 0
    with torch.no_grad():
        for q, v, a in zip(*[part.split(batch) for part in split]):
            correct += (model(q, v).argmax(1) == a).sum().item()
    return correct / len(split[0])


def train_loop(model, train, val, iterations=280, check_every=4):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model.train()
    for t in range(1, iterations + 1):
        pick = torch.randint(0, len(train[0]), (32,))
        question, image, answer = (part[pick] for part in train)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(question, image), answer)
        loss.backward()
        optimizer.step()
        if t % check_every == 0:
            train_acc = check_accuracy(model, [part[:200] for part in train])
            val_acc = check_accuracy(model, val)
            if t % 40 == 0:
                print(f"t {t}  loss {loss.item():.4f}  train acc {train_acc:.3f}  val acc {val_acc:.3f}")


train_loop(AnswerModel(), make_split(300), make_split(400))
