import torch
import torch.nn as nn

torch.manual_seed(2)


class PeptideLSTM(nn.Module):
    def __init__(self, residues=20, width=16):
        super().__init__()
        self.embed = nn.Embedding(residues, 8)
        self.lstm = nn.LSTM(8, width, batch_first=True)
        self.fc1 = nn.Linear(width, 16)
        self.fc2 = nn.Linear(16, 1)

    def forward(self, peptide):
        _, (hidden, _) = self.lstm(self.embed(peptide))
        x = torch.relu(self.fc1(hidden[-1]))
        return torch.relu(self.fc2(x)).squeeze(-1)


def peptides(n=256, length=10):
    weight = torch.linspace(0.2, 1.8, 20)
    peptide = torch.randint(0, 20, (n, length))
    return peptide, weight[peptide].mean(1)


def train(epochs=15, batch=32):
    model = PeptideLSTM()
    peptide, time = peptides()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        total = 0.0
        for i in range(0, len(time), batch):
            out = model(peptide[i : i + batch])
            loss = nn.functional.mse_loss(out, time[i : i + batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * batch / len(time)
        if epoch % 3 == 0 or epoch == epochs - 1:
            print(f"epoch {epoch:2d} loss {total:.4f} largest prediction {out.max().item():.3f}")


train()
