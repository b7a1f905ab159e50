"""Our callback under other TRL versions: what it does *today*, one line each.

An issue that widens support changes this table: a version that begins to work fails here, too.
Training must end in the same bits everywhere.
"""

import pytest

from wild.processes import run_script

MISSING = {
    "1.16.0": (),
    "1.9.2": ("eos_token_ids",),
    "0.29.1": ("_tokenizer", "eos_token_ids"),
    "0.24.0": ("_tokenizer", "_tokenize_prompts", "eos_token_ids"),
}
"""TRL version -> names that the probe reads and this version does not have. None: it works."""


@pytest.mark.parametrize("version", MISSING)
def test_grpo_with_and_without_the_callback(version, tmp_path):
    # The script itself compares weights, optimizer state, history and random numbers.
    report = run_script(f"trl-{version.rpartition('.')[0]}", "grpo_callback.py", tmp_path)
    assert report["trl"] == version
    assert report["steps"] == [4, 4]
    if not MISSING[version]:
        assert report["off"] is None
        assert report["messages"] == []
        assert report["rows"] == [0, 1, 2, 3]
        assert report["mismatch"] < 1e-3  # the step that was predicted is the step that was made
        return
    assert report["rows"] == []
    (message,) = report["messages"]
    assert "is off from here on; training goes on" in message
    names = ", ".join(MISSING[version])
    assert f"GRPOTrainer of trl {version} has no {names}; expected trl 1.16" in message
