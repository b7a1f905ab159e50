import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(4)

MOVES = 4


class PolicyNet(nn.Module):
    def __init__(self, cells=16):
        super().__init__()
        self.fc1 = nn.Linear(cells, 64)
        self.fc2 = nn.Linear(64, MOVES)

    def forward(self, board):
        h = torch.relu(self.fc1(board))
        return F.softmax(self.fc2(h), dim=1)


def play(board, move):
    """Moving towards the fullest side of the board pays."""
    grid = board.view(-1, 4, 4)
    sides = torch.stack([grid[:, 0].sum(1), grid[:, 3].sum(1), grid[:, :, 0].sum(1), grid[:, :, 3].sum(1)], 1)
    return (sides.argmax(1) == move).float()


policy = PolicyNet()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)

for episode in range(300):
    board = torch.randn(128, 16)
    probs = policy(board)
    move = torch.multinomial(probs.detach(), 1).squeeze(1)
    reward = play(board, move)
    score = reward - reward.mean()
    action = F.one_hot(move, MOVES).float()
    loss = ((action - probs) * score.unsqueeze(1)).sum() / len(board)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if episode % 50 == 0 or episode == 299:
        print(f"episode {episode:3d}  loss {loss.item():+.5f}  reward {reward.mean().item():.3f}")
