"""Classes 30 and 32: a loss that trains another network, and a loss that is driven up."""

import pytest

from doctor.snippets import look, loop, nothing, only, serious

ACTOR_CRITIC = """
policy, critic = nn.Linear(4, 3), nn.Linear(4, 1)
actor = torch.optim.Adam(policy.parameters(), lr=1e-3)
value = torch.optim.Adam(critic.parameters(), lr=1e-3)
for step in range(4):
    x, returns = torch.randn(16, 4), torch.randn(16)
    distribution = Categorical(logits=policy(x))
    action = distribution.sample()
{body}
"""


def actor_critic(body):
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return ACTOR_CRITIC.format(body=lines)


LIVE_ADVANTAGE = """
advantage = returns - critic(x).squeeze(-1)  # FAULT
loss = -(distribution.log_prob(action) * advantage).mean() + advantage.square().mean()
actor.zero_grad()
value.zero_grad()
loss.backward()
actor.step()
value.step()
"""
LEFTOVER = """
actor.zero_grad()
value.zero_grad()
(-critic(policy(x).softmax(-1) @ torch.ones(3, 4)).mean()).backward()  # FAULT
actor.step()
(critic(x).squeeze(-1) - returns).square().mean().backward()
value.step()
"""


def test_an_advantage_with_a_gradient(tmp_path):
    finding = only(tmp_path, actor_critic(LIVE_ADVANTAGE), 30)
    assert finding.parameters == ("critic.weight", "critic.bias")


def test_gradients_left_in_the_other_network(tmp_path):
    finding = only(tmp_path, actor_critic(LEFTOVER), 30)
    assert finding.parameters == ("critic.weight", "critic.bias")
    assert "value.zero_grad()" in finding.fix


CLEAN_OWNERS = {
    "detached": LIVE_ADVANTAGE.replace("* advantage)", "* advantage.detach())"),
    "cleared-between": LEFTOVER.replace("actor.step()\n", "actor.step()\nvalue.zero_grad()\n"),
    "one-backward": """
loss = -(distribution.log_prob(action) * returns).mean() + critic(x).square().mean()
actor.zero_grad()
value.zero_grad()
loss.backward()
actor.step()
value.step()
""",
    "entropy-bonus": """
loss = -(distribution.log_prob(action) * returns).mean()
loss = loss + (distribution.probs * distribution.logits).sum(-1).mean()
actor.zero_grad()
value.zero_grad()
(loss + critic(x).square().mean()).backward()
actor.step()
value.step()
""",
    "two-losses-two-steps": """
actor.zero_grad()
(-(distribution.log_prob(action) * returns).mean()).backward()
actor.step()
value.zero_grad()
(critic(x).squeeze(-1) - returns).square().mean().backward()
value.step()
""",
}


@pytest.mark.parametrize("body", CLEAN_OWNERS.values(), ids=CLEAN_OWNERS)
def test_each_loss_has_its_own(tmp_path, body):
    nothing(tmp_path, actor_critic(body))


SIGNS = {
    "minus-a-loss": ("loss = -F.cross_entropy(head(body(x)), y)  # FAULT",),
    "negative-factor": ("fit = F.mse_loss(head(body(x)), x[:, :3])", "loss = -0.5 * fit  # FAULT"),
    "no-minus": (
        "action = Categorical(logits=head(body(x)).detach()).sample()",
        "chosen = head(body(x)).log_softmax(-1).gather(1, action[:, None]).squeeze(1)",
        "loss = (chosen * torch.rand(8)).mean()  # FAULT",
    ),
    "no-minus-by-density": (
        "policy = Categorical(logits=head(body(x)))",
        "loss = (policy.log_prob(policy.sample()) * torch.rand(8)).sum()  # FAULT",
    ),
    "a-similarity": ("loss = F.cosine_similarity(head(body(x)), x[:, :3]).mean()  # FAULT",),
    "a-divergence": (
        "mean, spread = body(x).chunk(2, -1)",
        "divergence = 0.5 * (1 + spread - mean**2 - spread.exp()).sum(-1)  # FAULT",
        "loss = F.cross_entropy(head(body(x)), y) + divergence.mean()",
    ),
    "minus-a-divergence": (
        "mean, spread = body(x).chunk(2, -1)",
        "divergence = -0.5 * torch.sum(1 + spread - mean**2 - spread.exp())",
        "loss = F.cross_entropy(head(body(x)), y) - 0.1 * divergence  # FAULT",
    ),
}
CLEAN_SIGNS = {
    "a-loss": ("loss = F.cross_entropy(head(body(x)), y)",),
    "with-a-minus": (
        "policy = Categorical(logits=head(body(x)))",
        "loss = -(policy.log_prob(policy.sample()) * torch.rand(8)).sum()",
    ),
    "minus-first": (
        "policy = Categorical(logits=head(body(x)))",
        "loss = (-policy.log_prob(policy.sample()) * torch.rand(8)).mean()",
    ),
    "weights-of-both-signs": (
        "policy = Categorical(logits=head(body(x)))",
        "loss = (policy.log_prob(policy.sample()) * torch.randn(8)).mean()",
    ),
    "an-entropy": (
        "policy = Normal(head(body(x)), 1.0)",
        "action = policy.rsample()",
        "loss = (0.2 * policy.log_prob(action).sum(-1) + action.square().sum(-1)).mean()",
    ),
    "one-weight-for-all": (
        "policy = Categorical(logits=head(body(x)))",
        "loss = (policy.log_prob(policy.sample()) * torch.full((8,), 0.2)).mean()",
    ),
    "minus-a-similarity": ("loss = -F.cosine_similarity(head(body(x)), x[:, :3]).mean()",),
    "a-divergence": (
        "mean, spread = body(x).chunk(2, -1)",
        "divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(-1)",
        "loss = F.cross_entropy(head(body(x)), y) + divergence.mean()",
    ),
    "a-lower-bound": (
        "mean, spread = body(x).chunk(2, -1)",
        "bound = (1 + spread - mean**2 - spread.exp()).mean() - F.mse_loss(mean, x)",
        "loss = -bound + F.cross_entropy(head(body(x)), y)",
    ),
    "a-term-of-several": (
        "loss = F.cross_entropy(head(body(x)), y) - 0.1 * F.mse_loss(head(body(x)), x[:, :3])",
    ),
}


