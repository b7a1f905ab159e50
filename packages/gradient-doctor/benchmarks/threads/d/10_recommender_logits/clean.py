import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(42)
np.random.seed(42)


class NeuMF(nn.Module):
    def __init__(self, user_num, item_num, factors=8, loss_type="CL"):
        super().__init__()
        self.epochs, self.lr, self.loss_type = 12, 5e-3, loss_type
        self.embed_user_GMF = nn.Embedding(user_num, factors)
        self.embed_item_GMF = nn.Embedding(item_num, factors)
        self.embed_user_MLP = nn.Embedding(user_num, factors)
        self.embed_item_MLP = nn.Embedding(item_num, factors)
        self.MLP_layers = nn.Sequential(nn.Linear(2 * factors, 16), nn.ReLU(), nn.Linear(16, factors), nn.ReLU())
        self.predict_layer = nn.Linear(2 * factors, 1)
        for m in self.modules():
            if isinstance(m, nn.Embedding):
                nn.init.normal_(m.weight, std=0.1)

    def forward(self, user, item):
        gmf = self.embed_user_GMF(user) * self.embed_item_GMF(item)
        mlp = self.MLP_layers(torch.cat((self.embed_user_MLP(user), self.embed_item_MLP(item)), -1))
        pred = self.predict_layer(torch.cat((gmf, mlp), -1))
        return pred.view(-1)

    def fit(self, train_loader, test):
        optimizer = optim.Adam(self.parameters(), lr=self.lr)
        if self.loss_type == "CL":
            criterion = nn.BCEWithLogitsLoss(reduction="sum")
        else:
            raise ValueError(f"Invalid loss type: {self.loss_type}")
        for epoch in range(1, self.epochs + 1):
            self.train()
            current_loss = 0.0
            for user, item, label in train_loader:
                self.zero_grad()
                loss = criterion(self(user, item), label)
                loss.backward()
                optimizer.step()
                current_loss += loss.item()
            if epoch % 3 == 0:
                per_pair = current_loss / len(train_loader.dataset)
                print(f"[Epoch {epoch:02d}] loss {per_pair:.4f}  test auc {self.auc(*test):.3f}")

    @torch.no_grad()
    def auc(self, user, item, label):
        self.eval()
        score = self(user, item)
        return (score[label == 1][:, None] > score[label == 0][None]).float().mean().item()


USERS, ITEMS = 60, 80
taste, kind = np.random.randn(USERS, 4), np.random.randn(ITEMS, 4)
likes = (taste @ kind.T > 1.5).astype("float32")
pairs = np.random.permutation(USERS * ITEMS)
user, item = torch.from_numpy(pairs // ITEMS), torch.from_numpy(pairs % ITEMS)
label = torch.from_numpy(likes.reshape(-1)[pairs])
cut = int(0.85 * len(pairs))
loader = DataLoader(TensorDataset(user[:cut], item[:cut], label[:cut]), batch_size=64, shuffle=True)
NeuMF(USERS, ITEMS).fit(loader, (user[cut:], item[cut:], label[cut:]))
