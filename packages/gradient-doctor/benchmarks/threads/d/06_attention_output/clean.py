import math

import torch
import torch.nn as nn
import torch.optim as optim

torch.manual_seed(0)
d_model, d_k, n_heads, n_layers = 32, 8, 4, 2
vocab, length = 12, 6


class MultiHeadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_Q = nn.Linear(d_model, d_k * n_heads)
        self.W_K = nn.Linear(d_model, d_k * n_heads)
        self.W_V = nn.Linear(d_model, d_k * n_heads)
        self.fc = nn.Linear(n_heads * d_k, d_model)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.W_Q(x).view(b, n, n_heads, d_k).transpose(1, 2)
        k = self.W_K(x).view(b, n, n_heads, d_k).transpose(1, 2)
        v = self.W_V(x).view(b, n, n_heads, d_k).transpose(1, 2)
        attn = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(d_k), dim=-1)
        context = (attn @ v).transpose(1, 2).reshape(b, n, n_heads * d_k)
        output = self.fc(context)
        return self.norm(output + x)


class PoswiseFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(d_model, 64, 1)
        self.conv2 = nn.Conv1d(64, d_model, 1)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x):
        out = self.conv2(torch.relu(self.conv1(x.transpose(1, 2)))).transpose(1, 2)
        return self.norm(out + x)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(vocab, d_model)
        self.pos = nn.Embedding(length, d_model)
        self.blocks = nn.ModuleList([nn.Sequential(MultiHeadAttention(), PoswiseFeedForward()) for _ in range(n_layers)])
        self.projection = nn.Linear(d_model, vocab)

    def forward(self, x):
        h = self.emb(x) + self.pos(torch.arange(length))
        for block in self.blocks:
            h = block(h)
        return self.projection(h)


model = Transformer()
criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(250):
    sentence = torch.randint(0, vocab, (64, length))
    translated = sentence.flip(1)
    logits = model(sentence)
    loss = criterion(logits.view(-1, vocab), translated.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if (epoch + 1) % 50 == 0:
        right = (logits.argmax(-1) == translated).float().mean()
        print("Epoch:", "%04d" % (epoch + 1), "cost =", "{:.6f}".format(loss.item()), "accuracy = {:.3f}".format(right.item()))
