"""Broken configurations: refused with file and key, before torch, and nothing in them is run."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from entropy_experiments.cli import app
from entropy_experiments.config import Config, ConfigError, load_config, parse_config, template_text

pytestmark = pytest.mark.faults

BROKEN = {
    # name: (YAML, what the message must contain)
    "unknown key": ("batch_config: {B_X: 3}", ["batch_config.B_X: unknown key", "batch_config.B_"]),
    "misspelt key": ("generation: {temprature: 1.0}", ["Did you mean generation.temperature?"]),
    "key in the wrong section": (
        "batch_config: {temperature: 1.0}",
        ["batch_config.temperature: unknown key. Did you mean sampling.temperature?"],
    ),
    "misspelt section": ("precison: {allow_tf32: true}", ["precison: unknown", "precision?"]),
    "key without section": ("clip_c: 5.0", ["clip_c: unknown key", "importance.clip_c?"]),
    "nested unknown key": (
        "influence: {workspace: {knd: update}}",
        ["influence.workspace.knd", "workspace.kind?"],
    ),
    "unknown key like no other": (
        "output: {qqqqqq: 1}",
        ["output.qqqqqq: unknown key. Keys of output: log, level,", "max_logs, results_file."],
    ),
    "unknown key like no other, in a section of the documents": (
        "memory_config: {qqqqqq: 1}",
        ["memory_config.qqqqqq: unknown key. Keys of memory_config: microbatch_size, gradient"],
    ),
    "unknown section like no other": (
        "qqqqqq: {a: 1}",
        ["qqqqqq: unknown key. Sections: checkpoint, data, sampling, update, entropy, predict,"],
    ),
    "misspelt key of the schema": (
        "data: {evaluation_promts: 3}",
        ["data.evaluation_promts: unknown key. Did you mean data.evaluation_prompts?"],
    ),
    "nested section of the documents": (
        "influence: {workspace: null}",
        ["influence.workspace: got None, expected a section"],
    ),
    "both dialects disagree": (
        "data: {evaluation_prompts: 3}\nbatch_config: {B_E: 4}",
        ["line 2: batch_config.B_E: got 4, but data.evaluation_prompts is 3", "one setting"],
    ),
    "baseline of the schema": (
        "predict: {baseline: true}\nmeasure: {weighting: snis}",
        ["line 1: predict.baseline: is true with measure.weighting 'snis'"],
    ),
    "text for a number": ("batch_config: {B_E: '64'}", ["B_E: got '64'", "Remove the quotes"]),
    "text for a bool": ("importance: {enabled: maybe}", ["importance.enabled: got 'maybe'"]),
    "number for text": ("checkpoint: {backbone: 7}", ["checkpoint.backbone: got 7", "text"]),
    "float for a count": ("batch_config: {B_U: 2.5}", ["batch_config.B_U: got 2.5", "whole"]),
    "bool for a count": ("batch_config: {G: true}", ["batch_config.G: got True", "whole"]),
    "null for a count": ("batch_config: {G: null}", ["batch_config.G: got None", "whole"]),
    "too small": ("batch_config: {B_E: 0}", ["batch_config.B_E: got 0, expected 2 or more"]),
    "too large": ("generation: {top_p: 1.5}", ["generation.top_p: got 1.5, expected 1 or less"]),
    "zero temperature": ("generation: {temperature: 0.0}", ["generation.temperature: got 0.0"]),
    "negative rate": ("update: {lr: -8e-7}", ["update.lr: got -8e-07", "greater than 0"]),
    "not finite": ("update: {lr: .nan}", ["update.lr: got nan, expected a finite number"]),
    "unknown word": ("importance: {is_mode: sniss}", ["is_mode: got 'sniss'", "mean snis?"]),
    "unknown loss": ("update: {loss: ppo}", ["update.loss: got 'ppo'", "reinforce, grpo, bnpo"]),
    "bad item": ("estimator: {eta_list: [1e-6, -2e-6]}", ["estimator.eta_list[1]: got -2e-06"]),
    "empty list": ("estimator: {eta_list: []}", ["estimator.eta_list: got []", "at least 1"]),
    "item twice": ("estimator: {eta_list: [1e-6, 1e-6]}", ["estimator.eta_list repeats"]),
    "scalar for a list": ("estimator: {eta_list: 1e-6}", ["eta_list: got 1e-06, expected a list"]),
    "scalar for a section": ("importance: snis", ["importance: got 'snis', expected a section"]),
    "list for a section": ("importance: [1]", ["importance: got [1], expected a section"]),
    "empty path": ("checkpoint: {checkpoint_path: ''}", ["checkpoint.checkpoint_path: got ''"]),
    "weights without functions": ("reward: {weights: [1.0]}", ["reward.weights has 1 numbers"]),
    "odd function": (
        "reward: {functions: ['os; system']}",
        ["reward.functions has 'os; system'", "module:function"],
    ),
    "TF32 by the back door": (
        "precision: {matmul_precision: high}",
        ["precision.matmul_precision is 'high', expected 'highest'", "float32 means float32"],
    ),
    "TF32": (
        "precision: {allow_tf32: true, matmul_precision: medium}",
        ["precision.allow_tf32 is true, expected false", "matmul_precision is 'medium'"],
    ),
    "no tokens for a baseline": (
        "approx_delta_h:\n  baseline: true\nimportance: {is_mode: snis}",
        ["line 2: approx_delta_h.baseline: is true", "importance.is_mode 'snis'"],
    ),
    "no tokens for a baseline, by another name": (
        "approx_delta_h: {baseline: true}\ntrue_delta_h: {is_mode: snis}",
        ["Set true_delta_h.is_mode: per_decision, or approx_delta_h.baseline: false"],
    ),
    "no terms for a baseline": (
        "approx_delta_h: {method: reverse, baseline: true}",
        ["approx_delta_h.baseline is true", "approx_delta_h.method 'reverse'"],
    ),
    "aliases disagree": (
        "importance: {clip_c: 5.0}\ntrue_delta_h: {clip_c: 3.0}",
        ["line 2: true_delta_h.clip_c: got 3.0", "importance.clip_c is 5.0", "one setting"],
    ),
    "microbatch sizes disagree": (
        "memory_config: {microbatch_size: 2}\napprox_delta_h: {microbatch_size: 4}",
        ["approx_delta_h.microbatch_size: got 4", "memory_config.microbatch_size is 2"],
    ),
    "units disagree": (
        "importance: {report_per_token: true}\napprox_delta_h: {normalize: per_sequence}",
        ["importance.report_per_token: got True", "approx_delta_h.normalize is 'per_sequence'"],
    ),
    "alias of the wrong kind": (
        "true_delta_h: {clip_c: five}",
        ["true_delta_h.clip_c: got 'five', expected a number"],
    ),
    "translated alias of the wrong kind": (
        "importance: {report_per_token: per_token}",
        ["importance.report_per_token: got 'per_token', expected true or false"],
    ),
    "key twice": (
        "output: {results_path: a, results_path: b}",
        ["line 1", "'results_path'", "twice"],
    ),
    "key twice beside a merge": (
        "sampling: &a {seed: 1}\noutput:\n  <<: *a\n  log: true\n  log: false",
        ["line 5", "'log'", "twice"],
    ),
    "section twice": ("output: {}\nreward: {}\noutput: {}", ["line 3", "'output'", "twice"]),
    "key that is no text": ("1: {a: 2}", ["key 1 is not text"]),
    "inner key that is no text": ("output: {1: 2}", ["output", "1"]),
    "broken YAML": ("output: {results_path: a", ["not YAML that can be read"]),
    "tab": ("output:\n\tresults_path: a", ["line 2", "not YAML that can be read"]),
    "list": ("- output", ["got a list, expected sections"]),
    "scalar": ("hello", ["got a str, expected sections"]),
    "empty": ("# only a comment\n", ["is empty", "entropy-probe config template"]),
    "two documents": ("output: {}\n---\noutput: {}", ["not YAML that can be read"]),
    "anchor that holds itself": ("influence: &a {workspace: {params: *a}}", ["more than 100000"]),
    "anchors that explode": (
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
        + "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)),
        ["more than 100000 values"],
    ),
    "nested too deeply": ("a: " + "[" * 700 + "]" * 700, ["nested too deeply"]),
}


def written(folder, text):
    file = folder / "broken.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", BROKEN)
def test_refused_with_file_and_key(name, tmp_path):
    text, expected = BROKEN[name]
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as failure:
        load_config(file)
    assert str(failure.value).startswith(str(file))
    for part in expected:
        assert part in str(failure.value)
    assert len(str(failure.value)) < 2000


@pytest.mark.parametrize("name", BROKEN)
def test_the_command_stops_before_the_probe_is_imported(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "entropy_experiments.pipelines.probe", None)
    file = written(tmp_path, BROKEN[name][0])
    result = CliRunner().invoke(app, ["run", "--config", str(file)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {file}")
    assert "Traceback" not in result.output


def test_the_import_guard_has_teeth(monkeypatch):
    monkeypatch.setitem(sys.modules, "entropy_experiments.pipelines.probe", None)
    assert CliRunner().invoke(app, ["run"]).exit_code == 1


def test_refused_without_importing_torch(tmp_path):
    for number, (text, _) in enumerate(BROKEN.values()):
        (tmp_path / f"{number}.yaml").write_text(text)
    code = f"""
