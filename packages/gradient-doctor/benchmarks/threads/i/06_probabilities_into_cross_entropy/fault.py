import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
VOCAB, LENGTH, CLASSES, PAD = 200, 20, 4, 0


class TextEncoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(dim, CLASSES)

    def forward(self, ids):
        out, _ = self.lstm(self.tokens(ids))
        return self.classifier(self.dropout(out.mean(dim=1)))


def make_texts(n):
    labels = torch.randint(0, CLASSES, (n,))
    ids = torch.randint(50, VOCAB, (n, LENGTH))
    topic = labels.unsqueeze(1) * 10 + torch.randint(1, 11, (n, LENGTH))
    keep = torch.rand(n, LENGTH) < 0.3
    return torch.where(keep, topic, ids), labels


def train_model(model, data, criterion, optimizer, num_epochs):
    for epoch in range(num_epochs):
        for phase in ("train", "val"):
            model.train(phase == "train")
            total, correct, count = 0.0, 0, 0
            ids, labels = data[phase]
            for k in range(0, len(ids), 64):
                inputs, targets = ids[k:k + 64], labels[k:k + 64]
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(inputs)
                    outputs = F.softmax(outputs, dim=1)
                    loss = criterion(outputs, targets)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                total += loss.item() * len(inputs)
                correct += (outputs.argmax(dim=1) == targets).sum().item()
                count += len(inputs)
            print(f"epoch {epoch} {phase:5s} loss {total / count:.4f} acc {correct / count:.3f}")
    return model


model = TextEncoder()
data = {"train": make_texts(768), "val": make_texts(256)}
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
train_model(model, data, nn.CrossEntropyLoss(), optimizer, num_epochs=6)
