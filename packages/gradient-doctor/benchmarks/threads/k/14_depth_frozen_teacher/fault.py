import torch
import torch.nn as nn
import torch.nn.functional as F


class Trainer:
    def __init__(self, lr=1e-2, step_size=15, epochs=20, freeze_teacher_epoch=15):
        self.lr, self.step_size, self.epochs = lr, step_size, epochs
        self.freeze_teacher_epoch = freeze_teacher_epoch
        self.train_teacher = True
        self.mono = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
        self.multi = nn.Sequential(nn.Linear(13, 48), nn.ReLU(), nn.Linear(48, 1))
        self.make_optimizer([*self.mono.parameters(), *self.multi.parameters()])

    def make_optimizer(self, parameters):
        self.optimizer = torch.optim.Adam(parameters, lr=self.lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, self.step_size, gamma=0.1)

    def freeze_teacher(self):
        self.train_teacher = False
        for p in self.mono.parameters():
            p.requires_grad = False
            p.grad = None
        self.make_optimizer(list(self.multi.parameters()))
        print("teacher frozen")

    def losses(self, frames, depth):
        hint = self.mono(frames)
        refined = self.multi(torch.cat([frames, hint.detach()], dim=1))
        loss = F.l1_loss(refined, depth)
        if self.train_teacher:
            loss = loss + F.l1_loss(hint, depth)
        return loss, refined

    def run(self, data):
        for epoch in range(self.epochs):
            if epoch == self.freeze_teacher_epoch:
                self.freeze_teacher()
            total = 0.0
            for frames, depth in data:
                loss, refined = self.losses(frames, depth)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += (refined - depth).abs().mean().item()
            self.scheduler.step()
            if epoch % 4 == 3 or epoch >= self.freeze_teacher_epoch:
                print(f"epoch {epoch:2d}  abs error {total / len(data):.4f}  lr {self.optimizer.param_groups[0]['lr']:.0e}")


torch.manual_seed(0)
frames = torch.randn(640, 12)
depth = frames[:, :3].prod(dim=1, keepdim=True).tanh() + frames[:, 3:4].abs() + 0.1 * torch.randn(640, 1)
batches = list(zip(frames.split(32), depth.split(32)))
Trainer().run(batches)
