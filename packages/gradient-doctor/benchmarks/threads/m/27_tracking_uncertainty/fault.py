import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class MotLoss(nn.Module):
    """Detection and identity losses, balanced by learned uncertainties."""

    def __init__(self, emb_dim, n_ids):
        super().__init__()
        self.classifier = nn.Linear(emb_dim, n_ids)
        self.s_det = nn.Parameter(-1.85 * torch.ones(1))
        self.s_id = nn.Parameter(-1.05 * torch.ones(1))

    def forward(self, outputs, batch):
        det_loss = F.smooth_l1_loss(outputs["box"], batch["box"])
        id_logits = self.classifier(4.0 * F.normalize(outputs["id"], dim=1))
        id_loss = F.cross_entropy(id_logits, batch["ids"])
        loss = torch.exp(-self.s_det) * det_loss + torch.exp(-self.s_id) * id_loss + self.s_det + self.s_id
        return 0.5 * loss.squeeze(), {"det": det_loss.item(), "id": id_loss.item()}


class TrackNet(nn.Module):
    def __init__(self, fin=20, emb_dim=16):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(fin, 48), nn.ReLU())
        self.box_head = nn.Linear(48, 4)
        self.id_head = nn.Linear(48, emb_dim)

    def forward(self, x):
        h = self.base(x)
        return {"box": self.box_head(h), "id": self.id_head(h)}


class Trainer:
    def __init__(self, model, optimizer, n_ids):
        self.model, self.optimizer = model, optimizer
        self.loss = MotLoss(16, n_ids)

    def run_epoch(self, epoch, data, batch_size=32):
        sums = {"det": 0.0, "id": 0.0}
        for i in range(0, len(data["x"]), batch_size):
            batch = {k: v[i:i + batch_size] for k, v in data.items()}
            loss, stats = self.loss(self.model(batch["x"]), batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for k in sums:
                sums[k] += stats[k] * batch_size / len(data["x"])
        print(f"epoch {epoch}: det {sums['det']:.4f} id {sums['id']:.4f} "
              f"s_det {self.loss.s_det.item():.3f} s_id {self.loss.s_id.item():.3f}")


look = torch.randn(12, 20)
ids = torch.randint(0, 12, (640,))
x = look[ids] + 0.5 * torch.randn(640, 20)
data = {"x": x, "box": x[:, :4] * 0.3 + 0.05 * torch.randn(640, 4), "ids": ids}

model = TrackNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
trainer = Trainer(model, optimizer, n_ids=12)
for epoch in range(1, 9):
    trainer.run_epoch(epoch, data)
