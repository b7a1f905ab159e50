import torch
import torch.nn as nn

torch.manual_seed(0)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ENDINGS = {
    "Russian": ["ov", "ev", "in"],
    "Polish": ["ski", "cki", "wicz"],
    "Greek": ["os", "is", "akis"],
}
CATEGORIES = list(ENDINGS)


class CharRNN(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.width = width
        self.i2h = nn.Linear(len(LETTERS) + width, width)
        self.h2o = nn.Linear(width, len(CATEGORIES))

    def forward(self, letter, hidden):
        hidden = torch.tanh(self.i2h(torch.cat((letter, hidden), 1)))
        return self.h2o(hidden), hidden


def random_choice(items):
    return items[torch.randint(0, len(items), (1,)).item()]


def random_name():
    category = torch.randint(0, len(CATEGORIES), (1,)).item()
    stem = "".join(random_choice(LETTERS) for _ in range(3))
    name = stem + random_choice(ENDINGS[CATEGORIES[category]])
    letters = torch.tensor([LETTERS.index(c) for c in name])
    return category, nn.functional.one_hot(letters, len(LETTERS)).float()


rnn = CharRNN()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)


def train(category, line):
    hidden = torch.zeros(1, rnn.width)
    optimizer.zero_grad()
    for letter in line:
        output, hidden = rnn(letter[None], hidden)
    loss = criterion(output, torch.tensor([category]))
    loss.backward()
    optimizer.step()
    return output, loss.item()


rnn = CharRNN()
total, right = 0.0, 0
for number in range(1, 1001):
    category, line = random_name()
    output, loss = train(category, line)
    total += loss
    right += int(output.argmax().item() == category)
    if number % 200 == 0:
        print(f"names {number:4d} loss {total / 200:.3f} right {right / 200:.2f}")
        total, right = 0.0, 0
