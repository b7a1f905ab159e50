"""Training loops without an optimizer (7), or without a backward (21)."""

from doctor.look import look

LOOP = """\
def take_step(model):
    for p in model.parameters():
        p.data -= 0.1 * p.grad
        p.grad = None

model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
x, y = torch.randn(16, 6), torch.randint(0, 3, (16,))
for step in range(20):
    loss = F.cross_entropy(model(x), y)
    loss.backward()  # HERE
    {rest}
"""


def test_nobody_uses_the_gradients(tmp_path):
    finding = look(tmp_path, LOOP.format(rest="print(step, loss.item())")).one(7)
    assert "no optimizer at all" in finding.what


def test_somebody_does(tmp_path):
    for rest in (
        "print(loss.item()); take_step(model)",
        "print(loss.item(), sum(p.grad.norm() for p in model.parameters()))",  # looks at them
        "model.zero_grad(); print(loss.item())",
        "pass",  # measures time
    ):
        look(tmp_path, LOOP.format(rest=rest)).clean()


TRAINER = """\
class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x):
        return self.net(x)

    def training_step(self, x, y):
        loss = F.cross_entropy(self(x), y)  # HERE
        print(float(loss))
        {result}

task = Task(){mode}
optimizer = torch.optim.Adam(task.parameters())
for _ in range(12):
    loss = task.training_step(torch.randn(8, 6), torch.randint(0, 3, (8,)))
    if loss is not None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_loss_that_is_not_returned(tmp_path):
    finding = look(tmp_path, TRAINER.format(result="pass", mode="")).one(21)
    assert "backward is never called" in finding.what
    look(tmp_path, TRAINER.format(result="return loss", mode="")).clean()
    look(tmp_path, TRAINER.format(result="pass", mode=".eval()")).clean()  # an evaluation
