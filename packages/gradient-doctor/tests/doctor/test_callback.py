"""DoctorCallback in transformers' Trainer, with a tiny model: no tokenizer, no download."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

from doctor.stub import Broken, Stub, use
from doctor.test_untouched import state_of_torch
from gradient_doctor.findings import Severity
from gradient_doctor.session import STRICT

pytestmark = pytest.mark.slow  # transformers' Trainer alone takes long to import


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x, labels=None):
        out = self.head(torch.tanh(self.body(x))).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "out": out}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        x = torch.randn(3, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": x.sum().sin()}


@pytest.fixture
def trainer(tmp_path):
    from transformers import Trainer, TrainingArguments

    def make(*callbacks, add=False, **options):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=2,
            learning_rate=1e-2, report_to=[], use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False, **{"save_strategy": "no", **options},
        )  # fmt: skip
        given = None if add else list(callbacks)
        data = {"train_dataset": Rows(), "eval_dataset": Rows()}
        made = Trainer(model=Tiny(), args=arguments, callbacks=given, **data)
        for callback in callbacks if add else ():
            made.add_callback(callback)
        return made

    return make


@pytest.fixture
def callback():
    from gradient_doctor.hf import DoctorCallback

    return DoctorCallback


@pytest.mark.parametrize("accumulation", [1, 3])
def test_it_watches_the_trainers_steps(trainer, callback, monkeypatch, capsys, accumulation):
    use(monkeypatch, Stub)
    before = state_of_torch()
    doctor = callback(mode="trace")
    run = trainer(doctor, gradient_accumulation_steps=accumulation)  # kept: we ask for its names
    run.train()
    session = doctor.doctor.session
    assert session.step == 6
    assert [len(r.backwards) for r in session.history[:6]] == [accumulation] * 6
    (optimizer,) = session.registry.optimizers.values()
    assert type(optimizer) is torch.optim.AdamW  # not accelerate's wrapper
    assert session.registry.names(session.registry.owned) == tuple(
        f"model.{name}" for name, _ in Tiny().named_parameters()
    )
    assert [f.number for f in doctor.findings] == [5]
    assert "gradient_doctor: 1 warning in 6 steps." in capsys.readouterr().err
    assert state_of_torch() == before


def test_weights_are_bit_identical(trainer, callback, monkeypatch):
    plain = trainer()
    plain.train()
    for mode in ("trace", "auto", "light"):
        watched = trainer(callback(mode=mode, every=2))
        watched.train()
        pairs = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_clean_training_gives_no_finding(trainer, callback, capsys):
    doctor = callback(raise_on="warning")
    trainer(doctor).train()
    assert [f for f in doctor.findings if f.severity >= Severity.WARNING] == []


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("where", ["forward", "step", "data", "evaluation"])
def test_everything_is_put_back_when_training_breaks(
    trainer, callback, monkeypatch, capsys, where, add
):
    use(monkeypatch, Stub)
    doctor = callback(mode="trace")
    made = trainer(doctor, add=add, eval_strategy="steps", eval_steps=2)

    def fail(*_, **__):
        if made.state.global_step == 2:
            raise ZeroDivisionError("the trainer's")

    if where == "forward":
        made.model.register_forward_pre_hook(fail)
    elif where == "step":
        made.create_optimizer()
        made.optimizer.register_step_pre_hook(fail)
    elif where == "data":
        plain = made.data_collator
        made.data_collator = lambda rows: fail() or plain(rows)
    else:
        made.evaluate = fail
    before = state_of_torch()
    with pytest.raises(ZeroDivisionError) as caught:
        made.train()
    assert state_of_torch() == before
    assert any("Found by a stub" in note for note in caught.value.__notes__)
    assert capsys.readouterr().err.count("gradient_doctor: 1 warning") == 1
    # and the next training starts afresh
    monkeypatch.setattr(made.state, "global_step", 0)
    again = trainer(doctor)
    again.train()
    assert doctor.doctor.session.step == 6


@pytest.mark.parametrize(
    ("raise_on", "severity", "when", "step"),
    [
        ("warning", Severity.WARNING, "step", 1),
        ("warning", Severity.WARNING, "finish", 6),
        ("error", Severity.WARNING, "step", None),
        (None, Severity.ERROR, "step", None),
    ],
)
def test_raise_on(trainer, callback, monkeypatch, capsys, raise_on, severity, when, step):
    from gradient_doctor.hf import GradientError

    use(monkeypatch, Stub, severity=severity, when=when)
    before = state_of_torch()
    made = trainer(callback(raise_on=raise_on))
    if step is None:
        made.train()
    else:
        with pytest.raises(GradientError, match=r"\[5 unreachable\] Found by a stub") as caught:
            made.train()
        assert made.state.global_step == step
        assert not hasattr(caught.value, "__notes__")
    assert state_of_torch() == before


def test_our_own_mistakes_do_not_end_training(trainer, callback, monkeypatch, caplog):
    use(monkeypatch, Broken)
    before = state_of_torch()
    monkeypatch.setenv(STRICT, "1")  # a mistake outside of detectors shows itself like this
    doctor = callback(report=False)
    made = trainer(doctor)
    with caplog.at_level(logging.WARNING, "gradient_doctor"):
        made.train()
    assert made.state.global_step == 6
    assert caplog.text.count("the doctor failed and leaves") == 1
    assert state_of_torch() == before
    monkeypatch.delenv(STRICT)
    made = trainer(doctor)
    made.train()
    assert doctor.doctor.session.step == 6
    assert [f.number for f in doctor.findings] == [0]


def test_a_second_beginning_without_an_end(trainer, callback, monkeypatch):
    """As when the trainer looks for a batch size that fits in memory."""
    before = state_of_torch()
    doctor = callback()
    made = trainer(doctor, auto_find_batch_size=True)
    failed = []

    def once(*_):
        if not failed and made.state.global_step == 1:
            failed.append(True)
            raise RuntimeError("CUDA out of memory.")

    made.model.register_forward_pre_hook(once)
    made.train()
    assert failed
    assert doctor.doctor.session.step == 6
    assert state_of_torch() == before


def test_json_options_and_ranks(trainer, callback, monkeypatch, tmp_path, capsys):
    use(monkeypatch, Stub)
    target = tmp_path / "doctor.json"
    trainer(callback(report=False, json=target)).train()
    assert json.loads(target.read_text())["findings"][0]["number"] == 5
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="raise_on is 'always'; expected"):
        callback(raise_on="always")
    with pytest.raises(ValueError, match="mode is 'fast'"):
        callback(mode="fast")
    trainer(callback(mode="off", raise_on="warning")).train()
    doctor = callback()
    made = trainer(doctor)
    made.state.is_world_process_zero = False
    doctor.on_train_begin(made.args, made.state, made.control, model=made.model)
    assert doctor.doctor.session.registry.discover  # no optimizer yet: it is found
    doctor.on_train_end(made.args, made.state, made.control)
    assert capsys.readouterr().err == ""


def test_a_resumed_training_reports_all_its_parts(trainer, callback, monkeypatch, tmp_path, caplog):
    use(monkeypatch, Stub, when="step", severity=Severity.ERROR)
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer(callback(report=False), **saving).train()
    state = tmp_path / "checkpoint-3" / "trainer_state.json"
    assert json.loads(state.read_text())["stateful_callbacks"]["gradient_doctor"]["steps"] == 3
    # The second part finds nothing by itself; an earlier error does not end it either.
    use(monkeypatch, Stub, severity=None)
    doctor = callback(report=False, json=tmp_path / "doctor.json", raise_on="error")
    made = trainer(doctor, **saving)
    made.train(resume_from_checkpoint=str(state.parent))
    assert made.state.global_step == 6
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert written["steps"] == 6
    assert [f["step"] for f in written["findings"]] == [0]
    # A file that is damaged is no reason to do without a doctor.
    content = json.loads(state.read_text())
    content["stateful_callbacks"]["gradient_doctor"] = {"schema": 1, "steps": 3, "findings": 5}
    state.write_text(json.dumps(content))
    doctor = callback(report=False)
    with caplog.at_level(logging.WARNING, "gradient_doctor"):
        trainer(doctor, **saving).train(resume_from_checkpoint=str(state.parent))
    assert "cannot be read from trainer_state.json" in caplog.text
    assert doctor.doctor.session.step == 3


def test_without_transformers_the_error_says_so():
    code = """
import sys
sys.modules["transformers"] = None
import gradient_doctor
try:
    import gradient_doctor.hf
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gradient_doctor.hf is for transformers' Trainer" in done.stdout
    assert "use gradient_doctor.Doctor around your own loop" in done.stdout
