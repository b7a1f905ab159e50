"""The ablation benchmark: arms that differ in one thing, a table that says what was measured."""

import pytest
from benchmarks import arc_ablations
from benchmarks.arc_ablations import ARMS, configuration, main, markdown


def test_each_arm_differs_in_one_thing():
    base = configuration("rl", 0, 12).to_dict()
    for arm in ARMS:
        mine = configuration(arm, 0, 12).to_dict()
        assert sum(mine[key] != base[key] for key in base) == (arm != "rl"), arm


def fake(arm, seed, steps, max_side):
    cells = 0.5 + 0.1 * (arm != "rl") + 0.01 * seed
    return {
        "arm": arm,
        "seed": seed,
        "tasks": 40,
        "solved_after": 0,
        "seconds": 1.0,
        "exact_after_wilson": [0.0, 0.0876],
        "size_accuracy": 0.9,
        "last_loss": 2.0,
        "cell_accuracy_before": 0.5,
        "cell_accuracy_after": cells,
    }


def test_every_run_is_kept_and_none_is_made_twice(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(
        arc_ablations, "measure", lambda *what: (made.append(what[:2]), fake(*what))[1]
    )
    where = ["--out", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md")]
    main(["--steps", "3", "--seeds", "1", *where])
    main(["--steps", "3", "--seeds", "3", *where])
    assert len(made) == len(set(made)) == 15
    table = (tmp_path / "a.md").read_text()
    assert "| refine off | 2 | 0 of 40 | 0.0 to 8.8 % |" in table
    assert "| LM frozen | +10.00, +10.00, +10.00 | +10.00 |" in table
    with pytest.raises(SystemExit, match="other settings"):
        main(["--steps", "4", *where])
    assert "15 runs" not in capsys.readouterr().out


def test_the_table_of_no_runs_is_empty():
    text = markdown({"steps": 1, "batch_size": 2, "max_side": 3, "runs": []})
    assert text.count("\n| ") == 2  # two heads
