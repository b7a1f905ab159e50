import torch
import torch.nn as nn

torch.manual_seed(0)
CLASSES, CLIP = 10, 6


class ConvEncoder(nn.Module):
    def __init__(self, latent=32):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
        self.project = nn.Linear(16 * 9, latent)

    def forward(self, frames):
        return torch.relu(self.project(self.conv(frames).flatten(1)))


class ConvLstm(nn.Module):
    def __init__(self, latent=32, hidden=48):
        super().__init__()
        self.conv_model = ConvEncoder(latent)
        self.lstm = nn.LSTM(latent, hidden, batch_first=True)
        self.output_layer = nn.Sequential(
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, CLASSES))

    def forward(self, clips):
        n, t = clips.shape[:2]
        features = self.conv_model(clips.flatten(0, 1)).view(n, t, -1)
        out, _ = self.lstm(features)
        return self.output_layer(out[:, -1])


motions = torch.randn(CLASSES, CLIP, 1, 12, 12)


def dataset(n):
    labels = torch.randint(0, CLASSES, (n,))
    return motions[labels] + 0.8 * torch.randn(n, CLIP, 1, 12, 12), labels


def run_epoch(model, criterion, optimizer, clips, labels):
    model.train()
    total, correct = 0.0, 0
    for idx in torch.randperm(len(clips)).split(32):
        scores = model(clips[idx])
        loss = criterion(scores, labels[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(idx)
        correct += (scores.argmax(1) == labels[idx]).sum().item()
    return total / len(clips), correct / len(clips)


clips, labels = dataset(320)
model = ConvLstm()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(10):
    loss, accuracy = run_epoch(model, criterion, optimizer, clips, labels)
    if epoch % 3 == 0:
        print(f"epoch {epoch}  loss {loss:.4f}  accuracy {accuracy:.3f}")
