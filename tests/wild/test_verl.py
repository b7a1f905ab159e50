"""A checkpoint that verl's own manager wrote is refused by name: no reader for it exists yet."""

from wild.processes import entropy_probe, run_script


def test_a_real_checkpoint_is_refused_by_name(tmp_path):
    written = run_script("verl", "verl_checkpoint.py", tmp_path)
    shards = {
        f"{part}_world_size_2_rank_{rank}.pt"
        for part in ("model", "optim", "extra_state")
        for rank in range(2)
    }
    assert shards | {"fsdp_config.json", "huggingface/config.json"} <= set(written["files"])
    for place in ("", "/actor"):
        for command in ("run", "influence"):
            checkpoint = written["checkpoint"] + place
            done = entropy_probe(command, "--checkpoint", checkpoint, "--out", tmp_path / "out")
            assert done.returncode == 2, done.stderr
            assert done.stderr.startswith("Error: ")
            assert "holds verl shards" in done.stderr
            assert "python -m verl.model_merger merge --backend fsdp" in done.stderr
            assert "Traceback" not in done.stderr
            assert not (tmp_path / "out").exists()
