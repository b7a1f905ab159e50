import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB = 10


class GRUEncoder(nn.Module):
    def __init__(self, vocab, cell_size=24, n_layers=2, latent_dim=16, bidirectional=True):
        super().__init__()
        self.cell_size, self.n_layers = cell_size, n_layers
        self.n_directions = 2 if bidirectional else 1
        self.embedding = nn.Embedding(vocab, cell_size)
        self.gru = nn.GRU(cell_size, cell_size, n_layers, bidirectional=bidirectional)
        self.to_latent = nn.Linear(cell_size * self.n_directions, latent_dim)

    def forward(self, tokens):
        length, batch_size = tokens.shape
        _, hidden = self.gru(self.embedding(tokens))
        hidden = hidden.view(self.n_layers, self.n_directions, batch_size, self.cell_size)
        hidden = hidden[-1].transpose(0, 1)
        hidden = hidden.reshape(batch_size, self.cell_size * self.n_directions)
        return self.to_latent(hidden)


class PropertyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = GRUEncoder(VOCAB)
        self.predict = nn.Sequential(nn.ReLU(), nn.Linear(16, 1))

    def forward(self, tokens):
        return self.predict(self.encoder(tokens)).squeeze(-1)


def sample_molecules(n=64, length=9):
    tokens = torch.randint(0, VOCAB, (length, n))
    weights = torch.linspace(-1, 1, VOCAB)
    value = weights[tokens].sum(0) + 0.5 * (tokens[0] == tokens[1]).float()
    return tokens, value


def main():
    torch.manual_seed(0)
    model = PropertyModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    running = 0.0
    for it in range(1, 201):
        tokens, value = sample_molecules()
        loss = F.mse_loss(model(tokens), value)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        running += loss.item()
        if it % 40 == 0:
            print(f"it {it}  mse {running / 40:.4f}")
            running = 0.0


if __name__ == "__main__":
    main()
