import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
CLASSES = 3


def conv_net(n_in, n_out, width=12):
    return nn.Sequential(nn.Conv2d(n_in, width, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(width, n_out, 3, padding=1))


def batch(domain, n=4):
    label = F.interpolate(torch.rand(n, 1, 4, 4), size=16, mode="nearest").mul(CLASSES).long().squeeze(1)
    image = F.one_hot(label, CLASSES).permute(0, 3, 1, 2).float()
    if domain == "target":
        image = 0.5 * image + torch.tensor([0.5, 0.0, 0.3]).view(1, 3, 1, 1)
    return image + 0.15 * torch.randn_like(image), label


def set_trainable(net, flag):
    for p in net.parameters():
        p.requires_grad_(flag)


model, discriminator = conv_net(3, CLASSES), conv_net(CLASSES, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
lambda_adv = 0.3

for i in range(201):
    optimizer.zero_grad()
    optimizer_D.zero_grad()
    images, labels = batch("source")
    images_t, labels_t = batch("target")

    set_trainable(discriminator, False)
    pred = model(images)
    loss_seg = F.cross_entropy(pred, labels)
    loss_seg.backward()

    pred_target = model(images_t)
    score = discriminator(F.softmax(pred_target, dim=1))
    loss_adv = F.binary_cross_entropy_with_logits(score, torch.ones_like(score))
    loss_adv = loss_adv * lambda_adv
    loss_adv.backward()

    # optimize
    optimizer.step()

    # discriminator: source maps are real, target maps are fake
    set_trainable(discriminator, True)
    real = discriminator(F.softmax(pred.detach(), dim=1))
    fake = discriminator(F.softmax(pred_target.detach(), dim=1))
    loss_D = F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) \
        + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
    loss_D.backward()
    optimizer_D.step()

    if i % 40 == 0:
        hit = (pred_target.argmax(1) == labels_t).float().mean().item()
        print(f"iter {i:3d}  seg {loss_seg.item():.4f}  adv {loss_adv.item():.4f}  D {loss_D.item():.4f}  target accuracy {hit:.3f}")
