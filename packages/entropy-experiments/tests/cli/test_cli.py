"""The command line that scripts rely on: options, exit codes, what goes to which stream."""

import json
import resource
import subprocess
import sys
import types
from functools import cache

import pytest
import typer
from typer.testing import CliRunner

from checkout import ROOT
from entropy_experiments.cli import app
from entropy_experiments.config import documented_yaml, load_config, template_names, template_text

pytestmark = pytest.mark.contract

OPTIONS = {
    "": "--version",
    "run": "--config --checkpoint --set --out --overwrite --json --threads --quiet --debug",
    "measure": "--config --checkpoint --set --out --overwrite --json --threads --quiet --debug",
    "influence": "--config --checkpoint --set --out --what-if --confirm --entropy-budget "
    "--fisher --momentum --from --overwrite --json --threads --quiet --debug",
    "explain": "RUN --from --to --every --tangent --responses --training-prompts --out --overwrite "
    "--config --set --json --threads --quiet --debug",
    "train": "--config --preset --out --steps --resume --no-probe --set --dry-run --json "
    "--threads --quiet --debug",
    "evaluate": "CHECKPOINTS --task --data --split --prompts --samples --k --seed --reward "
    "--threshold --out --overwrite --config --set --json --threads --quiet --debug",
    "query": "RUN SQL --csv --json --parquet --rows --quiet --debug",
    "report": "RUNS --html --no-html --figures --columns --trajectory --evaluation --linearity "
    "--samples --rollout --out --follow --json --quiet --debug",
    "verify": "CHECKPOINT --merged --json --quiet --debug",
    "doctor": "",  # reads its own: tests of gradient-doctor
    "config": "",
    "config template": "NAME --out --force --list --json --quiet --debug",
    "config schema": "--json --quiet --debug",
    "config check": "FILE --set --json --quiet --debug",
    "config migrate": "FILE --out --force --json --quiet --debug",
    "arc": "",
    "arc train": "--epochs --max-batches --eval-batches --batch-size --lr-agent --lr-lm "
    "--lr-policy --weight-decay --clip --lm --lm-train --refine --refinements --bound "
    "--reward-scale --entropy-weight --hard-weight --risk-weight --z-weight --bi-weight "
    "--back-weight --prompt-weight --size-weight --prompt-width --fuse --agent-width --agent-steps "
    "--data --held-out --max-tasks --max-side --augment --curriculum --shuffle-text --device "
    "--dtype --threads --seed --doctor --log-every --checkpoint-every --tracker --resume --out "
    "--json --quiet --debug",
    "arc eval": "RUN --data --batches --json --quiet --debug",
    "arc show": "RUN --out --data --task --count --json --quiet --debug",
}
HEAVY = {"torch", "transformers", "numpy", "yaml", "ruamel", "entropy_experiments.config"}
"""Not pydantic, which typer itself imports to read options."""
HELP_SECONDS = 0.5
"""Of the processor's time, which other jobs do not lengthen much; the best of three."""


def commands(command, prefix=""):
    yield prefix, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{prefix} {name}".strip())


def options(command):
    for option in command.params:
        if option.name != "help":
            yield option.opts[0] if option.opts[0].startswith("-") else option.name.upper()


