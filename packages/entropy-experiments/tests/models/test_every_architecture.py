"""Every causal-LM type of the installed transformers: equal to a plain loop, or refused in words.

Nothing else may happen: no number that is silently another model's, and no traceback. A few types
are in the fast tier, all others in the slow one, with LoRA besides.
"""

from __future__ import annotations

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from checkout import DOCS
from oracles.every_causal_lm import NOT_BUILT, TYPES, small_model
from oracles.sweep import Row, examined, fault, sweep
from oracles.sweep_page import line, page

PAGE = DOCS / "architectures.md"
FAST = ("llama", "gpt2", "gemma2", "roberta", "mixtral", "bloom")
REFUSED = ("cpmant", "prophetnet", "reformer", "xlm", "xlnet")
"""Not causal as their configs are by default, or not made for batches."""

pytestmark = [
    pytest.mark.naive,
    pytest.mark.filterwarnings(
        "ignore::UserWarning",
        "ignore::FutureWarning",
        "ignore:The following (rank|alpha)_pattern keys:RuntimeWarning",  # peft's own
    ),
]


def check(row: Row) -> None:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[row.kind]
    if row.refused is not None:
        assert row.kind in REFUSED
        assert row.refused.startswith(f"{name} (model_type ")
        return
    assert row.kind not in REFUSED
    assert fault(row) is None


@pytest.mark.parametrize("kind", FAST)
def test_some_types_fully_trained(kind):
    check(examined(kind, "full", small_model(kind)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in NOT_BUILT])
def test_every_type_is_equal_or_refused(kind):
    rows = list(sweep(kind))
    assert [row.way for row in rows] == ["full", "LoRA"]
    for row in rows:
        check(row)
    if f"transformers {transformers.__version__}:" in PAGE.read_text():
        assert line(kind, rows) in PAGE.read_text()


def test_most_types_are_tried():
    assert len(set(TYPES) - set(NOT_BUILT)) >= 120
    assert set(REFUSED) < set(TYPES)


def test_the_comparison_has_teeth(monkeypatch):
    """A plain loop of a model that is one position off is not equal."""
    from entropy_experiments.models.scoring import SequenceProcessor

    count = SequenceProcessor._count_as_the_model_does

    def one_off(self, trial):
        count(self, trial)
        self.padding_index = 2

    monkeypatch.setattr(SequenceProcessor, "_count_as_the_model_does", one_off)
    row = examined("gpt2", "full", small_model("gpt2"))
    assert "gpt2, full: not equal in {'score'" in str(fault(row))
    with pytest.raises(ValueError, match="The page says that all of these are equal:\ngpt2, full"):
        page({"gpt2": [row]})
