import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class GraphConv(nn.Module):
    def __init__(self, n_in, n_out, init="normal"):
        super().__init__()
        self.w0, self.w1 = nn.Linear(n_in, n_out), nn.Linear(n_in, n_out)
        for layer in (self.w0, self.w1):
            if init == "normal":
                nn.init.normal_(layer.weight, std=0.2)
            elif init == "zero":
                nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, verts, edges):
        message = self.w1(verts)
        out = self.w0(verts)
        src, dst = edges
        return out.index_add(0, dst, message[src]).index_add(0, src, message[dst])


class MeshRefinementStage(nn.Module):
    def __init__(self, dims, feat_dim, init):
        super().__init__()
        self.convs = nn.ModuleList()
        n_in = feat_dim + 3
        for dim in dims:
            self.convs.append(GraphConv(n_in, dim, init=init))
            n_in = dim + 3
        self.offset = nn.Linear(n_in, 3)

    def forward(self, verts, edges, feats):
        x = torch.cat([feats, verts], dim=1)
        for conv in self.convs:
            x = torch.cat([F.relu(conv(x, edges)), verts], dim=1)
        return verts + torch.tanh(self.offset(x))


def ring_mesh(n):
    angle = torch.arange(n) * 2 * torch.pi / n
    verts = torch.stack([angle.cos(), angle.sin(), torch.zeros(n)], dim=1)
    index = torch.arange(n)
    return verts, (index, (index + 1) % n), angle


verts, edges, angle = ring_mesh(60)
feats = torch.stack([(2 * angle).cos(), (3 * angle).sin()], dim=1)
target = verts * (1 + 0.4 * torch.sin(3 * angle) * torch.cos(2 * angle)).unsqueeze(1)
target[:, 2] = 0.3 * torch.cos(3 * angle)

net = MeshRefinementStage([16, 32, 32], 2, "zero")
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(201):
    before = net.convs[0].w0.weight.detach().clone()
    loss = F.mse_loss(net(verts, edges, feats), target, reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 40 == 0:
        moved = not torch.equal(before, net.convs[0].w0.weight)
        print(f"epoch {epoch:3d}  loss {loss.item():.4f}  first layer changed: {moved}")
