import torch
from torch import nn

torch.manual_seed(0)

hidden = 16
lr = 0.05
epochs = 400

# the four corners of the square, with some jitter
corners = torch.tensor([[0., 0.], [0., 1.], [1., 0.], [1., 1.]])
answers = torch.tensor([0., 1., 1., 0.])
pick = torch.randint(0, 4, (400,))
inputs = corners[pick] + 0.05 * torch.randn(400, 2)
targets = answers[pick].unsqueeze(1)

mlp = nn.Sequential(
    nn.Linear(2, hidden),
    nn.ReLU(),
    nn.Linear(hidden, 1),
)
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(mlp.parameters(), lr=lr)

for epoch in range(epochs):
    logits = mlp(inputs)
    loss = criterion(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 80 == 0 or epoch == epochs - 1:
        acc = ((logits > 0).float() == targets).float().mean()
        print(f"epoch {epoch:3d}  loss {loss.item():.4f}  accuracy {acc.item():.2f}")
