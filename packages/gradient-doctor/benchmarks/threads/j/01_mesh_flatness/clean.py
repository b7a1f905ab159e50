import torch

torch.manual_seed(0)
N = 8


def build_grid(n):
    ys, xs = torch.meshgrid(torch.linspace(-1, 1, n), torch.linspace(-1, 1, n), indexing="ij")
    verts = torch.stack([xs.flatten(), ys.flatten(), torch.zeros(n * n)], dim=1)
    pairs = []
    for i in range(n - 1):
        for j in range(n - 1):
            a, b = i * n + j, i * n + j + 1
            c, d = (i + 1) * n + j, (i + 1) * n + j + 1
            # the two triangles of a cell share the edge b-c
            pairs.append((b, c, a, d))
    return verts, torch.tensor(pairs)


def face_normal(p, q, r):
    n = torch.linalg.cross(q - p, r - p)
    return n / (n * n).sum(dim=1, keepdim=True).sqrt()


def bend_loss(verts, pairs):
    e0, e1, left, right = verts[pairs].unbind(dim=1)
    n1 = face_normal(e0, e1, left)
    n2 = face_normal(e1, e0, right)
    cos = (n1 * n2).sum(dim=1)
    sin = torch.sqrt((1.0 - cos ** 2).clamp(min=0.0) + 1e-6)
    return sin.mean()


def main():
    template, pairs = build_grid(N)
    target = template.clone()
    target[:, 2] = 0.4 * torch.sin(2.0 * target[:, 0]) * torch.cos(1.5 * target[:, 1])

    offsets = torch.zeros_like(template, requires_grad=True)
    optimizer = torch.optim.Adam([offsets], lr=0.02)

    for it in range(121):
        verts = template + offsets
        fit = ((verts - target) ** 2).sum(dim=1).mean()
        bend = bend_loss(verts, pairs)
        loss = fit + 0.01 * bend
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 20 == 0:
            print(f"iter {it:4d}  fit {fit.item():.5f}  bend {bend.item():.5f}")


if __name__ == "__main__":
    main()
