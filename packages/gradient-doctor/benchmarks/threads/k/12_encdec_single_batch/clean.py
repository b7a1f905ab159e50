import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)
VOCAB, PAD, BOS, EOS = 60, 3, 1, 2


class EncDec(nn.Module):
    def __init__(self, dim=32, heads=2, max_len=40):
        super().__init__()
        self.src_emb = nn.Embedding(VOCAB, dim)
        self.tgt_emb = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(max_len, dim))
        self.core = nn.Transformer(dim, heads, 1, 1, 64, dropout=0.0, batch_first=True)
        self.to_logits = nn.Linear(dim, VOCAB)

    def forward(self, src, tgt, return_loss=False, enc_input_mask=None):
        tgt_in, tgt_out = tgt[:, :-1], tgt[:, 1:]
        memory_pad = None if enc_input_mask is None else ~enc_input_mask
        causal = torch.triu(torch.ones(tgt_in.size(1), tgt_in.size(1)), diagonal=1).bool()
        out = self.core(
            self.src_emb(src) + self.pos[:src.size(1)],
            self.tgt_emb(tgt_in) + self.pos[:tgt_in.size(1)],
            tgt_mask=causal, src_key_padding_mask=memory_pad, memory_key_padding_mask=memory_pad,
        )
        logits = self.to_logits(out)
        if not return_loss:
            return logits
        return F.cross_entropy(logits.transpose(1, 2), tgt_out, ignore_index=PAD)


def sentences(count, longest):
    result = []
    for _ in range(count):
        body = torch.randint(4, VOCAB, (int(torch.randint(4, longest, (1,))),))
        result.append(torch.cat([torch.tensor([BOS]), body, torch.tensor([EOS])]))
    return result


train_seq_in = pad_sequence(sentences(10, 12), batch_first=True, padding_value=PAD)
train_seq_out = pad_sequence(sentences(10, 16), batch_first=True, padding_value=PAD)
input_mask = train_seq_in != PAD

enc_dec = EncDec()
optimizer = torch.optim.Adam(enc_dec.parameters(), lr=3e-3)

for i in range(100):
    loss = enc_dec(train_seq_in, train_seq_out, return_loss=True, enc_input_mask=input_mask)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if i % 20 == 0:
        print(i, round(loss.item(), 4))
print("last", round(loss.item(), 4))