import sys
from pathlib import Path
from entropy_experiments.config import ConfigError, load_config
refused = 0
for file in Path({str(tmp_path)!r}).iterdir():
    try:
        load_config(file)
    except ConfigError:
        refused += 1
print(refused, *({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(BROKEN))]


@pytest.mark.parametrize("section", Config.model_fields)
def test_every_section_is_strict(section):
    with pytest.raises(ConfigError, match=rf"{section}\.no_such_key: unknown key"):
        parse_config({section: {"no_such_key": 1}})


def test_all_problems_at_once_with_their_lines(tmp_path):
    file = written(tmp_path, "batch_config:\n  B_E: -1\n\noutput:\n  result_path: a\n")
    with pytest.raises(ConfigError) as failure:
        load_config(file)
    assert failure.value.problems == (
        "line 2: batch_config.B_E: got -1, expected 2 or more.",
        "line 5: output.result_path: unknown key. Did you mean output.results_path?",
    )


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {0}']",
        "!!python/object/apply:pathlib.Path.touch [{0}]",
        "!!python/name:os.system",
    ],
)
def test_nothing_in_a_file_is_executed(tag, tmp_path):
    target = tmp_path / "made_by_the_file"
    file = written(tmp_path, f"output:\n  results_path: {tag.format(target)}")
    with pytest.raises(ConfigError, match="line 2: not YAML that can be read: could not determine"):
        load_config(file)
    assert not target.exists()


