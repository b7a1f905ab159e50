"""What popular training code does, and what is right in it though it looks like a fault."""

from doctor.snippets import nothing, only

TEMPORAL = """
value = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
actor = nn.Linear(4, 2)
optimizer = torch.optim.Adam([*value.parameters(), *actor.parameters()])
for step in range(4):
    state, after, reward = torch.randn(32, 4), torch.randn(32, 4), torch.rand(32, 1)
    target = reward + 0.98 * value(after){mark}
    delta = target - value(state)
    chosen = actor(state).softmax(1).gather(1, torch.randint(0, 2, (32, 1)))
    loss = (F.smooth_l1_loss(value(state), target{end}) - chosen.log() * delta.detach()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_advantage_that_is_detached_later(tmp_path):
    """minimalRL: the difference of two values that have gradients is learnt from by nobody."""
    nothing(tmp_path, TEMPORAL.format(mark="", end=".detach()"))


def test_a_target_that_is_learnt_from(tmp_path):
    only(tmp_path, TEMPORAL.format(mark="  # FAULT", end=""), 30)


WRAPPED = """
class Wrapper(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer
    @property
    def param_groups(self):
        return self.optimizer.param_groups
    @property
    def state(self):
        return self.optimizer.state
    @property
    def defaults(self):
        return self.optimizer.defaults
    def step(self, closure=None):
        self.optimizer.step(closure)
    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

model = nn.Linear(4, 1)
optimizer = Wrapper(torch.optim.Adam(model.parameters()))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
for step in range(6):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
"""


def test_a_scheduler_of_an_optimizer_in_a_wrapper(tmp_path):
    """transformers' Trainer: the scheduler is given accelerate's wrapper, the wrapped one steps."""
    nothing(tmp_path, WRAPPED)


CRITIC = """
generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
critic = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
generators = torch.optim.Adam(generator.parameters())
critics = torch.optim.Adam(critic.parameters())
for step in range(6):
    real, noise = torch.randn(8, 4), torch.randn(8, 4)
    critics.zero_grad()
    fake = generator(noise)
    between = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
    slope, = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    loss.backward()
    critics.step()
    generators.zero_grad()
    if step % 2 == 0:
        (-critic(generator(noise)).mean()).backward()
        generators.step()
"""


def test_a_wasserstein_critic_whose_fakes_are_not_detached(tmp_path):
    """PyTorch-GAN's wgan_gp: the generator's gradients of the critic's loss are erased."""
    nothing(tmp_path, CRITIC)
