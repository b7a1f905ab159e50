import torch
import torch.nn as nn

torch.manual_seed(0)


class GradientReversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return -grad_output


def grad_reverse(x):
    return GradientReversal.apply(x)


class Synthesizer(nn.Module):
    """Text features should not tell who speaks."""

    def __init__(self, n_in=12, width=16, speakers=3, sounds=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(n_in, 32), nn.ReLU(), nn.Linear(32, width))
        self.sound = nn.Linear(width, sounds)
        self.speaker = nn.Linear(width, speakers)

    def forward(self, x):
        z = self.encoder(x)
        return self.sound(z), self.speaker(grad_reverse(z))


SOUNDS, SPEAKERS = torch.randn(4, 12), torch.randn(3, 12)


def speech(n=128):
    sound, speaker = torch.randint(0, 4, (n,)), torch.randint(0, 3, (n,))
    return SOUNDS[sound] + SPEAKERS[speaker] + 0.3 * torch.randn(n, 12), sound, speaker


def train(steps=300):
    model = Synthesizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    criterion = nn.CrossEntropyLoss()
    for step in range(steps):
        x, sound, speaker = speech()
        says, who = model(x)
        loss = criterion(says, sound) + 0.3 * criterion(who, speaker)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            right = (says.argmax(1) == sound).float().mean().item()
            known = (who.argmax(1) == speaker).float().mean().item()
            print(f"step {step:3d} loss {loss.item():.3f} sound {right:.2f} speaker {known:.2f}")


train()