def test_files_that_are_no_text(tmp_path):
    with pytest.raises(ConfigError, match="is a folder, expected a YAML file"):
        load_config(tmp_path)
    file = tmp_path / "broken.yaml"
    file.write_bytes(b"\x80\x81\xff")
    with pytest.raises(ConfigError, match=r"broken\.yaml: is not text in UTF-8"):
        load_config(file)
    file.write_bytes(b"output: {results_path: \x00}")
    with pytest.raises(ConfigError, match="not YAML that can be read"):
        load_config(file)


def test_missing_file():
    with pytest.raises(FileNotFoundError, match=r"not found: nowhere/my\.yaml.*test_deltaH1\.yaml"):
        load_config("nowhere/my.yaml")
    with pytest.raises(FileNotFoundError, match="not found: nowhere/test_deltaH1"):
        load_config("nowhere/test_deltaH1.yaml")
    with pytest.raises(ConfigError, match=r"got 'nothing', expected one of all_keys\.yaml"):
        template_text("nothing")


@pytest.mark.parametrize("given", [[1], "text", 3])
def test_dicts_that_are_none(given):
    with pytest.raises(ConfigError, match=f"got a {type(given).__name__}, expected a dict"):
        parse_config(given)


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("batch_config.B_E", "--set: got 'batch_config.B_E', expected section.key=value"),
        ("B_E=3", "expected section.key=value"),
        (".B_E=3", "expected section.key=value"),
        ("batch_config.B_E=many", "--set: batch_config.B_E: got 'many', expected a whole number"),
        ("batch_config.BE=3", "--set: batch_config.BE: unknown key. Did you mean batch_config.B_E"),
        ("batch_config.B_E={", "--set batch_config.B_E={: line 1: not YAML"),
        ("batch_config.B_E.x=3", "batch_config.B_E.x: unknown key"),
        ("batch_config.B_E=[1, 2]", r"batch_config.B_E: got \[1, 2\]"),
    ],
)
def test_bad_overrides(override, match):
    with pytest.raises(ConfigError, match=match):
        parse_config({"batch_config": {"B_E": 8}}).with_overrides([override])


def test_overrides_that_disagree_with_each_other():
    with pytest.raises(ConfigError, match=r"true_delta_h\.clip_c: got 2.*importance\.clip_c is 1"):
        parse_config({}).with_overrides(["importance.clip_c=1", "true_delta_h.clip_c=2"])
