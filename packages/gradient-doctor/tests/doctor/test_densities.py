"""Classes 3, 24 and 32: divergences, likelihoods, draws, and the clipped objective of a policy."""

import pytest

from doctor.snippets import nothing, only

AUTOENCODER = """
encoder, decoder = nn.Linear(8, 6), nn.Linear(3, 8)
adam = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for step in range(4):
    x = torch.rand(32, 8)
    mu, v = encoder(x).chunk(2, 1)
{body}
    adam.zero_grad()
    loss.backward()
    adam.step()
"""
DRAW = "z = mu + (v / 2).exp() * torch.randn_like(mu)"
KL = "kl = -0.5 * (1 + v - mu.pow(2) - v.exp()).sum(1).mean()"
ERROR = "error = (decoder(z) - x).square().sum(1).mean()"
SUM = "loss = error + kl"
NORMAL = "q = Normal(mu, (v / 2).exp())"
LIKELY = "seen = Normal(decoder(z), 1.0).log_prob(x).sum(1).mean()"


def autoencoder(*lines):
    return AUTOENCODER.format(body="\n".join(f"    {line}" for line in lines))


FAULTS = {
    "formula": (DRAW, KL.replace("-0.5", "0.5") + "  # FAULT", ERROR, SUM),
    "a-sign-inside": (DRAW, KL.replace("- v.exp", "+ v.exp") + "  # FAULT", ERROR, SUM),
    "subtracted": (DRAW, KL, ERROR, "loss = error - kl  # FAULT"),
    "elbo": (DRAW, KL, LIKELY, "bound = seen - kl", "loss = 1.0 * bound  # FAULT"),
}


@pytest.mark.parametrize("lines", FAULTS.values(), ids=FAULTS)
def test_a_divergence_or_a_likelihood_turned(tmp_path, lines):
    only(tmp_path, autoencoder(*lines), 32)


def test_a_draw_without_gradient(tmp_path):
    only(tmp_path, autoencoder(NORMAL, "z = q.sample()  # FAULT", KL, ERROR, SUM), 3)


CLEAN = {
    "formula": (DRAW, KL, ERROR, SUM),
    "elbo": (DRAW, KL, LIKELY, "bound = seen - kl", "loss = -bound"),
    "pathwise": (NORMAL, "z = q.rsample()", KL, ERROR, SUM),
    "score-function": (
        NORMAL,
        "z = q.sample()",
        KL,
        ERROR,
        "loss = error + kl + (q.log_prob(z).sum(1) * (x.sum(1) - 4)).mean()",
    ),
    "annealed": (DRAW, KL, ERROR, "loss = error + step / 4 * kl"),
}


@pytest.mark.parametrize("lines", CLEAN.values(), ids=CLEAN)
def test_autoencoders_that_are_right(tmp_path, lines):
    nothing(tmp_path, autoencoder(*lines))


PPO = """
policy = nn.Linear(4, 3)
adam = torch.optim.Adam(policy.parameters(), lr=1e-2)
for batch in range(4):
    x = torch.randn(64, 4)
    with torch.no_grad():
        behind = Categorical(logits=policy(x))
        action = behind.sample()
        stored = behind.log_prob(action)
    gain = torch.randn(64)
    for epoch in range(3):
        pi = Categorical(logits=policy(x))
{body}
        adam.zero_grad()
        loss.backward()
        adam.step()
"""
OLD = "old = stored"
NEW = "new = pi.log_prob(action)"
RATIO = "ratio = (new - old).exp()"
LOSS = "loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()"


def ppo(*lines):
    return PPO.format(body="\n".join(f"        {line}" for line in lines))


def test_the_old_policy_computed_anew(tmp_path):
    old = "old = Categorical(logits=policy(x)).log_prob(action).detach()  # FAULT"
    only(tmp_path, ppo(old, NEW, RATIO, LOSS), 24)


def test_another_action(tmp_path):
    only(tmp_path, ppo(OLD, "new = pi.log_prob(pi.sample())  # FAULT", RATIO, LOSS), 24)


def test_the_objective_minimised(tmp_path):
    only(tmp_path, ppo(OLD, NEW, RATIO, LOSS.replace("-torch", "torch") + "  # FAULT"), 32)


def test_an_entropy_by_hand(tmp_path):
    entropy = "p, log = F.softmax(policy(x), 1), F.log_softmax(policy(x), 1)"
    own = "scores = policy(x); p, log = scores.softmax(1), scores.log_softmax(1)"
    bonus = "entropy = -(p * log).sum(1).mean()"
    gain = "score = -(log.gather(1, pi.sample()[:, None]).squeeze(1) * gain).mean()"
    only(tmp_path, ppo(own, bonus, gain, "loss = score + 0.01 * entropy  # FAULT"), 32)
    nothing(tmp_path, ppo(own, bonus, gain, "loss = score - 0.01 * entropy"))
    nothing(tmp_path, ppo(entropy, bonus, "loss = 0.01 * entropy"))


OBJECTIVES = {
    "min": (OLD, NEW, RATIO, LOSS),
    "max-of-losses": (
        OLD,
        NEW,
        RATIO,
        "loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()",
    ),
    "minibatches": (
        "part = torch.randperm(64)[:16]",
        "new = Categorical(logits=policy(x[part])).log_prob(action[part])",
        "ratio = (new - stored[part]).exp()",
        "gain_ = gain[part]",
        "loss = -torch.min(ratio * gain_, ratio.clamp(0.8, 1.2) * gain_).mean()",
    ),
}


@pytest.mark.parametrize("lines", OBJECTIVES.values(), ids=OBJECTIVES)
def test_objectives_that_are_right(tmp_path, lines):
    nothing(tmp_path, ppo(*lines))


def test_one_update_for_each_batch_has_a_ratio_of_one(tmp_path):
    source = ppo("old = new = pi.log_prob(action)", "ratio = (new - old.detach()).exp()", LOSS)
    nothing(tmp_path, source.replace("range(3)", "range(1)"))
