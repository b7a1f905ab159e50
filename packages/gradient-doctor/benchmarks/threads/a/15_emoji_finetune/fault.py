import torch
import torch.nn as nn
from torch.autograd import Variable

torch.manual_seed(0)


class EmojiModel(nn.Module):
    def __init__(self, vocab=40, dim=16, hidden=24, return_tensor=True):
        super().__init__()
        self.return_tensor = return_tensor
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.output_layer = nn.Linear(2 * hidden, 1)

    def forward(self, tokens):
        states, _ = self.lstm(self.embed(tokens))
        pooled = states.max(dim=1).values
        outputs = self.output_layer(pooled)
        if self.return_tensor:
            outputs = outputs.data.squeeze(1)
        return outputs


def comments(n=128, length=10):
    label = torch.randint(0, 2, (n,)).float()
    tokens = torch.randint(10, 40, (n, length))
    tokens[:, 3] = torch.where(label > 0, torch.tensor(1), torch.tensor(2))
    return tokens, label


def finetune(model, tokens, label, epochs=6, batch=32):
    loss_op = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        losses = []
        for i in range(0, len(tokens), batch):
            optimizer.zero_grad()
            outputs = model(tokens[i:i + batch])
            loss = loss_op(outputs, label[i:i + batch])
            loss = Variable(loss, requires_grad=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1} loss {sum(losses) / len(losses):.5f}")


finetune(EmojiModel(), *comments())
