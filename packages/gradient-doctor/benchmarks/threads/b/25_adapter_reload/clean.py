import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model

DIM, CLASSES = 24, 4


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 64), nn.Linear(64, 32)

    def forward(self, x):
        return torch.tanh(self.fc2(torch.tanh(self.fc1(x))))


def base_encoder():
    torch.manual_seed(24)
    return Encoder()


def run(encoder, task, steps):
    head = nn.Linear(32, CLASSES)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-2)
    for step in range(steps):
        x = torch.randn(64, DIM)
        y = (x @ task).argmax(-1)
        loss = F.cross_entropy(head(encoder(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"  step {step} loss {loss.item():.4f}")


def main():
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["fc1", "fc2"])
    encoder = get_peft_model(base_encoder(), config)
    task_a, task_b = torch.randn(DIM, CLASSES), torch.randn(DIM, CLASSES)
    print("task a")
    run(encoder, task_a, 6)
    with tempfile.TemporaryDirectory() as folder:
        encoder.save_pretrained(folder)
        encoder = PeftModel.from_pretrained(base_encoder(), folder, is_trainable=True)
    start = {n: p.detach().clone() for n, p in encoder.named_parameters() if "lora" in n}
    print("task b")
    run(encoder, task_b, 20)
    change = max((p - start[n]).abs().max().item() for n, p in encoder.named_parameters() if n in start)
    print("adapter change", change)


if __name__ == "__main__":
    main()
