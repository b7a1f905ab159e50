import torch
import torch.nn as nn
import torch.nn.functional as F


class ReverseGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.alpha * g, None


class Extractor(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        )

    def forward(self, x):
        return self.features(x).flatten(1)


class Head(nn.Module):
    def __init__(self, n_out):
        super().__init__()
        self.fc1 = nn.Linear(24 * 16, 64)
        self.fc2 = nn.Linear(64, n_out)

    def forward(self, z):
        z = F.relu(self.fc1(z))
        return F.softmax(self.fc2(z), dim=1)


def digits(templates, n, shift):
    label = torch.randint(0, 10, (n,))
    picture = templates[label] + 0.4 * torch.randn(n, 1, 12, 12)
    return picture * (1 - 0.3 * shift) + 0.3 * shift, label


def main(iters=160, batch=48):
    torch.manual_seed(2)
    templates = (torch.rand(10, 1, 12, 12) > 0.5).float()
    encoder, classifier, discriminator = Extractor(), Head(10), Head(2)
    optimizer = torch.optim.SGD(
        [*encoder.parameters(), *classifier.parameters(), *discriminator.parameters()], lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    domain = torch.cat([torch.zeros(batch), torch.ones(batch)]).long()
    for i in range(1, iters + 1):
        alpha = 0.05 * i / iters
        source, label = digits(templates, batch, 0.0)
        target, hidden_label = digits(templates, batch, 1.0)
        z = encoder(torch.cat([source, target]))
        class_loss = criterion(classifier(z[:batch]), label)
        domain_loss = criterion(discriminator(ReverseGrad.apply(z, alpha)), domain)
        optimizer.zero_grad()
        (class_loss + domain_loss).backward()
        optimizer.step()
        if i % 40 == 0:
            acc = (classifier(z[batch:]).argmax(1) == hidden_label).float().mean()
            print(f"iter {i} class {class_loss.item():.3f} domain {domain_loss.item():.3f} target accuracy {acc.item():.2f}")


main()
