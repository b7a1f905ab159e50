"""The training loop: epochs, validation, checkpoints, and what to do when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arc_refine.checkpoint import FOLDER, LATEST, find_checkpoint, load_checkpoint, save_checkpoint
from arc_refine.config import TrainConfig
from arc_refine.data import Episode
from arc_refine.episodes import RunData, generator, load_data
from arc_refine.evaluate import evaluate, summary
from arc_refine.live import LiveContracts
from arc_refine.metrics import RunFolder, versions
from arc_refine.networks import build_networks, build_optimizers, describe_optimizers
from arc_refine.step import Precision, Training, train_step
from gradient_doctor import Severity

Say = Callable[[str], None]


@dataclass
class Position:
    """Where the next step is."""

    epoch: int = 0
    batch: int = 0


def begin(config: TrainConfig) -> Training:
    """Networks first, optimizers last."""
    check_device(config.device)
    # part of the configuration: sums over another number of threads have other last bits
    torch.set_num_threads(config.threads)
    networks = build_networks(config)
    return Training(
        config=config,
        networks=networks,
        optimizers=build_optimizers(networks, config),
        precision=Precision(config),
    )


def check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise ValueError(
            f"--device is {device!r}, expected cpu, cuda or cuda:0. Write one of these."
        ) from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: this machine has no CUDA device. Use --device cpu.")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device is {device!r}, expected cpu or cuda. Use --device cpu.")


def train(config: TrainConfig, out: str | Path, *, say: Say = print) -> Path:
    """Begin a run in a new folder; gives the folder."""
    data = load_data(config)
    training = begin(config)
    folder = RunFolder(out)
    folder.track(config.tracker, config.to_dict())
    folder.write_header(header(training, data))
    _loop(training, data, folder, Position(), say)
    return folder.path


def resume(run: str | Path, changes: dict[str, Any], *, say: Say = print) -> Path:
    """Go on from the latest checkpoint; `given` are options of the command line."""
    folder = RunFolder(run, resume=True)
    training, data, position = load_run(folder.path, changes)
    dropped = folder.forget_after(training.step)
    again = f"; {dropped} rows after it are made again" if dropped else ""
    say(f"resuming {folder.path} after step {training.step}{again}")
    if position.epoch >= training.config.epochs:
        say(f"nothing left to do: all {training.config.epochs} epochs are done; raise --epochs")
        return folder.path
    folder.track(training.config.tracker, training.config.to_dict())
    _loop(training, data, folder, position, say)
    return folder.path


def load_run(
    run: Path, changes: dict[str, Any] | None = None, *, checkpoint: Path | None = None
) -> tuple[Training, RunData, Position]:
    """A run as its latest checkpoint left it."""
    weights, state, facts = load_checkpoint(checkpoint or find_checkpoint(run))
    config = TrainConfig.from_dict(facts["config"]).resumed_with(changes or {})
    data = load_data(config)
    if data.split_hash() != facts["split"]:
        raise ValueError(
            f"The tasks of {config.data!r} are not those that {run} was trained on: another split "
            "would mix training with held-out tasks. Restore them."
        )
    training = begin(config)
    if training.networks.lm_fingerprint != facts["lm_fingerprint"]:
        raise ValueError(
            f"The language model {config.lm!r} has other weights than when {run} was trained. "
            "Restore them; checkpoints hold only what was trained."
        )
    training.networks.load(weights)
    for name, optimizer in training.optimizers.items():
        optimizer.load_state_dict(state["optimizers"][name])
    if training.precision.scaler is not None:
        training.precision.scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["rng"])
    training.step = facts["step"]
    return training, data, Position(facts["epoch"], facts["batch"])


def header(training: Training, data: RunData) -> dict[str, Any]:
    groups = training.networks.groups()
    return {
        "config": training.config.to_dict(),
        "versions": versions(),
        "optimizers": describe_optimizers(training.networks, training.optimizers),
        "parameters": {name: sum(p.numel() for p in g.values()) for name, g in groups.items()},
        "frozen_parameters": sum(
            p.numel() for _, p in training.networks.named_parameters() if not p.requires_grad
        ),
        "lm_fingerprint": training.networks.lm_fingerprint,
        "split": data.split_hash(),
        "training_tasks": len(data.training),
        "held_out_tasks": [task.id for task in data.held_out],
        "episodes": len(data.curriculum.episodes),
    }


def _loop(
    training: Training, data: RunData, folder: RunFolder, position: Position, say: Say
) -> None:
    config = training.config
    training.networks.train()
    live = LiveContracts(training, config.doctor, data.batch)
    episodes: list[Episode] = []
    try:
        while position.epoch < config.epochs:
            order = data.order(position.epoch)
            last = data.batches() - 1
            while position.batch <= last:
                episodes = data.episodes(position.epoch, position.batch, order)
                if not live.finished and live.count == 0:
                    live.before(episodes)
                row = _one_step(training, data, episodes, position, live)
                folder.row(row)
                if position.batch % config.log_every == 0 or position.batch == last:
                    say(line(row))
                position.batch += 1
                if live.due:
                    _told(live, folder, episodes, say)
                if training.step % config.checkpoint_every == 0 and position.batch <= last:
                    _save(training, data, folder, position)
            _validate(training, data, folder, position.epoch, say)
            position.epoch, position.batch = position.epoch + 1, 0
            _save(training, data, folder, position)
        if not live.finished and live.count:
            _told(live, folder, episodes, say)
    except BaseException as failure:
        folder.error(failure, step=training.step)
        raise
    finally:
        live.close()
        folder.close()


def kept(run: Path) -> str:
    """What an interrupted run leaves."""
    latest = run / FOLDER / LATEST
    if not latest.is_file():
        return f"Interrupted before the first checkpoint; {run} has the metrics so far."
    name = latest.read_text("utf-8").strip()
    return f"Interrupted. {name} is kept; go on with --resume {run}"


def _one_step(
    training: Training,
    data: RunData,
    episodes: Sequence[Episode],
    position: Position,
    live: LiveContracts,
) -> dict[str, Any]:
    numbers = (position.epoch, position.batch)
    batch = data.batch(episodes, *numbers)
    draw = generator("refine", training.config.seed, *numbers)
    row = live.run(lambda observer: train_step(training, batch, draw, observer))
    return {"step": row.pop("step"), "epoch": position.epoch, "batch": position.batch, **row}


def _told(live: LiveContracts, folder: RunFolder, episodes: Sequence[Episode], say: Say) -> None:
    """The contracts' last word on the first steps."""
    live.after(episodes)
    report = live.report()
    folder.write_contracts(report)
    say(f"contracts hold in the first {live.count} steps: {' '.join(report['held'])}")
    for finding in live.findings:
        if finding.severity >= Severity.WARNING:
            say(f"doctor: {finding}")


