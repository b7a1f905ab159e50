import torch
import torch.nn as nn


class Doubler(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.rnn = nn.RNN(input_size=1, hidden_size=hidden, num_layers=1)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x, h):
        y, h = self.rnn(x, h)
        return self.out(y), h


def make_series(n=60):
    x = torch.linspace(0.1, 1.0, n).view(n, 1, 1, 1)
    return x, 2 * x


def main():
    torch.manual_seed(0)
    train_x, train_y = make_series()
    net = Doubler()
    loss_fn = nn.MSELoss()
    opt = torch.optim.Adam(net.parameters(), lr=0.01)

    for epoch in range(20):
        h_cur = torch.zeros(1, 1, 8)
        total = 0.0
        for i in range(len(train_x)):
            opt.zero_grad()
            output, h_next = net(train_x[i], h_cur)
            loss = loss_fn(output, train_y[i])
            loss.backward(retain_graph=True)
            opt.step()
            total += loss.item()
            h_cur = h_next.detach()
        if epoch % 5 == 4:
            print(f"epoch {epoch}  loss {total / len(train_x):.5f}")


if __name__ == "__main__":
    main()
