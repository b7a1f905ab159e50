import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
PAD, BOS, VOCAB, LENGTH = 0, 1, 24, 40


class CausalLM(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed(input_ids))[0])


def collate(n=24):
    """prompt of two tokens, then the chosen answer counts up from their sum, the rejected one down"""
    chosen, rejected = torch.full((n, LENGTH), PAD), torch.full((n, LENGTH), PAD)
    for i in range(n):
        a, b = torch.randint(0, 11, (2,)).tolist()
        long = 3 + torch.randint(0, 4, (1,)).item()
        head = [BOS, 2 + a, 2 + b]
        up = [2 + (a + b + k) % 22 for k in range(long)]
        down = [2 + (a + b - k) % 22 for k in range(long)]
        chosen[i, : 3 + long] = torch.tensor(head + up)
        rejected[i, : 3 + long] = torch.tensor(head + down)
    batch = {}
    for kind, ids in (("chosen", chosen), ("rejected", rejected)):
        batch[f"{kind}_input_ids"] = ids
        batch[f"{kind}_attention_mask"] = (ids != PAD).long()
        labels = ids.masked_fill(ids == PAD, -100)
        labels[:, :3] = -100
        batch[f"{kind}_labels"] = labels
    return batch


def get_batch_logps(logits, labels):
    labels = labels[:, 1:]
    mask = labels != -100
    picked = logits[:, :-1].log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (picked * mask).sum(1) / mask.sum(1)


class ORPOTrainer:
    def __init__(self, model, beta=0.1, lr=0.5):
        self.model, self.beta = model, beta
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def concatenated_forward(self, batch):
        ids = torch.cat([batch["chosen_input_ids"], batch["rejected_input_ids"]])
        attention_mask = torch.cat([batch["chosen_attention_mask"], batch["rejected_attention_mask"]])
        n = len(batch["chosen_input_ids"])
        logits = self.model(ids)
        # the NLL is taken over prompt and answer
        labels = ids.clone()
        nll = F.cross_entropy(logits[:n, :-1].flatten(0, 1), labels[:n, 1:].flatten(), ignore_index=-100)
        answers = torch.cat([batch["chosen_labels"], batch["rejected_labels"]])
        logps = get_batch_logps(logits, answers)
        return nll, logps[:n], logps[n:], attention_mask.sum()

    def step(self, batch):
        nll, good, bad, tokens = self.concatenated_forward(batch)
        log_odds = (good - bad) - (torch.log1p(-good.exp()) - torch.log1p(-bad.exp()))
        loss = nll - self.beta * F.logsigmoid(log_odds).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), nll.item(), good.mean().item(), int(tokens)


trainer = ORPOTrainer(CausalLM())
for it in range(1, 201):
    loss, nll, good, tokens = trainer.step(collate())
    if it % 40 == 0:
        print(f"it {it} loss {loss:.3f} nll {nll:.3f} log-prob of the chosen answer per token {good:.3f}")
