import copy
import torch
import torch.nn as nn


def small_net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 9, 4),
    )


def fix_for_privacy(module):
    """Returns a copy of the module in which each batch norm is a group norm."""
    module = copy.deepcopy(module)
    for name, child in module.named_modules():
        for key, leaf in child.named_children():
            if isinstance(leaf, nn.BatchNorm2d):
                setattr(child, key, nn.GroupNorm(min(4, leaf.num_features), leaf.num_features))
    return module


def privatize(params, batch_size, max_norm=2.0, noise=0.02):
    params = list(params)
    nn.utils.clip_grad_norm_(params, max_norm)
    for p in params:
        p.grad += noise * max_norm / batch_size * torch.randn_like(p)


def sample(n, patterns):
    y = torch.randint(len(patterns), (n,))
    return patterns[y] + 0.7 * torch.randn(n, 3, 12, 12), y


def train_one_epoch(model, optimizer, patterns, batches=20, bs=32):
    criterion = nn.CrossEntropyLoss()
    losses, hits = 0.0, 0.0
    for _ in range(batches):
        x, y = sample(bs, patterns)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        privatize(model.parameters(), bs)
        optimizer.step()
        losses += loss.item() / batches
        hits += (out.argmax(1) == y).float().mean().item() / batches
    return losses, hits


if __name__ == "__main__":
    torch.manual_seed(99)
    patterns = torch.randn(4, 3, 12, 12)
    model = small_net()
    model = fix_for_privacy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(5):
        loss, acc = train_one_epoch(model, optimizer, patterns)
        print(f"Train Epoch: {epoch} \t Loss: {loss:.4f} Acc@1: {acc:.3f}")
