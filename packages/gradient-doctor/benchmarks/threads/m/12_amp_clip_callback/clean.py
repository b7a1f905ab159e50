import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Engine:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)

    def backward_loss(self, loss):
        self.scaler.scale(loss).backward()

    def optimizer_step(self, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()


class OptimizerCallback:
    def __init__(self, accumulation_steps=1, grad_clip=None):
        self.accumulation_steps = accumulation_steps
        self.grad_clip = grad_clip
        self.counter = 0

    def on_batch_end(self, runner, loss):
        self.counter += 1
        runner.engine.backward_loss(loss / self.accumulation_steps)
        if self.counter % self.accumulation_steps:
            return
        if self.grad_clip is not None:
            runner.engine.scaler.unscale_(runner.optimizer)
            nn.utils.clip_grad_norm_(runner.model.parameters(), self.grad_clip)
        runner.engine.optimizer_step(runner.optimizer)
        runner.optimizer.zero_grad()


class Runner:
    def __init__(self, model, callback):
        self.model, self.callback = model, callback
        self.engine = Engine()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train(self, batches, epochs):
        for epoch in range(epochs):
            total = correct = 0.0
            for x, y in batches:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    logits = self.model(x)
                loss = F.cross_entropy(logits.float(), y)
                self.callback.on_batch_end(self, loss)
                total += loss.item()
                correct += (logits.argmax(1) == y).float().mean().item()
            print(f"epoch {epoch}: loss {total / len(batches):.4f} acc {correct / len(batches):.3f}")


centers = torch.randn(4, 10) * 1.5
labels = torch.randint(0, 4, (16, 32))
batches = [(centers[y] + torch.randn(32, 10), y) for y in labels]
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
Runner(net, OptimizerCallback(accumulation_steps=2, grad_clip=1.0)).train(batches, 8)
