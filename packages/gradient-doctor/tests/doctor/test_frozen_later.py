"""Class 4: frozen when backward comes, whatever requires_grad is at other times."""

from doctor.look import look

TURNS = """\
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
first = torch.optim.Adam(net[0].parameters())
second = torch.optim.Adam(net[2].parameters())
for _ in range(8):
    loss = net(torch.randn(8, 4)).square().mean()
    first.zero_grad()
    second.zero_grad()
    loss.backward()
    first.step()
    for p in net[2].parameters():
        p.requires_grad = True
    second.step()
    for p in net[2].parameters():
        p.requires_grad = {last}  # HERE
"""


def test_thawed_for_the_step_alone(tmp_path):
    assert "holds only frozen" in look(tmp_path, TURNS.format(last="False")).one(4).what
    look(tmp_path, TURNS.format(last="True")).clean()


ADAPTERS = """\
class Low(nn.Linear):
    def __init__(self, size):
        super().__init__(size, size)
        self.lora_A = nn.Parameter(torch.randn(2, size))
        self.lora_B = nn.Parameter(torch.{second}(size, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T

body, head = nn.Sequential(Low(4), nn.Tanh(), Low(4)), nn.Linear(4, 1)
body.requires_grad_(False)  # HERE
optimizer = torch.optim.Adam(head.parameters())
for _ in range(6):
    loss = head(body(torch.randn(8, 4))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_new_adapters_that_a_freeze_took_too(tmp_path):
    look(tmp_path, ADAPTERS.format(second="zeros")).one(4)


def test_trained_adapters_may_rest(tmp_path):
    look(tmp_path, ADAPTERS.format(second="randn")).clean()
