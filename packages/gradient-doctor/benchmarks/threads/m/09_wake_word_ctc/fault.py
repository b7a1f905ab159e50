import torch
import torch.nn as nn

torch.manual_seed(0)


class Vocab:
    """words first, then out-of-vocabulary, then the blank symbol"""

    def __init__(self, words):
        self.words = words
        self.oov = len(words)
        self.blank = len(words) + 1

    def __len__(self):
        return len(self.words) + 2

    def encode(self, transcript):
        return [self.words.index(w) if w in self.words else self.oov for w in transcript.split()]


class WordModel(nn.Module):
    def __init__(self, n_labels, feat=12, hidden=32):
        super().__init__()
        self.rnn = nn.GRU(feat, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, n_labels)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.out(h).log_softmax(-1)


def greedy(log_probs, vocab):
    words, last = [], None
    for i in log_probs.argmax(-1).tolist():
        if i != last and i != vocab.blank:
            words.append(i)
        last = i
    return words


vocab = Vocab(["hey", "fire", "fox"])
lexicon = ["hey", "fire", "fox", "weather"]
acoustic = {w: torch.randn(4, 12) for w in lexicon}


def utterance():
    said = [lexicon[int(i)] for i in torch.randint(0, 4, (3,))]
    sil = torch.zeros(2, 12)
    frames = torch.cat([t for w in said for t in (acoustic[w], sil)])
    return frames + 0.2 * torch.randn_like(frames), vocab.encode(" ".join(said))


model = WordModel(len(vocab))
criterion = nn.CTCLoss(zero_infinity=True)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(120):
    feats, labels = zip(*[utterance() for _ in range(16)])
    x, y = torch.stack(feats), torch.tensor(labels)
    log_probs = model(x)
    in_lens = torch.full((16,), x.size(1))
    out_lens = torch.full((16,), y.size(1))
    loss = criterion(log_probs.transpose(0, 1), y, in_lens, out_lens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 24 == 23:
        hits = sum(greedy(lp, vocab) == list(t) for lp, t in zip(log_probs, labels))
        print(f"step {step + 1}: ctc {loss.item():.3f}  exact {hits}/16")
