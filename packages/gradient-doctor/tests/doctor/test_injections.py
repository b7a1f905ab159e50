"""The cases themselves: every edit applies exactly once, and every faulty script compiles."""

from collections import Counter

import pytest

from doctor.case import PREFLIGHT, Case
from doctor.documents.cases import DOCUMENTS
from doctor.harness import (
    LIGHT,
    RECIPES,
    faulty_source,
    marked_lines,
    named,
    recipe_path,
    write_case,
)
from doctor.injectors import DEV
from doctor.judged.injectors import JUDGED
from doctor.judged.second import SECOND
from doctor.judged.third import THIRD

CLASSES = range(1, 28)


@pytest.mark.parametrize("case", [*DEV, *JUDGED, *SECOND, *THIRD], ids=lambda case: case.id)
def test_the_fault_is_in_the_script_and_its_mark_is_not(case, tmp_path):
    path, lines = write_case(case, tmp_path)
    source = path.read_text()
    compile(source, str(path), "exec")
    assert "FAULT" not in source
    assert source.count("\n") == faulty_source(case).count("\n"), "removing marks moved lines"
    assert lines or case.kind == "preflight", "a fault of a script has a line"


def test_an_edit_that_does_not_fit_is_refused():
    case = Case(1, "misfit", "mlp_loop", (("no such text", ""),))
    with pytest.raises(ValueError, match="0 places instead of one"):
        faulty_source(case)


def test_every_class_has_two_cases_to_develop_on_and_one_elsewhere():
    assert Counter(case.number for case in DEV) == dict.fromkeys(CLASSES, 2)
    seen = {(case.number, case.recipe) for case in DEV}
    held_out = {(case.number, case.recipe) for case in JUDGED}
    assert {number for number, _ in held_out} == set(CLASSES)
    assert not seen & held_out


def test_the_second_set_has_every_class_and_recipe_and_no_fault_of_the_others():
    assert 30 <= len(SECOND) <= 36
    assert {case.number for case in SECOND} == set(CLASSES)
    assert {case.recipe for case in SECOND} == set(RECIPES)
    light = sum(case.recipe in LIGHT for case in SECOND)
    assert 0.6 <= light / len(SECOND) <= 0.75
    assert not {case.edits for case in SECOND} & {case.edits for case in [*DEV, *JUDGED]}
    assert not {case.name for case in SECOND} & {case.name for case in [*DEV, *JUDGED]}


def test_the_third_set_has_every_class_and_light_recipe_and_no_fault_of_the_others():
    earlier = [*DEV, *JUDGED, *SECOND]
    assert 25 <= len(THIRD) <= 30
    assert {case.number for case in THIRD} == set(CLASSES)
    assert {case.recipe for case in THIRD} == set(LIGHT)
    assert not {case.edits for case in THIRD} & {case.edits for case in earlier}
    assert not {case.name for case in THIRD} & {case.name for case in earlier}


def test_a_pattern_of_a_case_does_not_name_the_root():
    roots = ("model.", "agent.", "generator.", "discriminator.", "online.", "target.")
    for case in [*SECOND, *THIRD]:
        asked = (case.contract or {}).get("trainable", [])
        assert not [p for p in [*case.parameters, *asked] if p.startswith(roots)], case.id


def test_every_name_is_given_once():
    ids = [case.id for case in [*DEV, *JUDGED, *SECOND, *THIRD]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_recipes_are_short_and_know_nothing_of_the_doctor(recipe):
    source = recipe_path(recipe).read_text()
    assert len(source.splitlines()) <= 92
    assert "doctor" not in source
    assert not marked_lines(source)
    assert recipe in PREFLIGHT or recipe == "trl_grpo"


@pytest.mark.parametrize("case", DOCUMENTS, ids=lambda case: case.id)
def test_the_documents_scripts_are_short_and_marked(case):
    source = case.path.read_text()
    compile(source, str(case.path), "exec")
    assert len(source.splitlines()) <= 60
    assert marked_lines(source)


def test_suffixes_match():
    assert named("agent.actor.mean.weight", ("mean.weight",))
    assert named("model.trunk.0.weight", ("trunk.*",))
    assert not named("model.trunk.0.weight", ("head.*", "unk.*"))
