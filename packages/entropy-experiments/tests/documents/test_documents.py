"""The users' five documents, to the letter: every import, command, YAML and result key.

What stands between triple quotes is copied from the documents. Paths of checkpoints are put in
(`/path/to/checkpoint`), and where a document names a file that its reader writes, that file is
small; nothing else is changed. Document 002's quick start is in `test_document_002.py`, document
003's snippets in the tests of arc-refine, numbers of the documents' classes in
`test_document_modules.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import entropy_experiments
from checkout import ROOT
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.runs import default_checkpoint
from entropy_experiments.config import load_config, parse_config
from entropy_experiments.config.training_reading import load_training
from entropy_experiments.pipelines.influence.stages import Clock
from oracles.tiny_models import save_tiny_checkpoint, tiny_rollouts

pytestmark = pytest.mark.contract

FOLDER = ROOT / "entropy_experiments"
SMALL = """\
batch_config: {B_E: 6, B_U: 2, G: 4}
memory_config: {microbatch_size: 32}
approx_delta_h: {curvature: false, variance: false}
update: {batch: drawn}
probe_rework: {compute_delta_h1: true}
importance: {enabled: true}
influence: {measured_rollouts: 3, reward: false, plots: false}
"""
"""What a reader's own configuration says: batches that take a second."""


