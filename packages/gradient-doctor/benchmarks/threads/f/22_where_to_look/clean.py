import torch
import torch.nn as nn


class Encoder(nn.Module):
    def __init__(self, features=24):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(3, 24, 4, stride=4), nn.ReLU(),
            nn.Conv2d(24, features, 1), nn.ReLU(),
        )

    def forward(self, images):
        encoded_image = self.cnn(images)
        batch_size, features = encoded_image.shape[:2]
        num_pixels = encoded_image.shape[2] * encoded_image.shape[3]
        enc_image = encoded_image.permute(0, 2, 3, 1).reshape(batch_size, num_pixels, features)
        return enc_image


class Decoder(nn.Module):
    """Looks at the regions for one asked word and names what is found there."""

    def __init__(self, words=4, answers=4, features=24, dim=32):
        super().__init__()
        self.word = nn.Embedding(words, dim)
        self.key, self.value = nn.Linear(features, dim), nn.Linear(features, dim)
        self.name = nn.Linear(dim, answers)

    def forward(self, enc_image, word):
        score = torch.einsum("bd,bpd->bp", self.word(word), self.key(enc_image)) / 5.0
        look = score.softmax(1)
        return self.name((look.unsqueeze(2) * self.value(enc_image)).sum(1)), look


colors = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [1.0, 1.0, 0]])
marks = torch.tensor([[[1, 1], [0, 0]], [[0, 0], [1, 1]], [[1, 0], [1, 0]], [[1, 0], [0, 1]]]).float()


def pictures(n, cells=4):
    """Four coloured marks in cells of a 4x4 grid; asked for a colour, say its mark."""
    images = 0.05 * torch.randn(n, 3, 4 * cells, 4 * cells)
    kind = torch.randint(0, 4, (n, 4))
    for i in range(n):
        for c, cell in enumerate(torch.randperm(cells * cells)[:4].tolist()):
            r, k = 4 * (cell // cells) + 1, 4 * (cell % cells) + 1
            images[i, :, r:r + 2, k:k + 2] += colors[c][:, None, None] * marks[kind[i, c]]
    asked = torch.randint(0, 4, (n,))
    return images, asked, kind.gather(1, asked[:, None]).squeeze(1)


if __name__ == "__main__":
    torch.manual_seed(3)
    encoder, decoder = Encoder(), Decoder()
    bank = pictures(1500)
    cnn_optimizer = torch.optim.Adam(encoder.parameters(), lr=4e-3)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=4e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, 9):
        for idx in torch.randperm(1500).split(60):
            images, asked, answer = (t[idx] for t in bank)
            scores, look = decoder(encoder(images), asked)
            loss = criterion(scores, answer)
            cnn_optimizer.zero_grad(), optimizer.zero_grad()
            loss.backward()
            cnn_optimizer.step(), optimizer.step()
        test = pictures(300)
        hit = (decoder(encoder(test[0]), test[1])[0].argmax(1) == test[2]).float().mean().item()
        print(f"epoch {epoch} loss {loss.item():.3f} right on new pictures {hit:.2f} sharpest look {look.max().item():.2f}")
