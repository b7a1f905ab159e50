import copy
import torch
import torch.nn as nn

torch.manual_seed(0)


def blobs(n):
    labels = torch.randint(0, 2, (n,))
    images = torch.randn(n, 3, 8, 8)
    images[:, 0, 2:6, 2:6] += (labels * 2 - 1)[:, None, None] * 0.5
    return images, labels


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2))
        self.fc = nn.Linear(8 * 16, 2)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


data = {"train": blobs(320), "val": blobs(200)}


def train_model(model, criterion, optimizer, scheduler, num_epochs=12):
    best_weights, best_acc = copy.deepcopy(model.state_dict()), 0.0
    for epoch in range(num_epochs):
        for phase in ["train", "val"]:
            model.train(phase == "train")
            images, labels = data[phase]
            running_loss, running_corrects = 0.0, 0
            for idx in torch.randperm(len(images)).split(16):
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    outputs = model(images[idx])
                    loss = criterion(outputs, labels[idx])
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running_loss += loss.item() * len(idx)
                running_corrects += (outputs.argmax(1) == labels[idx]).sum().item()
            if phase == "train":
                scheduler.step()
            epoch_loss, epoch_acc = running_loss / len(images), running_corrects / len(images)
            if epoch % 3 == 2:
                print(f"epoch {epoch:2d} {phase:5s} loss {epoch_loss:.4f} acc {epoch_acc:.3f}")
            if phase == "val" and epoch_acc > best_acc:
                best_weights, best_acc = copy.deepcopy(model.state_dict()), epoch_acc
    model.load_state_dict(best_weights)
    return model


model = ConvNet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
exp_lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
train_model(model, criterion, optimizer, exp_lr_scheduler)
