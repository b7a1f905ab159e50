"""Class 21: the best model under a second name."""

import pytest

from doctor.look import look

SCRIPT = """\
import copy

net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
x, y = torch.randn(16, 4), torch.randn(16, 1)
lowest = 1e9
for _ in range(10):
    loss = (net(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.item() < lowest:
        lowest = loss.item()
        {keep}  # HERE
{use}
"""


@pytest.mark.parametrize(
    ("keep", "use"),
    [
        ("best = net", "print(best(x).mean())"),
        ("best_state = net.state_dict()", "print(len(best_state))"),
    ],
)
def test_no_copy_is_kept(tmp_path, keep, use):
    assert "keeps no copy" in look(tmp_path, SCRIPT.format(keep=keep, use=use)).one(21).what


@pytest.mark.parametrize(
    ("keep", "use"),
    [
        ("best = copy.deepcopy(net)", "print(best(x).mean())"),
        ("best_state = copy.deepcopy(net.state_dict())", "print(len(best_state))"),
        ("best_state = net.state_dict(); copy.deepcopy(best_state)", ""),  # saved at once
        (
            "best_state = net.state_dict()\n"
            "        best_state = {k: v.clone() for k, v in best_state.items()}",
            "print(len(best_state))",
        ),
        ("best = net\n        break", "print(best(x).mean())"),
    ],
)
def test_a_copy_is_kept(tmp_path, keep, use):
    look(tmp_path, SCRIPT.format(keep=keep, use=use)).clean()


def test_a_search_keeps_one_of_many(tmp_path):
    look(
        tmp_path,
        """\
        x, y = torch.randn(16, 4), torch.randn(16, 1)
        lowest, best = 1e9, None
        for rate in (0.01, 0.1):
            net = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(net.parameters(), rate)
            for _ in range(6):
                loss = (net(x) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if loss.item() < lowest:
                lowest, best = loss.item(), net
                best_net = net
        print(best(x).mean(), best_net(x).mean())
        """,
    ).clean()