def start(*arguments, cwd, **environment):
    """Start Python as the document does, from `cwd`."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=240,
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A reader's folder, with a small configuration under the documents' names."""
    monkeypatch.chdir(tmp_path)
    for name in ("configs/my_config.yaml", "configs/detailed_logging_example.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SMALL)
    return tmp_path


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The repository's root, as far as scripts see it, in a folder that may be written to."""
    for name in ("entropy_experiments", "fixed.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Which `entropy_experiments` is imported ---------------------------------------------------------

INSTALLED = "import entropy_experiments as e; print(e.__file__)"


def is_the_package(text):
    path = Path(text.strip())
    return path.name == "__init__.py" and FOLDER not in path.parents and path.is_file()


def test_the_scripts_folder_is_no_package():
    assert FOLDER.is_dir()
    assert not (FOLDER / "__init__.py").exists()
    assert (FOLDER / "configs" / "config_template.yaml").is_file()
    assert is_the_package(entropy_experiments.__file__)  # this very pytest has the root in its path
    assert str(ROOT) in map(os.path.abspath, sys.path)


def test_the_installed_package_wins_from_the_root():
    found = start("-c", INSTALLED, cwd=ROOT)
    assert is_the_package(found.stdout), found


def test_it_wins_for_a_script_and_for_pytest_in_the_root(root):
    (root / "mine.py").write_text(INSTALLED)
    assert is_the_package(start("mine.py", cwd=root).stdout)
    (root / "test_mine.py").write_text(
        "import sys, entropy_experiments\n"
        "def test_it(): print('FILE', entropy_experiments.__file__); assert '' in sys.path[0]"
    )
    found = start("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "test_mine.py", cwd=root)
    assert found.returncode == 0, found.stdout
    assert is_the_package(found.stdout.split("FILE ")[1].split("\n")[0].rstrip("."))


# Document 000: the crash report ------------------------------------------------------------------


def test_document_000(here):
    """`run_mixed_probe() -> compute_delta_h1_from_batches() -> accumulate_sum_X()`, no crash."""
    from entropy_experiments.pipelines.probe_inputs import gather
    from entropy_experiments.probe_components import ProbeComponents

    config = load_config("entropy_experiments/configs/test_deltaH1.yaml")
    config = parse_config({**config.documents(), **yaml.safe_load(SMALL)})
    inputs = gather(config, None)
    parts = ProbeComponents(
        inputs.policy,
        objective=inputs.facts.objective,
        max_grad_norm=inputs.facts["max_grad_norm"],
        microbatch=32,
    )
    found = parts.compute_delta_h1_from_batches(inputs.evaluation, inputs.update, inputs.optimizer)
    # Expected computation: deltaH1 = learning_rate x bars_dot
    assert found["deltaH1"] == found["learning_rate"] * found["bars_dot"]
    assert (found["B_E"], found["B_U"]) == (6, 2)
    sum_X, _ = parts.accumulate_sum_X(inputs.evaluation)
    assert all(g.any() for g in sum_X.values())
    probe = entropy_experiments.OfflineEntropyProbe(config, quiet=True)
    results = probe.run_mixed_probe()
    assert results["bars_dot"] == pytest.approx(found["bars_dot"], rel=1e-4)


def test_document_000s_checkpoint_layout(tmp_path):
    """training_state/step_60/ with model/ and optimizer.pt below it."""
    save_tiny_checkpoint(tmp_path / "training_state", layout="step", step=60)
    for path in ("step_60", "step_60/model"):
        found = load_checkpoint(tmp_path / "training_state" / path)
        assert (found.step, found.name, found.kind) == (60, "step_60", "lora")


# Document 001: gradients between two steps of training -------------------------------------------

DUAL_BUFFER = """
# 1. Collect entropy buffer (half size)
entropy_per_rank = per_rank // 2
entropy_rb = self.collector.collect_batch(batch_prompts=entropy_per_rank)

# 2. Convert and compute entropy gradients with gradient accumulation
entropy_batch = entropy_rb.to_batch(device=f"cuda:{self.local_rank}")
entropy_grads = self.algo.simple_entropy_probe.compute_entropy_gradients_only(
    entropy_rollouts=entropy_batch,
    trainable_params=ddp_trainable_params,
    policy_model=self.model,
    cfg=self.cfg,
    step_number=self.step_id + 1,
    microbatch_size=self.cfg["microbatch_size"]
)

# 3. Immediate cleanup
del entropy_rb
torch.cuda.empty_cache()
"""


@pytest.mark.parametrize("form", ["module", "object"])
def test_document_001s_dual_buffer(form):
    from entropy_experiments import simple_entropy_probe

    checkpoint = load_checkpoint(default_checkpoint(), read_optimizer=False)
    model = checkpoint.model
    rollouts = tiny_rollouts(prompts=(3, 37, 9, 4), responses=(20, 4, 31, 1))
    collected = []
    probe = simple_entropy_probe
    runner = SimpleNamespace(
        collector=SimpleNamespace(
            collect_batch=lambda batch_prompts: (
                collected.append(batch_prompts) or SimpleNamespace(to_batch=lambda device: rollouts)
            )
        ),
        algo=SimpleNamespace(
            simple_entropy_probe=probe if form == "module" else probe.SimpleEntropyProbe()
        ),
        local_rank=0,
        model=model,
        cfg={"microbatch_size": 4, "rollout_batch_size": 12},
        step_id=9,
    )
    params = [p for p in model.parameters() if p.requires_grad]
    names = {"self": runner, "per_rank": 8, "ddp_trainable_params": params, "torch": torch}
    exec(DUAL_BUFFER, names)
    assert collected == [4]
    grads = names["entropy_grads"]
    assert [g.shape for g in grads] == [p.shape for p in params]  # no None among them
    assert all(torch.isfinite(g).all() for g in grads)
    # Open issue 3, "values around 1e6": a mean over tokens is of order one.
    assert 0 < max(float(g.norm()) for g in grads) < 100


def test_document_001s_configuration():
    """rl_training/cfg/..., by the names that the document gives."""
    test = load_training("rl_training/cfg/entropy_probe_test_optimized.yaml")
    assert load_training("overnight_config.yaml").max_steps > test.max_steps
    used = yaml.safe_load(
        "rollout_batch_size: 12\n"
        "tf_micro_batch: 12\n"
        "buffer_size: 64\n"
        "microbatch_size: 4\n"
        "total_steps: 10\n"
        "simple_entropy_probe: {enabled: true}"
    )
    assert parse_config(used).memory.microbatch_size == 4


# Document 002: the probe -------------------------------------------------------------------------

MODULES = {
    "offline_entropy_probe": "OfflineEntropyProbe",
    "detailed_logger": "DetailedLogger",
    "delta_entropy_is": "DeltaEntropyIS",
    "probe_components": "ProbeComponents",
    "adam_preconditioner": "AdamPreconditioner",
    "model_loader": "load_checkpoint",
    "distributed_helpers": "Ranks",
    "simple_entropy_probe": "compute_entropy_gradients_only",
    "entropy_experiment_runner": "EntropyMeasurements",
    "entropy_influence": "EntropyInfluenceRunner",
    "delta_entropy_true": "DeltaEntropyTrue",
    "delta_entropy_approx": "DeltaEntropyApprox",
    "update_vector": "compute_update_vector_adamw",
    "fisher_kernel": "WorkspaceSpec BatchRequest",
    "utils.sequence_processor": "SequenceProcessor",
    "utils.sample_generator": "SampleGenerator",
    "utils.model_loader": "load_checkpoint",
    "utils.param_overrides": "build_functional_params_named",
    "utils.detailed_logger": "DetailedLogger",
    "utils.precision_utils": "apply_global_precision",
}
"""Of documents 001, 002 and 004, each with the name it is known for."""

METHODS = {
    "offline_entropy_probe.OfflineEntropyProbe": "from_config_file run_mixed_probe",
    "probe_components.ProbeComponents": "accumulate_sum_X compute_delta_h1_from_batches",
    "delta_entropy_true.DeltaEntropyTrue": "compute_delta_h_true compute_delta_h_true_multi",
    "utils.sample_generator.SampleGenerator": "generate_update_batch",
    "entropy_experiment_runner.EntropyMeasurements": "run_experiments",
    "entropy_influence.EntropyInfluenceRunner": "run",
    "delta_entropy_is.DeltaEntropyIS": "entropy_change_two_batch",
}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_path_imports(module):
    found = importlib.import_module(f"entropy_experiments.{module}")
    for name in MODULES[module].split():
        assert callable(getattr(found, name))


@pytest.mark.parametrize("where", METHODS)
def test_their_methods_are_there(where):
    module, _, name = where.rpartition(".")
    found = getattr(importlib.import_module(f"entropy_experiments.{module}"), name)
    for method in METHODS[where].split():
        assert callable(getattr(found, method))


LEVELS = """
detailed_logging:
  enabled: true
  level: "minimal"
---
detailed_logging:
  enabled: true
  level: "standard"
  log_sequences: true
---
detailed_logging:
  enabled: true
  level: "detailed"
  log_sequences: true
---
detailed_logging:
  enabled: true
  level: "debug"
  log_sequences: true
  log_tokens: true
  log_raw_tensors: true
---
batch_config:
  B_E: 16    # Reduce from default 64
  B_U: 8     # Reduce from default 16

memory_config:
  microbatch_size: 1  # Reduce from default 2
---
detailed_logging:
  level: "standard"    # Reduce from "detailed" or "debug"
  compress: true       # Enable gzip compression
  log_sequences: false # Disable sequence text logging
"""


def test_every_yaml_of_document_002(tmp_path):
    """The long template is in test_config.py."""
    blocks = LEVELS.split("---\n")
    assert len(blocks) == 6
    for text in blocks:
        (tmp_path / "my.yaml").write_text(text)
        config, asked = load_config(tmp_path / "my.yaml"), yaml.safe_load(text)
        for section, keys in asked.items():
            for key, value in keys.items():
                assert config.documents()[section][key] == value


SNIPPETS = {
    "main orchestrator": """
from entropy_experiments.offline_entropy_probe import OfflineEntropyProbe

# Load from config
probe = OfflineEntropyProbe.from_config_file('configs/my_config.yaml')

# Run analysis
results = probe.run_mixed_probe(checkpoint_path='/path/to/checkpoint')
""",
    "basic": """
# Load probe
probe = OfflineEntropyProbe.from_config_file('configs/detailed_logging_example.yaml')

# Run analysis
results = probe.run_mixed_probe('/path/to/checkpoint')

# Extract key metrics
delta_h1_pred = results['deltaH1']        # First-order prediction
delta_h_true = results['deltaH_true']     # Ground truth measurement
bars_dot = results['bars_dot']            # Gradient dot product
learning_rate = results['learning_rate']  # Effective learning rate

print(f"dH1 = {delta_h1_pred:.8f}")
print(f"dH_true = {delta_h_true:.8f}")
print(f"Error = {abs(delta_h1_pred - delta_h_true):.8f}")
""",
    "debugging": """
# Enable debug logging
config['detailed_logging'] = {
    'enabled': True,
    'level': 'debug',
    'log_sequences': True,
    'log_tokens': True,
    'log_raw_tensors': True
}

probe = OfflineEntropyProbe(config)
results = probe.run_mixed_probe('/path/to/checkpoint')
""",
    "ground truth only": """
# For direct entropy measurement without gradient estimation
config['probe_rework']['compute_delta_h1'] = False  # Skip Phase 1-3
config['importance']['enabled'] = True              # Enable Phase 5 only

probe = OfflineEntropyProbe(config)
results = probe.run_mixed_probe('/path/to/checkpoint')

# Results will only contain ground truth measurements
delta_h_true = results['deltaH_true']
""",
}
READ = """
results = probe.run_mixed_probe(checkpoint_path)
prediction_error = abs(results['deltaH1'] - results['deltaH_true'])
relative_error = prediction_error / abs(results['deltaH_true'])

results = probe.run_mixed_probe(checkpoint_path)
ess = results['diagnostics']['ESS']
w_max = results['diagnostics']['w_max']
# ESS should be high, weight ratios should be moderate
"""
"""Two snippets that only read; they get what an earlier one computed."""
KEYS = (
    *("bars_dot", "deltaH1", "deltaH_true", "learning_rate", "H_orig", "H_upd", "B_E", "B_U"),
    *("avg_generation_length", "avg_reward", "timing"),
)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_snippet_of_document_002(snippet, here):
    from entropy_experiments.offline_entropy_probe import OfflineEntropyProbe

    config = yaml.safe_load(SMALL)
    names = {
        "OfflineEntropyProbe": OfflineEntropyProbe,
        "config": config,
        "probe": OfflineEntropyProbe(config, quiet=True),
        "checkpoint_path": str(default_checkpoint()),
    }
    exec(SNIPPETS[snippet].replace("/path/to/checkpoint", str(default_checkpoint())), names)
    results = names["results"]
    skipped = {"bars_dot", "deltaH1"} if snippet == "ground truth only" else set()
    assert {*KEYS} - results.keys() == skipped
    assert {"ESS", "w_max", "w_min"} <= results["diagnostics"].keys()
    assert Path(results["log_path"]).is_file()
    if snippet == "basic":
        assert names["delta_h1_pred"] == pytest.approx(names["bars_dot"] * names["learning_rate"])
        names["probe"] = SimpleNamespace(run_mixed_probe=lambda path: results)
        exec(READ, names)
        assert names["relative_error"] < 1
        assert 1 < names["ess"] <= 6


def test_a_checkpoint_that_is_not_there(here):
    """`Checkpoint not found`, and which files should be there, as the document lists them."""
    probe = entropy_experiments.OfflineEntropyProbe(yaml.safe_load(SMALL), quiet=True)
    with pytest.raises(FileNotFoundError, match="Checkpoint not found") as failure:
        probe.run_mixed_probe("/path/to/checkpoint")
    for name in ("adapter_config.json", "adapter_model.safetensors", "model/"):
        assert name in str(failure.value)
    path = save_tiny_checkpoint(here, layout="step").path
    (path / "optimizer.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"optimizer\.pt"):
        probe.run_mixed_probe(path)


COMPREHENSIVE = [
    "entropy_experiments/run_probe_with_comprehensive_logging.py",
    *("--config", "entropy_experiments/configs/detailed_logging_example.yaml"),
    *("--checkpoint", "/path/to/checkpoint"),
]


def test_the_probes_script_is_the_command(root, monkeypatch, capsys):
    """In this process, with its documented arguments; the folder's configuration is found."""
    monkeypatch.setattr(sys, "argv", [str(word) for word in COMPREHENSIVE])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(COMPREHENSIVE[0], run_name="__main__")
    assert ended.value.code == 2
    assert "Checkpoint not found: /path/to/checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_the_probes_script_from_the_root(root):
    words = [w.replace("/path/to/checkpoint", str(default_checkpoint())) for w in COMPREHENSIVE]
    found = start(*words, cwd=root)
    assert found.returncode == 0, found.stderr
    assert "predicted" in found.stdout
    assert "log: logs/" in found.stderr
    assert len(list((root / "logs").glob("*/entropy_probe_*_step_13*"))) == 3


@pytest.mark.slow
def test_the_import_of_document_002s_troubleshooting():
    """`Run from project root`."""
    code = "from entropy_experiments.offline_entropy_probe import OfflineEntropyProbe"
    found = start("-c", code, cwd=ROOT)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


# Document 003: the ARC trainer -------------------------------------------------------------------

FIXED = (
    "python fixed.py --epochs 1 --agent_lr 1e-5 --qwen_lr 5e-5 --device cpu --max_batches 5",
    "python fixed.py --epochs 1 --agent_lr 1e-5 --qwen_lr 5e-5 --device cuda --max_batches 100",
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would train on the GPU")
def test_document_003s_command_on_a_machine_without_cuda(root, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", FIXED[1].split()[1:])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("fixed.py", run_name="__main__")
    assert ended.value.code == 2
    assert "--device cuda: this machine has no CUDA device. Use --device cpu." in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_document_003s_quick_validation(root):
    """No FP16 errors, no graph errors, the language model's gradient nonzero, all 5 batches."""
    found = start(*FIXED[0].split()[1:], cwd=root)
    assert found.returncode == 0, found.stderr
    (run,) = (root / "arc_runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert all(row["qwen_grad"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


# Document 004: studies ---------------------------------------------------------------------------

LARGE = FOLDER / "scripts" / "run_entropy_influence_large.py"


def edited(tmp_path):
    """The script as its reader leaves it: ETAS, WorkspaceSpec and evaluation requests inline."""
    text = LARGE.read_text()
    changes = {
        "\nETAS: list[float] | None = None": "\nETAS = [3e-3, 1.5e-3, 7.5e-4]",
        'WORKSPACE = WorkspaceSpec(kind="update")': "WORKSPACE = WorkspaceSpec("
        'kind="update", params={"batch": "drawn", "prompts": 2, "group": 4})',
        'EVALUATION_REQUESTS = [BatchRequest(kind="evaluation")]': "EVALUATION_REQUESTS = ["
        'BatchRequest(kind="evaluation", params={"group": 2})]',
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder = tmp_path / "scripts"
    folder.mkdir()
    for helper in LARGE.parent.glob("*.py"):
        (folder / helper.name).write_bytes(helper.read_bytes())
    (folder / LARGE.name).write_text(text)
    return folder / LARGE.name


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """(run directory, what was printed) of the edited script, in this process."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "my.yaml").write_text(SMALL)
    script = edited(folder)
    spec = importlib.util.spec_from_file_location("large", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = Path.cwd()
    os.chdir(folder)
    try:
        app = module.typer.Typer()
        app.command()(module.main)
        found = CliRunner().invoke(app, ["--config", "my.yaml"], catch_exceptions=False)
    finally:
        os.chdir(before)
    assert found.exit_code == 0, found.output
    (run,) = (folder / "results" / "entropy_influence").iterdir()
    return run, found.stdout


def test_the_studys_script_writes_what_document_004_lists(study):
    run, printed = study
    assert f"Files: {run.relative_to(run.parents[2])}" in printed
    summary = json.loads((run / "summary.json").read_text())
    assert summary["plan"]["etas"] == [0.003, 0.0015, 0.00075]
    (evaluation,) = summary["evaluations"]
    assert set(evaluation["aggregate"]) == {"0.003", "0.0015", "0.00075"}
    assert {"norms"} <= summary["update"].keys()
    assert "timings" in summary
    rollouts, updates = 12, 8
    assert np.load(run / "eval_00_delta_matrix.npy").shape == (rollouts, updates)
    for flavour in ("full", "baseline", "grad", "baseline_plus_grad"):
        files = sorted((run / "eval_00_per_sequence" / flavour).glob("eta_*.npy"))
        assert len(files) == 3
        assert all(rollouts in np.load(file).shape for file in files)
    assert len(list((run / "eval_00_grad_eta").glob("*.npy"))) == 3
    for file in (run / "eval_00_grad_eta").glob("*.json"):
        assert "ESS" in json.dumps(json.loads(file.read_text()))


@pytest.mark.parametrize("helper", ["analyze_grad_linearity.py", "plot_grad_delta_samples.py"])
def test_the_analysis_helpers_lie_in_the_study(helper, study, monkeypatch, capsys):
    """results/entropy_influence/*/analyze_grad_linearity.py, run where it lies."""
    run, _ = study
    monkeypatch.setattr(sys, "argv", [helper])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(run / helper), run_name="__main__")
    assert ended.value.code in (0, None)
    printed = capsys.readouterr().out
    if helper.startswith("plot"):
        drawn = Path(printed.split()[-1])
        assert drawn.parent == run / "plots"
        assert drawn.stat().st_size > 10_000
    else:
        assert "of 6 are straight lines" in printed  # three rollouts, two flavours
        assert "R2" in printed or "r2" in printed.lower()


def test_a_folder_that_is_no_study(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["analyze_grad_linearity.py", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(LARGE.with_name("analyze_grad_linearity.py")), run_name="__main__")
    assert ended.value.code == 2
    assert "expected the run directory of a study" in capsys.readouterr().err


def test_document_004s_configuration():
    config = load_config("configs/config_template.yaml")
    changed = config.with_overrides(
        [
            "batch_config.filter_zero_advantage_prompts=true",
            "batch_config.max_resample_attempts=7",
            "batch_config.advantage_filter_tol=1e-6",
            "true_delta_h.tf_batch_size=64",
            "influence.grad_chunk_size=4",
            "detailed_logging.level=standard",
        ]
    )
    assert changed.data.resample_equal_rewards
    assert changed.forward_batch_size == 64
    assert config.data.resample_equal_rewards  # the documented default


def test_progress_is_a_bar_on_a_terminal(monkeypatch, capsys):
    """`progress bars are emitted`; where nobody watches, a line for each stage."""
    said = []
    clock = Clock(say=said.append, total=10.0)
    clock.tell("step", 4, 1.0, found=False)
    assert said == ["the optimizer step: 1.0 s (40%, about 2 s left)"]
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with closing(clock):
        clock.tell("eval_00_matrix", 6, 1.0, found=False)
    shown = capsys.readouterr().err
    assert len(said) == 1
    assert "━━━━━━━━━━" in shown
    assert "100%" in shown
    assert "eval_00, every pair of rollouts: 1.0 s" in shown
    assert shown.endswith("\x1b[?25h")  # the cursor is back


@pytest.mark.slow
def test_the_studys_script_from_the_root(root):
    """As it stands, on the policy in the package; then the helper beside its results."""
    (root / "my.yaml").write_text(SMALL)
    words = ["entropy_experiments/scripts/run_entropy_influence_large.py", "--config", "my.yaml"]
    found = start(*words, cwd=root)
    assert found.returncode == 0, found.stderr
    (run,) = (root / "results" / "entropy_influence").iterdir()
    helper = run.relative_to(root) / "analyze_grad_linearity.py"
    assert "straight lines" in start(helper, cwd=root).stdout
    again = start(*words, cwd=root)
    assert "finished already, nothing was computed" in again.stderr


# Item 8: the callback is a public name -----------------------------------------------------------


def test_the_callback_is_public_and_lazy():
    code = (
        "import sys, entropy_experiments\n"
        "assert 'EntropyProbeCallback' in dir(entropy_experiments)\n"
        "print('torch' in sys.modules, 'trl' in sys.modules, 'transformers' in sys.modules)"
    )
    assert start("-c", code, cwd=ROOT).stdout.split() == ["False"] * 3
    from entropy_experiments import EntropyProbeCallback
    from entropy_experiments.online import trl

    assert EntropyProbeCallback is trl.EntropyProbeCallback
