"""A finished or interrupted run, looked at again: its predictions for a set of tasks."""

from __future__ import annotations

from pathlib import Path

from arc_refine.data import Task, load_tasks, test_episodes
from arc_refine.episodes import RunData
from arc_refine.evaluate import Outcome, evaluate
from arc_refine.metrics import RunFolder
from arc_refine.train import load_run


def outcomes(
    run: Path,
    source: str = "held-out",
    *,
    ids: tuple[str, ...] = (),
    count: int | None = None,
    max_batches: int | None = None,
) -> list[Outcome]:
    """Of the latest checkpoint, one for each test output, in the order of the tasks."""
    RunFolder(run, resume=True)
    training, data, _ = load_run(run)
    tasks = chosen_tasks(data, source, ids)[:count]
    episodes = [episode for task in tasks for episode in test_episodes(task)]
    evaluated = evaluate(
        training, episodes, lambda chunk: data.batch(chunk, -1), max_batches=max_batches
    )
    place = {task.id: n for n, task in enumerate(tasks)}
    return sorted(evaluated, key=lambda o: place[o.task_id])


def chosen_tasks(data: RunData, source: str, ids: tuple[str, ...]) -> tuple[Task, ...]:
    own = {"held-out": data.held_out, "training": data.training}
    tasks = own[source] if source in own else load_tasks(source)
    if not ids:
        return tuple(tasks)
    by_id = {task.id: task for task in tasks}
    missing = [i for i in ids if i not in by_id]
    if missing:
        raise ValueError(
            f"{source} has no task {', '.join(missing)}, expected one of its {len(by_id)}, such as "
            f"{next(iter(by_id))}. Try --data training, held-out or evaluation."
        )
    return tuple(by_id[i] for i in ids)
