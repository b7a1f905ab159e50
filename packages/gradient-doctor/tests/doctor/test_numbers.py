"""Numbers from `.item()` in a traced step: libraries take them for the floats that they are."""

import importlib
import json
import statistics
import sys

import pytest
import torch
from torch import nn

from gradient_doctor import Doctor
from gradient_doctor.taint import Taint, TracedFloat, plain
from gradient_doctor.yaml_tables import teach_yaml


def traced(value=0.25):
    return TracedFloat(value, Taint(1, 0, frozenset(), None, "item", 0))


def losses():
    """Numbers of two traced steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with Doctor({"model": model}, {"sgd": sgd}) as doctor:
        for _ in range(2):
            loss = model(torch.randn(8, 4)).square().mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            found.append(loss.item())
            doctor.step()
    assert all(type(number) is TracedFloat for number in found)  # or nothing is tested here
    return found


def test_statistics_make_floats_of_their_type():
    numbers = losses()
    for middle in (statistics.mean, statistics.fmean, statistics.median, statistics.stdev):
        assert middle(numbers) == middle([float(n) for n in numbers])
    assert type(statistics.mean(numbers)) is float


def test_its_type_makes_floats_of_anything():
    assert type(type(traced())("0.5")) is float
    assert type(traced())() == 0.0
    assert TracedFloat.fromhex("0x1p-1") == 0.5


# PyYAML


@pytest.fixture
def without_yaml(monkeypatch):
    """As in a program that has not imported it yet."""
    for name in [n for n in sys.modules if n == "yaml" or n.startswith("yaml.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [n for n in sys.modules if n == "yaml" or n.startswith("yaml.")]:
        del sys.modules[name]


def dumps(yaml, value):
    # its dumpers in C cannot be imported twice in a process; they share these tables
    return yaml.safe_dump(value), yaml.dump(value)


def test_yaml_imported_after_the_number(without_yaml):
    numbers = losses()
    assert "yaml" not in sys.modules
    yaml = importlib.import_module("yaml")
    for text in dumps(yaml, {"loss": numbers}):
        assert text == yaml.safe_dump({"loss": [float(n) for n in numbers]})
    assert not any(type(f).__module__ == "gradient_doctor.yaml_tables" for f in sys.meta_path)


def test_yaml_imported_before_and_its_tables_copied(without_yaml):
    yaml = importlib.import_module("yaml")

    class Mine(yaml.SafeDumper):
        pass

    for dumper in (yaml.SafeDumper, Mine):
        dumper.add_representer(tuple, lambda d, t: d.represent_list(list(t)))
    number = losses()[0]
    for text in (*dumps(yaml, number), yaml.dump(number, Dumper=Mine)):
        assert text == yaml.safe_dump(float(number))


def test_a_dumper_with_its_own_way_of_floats_keeps_it(without_yaml):
    yaml = importlib.import_module("yaml")
    number = losses()[0]
    yaml.SafeDumper.add_representer(
        float, lambda d, x: d.represent_scalar("tag:yaml.org,2002:float", f"{x:.1e}")
    )
    assert yaml.safe_dump([number]) == yaml.safe_dump([float(number)]) == f"- {number:.1e}\n"


def test_another_module_of_that_name_is_left_alone(without_yaml, tmp_path, monkeypatch):
    (tmp_path / "yaml.py").write_text("representer = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    teach_yaml()
    assert importlib.import_module("yaml").representer == 1


# checkpoints


def test_plain_keeps_what_is_one_object_one():
    shared, other = [traced()], [1.0]
    given = {"a": shared, "b": shared, "c": other, traced(0.5): (shared, other)}
    made = plain(given)
    assert made == given
    assert {type(key) for key in made} == {str, float}
    assert type(made["a"][0]) is float
    assert made["a"] is made["b"] is made[0.5][0]
    assert made["c"] is made[0.5][1] is other  # nothing in it to be changed


def test_plain_of_what_has_none_is_itself():
    given: dict = {"a": [1.0, (2.0,)]}
    given["self"] = given
    assert plain(given) is given


def test_plain_of_what_contains_itself(tmp_path):
    given: dict = {"loss": traced(), "rows": [traced(0.5)]}
    given["self"] = given
    pair = (given, given["rows"])
    given["rows"].append(pair)
    made = plain(given)
    assert made is made["self"] is made["rows"][1][0]
    assert made["rows"][1][1] is made["rows"]
    assert type(made["loss"]) is type(made["rows"][0]) is float
    assert type(given["loss"]) is TracedFloat  # the user's own is as it was


def test_a_state_that_contains_itself_is_saved(tmp_path):
    model = nn.Linear(2, 1)
    with Doctor({"model": model}) as doctor:
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        state = {"loss": loss.item(), "model": model.state_dict()}
        state["self"] = state
        torch.save(state, tmp_path / "state.pt")
    assert not doctor.findings
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded["self"] is loaded
    assert type(loaded["loss"]) is float
    assert json.dumps(loaded["loss"]) == json.dumps(state["loss"])
