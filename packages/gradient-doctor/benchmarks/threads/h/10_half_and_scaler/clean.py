import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(8)


class ScrewNet(nn.Module):
    def __init__(self, n_class=2):
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(64, 96), nn.ReLU(),
            nn.Linear(96, 48), nn.ReLU())
        self.classifier = nn.Linear(48, n_class)

    def forward(self, x):
        return self.classifier(self.features(x))


def screws(n):
    """8x8 crops; the defective ones have a bright stripe."""
    img = torch.rand(n, 8, 8)
    label = torch.randint(0, 2, (n,))
    col = torch.randint(0, 8, (n,))
    img[torch.arange(n), :, col] += 0.8 * label[:, None]
    return img.flatten(1) - 0.5, label


class Runner:
    def __init__(self, model, lr=0.05):
        self.model = model
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def training_step(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(x)
        return F.cross_entropy(logits.float(), y)

    def fit(self, x, y, epochs=10, bs=32):
        for epoch in range(epochs):
            for i in range(0, len(x), bs):
                loss = self.training_step(x[i:i + bs], y[i:i + bs])
                self.opt.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.opt)
                self.scaler.update()
            print("epoch", epoch, "loss %.4f" % loss.item())


model = ScrewNet()
runner = Runner(model)
runner.fit(*screws(512))
