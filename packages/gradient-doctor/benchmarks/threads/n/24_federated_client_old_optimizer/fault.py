import io
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class TrainConfig:
    def __init__(self, model, batch_size=16, epochs=3, optimizer="SGD", lr=0.1):
        buffer = io.BytesIO()
        torch.save(model, buffer)
        self.payload = buffer.getvalue()
        self.batch_size, self.epochs = batch_size, epochs
        self.optimizer, self.lr = optimizer, lr

    def load(self):
        return torch.load(io.BytesIO(self.payload), weights_only=False)


class FederatedClient:
    def __init__(self, data):
        self.data = data
        self.train_config = None
        self.model = None
        self.optimizer = None

    def set_obj(self, config):
        self.train_config = config
        self.model = config.load()

    def _build_optimizer(self):
        if self.optimizer is None:
            cls = getattr(torch.optim, self.train_config.optimizer)
            self.optimizer = cls(self.model.parameters(), lr=self.train_config.lr)
        return self.optimizer

    def fit(self):
        optimizer = self._build_optimizer()
        x, y = self.data
        for _ in range(self.train_config.epochs):
            for idx in torch.randperm(len(x)).split(self.train_config.batch_size):
                loss = F.cross_entropy(self.model(x[idx]), y[idx])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return self.model, loss.item()


def average(models):
    result = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
    states = [m.state_dict() for m in models]
    result.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in states[0]})
    return result


teacher = torch.randn(8, 3)


def shard(n=96):
    x = torch.randn(n, 8)
    return x, (x @ teacher).argmax(1)


clients = [FederatedClient(shard()) for _ in range(4)]
test_x, test_y = shard(400)
model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
for round_ in range(6):
    results = []
    for client in clients:
        client.set_obj(TrainConfig(model))
        results.append(client.fit())
    model = average([m for m, _ in results])
    losses = sum(l for _, l in results) / len(results)
    accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    print(f"round {round_}  client loss {losses:.3f}  test accuracy {accuracy:.3f}")