def _validate(training: Training, data: RunData, folder: RunFolder, epoch: int, say: Say) -> None:
    outcomes = evaluate(
        training,
        data.held_out_episodes(),
        lambda chunk: data.batch(chunk, -1),
        max_batches=training.config.eval_batches,
    )
    numbers = summary(outcomes)
    folder.validation({"step": training.step, "epoch": epoch, **numbers})
    say(
        f"validation after epoch {epoch}: {numbers['solved_after']} of {numbers['tasks']} held-out "
        f"tasks exact, cells {numbers['cell_accuracy_before']:.3f} -> "
        f"{numbers['cell_accuracy_after']:.3f}, sizes {numbers['size_accuracy']:.3f}"
    )


def _save(training: Training, data: RunData, folder: RunFolder, position: Position) -> None:
    scaler = training.precision.scaler
    save_checkpoint(
        folder.path,
        step=training.step,
        weights=training.networks.state(),
        state={
            "optimizers": {name: o.state_dict() for name, o in training.optimizers.items()},
            "scaler": None if scaler is None else scaler.state_dict(),
            "rng": torch.get_rng_state(),
        },
        facts={
            "epoch": position.epoch,
            "batch": position.batch,
            "config": training.config.to_dict(),
            "split": data.split_hash(),
            "lm_fingerprint": training.networks.lm_fingerprint,
        },
    )


def line(row: dict[str, Any]) -> str:
    """A row for the screen."""
    text = f"epoch {row['epoch']} batch {row['batch']:>4}  loss {row['loss']:.4f}"
    if row["qwen_grad"] is not None:
        text += f"  qwen_grad {row['qwen_grad']:.2e}"
    text += f"  mask_ratio {row['mask_ratio']:.3f}"
    if "reward_mean" in row:
        text += f"  reward {row['reward_mean']:+.5f}"
    text += f"  accuracy {row['accuracy_before']:.3f} -> {row['accuracy_after']:.3f}"
    return f"{text}  {row['seconds']:.2f} s"