@pytest.mark.parametrize("lines", SIGNS.values(), ids=SIGNS)
def test_the_wrong_way(tmp_path, lines):
    only(tmp_path, loop(*lines), 32)


@pytest.mark.parametrize("lines", CLEAN_SIGNS.values(), ids=CLEAN_SIGNS)
def test_the_right_way(tmp_path, lines):
    nothing(tmp_path, loop(*lines))


def test_maximised(tmp_path):
    source = loop("loss = F.cross_entropy(head(body(x)), y)")
    adam = "torch.optim.Adam([*body.parameters(), *head.parameters()]"
    only(tmp_path, source.replace(f"{adam})", f"{adam}, maximize=True)  # FAULT"), 32)
    source = loop("loss = -F.cross_entropy(head(body(x)), y)")
    nothing(tmp_path, source.replace(adam, adam + ", maximize=True"))


GAN = """
maker, judge = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
making, judging = (torch.optim.Adam(net.parameters(), lr=1e-3) for net in (maker, judge))
{before}
for step in range(6):
    made = maker(torch.randn(16, 4))
    loss = F.softplus(-judge(torch.randn(16, 2))).mean() + F.softplus(judge(made)).mean()  {mark}
    judging.zero_grad()
    loss.backward()
    judging.step()
    {between}
    F.softplus(-judge(maker(torch.randn(16, 4)))).mean().backward()
    making.step()
    {after}
"""


def test_generated_samples_that_nobody_detached(tmp_path):
    """They reach the generator; that is a fault only where its optimizer takes what they leave."""
    fault = GAN.format(before="", between="", after="making.zero_grad()", mark="# FAULT")
    finding = only(tmp_path, fault, 30)
    assert finding.parameters == ("maker.weight", "maker.bias")
    nothing(tmp_path, GAN.format(before="", between="making.zero_grad()", after="", mark=""))


CONTEST = """
maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
judge = nn.Linear(4, 1)
one, two = torch.optim.RMSprop(maker.parameters()), torch.optim.RMSprop(judge.parameters())
for step in range(5):
    for _ in range(2):
        real, made = torch.randn(8, 4), maker(torch.randn(8, 4))
        loss = judge({given}).mean() - judge(real).mean()  # FAULT
        two.zero_grad()
        loss.backward()
        two.step()
    {clear}
    loss = -judge({scored}).mean()
    loss.backward()
    one.step()
    {after}
"""
FAKE = "maker(torch.randn(8, 4))"


def test_a_judge_whose_loss_stays_in_the_maker(tmp_path):
    source = CONTEST.format(given="made", clear="", scored=FAKE, after="one.zero_grad()")
    only(tmp_path, source, 30)


@pytest.mark.parametrize(("given", "clear"), [("made.detach()", ""), ("made", "one.zero_grad()")])
def test_a_judge_that_is_kept_apart(given, clear, tmp_path):
    after = "" if clear else "one.zero_grad()"
    nothing(tmp_path, CONTEST.format(given=given, clear=clear, scored=FAKE, after=after))


def test_a_loss_without_the_network_that_steps_on_it(tmp_path):
    source = CONTEST.format(given="made.detach()", clear="", scored="real", after="one.zero_grad()")
    source = source.replace("  # FAULT", "")
    source = source.replace("loss = -judge(real).mean()", "loss = -judge(real).mean()  # FAULT")
    examination, lines = look(tmp_path, source)
    found = {f.number: f for f in serious(examination)}
    assert 5 in found, "\n".join(map(str, examination.findings))
    assert found[5].site.line in lines
    assert "maker.0.weight" in found[5].parameters
