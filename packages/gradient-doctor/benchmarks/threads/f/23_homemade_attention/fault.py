import math
import torch
import torch.nn as nn

d_model, d_k, n_heads, d_ff, vocab, seq_len = 24, 8, 3, 48, 12, 8


class MultiHeadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_Q = nn.Linear(d_model, d_k * n_heads)
        self.W_K = nn.Linear(d_model, d_k * n_heads)
        self.W_V = nn.Linear(d_model, d_k * n_heads)
        self.norm = nn.LayerNorm(d_model)

    def split(self, x):
        return x.view(x.size(0), -1, n_heads, d_k).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.W_Q(x)), self.split(self.W_K(x)), self.split(self.W_V(x))
        attn = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(d_k), dim=-1)
        context = (attn @ v).transpose(1, 2).contiguous().view(x.size(0), -1, n_heads * d_k)
        output = nn.Linear(n_heads * d_k, d_model)(context)
        return self.norm(output + x)


class PoswiseFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        return self.norm(self.ff(x) + x)


class Reverser(nn.Module):
    def __init__(self, n_layers=2):
        super().__init__()
        self.src_emb = nn.Embedding(vocab, d_model)
        self.pos_emb = nn.Embedding(seq_len, d_model)
        self.layers = nn.Sequential(*[nn.Sequential(MultiHeadAttention(), PoswiseFeedForward()) for _ in range(n_layers)])
        self.projection = nn.Linear(d_model, vocab)

    def forward(self, tokens):
        return self.projection(self.layers(self.src_emb(tokens) + self.pos_emb(torch.arange(seq_len))))


torch.manual_seed(0)
model = Reverser()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

for epoch in range(300):
    inputs = torch.randint(0, vocab, (64, seq_len))
    targets = inputs.flip(1)
    outputs = model(inputs)
    loss = criterion(outputs.view(-1, vocab), targets.contiguous().view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (epoch + 1) % 50 == 0:
        right = (outputs.argmax(-1) == targets).float().mean().item()
        print("Epoch:", "%04d" % (epoch + 1), "cost =", "{:.4f}".format(loss.item()), "right = {:.2f}".format(right))
