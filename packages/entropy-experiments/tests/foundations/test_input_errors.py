"""The boundaries at which somebody else's error becomes one sentence, and ours does not."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from entropy_experiments import input_errors
from entropy_experiments.artifacts import try_file, try_folder, write_changed, write_whole
from entropy_experiments.checkpoints.adapter import check_adapter_config, check_patterns
from entropy_experiments.checkpoints.sizes import check_config_file, check_size
from entropy_experiments.cli import app, options
from entropy_experiments.cli.job import ending, on_threads, signals_interrupt
from entropy_experiments.cli.options import keep_stdout_for_json, print_results
from entropy_experiments.config import ConfigError, parse_training
from entropy_experiments.config.training_batch import batch_plan
from entropy_experiments.input_errors import (
    InputError,
    TimeLimitError,
    check_regular,
    expand_path,
    library_errors,
    message,
    parse_json,
    printable,
    time_limit,
    users_code,
    words_of_os_error,
)
from entropy_experiments.online.rows import RowFile
from entropy_experiments.pipelines.run_conditions import analysis_conditions
from entropy_experiments.torchrun import ranks_of_job

pytestmark = pytest.mark.faults

PATH = Path("adapter_config.json")


def test_what_a_terminal_obeys_is_shown():
    assert printable("a\tb\nc ä €") == "a\tb\nc ä €"
    assert printable("\x1b[31m\u202e\x85\ud800\u2028") == r"\x1b[31m\u202e\x85\ud800\u2028"
    long = message("x" * 10_000)
    assert len(long) < 3100
    assert "..." in long


def test_what_a_library_raises_is_one_sentence():
    with (
        pytest.raises(InputError, match=r"^The file is odd \(JSONDecodeError: Expect.*\)\. Mend"),
        library_errors("The file is odd", "Mend it."),
    ):
        json.loads("{")


def test_what_a_line_of_ours_raises_passes():
    """`check_regular` is ours, and so would be a KeyError in it."""
    with (
        pytest.raises(InputError, match=r"^/nowhere is not there; expected a file"),
        library_errors("The file is odd", "Mend it."),
    ):
        check_regular(Path("/nowhere"))

    def bug():
        return {}["ours"]

    from entropy_experiments import input_errors

    ours = type(bug)(bug.__code__.replace(co_filename=input_errors.__file__), {})
    with pytest.raises(KeyError, match="ours"), library_errors("The file is odd", "Mend it."):
        ours()


def test_a_panic_is_an_error_too_and_an_interrupt_is_not():
    class PanicException(BaseException):
        pass

    with pytest.raises(InputError, match="PanicException: index"), library_errors("It", "Mend."):
        raise PanicException("index out of range")
    with pytest.raises(KeyboardInterrupt), library_errors("It", "Mend."):
        raise KeyboardInterrupt


def test_time_limit_ends_what_would_not_end():
    started = time.monotonic()
    with (
        pytest.raises(TimeLimitError, match=r"The pattern takes more than 0\.05 s\. Simplify it"),
        time_limit(0.05, "The pattern", "Simplify it."),
    ):
        time.sleep(5)
    assert time.monotonic() - started < 2


def test_time_limit_leaves_another_alarm_as_it_was():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.08)
        with time_limit(5, "It", "Mend."):
            time.sleep(0.02)
        assert not rung
        time.sleep(0.1)
        assert rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _signals() -> list[Any]:
    numbers = (signal.SIGALRM, input_errors._RING)
    return [signal.getitimer(signal.ITIMER_REAL), *map(signal.getsignal, numbers)]


def test_time_limit_that_passes_before_the_block_begins_leaves_nothing_behind(monkeypatch):
    """On a starved machine to start the thread takes longer than the limit."""
    start = threading.Thread.start

    def slow_start(thread: threading.Thread) -> None:
        time.sleep(0.1)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    before = _signals()
    with (
        pytest.raises(TimeLimitError, match=r"It takes more than 0.05 s"),
        time_limit(0.05, "It", "Mend."),
    ):
        pytest.fail("the limit has passed")
    assert _signals() == before


def test_time_limit_rings_no_more_once_the_block_has_ended(monkeypatch):
    """A ring in the middle of tidying up would leave the timer ringing for ever."""
    ended = threading.Event.set

    def slow_set(event: threading.Event) -> None:
        time.sleep(0.3)
        ended(event)

    monkeypatch.setattr(input_errors, "AGAIN", 0.02)
    before = _signals()
    with time_limit(0.2, "It", "Mend."):
        monkeypatch.setattr(threading.Event, "set", slow_set)
    assert _signals() == before


def test_time_limit_in_a_thread_is_none():
    done = []

    def work():
        with time_limit(0.01, "It", "Mend."):
            time.sleep(0.05)
        done.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done


def test_users_code_is_named_whatever_it_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = ("Reward 'm:f'", "Expected numbers.")
    with (
        pytest.raises(InputError, match=r"Reward 'm:f' failed \(ZeroDivisionError: "),
        users_code(*own),
    ):
        _ = 1 / 0
    with (
        pytest.raises(InputError, match=r"Reward 'm:f' called sys\.exit \(SystemExit: 0\)"),
        users_code(*own),
    ):
        raise SystemExit(0)
    with pytest.raises(InputError, match=r"changed the working directory to /;"), users_code(*own):
        os.chdir("/")
    assert Path.cwd() == tmp_path
    with pytest.raises(KeyboardInterrupt), users_code(*own):
        raise KeyboardInterrupt
    for odd in (asyncio.CancelledError, GeneratorExit, type("Odd", (BaseException,), {})):
        named = rf"Reward 'm:f' failed \({odd.__name__}\)"
        with pytest.raises(InputError, match=named), users_code(*own):
            raise odd


def test_users_code_leaves_the_process_as_it_was(monkeypatch, tmp_path):
    """Else the analysis runs in inference mode or bf16, or its messages go nowhere."""
    stream = (tmp_path / "stdout").open("w")
    monkeypatch.setattr(sys, "stdout", stream)
    limit, inference = sys.getrecursionlimit(), torch.inference_mode()
    for leave, words in {
        inference.__enter__: "left torch.inference_mode on",
        lambda: torch.set_grad_enabled(False): "left torch's grad mode off",
        lambda: torch.set_autocast_enabled("cpu", True): r"left torch.autocast\('cpu'\) on",
        lambda: sys.setrecursionlimit(limit - 1): "lowered the recursion limit to",
        stream.close: "closed sys.stdout",
        lambda: setattr(sys, "stdout", None): "closed sys.stdout",
    }.items():
        with (
            pytest.raises(InputError, match=rf"Reward 'm:f' {words}.*; expected it to stay"),
            users_code("Reward 'm:f'", ""),
        ):
            leave()
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert sys.getrecursionlimit() == limit
        assert not sys.stdout.closed
    with torch.no_grad(), users_code("Reward 'm:f'", ""), torch.inference_mode():
        sys.setrecursionlimit(limit + 1)  # raised: nobody minds
    sys.setrecursionlimit(limit)


def test_a_descriptor_that_is_closed_comes_back():
    program = (
        "import os\nfrom entropy_experiments.input_errors import users_code\n"
        "try:\n    with users_code('Reward', ''):\n        os.close(1)\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("Reward closed the descriptor 1 of stdout; expected")


def test_more_threads_than_a_process_can_have(monkeypatch, capsys):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for threads, variable, name in ((100000, "1", "--threads"), (None, "99999,2", "OMP_NUM")):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        with pytest.raises(typer.Exit), ending(debug=False), on_threads(threads):
            raise AssertionError("not refused")
        error = capsys.readouterr().err
        assert error.startswith(f"Error: {name}")
        assert "expected at most 64. This machine has 2 cores" in error
    monkeypatch.setenv("OMP_NUM_THREADS", "auto")
    with ending(debug=False), on_threads(None):
        pass


def test_a_warning_that_is_an_error_is_one_sentence(capsys):
    with pytest.raises(typer.Exit) as end, ending(debug=False):
        raise DeprecationWarning("jit is old")
    assert end.value.exit_code == 2
    assert "warning was raised as an error (DeprecationWarning: jit is old)" in (
        capsys.readouterr().err
    )


def test_a_reader_that_leaves_gets_an_exit_code_and_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "entropy_experiments.cli", "config", "schema"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_stdout_has_json_alone_whatever_a_child_prints(capfd):
    with keep_stdout_for_json(as_json=True):
        subprocess.run(["echo", "a child"], check=True)
        os.write(1, b"a library\n")
    print("{}")
    captured = capfd.readouterr()
    assert captured.out == "{}\n"
    assert captured.err == "a child\na library\n"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "/x/y: No space left on device. The disk is full: free some space"),
        (errno.EFBIG, "/x/y: File too large. It would exceed a limit of the file system or of"),
        (errno.EROFS, "/x/y: Read-only file system. That place can only be read"),
        (errno.EACCES, "/x/y: Permission denied. Permission is missing"),
        (errno.EIO, "/x/y: Input/output error."),
    ],
)
def test_errors_of_the_system_name_path_and_remedy(number, remedy):
    assert words_of_os_error(OSError(number, os.strerror(number), "/x/y")).startswith(remedy)


def test_our_own_os_errors_are_as_they_are():
    assert words_of_os_error(FileNotFoundError("No such thing.")) == "No such thing."


def test_json_made_to_exhaust_a_reader():
    with pytest.raises(InputError, match=r"f.json is not valid JSON .*nested too deeply"):
        parse_json("[" * 100_000, source="f.json")
    with pytest.raises(InputError, match=r"f.json is not valid JSON \(Exceeds the limit"):
        parse_json("9" * 5000, source="f.json")


def test_paths_that_are_none():
    with pytest.raises(InputError, match="--config is a path with a zero byte"):
        expand_path("a\0b", "--config")
    with pytest.raises(InputError, match="--config is a path of 5000 characters"):
        expand_path("x" * 5000, "--config")
    with pytest.raises(InputError, match=r"--config is '~nobody_here/x': Could not determine"):
        expand_path("~nobody_here/x", "--config")


# Outputs.


def test_trying_a_folder_leaves_no_trace(tmp_path):
    try_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    try_folder(tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_place_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(InputError, match="is a file; expected a folder to write into"):
        try_folder(file)
    with pytest.raises(OSError, match="Not a directory"):
        try_folder(file / "deeper")
    with pytest.raises(IsADirectoryError):
        try_file(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_output_is_no_device_and_no_pipe(tmp_path):
    """Renaming over one replaces it; reading one to append to it may never end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for write in (
        lambda: write_whole(pipe, b"x"),
        lambda: write_changed(pipe, b"x"),
        lambda: try_file(pipe),
        lambda: RowFile(pipe),
    ):
        with pytest.raises(InputError, match="pipe is a device, a pipe or a socket; expected a"):
            write()
    assert pipe.is_fifo()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """A write that fails has no path of its own, and stdout may be on a full disk, too."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/results.json'"):
        write_whole(tmp_path / "results.json", b"x")
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(options.typer, "echo", full)
        with pytest.raises(OSError, match=r"No space left on device: 'standard output'"):
            print_results({}, lambda: ["x"], as_json=False)


def test_too_many_prompts_are_named_by_their_key():
    end = CliRunner().invoke(app, ["run", "--set", "data.evaluation_prompts=100001"])
    assert end.exit_code == 2
    assert "data.evaluation_prompts is 100001; expected at most 100000." in end.output


def test_the_report_refuses_a_pipe_before_it_reads_the_run(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for option in ("--html", "--out"):
        end = CliRunner().invoke(app, ["report", "no_such_run", option, str(pipe)])
        assert end.exit_code == 2
        assert "expected a regular file" in end.output
    assert pipe.is_fifo()


@pytest.mark.parametrize("verb", ["run", "measure", "influence"])
def test_outputs_are_tried_before_anything_is_computed(verb, tmp_path, monkeypatch):
    from entropy_experiments.checkpoints import load

    def never(*_, **__):
        raise AssertionError("a checkpoint was loaded")

    monkeypatch.setattr(load, "find_checkpoint", never)
    (tmp_path / "file").write_text("x")
    results = f"output.results_path={tmp_path / 'file' / 'results.json'}"
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [verb, "--quiet", "--set", results])
    assert done.exit_code == 2
    assert "expected a folder to write into" in done.stderr


# Signals.


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_say_what_an_interrupt_says(number, code, capsys):
    assert signal.getsignal(number) == signal.SIG_DFL
    with (
        pytest.raises(typer.Exit) as found,
        ending(debug=False, interrupted=lambda: KEPT),
        signals_interrupt(),
    ):
        signal.raise_signal(number)
    assert found.value.exit_code == code
    name = signal.Signals(number).name
    assert capsys.readouterr().err == f"\nEnded by {name}. Units are kept in logs; start again.\n"
    assert signal.getsignal(number) == signal.SIG_DFL


KEPT = "Interrupted. Units are kept in logs; start again."


def test_a_signal_that_somebody_handles_is_theirs():
    seen = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    own = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        with signals_interrupt():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert seen == [1]
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGTERM, own)


# Memory.


def test_a_cpu_out_of_memory_names_the_keys():
    with (
        pytest.raises(MemoryError, match=r"Out of memory: .*allocate.*memory\.microbatch"),
        analysis_conditions(),
    ):
        torch.empty(2**50)
    with pytest.raises(RuntimeError, match="shape"), analysis_conditions():
        torch.zeros(3).view(2)


# Checkpoints.


def adapter(**more):
    return {"peft_type": "LORA", "r": 2, "lora_alpha": 8, **more}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"use_rslora": "false"}, "use_rslora is 'false'; expected true or false"),
        ({"megatron_config": {}}, "megatron_config is set; expected null"),
        ({"megatron_core": "evil"}, "megatron_core is 'evil'; expected 'megatron.core'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda', which changed the base"),
        ({"init_lora_weights": "x"}, "init_lora_weights is 'x'; expected true, false or one of"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0; expected a number from 0 up to below 1"),
        ({"revision": "../x"}, r"revision is '../x'; expected a branch"),
        ({"use_qalora": True}, "use_qalora is set; expected null or false"),
        ({"layer_replication": [[0, 10**9]]}, "layer_replication is"),
    ],
)
def test_kinds_of_an_adapter_config(more, said):
    with pytest.raises(InputError, match=said):
        check_adapter_config(PATH, adapter(**more))


def test_what_peft_writes_is_accepted():
    from peft import LoraConfig

    written = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict()
    plain = json.loads(json.dumps(written, default=lambda x: list(x) if isinstance(x, set) else x))
    assert check_adapter_config(PATH, plain) == plain


def test_patterns_end(monkeypatch):
    from entropy_experiments.checkpoints import adapter as adapters

    monkeypatch.setattr(adapters, "PATTERN_SECONDS", 0.1)
    trap = adapter(target_modules=r"(?:(?:.?.?.?)*)*(?:.*.*.*.*)*Z")
    with pytest.raises(TimeLimitError, match=r"target_modules has the pattern .* takes more than"):
        check_patterns(PATH, trap, ["model.layers.0.self_attn.q_proj"])
    with pytest.raises(InputError, match=r"rank_pattern has the pattern '\(', which is none"):
        check_patterns(PATH, adapter(rank_pattern={"(": 3}), ["q_proj"])
    check_patterns(PATH, adapter(target_modules=r".*\.(q|v)_proj"), ["model.q_proj"] * 1000)


def test_a_config_larger_than_its_weights_is_not_made(tmp_path):
    from safetensors.torch import save_file
    from transformers import Qwen2Config

    save_file({"a": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    files = [tmp_path / "model.safetensors"]
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 7}')
    with pytest.raises(InputError, match=r"num_hidden_layers is 7, but the weights .* 1 tensors"):
        check_config_file(tmp_path / "config.json", files)
    large = Qwen2Config(hidden_size=2**30, num_hidden_layers=1)
    with pytest.raises(InputError, match=r"describes a model of [\d,]+ parameters; .* hold 16 num"):
        check_size(tmp_path / "config.json", large, files)


def test_a_recorded_revision_is_the_one_that_is_loaded(tmp_path, monkeypatch):
    """And where none is recorded, the report names the commit."""
    from entropy_experiments.checkpoints import base
    from entropy_experiments.checkpoints.base import load_tokenizer, model_config
    from entropy_experiments.checkpoints.layout import find_checkpoint
    from entropy_experiments.checkpoints.runs import embedded_trajectory

    layout = find_checkpoint(embedded_trajectory() / "checkpoint-13")
    found = base.find_base(
        layout, base=None, backbone=None, recorded="owner/name", revision="abc123"
    )
    assert found.revision == "abc123"
    assert found.words == "hub model owner/name at abc123 (adapter_config.json)"
    asked = []

    def noted(name, **options):
        asked.append((name, options.get("revision")))
        raise OSError("no network")

    monkeypatch.setattr(base.AutoConfig, "from_pretrained", noted)
    monkeypatch.setattr(base.AutoTokenizer, "from_pretrained", noted)
    with pytest.raises(InputError, match="no network"):
        model_config("owner/name", revision=found.revision)
    with pytest.raises(InputError, match="no network"):
        load_tokenizer(["owner/name"], torch.nn.Module(), revision=found.revision)
    assert asked == [("owner/name", "abc123")] * 2
    # What the user names is the user's: no revision of the adapter's.
    own = base.find_base(layout, base="other/name", backbone=None, recorded="x/y", revision="abc")
    assert own.revision is None


# Trainings.


def test_a_training_without_end_is_refused():
    with pytest.raises(ConfigError, match=r"100000000 steps of 16 prompts x 8 responses are 1\.6e"):
        batch_plan(parse_training({"max_steps": 10**8}))
    batch_plan(parse_training({"max_steps": 10**5}))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x' in the environment; expected a whole"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2 .* expected a rank from 0"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 99}, "WORLD_SIZE is '9+' in the environment"),
    ],
)
def test_words_of_torchrun(variables, said, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        ranks_of_job()


class Metrics:
    def __init__(self, shares):
        self._metrics = {"train": {"frac_reward_zero_std": shares, "reward": [0.0]}}


class State:
    should_training_stop = False

    def __init__(self, global_step=0, kept=None):
        self.global_step, self.stateful_callbacks = global_step, kept or {}


def equal_rewards(shares):
    """A callback that has seen steps with these shares of groups without spread."""
    from entropy_experiments.online.train.callbacks import EqualRewards

    watcher, control = EqualRewards(["mine"], group=8), State()
    watcher.on_train_begin(None, State(), control)
    for share in shares:
        watcher.trainer = Metrics([share])
        watcher.on_step_end(None, State(), control)
    return watcher, control


def test_five_steps_of_equal_rewards_end_a_training():
    from entropy_experiments.online.train.callbacks import EqualRewardsError

    watcher, control = equal_rewards([1.0] * 5)
    assert control.should_training_stop
    with pytest.raises(EqualRewardsError, match=r"All 8 responses .* first 5 steps had equal rewa"):
        watcher.refuse()


def test_equal_rewards_are_counted_on_after_a_resume():
    """Two steps, a kill, three steps: ended like five in one process."""
    from entropy_experiments.online.train.callbacks import EqualRewards, EqualRewardsError

    control, kept = State(), {}
    for part, steps in ((0, 2), (2, 3)):
        watcher, state = EqualRewards(["mine"], group=8), State(part, kept)
        watcher.on_train_begin(None, state, control)
        watcher.trainer = Metrics([1.0])
        for _ in range(steps):
            assert not control.should_training_stop
            watcher.on_step_end(None, state, control)
        kept = json.loads(json.dumps(state.stateful_callbacks))
    assert control.should_training_stop
    with pytest.raises(EqualRewardsError, match="first 5 steps"):
        watcher.refuse()


@pytest.mark.parametrize("shares", [[1.0] * 4, [1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0], [0.5] * 9])
def test_a_training_with_a_spread_goes_on(shares):
    watcher, control = equal_rewards(shares)
    assert not control.should_training_stop
    watcher.refuse()
