import torch
import torch.nn as nn

torch.manual_seed(0)

GRAD_CLIP, GRAD_SKIP = 1.0, 5.0


class ViewNet(nn.Module):
    def __init__(self, patch=16, width=32):
        super().__init__()
        self.embed = nn.Linear(patch + 3, width)
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.to_pixels = nn.Linear(width, patch)

    def forward(self, patches, pose):
        x = self.embed(torch.cat([patches, pose], -1))
        return self.to_pixels(x + self.block(x))


def batches(n, bs=32):
    scene = torch.randn(3, 16)
    for i in range(n):
        patches, pose = torch.rand(bs, 16), torch.randn(bs, 3)
        target = patches.roll(2, -1) + 0.3 * pose @ scene
        if i % 25 == 9:  # a badly exposed frame
            target = target * 60
        yield patches, pose, target


model = ViewNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
done = 0
for step, (patches, pose, target) in enumerate(batches(240)):
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rendered = model(patches, pose)
    loss = nn.functional.mse_loss(rendered.float(), target)
    scaler.scale(loss).backward()

    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    skip = norm.item() > GRAD_SKIP
    if skip:
        print(f"step {step}: grad norm {norm.item():.1f} too large, skipping the update")
    else:
        scaler.step(optimizer)
        scaler.update()
        done += 1
    if step % 40 == 0:
        print(f"step {step} updates {done} loss {loss.item():.4f}")
