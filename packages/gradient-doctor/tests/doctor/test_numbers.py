"""Numbers from `.item()` in a traced step are plain floats, and are known again all the same."""

import gc
import statistics
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from gradient_doctor import Doctor

SCALE = 0.3


class Setting:
    """A loss with a term that left torch; `term` brings it back in some way."""

    def __init__(self, term):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.term, self.seen, self.baseline = term, [], 0.0

    def findings(self):
        with Doctor({"model": self.model}, {"sgd": self.sgd}) as doctor:
            for _ in range(3):
                out = self.model(torch.randn(8, 4))
                loss = self.term(self, out.square().mean(), out)
                self.sgd.zero_grad()
                loss.backward()
                self.sgd.step()
                doctor.step()
        return doctor.findings


def as_it_is(setting, loss, out):
    reward = out.mean().item()
    return loss + reward


def in_an_expression(setting, loss, out):
    reward = out.mean().item() * 5.0
    return 0.7 * loss + SCALE * reward


def in_one_statement(setting, loss, out):
    return loss + 2.0 * out.mean().item()


def augmented(setting, loss, out):
    reward = 0.0
    reward += out.mean().item()
    loss += reward / 2
    return loss


def scored(out):
    total = 0.0
    for row in out:
        total += row.mean().item()
    return total / len(out)


def by_a_function(setting, loss, out):
    reward = scored(out)
    return loss + reward


def by_a_list(setting, loss, out):
    rewards = [row.mean().item() for row in out]
    return loss + sum(rewards) / len(rewards)


def by_a_list_that_grows(setting, loss, out):
    rewards = []
    for row in out:
        rewards.append(row.mean().item())
    reward = statistics.fmean(rewards)
    return loss + reward


def by_numpy(setting, loss, out):
    reward = np.mean(out.mean(1).tolist())
    return loss + reward


def by_an_attribute(setting, loss, out):
    setting.baseline = 0.9 * setting.baseline + 0.1 * out.mean().item()
    return loss + setting.baseline


def by_float(setting, loss, out):
    reward = -float(out.mean().detach())
    return loss + reward


WAYS = [
    as_it_is,
    in_an_expression,
    in_one_statement,
    augmented,
    by_a_function,
    by_a_list,
    by_a_list_that_grows,
    by_numpy,
    by_an_attribute,
    by_float,
]


@pytest.mark.parametrize("term", WAYS)
def test_a_term_of_the_loss_that_left_torch_is_told(term):
    findings = Setting(term).findings()
    assert [f.number for f in findings] == [23]
    assert findings[0].site.function == term.__name__
    assert "no gradient" in findings[0].what
    assert findings[0].parameters == ("model.weight", "model.bias")


# what is no data


def logged(setting, loss, out):
    setting.seen.append(loss.item())
    return SCALE * loss + 0.5


def logged_with_a_rate(setting, loss, out):
    rate = 0.25
    shown = loss.item() * rate
    setting.seen.append(shown)
    return loss * rate


def overwritten(setting, loss, out):
    weight = out.mean().item()
    setting.seen.append(weight)
    weight = 0.5
    return loss * weight


def an_argument(setting, loss, out):
    setting.seen.append(out.mean().item())
    return nn.functional.smooth_l1_loss(out, torch.zeros_like(out), beta=0.5) * SCALE


@pytest.mark.parametrize("term", [logged, logged_with_a_rate, overwritten, an_argument])
def test_constants_of_the_program_beside_numbers_that_left(term):
    setting = Setting(term)
    assert not setting.findings()
    assert len(setting.seen) == 3


def test_backward_of_a_number_names_where_it_left():
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(doctor):
        with doctor:
            loss = model(torch.randn(8, 4)).square().mean()
            total = 0.5 * loss.item()
            total.backward()

    doctor = Doctor({"model": model}, {"sgd": sgd})
    with pytest.raises(AttributeError):
        step(doctor)
    (finding,) = [f for f in doctor.findings if f.number in (1, 3)]
    assert "item" in finding.what + finding.why


# nothing of the user's is changed


def test_they_are_plain_floats_and_libraries_are_as_they_were():
    yaml = pytest.importorskip("yaml")
    tables = dict(yaml.SafeDumper.yaml_representers), dict(yaml.Dumper.yaml_representers)
    paths = list(sys.meta_path)

    def term(setting, loss, out):
        setting.seen += [loss.item(), float(loss.detach()), *out[0].tolist()]
        return loss

    setting = Setting(term)
    assert not setting.findings()
    assert {type(number) for number in setting.seen} == {float}
    assert yaml.safe_load(yaml.safe_dump(setting.seen)) == setting.seen
    assert type(statistics.mean(setting.seen)) is float
    assert (yaml.SafeDumper.yaml_representers, yaml.Dumper.yaml_representers) == tables
    assert sys.meta_path == paths


def test_saving_is_torch_s_own(tmp_path):
    save = torch.save

    def term(setting, loss, out):
        assert torch.save is save
        torch.save({"loss": loss.item()}, tmp_path / "state.pt")
        return loss

    assert not Setting(term).findings()
    assert type(torch.load(tmp_path / "state.pt", weights_only=True)["loss"]) is float


def test_locals_of_the_user_are_neither_kept_alive_nor_emptied():
    kept = []

    def term(setting, loss, out):
        large = torch.zeros(1000)
        kept.append(weakref.ref(large))
        reward = out.mean().item() * 2
        total = loss + reward
        del large
        gc.collect()
        assert kept[-1]() is None
        mine = locals()
        again = total + reward
        assert mine["reward"] == reward
        return again

    assert {f.number for f in Setting(term).findings()} == {23}
    assert len(kept) == 3
