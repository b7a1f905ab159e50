"""Numbers from `.item()` in a traced step are plain floats, and are known again all the same."""

import gc
import importlib
import statistics
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from doctor.snippets import loop, nothing, only
from gradient_doctor import Doctor
from gradient_doctor.findings import Site
from gradient_doctor.python_numbers import Numbers
from gradient_doctor.taint import Taint

SCALE = 0.3


class Setting:
    """A loss with a term that left torch; `term` brings it back in some way."""

    def __init__(self, term):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.term, self.seen, self.baseline, self.rate = term, [], 0.0, 0.25

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


def combined(loss, bonus):
    return loss + bonus


def as_an_argument(setting, loss, out):
    return combined(loss, 2 * out.mean().item())


def from_a_generator(setting, loss, out):
    for reward in (2 * row.mean().item() for row in out[:1]):
        loss = loss + reward
    return loss


def scores(out):
    for row in out[:2]:
        yield 2 * row.mean().item()


def yielded(setting, loss, out):
    for reward in scores(out):
        loss = loss + reward
    return loss


def from_around(setting, loss, out):
    reward = 2 * out.mean().item()

    def total():
        return loss + reward

    return total()


WAYS = [
    from_a_generator,
    yielded,
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


@pytest.mark.parametrize(
    ("term", "function"), [(as_an_argument, "combined"), (from_around, "total")]
)
def test_a_term_that_is_added_in_another_function(term, function):
    findings = Setting(term).findings()
    assert [f.number for f in findings] == [23]
    assert function in _functions(findings[0])
    assert findings[0].parameters == ("model.weight", "model.bias")


def _functions(finding):
    """Of the line where the number leaves torch, and of the sum that it enters."""
    return {site.function for site in (finding.site, *finding.related)}


@pytest.mark.parametrize("term", WAYS)
def test_a_term_of_the_loss_that_left_torch_is_told(term):
    findings = Setting(term).findings()
    assert [f.number for f in findings] == [23]
    assert term.__name__ in _functions(findings[0])
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


def an_attribute_beside(setting, loss, out):
    setting.last = out.mean().item()
    setting.seen.append(setting.last)
    return loss * setting.rate + setting.rate


def another_objects_attribute(setting, loss, out):
    setting.rate_seen = loss.item()
    setting.seen.append(setting.rate_seen)
    return loss * Fixed.rate_seen


def one_of_two(setting, loss, out):
    shown, weight = loss.item(), setting.rate
    setting.seen.append(shown)
    return loss * weight


def an_entry_beside(setting, loss, out):
    by_weight, weight = {}, float(setting.rate)
    by_weight[weight] = loss.item()
    setting.seen.append(by_weight[weight])
    return loss * weight


class Fixed:
    rate_seen = 0.25


NO_DATA = [
    logged,
    logged_with_a_rate,
    overwritten,
    an_argument,
    an_attribute_beside,
    another_objects_attribute,
    one_of_two,
    an_entry_beside,
]


@pytest.mark.parametrize("term", NO_DATA)
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


def imported(folder, monkeypatch, text):
    (folder / "edited_later.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("edited_later", None)
    return importlib.import_module("edited_later")


LOGGED = """
SCALE = 0.3


def term(setting, loss, out):
    shown = 2 * loss.item()
    setting.seen.append(shown)
    return loss + SCALE
"""


def test_a_file_that_was_edited_after_its_import_says_nothing(tmp_path, monkeypatch):
    module = imported(tmp_path, monkeypatch, LOGGED)
    (tmp_path / "edited_later.py").write_text(LOGGED.replace("SCALE\n", "shown\n"))
    assert not Setting(module.term).findings()


def test_a_long_sum_in_the_file_is_no_trouble(tmp_path, monkeypatch):
    long = f"LONG = {' + '.join('1' for _ in range(1500))}\n"
    module = imported(tmp_path, monkeypatch, long + LOGGED.replace("SCALE\n", "shown\n"))
    assert [f.number for f in Setting(module.term).findings()] == [23]


def test_many_numbers_are_kept_by_line_and_few_are_looked_for(monkeypatch):
    looked, real = [], Numbers.behind
    monkeypatch.setattr(Numbers, "behind", lambda *args: looked.append(1) or real(*args))

    def term(setting, loss, out):
        values = (out.detach().repeat(200, 1) * 1.0).flatten().tolist()
        again = torch.tensor([2 * value for value in values])
        return loss + again.mean()

    Setting(term).findings()
    assert 0 < len(looked) < 100  # of 4,800 numbers in each of three steps
    numbers, taint = Numbers(), Taint(1, 0, frozenset(), Site("a.py", 3), "tolist", 0)
    for value in range(1000):
        numbers.keep(float(value), taint)
    assert numbers._lines == {("a.py", 3): taint}


def test_a_function_of_math_takes_the_number_of_a_tensor(tmp_path):
    source = """
import math
scale = nn.Parameter(torch.tensor(2.6))
""" + loop(
        "loss = F.cross_entropy(head(body(x)) * {}, y){}",
    ).replace("*head.parameters()", "*head.parameters(), scale")
    finding = only(tmp_path, source.format("math.exp(scale)", "  # FAULT"), 3)
    assert len(finding.parameters) == 1
    nothing(tmp_path, source.format("scale.exp()", ""))
