import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(18)
DIM, STEPS = 16, 50


class UNet(nn.Module):
    def __init__(self, dim=DIM, hidden=96):
        super().__init__()
        self.time = nn.Embedding(STEPS, hidden)
        self.down = nn.Linear(dim, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, dim)

    def forward(self, x, t):
        h = F.silu(self.down(x) + self.time(t))
        h = h + F.silu(self.mid(h))
        return self.up(h)


def load_pretrained(torch_dtype):
    unet = UNet()
    return unet.to(torch_dtype)


def add_noise(latents, noise, t, alphas):
    a = alphas[t].unsqueeze(1)
    return a.sqrt() * latents + (1.0 - a).sqrt() * noise


def main(max_train_steps=300):
    weight_dtype = torch.float16
    unet = load_pretrained(torch_dtype=torch.float32)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3, eps=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8)
    alphas = torch.cumprod(1.0 - torch.linspace(1e-3, 0.12, STEPS), dim=0)
    concept = torch.randn(4, DIM)

    unet.train()
    for step in range(max_train_steps):
        latents = concept[torch.randint(0, 4, (64,))]
        noise = torch.randn_like(latents)
        t = torch.randint(0, STEPS, (64,))
        noisy = add_noise(latents, noise, t, alphas).to(weight_dtype)
        with torch.autocast("cpu", dtype=weight_dtype):
            pred = unet(noisy, t)
        loss = F.mse_loss(pred.float(), noise)

        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 50 == 0 or step == max_train_steps - 1:
            print(f"step {step:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