def test_options_are_frozen():
    found = {
        name: " ".join(options(command)) for name, command in commands(typer.main.get_command(app))
    }
    assert found == OPTIONS


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def fresh(code):
    """In a process of its own: what is imported, and how long it takes."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@cache
def help_of(verb):
    """One start of a command's help: what it says, what it imports, and its CPU seconds."""
    code = f"""
import sys
from entropy_experiments.cli import main
sys.argv = ["entropy-probe", *{verb.split()!r}, "--help"]
try:
    main()
finally:
    heavy = {HEAVY!r} & set(sys.modules)
    print("heavy:", *sorted(heavy), file=sys.stderr)
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = fresh(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@pytest.mark.parametrize("verb", OPTIONS)
def test_help_shows_examples_without_torch(verb):
    done, _ = help_of(verb)
    assert done.returncode == 0
    assert done.stderr.split() == ["heavy:"]
    assert "Example" in done.stdout
    assert f"  entropy-probe {verb}".rstrip() in done.stdout.split("Example")[1]
    assert all(len(line) <= 88 for line in done.stdout.splitlines())


@pytest.mark.parametrize("verb", OPTIONS)
def test_help_is_quick(verb):
    tries = (help_of if n == 0 else help_of.__wrapped__ for n in range(3))
    assert any(start(verb)[1] < HELP_SECONDS for start in tries)


def test_the_program_can_be_started_as_a_module():
    words = ["-m", "entropy_experiments.cli", "--help"]
    done = subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True)
    assert done.stdout == help_of("")[0].stdout


def test_every_verb_can_be_read_by_machines_and_be_quiet():
    groups = {name for name in OPTIONS if any(o.startswith(f"{name} ") for o in OPTIONS)}
    groups |= {"", "doctor"}  # whose options are its own
    for name, options_ in OPTIONS.items():
        if name not in groups:
            assert {"--json", "--quiet"} <= set(options_.split()), name


def test_exit_codes_are_told_in_help_and_in_the_documents():
    from entropy_experiments.cli.job import EXIT_CODES

    said = invoke("--help").stdout.split("Exit codes:")[1]
    table = (ROOT / "docs" / "reference" / "commands.md").read_text().split("## Exit codes")[1]
    for code, what in EXIT_CODES.items():
        assert f"{code:<3}  {what}" in said
        assert f"\n| {code} |" in table
    codes = [int(row.split("|")[1]) for row in table.splitlines() if row[2:3].isdigit()]
    assert codes == list(EXIT_CODES)


def test_version():
    assert invoke("--version").stdout == "0.1.0\n"


class Probe:
    """Stands in for OfflineEntropyProbe, which needs torch and a checkpoint."""

    made: list = []  # noqa: RUF012
    failure: BaseException | None = None

    def __init__(self, config, *, quiet):
        self.config, self.quiet = config, quiet
        Probe.made.append(self)

    def run_mixed_probe(self, checkpoint_path=None):
        print("a library prints this")
        if Probe.failure is not None:
            raise Probe.failure
        return {"deltaH1": -1e-4, "verdict": ["entropy falls", "trusted"]}


@pytest.fixture
def probe(monkeypatch):
    module = types.ModuleType("entropy_experiments.pipelines.probe")
    module.OfflineEntropyProbe = Probe
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Probe, "made", [])
    monkeypatch.setattr(Probe, "failure", None)
    return Probe


def test_run_without_anything_is_the_quick_start(probe):
    result = invoke("run")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-2:] == ["entropy falls", "trusted"]
    (made,) = probe.made
    assert made.config.dump() == load_config("detailed_logging_example.yaml").dump()
    assert made.quiet is False


def test_run_hands_over_its_options(probe, tmp_path):
    result = invoke(
        *("run", "--config", "test_deltaH1", "--checkpoint", "step_60", "--out", str(tmp_path)),
        *("--set", "batch_config.B_E=8", "--set", "output.results_path=mine.json", "--quiet"),
    )
    assert result.exit_code == 0
    config = probe.made[0].config
    assert config.checkpoint.path == "step_60"
    assert config.data.evaluation_prompts == 8
    assert config.data.update_prompts == 4
    assert config.sampling.save == str(tmp_path / "rollouts")
    assert config.output.folder == str(tmp_path / "logs")
    assert config.output.results_file == "mine.json"  # --set wins
    assert probe.made[0].quiet is True


def test_json_alone_on_stdout(probe):
    result = invoke("run", "--json", "--set", "true_delta_h.clip_c=5.0")
    assert json.loads(result.stdout)["deltaH1"] == -1e-4
    assert "a library prints this" in result.stderr
    assert "keys: true_delta_h.clip_c is measure.clip_log_weights." in result.stderr


def test_quiet_says_no_notes(probe):
    result = invoke("run", "--quiet", "--set", "true_delta_h.clip_c=5.0")
    assert result.stderr == ""


def test_interrupted(probe, tmp_path):
    probe.failure = KeyboardInterrupt()
    result = invoke("run", "--out", str(tmp_path))
    assert result.exit_code == 130
    kept = f"Finished units of rollouts are kept in {tmp_path / 'rollouts'}; the same command"
    assert f"{kept} continues" in result.stderr
    assert "kept in logs/rollouts" in invoke("run").stderr


def test_unexpected_errors_show_their_traceback(probe):
    for failure in (RuntimeError("odd"), ValueError("from a library")):
        probe.failure = failure
        result = invoke("run")
        assert result.exit_code == 1
        assert "Traceback" in result.stderr
        assert str(failure) in result.stderr


def test_missing_files_are_bad_input(probe):
    probe.failure = FileNotFoundError("Checkpoint not found: step_61")
    result = invoke("run")
    assert result.exit_code == 2
    assert result.stderr == "Error: Checkpoint not found: step_61\n"


def test_bad_input_and_debug(probe, tmp_path):
    result = invoke("run", "--set", "batch_config.BE=3")
    assert result.exit_code == 2
    assert "--set: batch_config.BE: unknown key. Did you mean batch_config.B_E?" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    result = invoke("run", "--set", "batch_config.BE=3", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert not probe.made
    assert invoke("run", "--no-such-option").exit_code == 2


def test_template(tmp_path):
    assert invoke("config", "template").stdout == documented_yaml()
    assert invoke("config", "template", "test_deltaH1").stdout == template_text("test_deltaH1.yaml")
    assert invoke("config", "template", "--list").stdout.split() == list(template_names())
    result = invoke("config", "template", "tset_deltaH1")
    assert result.exit_code == 2
    assert "expected one of all_keys.yaml, config_template.yaml" in result.stderr


def test_template_does_not_overwrite(tmp_path):
    file = tmp_path / "my.yaml"
    assert invoke("config", "template", "--out", str(file)).exit_code == 0
    assert load_config(file).dump() == load_config("config_template.yaml").dump()
    file.write_text("mine")
    result = invoke("config", "template", "--out", str(file))
    assert result.exit_code == 2
    assert f"{file} exists" in result.stderr
    assert "--force" in result.stderr
    assert file.read_text() == "mine"
    assert invoke("config", "template", "--out", str(file), "--force").exit_code == 0
    assert file.read_text() == documented_yaml()
    result = invoke("config", "template", "--out", str(tmp_path / "no" / "folder.yaml"))
    assert result.exit_code == 2
    assert "Traceback" not in result.stderr


def test_schema():
    schema = json.loads(invoke("config", "schema").stdout)
    description = schema["$defs"]["Data"]["properties"]["evaluation_prompts"]["description"]
    assert description.startswith("Evaluation prompts")


def test_check(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("true_delta_h: {clip_c: 5.0}\nprobe_rework: {mb_size_prompts: 2}\n")
    result = invoke("config", "check", str(file))
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{file}: valid.",
        "  note: written in the documents' keys: true_delta_h.clip_c is measure.clip_log_weights. "
        "`entropy-probe config migrate FILE` writes today's.",
        "  note: probe_rework.mb_size_prompts: has no effect; passes count sequences: "
        "memory.microbatch_size.",
    ]
    result = invoke("config", "check", str(file), "--set", "importance.is_mode=sniss")
    assert result.exit_code == 2
    assert f"Error: {file}: --set: importance.is_mode: got 'sniss'" in result.stderr
    assert invoke("config", "check", "nowhere.yaml").exit_code == 2


def test_json_of_the_configuration(tmp_path):
    names = json.loads(invoke("config", "template", "--list", "--json").stdout)
    assert names == list(template_names())
    values = json.loads(invoke("config", "template", "test_deltaH1", "--json").stdout)
    assert values == load_config("test_deltaH1").dump()
    file = tmp_path / "my.yaml"
    result = invoke("config", "template", "--out", str(file), "--json")
    assert json.loads(result.stdout) == {"written": str(file)}
    assert result.stderr == ""
    assert invoke("config", "template", "--out", str(file), "--force", "--quiet").output == ""
    assert json.loads(invoke("config", "schema", "--json").stdout)["$defs"]
    file.write_text("true_delta_h: {clip_c: 5.0}\n")
    found = json.loads(invoke("config", "check", str(file), "--json").stdout)
    assert found["valid"] is True
    (note,) = found["notes"]
    assert "true_delta_h.clip_c is measure.clip_log_weights" in note
    assert invoke("config", "check", str(file), "--quiet").stdout == f"{file}: valid.\n"


def test_doctor_on_stdout(tmp_path):
    """`--json -`: the report alone, whatever the script prints."""
    script = tmp_path / "train.py"
    script.write_text("print('the script prints this')\n")
    done = subprocess.run(
        [sys.executable, "-m", "entropy_experiments.cli", "doctor", "--json", "-", str(script)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    assert "the script prints this" in done.stderr


def test_check_does_not_import_torch():
    code = """
import sys
from entropy_experiments.cli import app
app(["config", "check", "config_template"], standalone_mode=False)
assert "torch" not in sys.modules
"""
    done = fresh(code)
    assert done.returncode == 0, done.stderr
    assert "valid." in done.stdout
