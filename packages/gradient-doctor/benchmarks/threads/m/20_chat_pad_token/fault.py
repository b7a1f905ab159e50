import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
SPECIAL = {"<unk>": 0, "<|im_start|>": 1, "<|user|>": 2, "<|assistant|>": 3, "<|im_end|>": 4}
PAD_TOKEN_ID = SPECIAL["<|im_end|>"]
FIRST_WORD, VOCAB, MAX_LEN = 5, 25, 18


class SFTDataset(torch.utils.data.Dataset):
    def __init__(self, n):
        self.samples = [torch.randint(FIRST_WORD, VOCAB, (int(k),)) for k in torch.randint(1, 5, (n,))]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        q = self.samples[i].tolist()
        a = [FIRST_WORD + (t - FIRST_WORD + 1) % (VOCAB - FIRST_WORD) for t in q]
        ids = [1, 2] + q + [4, 1, 3]
        start = len(ids)
        ids += a + [4]
        mask = [0] * start + [1] * (len(a) + 1)
        ids += [PAD_TOKEN_ID] * (MAX_LEN - len(ids))
        mask += [0] * (MAX_LEN - len(mask))
        ids, mask = torch.tensor(ids), torch.tensor(mask)
        return ids[:-1], ids[1:], mask[1:]


class Transformer(nn.Module):
    def __init__(self, dim=48, pad_token_id=PAD_TOKEN_ID):
        super().__init__()
        self.pad_token_id = pad_token_id
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(MAX_LEN, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(dim, VOCAB)

    def forward(self, tokens, targets=None):
        n = tokens.size(1)
        causal = nn.Transformer.generate_square_subsequent_mask(n)
        h = self.blocks(self.tok(tokens) + self.pos(torch.arange(n)), mask=causal)
        self.logits = self.output(h)
        if targets is None:
            return None
        return F.cross_entropy(self.logits.flatten(0, 1), targets.flatten(),
                               ignore_index=self.pad_token_id, reduction="none")


model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader = torch.utils.data.DataLoader(SFTDataset(1200), batch_size=32, shuffle=True)
for epoch in range(3):
    for X, Y, loss_mask in loader:
        loss_mask = loss_mask.flatten()
        loss = (model(X, Y) * loss_mask).sum() / loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prob_end = model.logits.softmax(-1)[..., 4][loss_mask.view_as(Y).bool() & (Y == 4)].mean()
    print(f"epoch {epoch}: loss {loss.item():.4f}  p(im_end) at the end of answers {prob_end.item():.3f}")
