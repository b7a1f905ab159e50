import io

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(23)
CLASSES = 3


def build_network():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
                         nn.Flatten(), nn.Linear(128, CLASSES))


class SoundModel:
    def __init__(self):
        self.network = build_network()
        self.optimizer_params = {"params": list(self.network.parameters()), "lr": 0.05, "momentum": 0.9}

    def save(self, f):
        torch.save({"weights": self.network.state_dict(), "optimizer_params": self.optimizer_params}, f)

    @classmethod
    def load(cls, f):
        model_dict = torch.load(f, weights_only=False)
        model = cls()
        model.network.load_state_dict(model_dict["weights"])
        model.optimizer_params = model_dict["optimizer_params"]
        return model

    def train(self, data, steps):
        optimizer = torch.optim.SGD([self.optimizer_params])
        for step in range(steps):
            x, y = data()
            loss = F.cross_entropy(self.network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 4 == 0:
                print(f"  step {step} loss {loss.item():.4f}")


def spectrograms(n=32):
    y = torch.randint(CLASSES, (n,))
    x = torch.randn(n, 1, 16, 16) * 0.5
    for i, c in enumerate(y):
        x[i, 0, 5 * c : 5 * c + 5] += 1.0
    return x, y


def main():
    first = SoundModel()
    print("first run")
    first.train(spectrograms, 5)
    f = io.BytesIO()
    first.save(f)
    f.seek(0)
    print("continued run")
    second = SoundModel.load(f)
    before = second.network[-1].weight.detach().clone()
    second.train(spectrograms, 20)
    print("classifier change", (second.network[-1].weight - before).abs().max().item())


if __name__ == "__main__":
    main()
