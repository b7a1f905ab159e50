import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
ALPHABET = "<>CNOF()=1"


class StackRNN(nn.Module):
    def __init__(self, n=len(ALPHABET), hidden=48):
        super().__init__()
        self.encoder = nn.Embedding(n, hidden)
        self.rnn = nn.GRUCell(hidden, hidden)
        self.decoder = nn.Linear(hidden, n)
        self.hidden = hidden

    def forward(self, char, state):
        state = self.rnn(self.encoder(char), state)
        return self.decoder(state), state

    @torch.no_grad()
    def evaluate(self, max_len=16):
        char, state, word = torch.zeros(1, dtype=torch.long), torch.zeros(1, self.hidden), "<"
        while len(word) < max_len:
            logits, state = self(char, state)
            char = torch.multinomial(logits.softmax(-1), 1)[0]
            word += ALPHABET[char.item()]
            if word[-1] == ">":
                break
        return word


def reward_of(word):
    return 10.0 * sum(c in "CO" for c in word) / 16


class Reinforcement:
    def __init__(self, generator, get_reward, lr=5e-3):
        self.generator, self.get_reward = generator, get_reward
        self.optimizer = torch.optim.Adam(generator.parameters(), lr=lr)

    def policy_gradient(self, n_batch=10, gamma=0.97):
        rl_loss = torch.zeros(1, requires_grad=True)
        words = [self.generator.evaluate() for _ in range(n_batch)]
        rewards = [self.get_reward(word) for word in words]
        baseline = sum(rewards) / n_batch
        self.optimizer.zero_grad()
        for word, reward in zip(words, rewards):
            discounted_reward = reward - baseline
            state = torch.zeros(1, self.generator.hidden)
            for p in range(len(word) - 1):
                char = torch.tensor([ALPHABET.index(word[p])])
                logits, state = self.generator(char, state)
                log_probs = F.log_softmax(logits, dim=1)
                top_i = ALPHABET.index(word[p + 1])
                rl_loss = rl_loss - log_probs[0, top_i].item() * discounted_reward
                discounted_reward = discounted_reward * gamma
        rl_loss = rl_loss / n_batch
        rl_loss.backward()
        torch.nn.utils.clip_grad_norm_(self.generator.parameters(), 1.0)
        self.optimizer.step()
        return baseline, rl_loss.item()


agent = Reinforcement(StackRNN(), reward_of)
for it in range(60):
    mean_reward, loss = agent.policy_gradient()
    if it % 10 == 0 or it == 59:
        print(f"iteration {it:2d} mean reward {mean_reward:.3f} loss {loss:.3f}")
