"""A small influence study of the embedded default, and how to ask for it."""

from __future__ import annotations

import numpy as np

from entropy_experiments import BatchRequest, EntropyInfluencePlan, WorkspaceSpec

BATCHES = {"batch_config": {"B_E": 8, "B_U": 2, "G": 4}, "memory_config": {"microbatch_size": 16}}

ROWS, ETAS = [0, 2, 5], (0.003, 0.001)
SETTINGS = {
    "batch_config": {"B_E": 6},
    "memory_config": {"microbatch_size": 32},
}
WHAT_IF = ["drop=negative", "lr=0.001"]
EVERYTHING = {"fisher": True, "plots": True}
"""On top of `plan`: what most tests can do without."""


def settings_in(folder, **sections):
    """Rollouts are kept beside the study, so that one that was copied draws none."""
    return {**SETTINGS, "rollouts": {"save": str(folder / "rollouts")}, **sections}


def plan(folder, **changes):
    return EntropyInfluencePlan(
        **{
            "workspace": WorkspaceSpec(
                kind="update", params={"batch": "drawn", "prompts": 2, "group": 4}
            ),
            "evaluation_requests": [
                BatchRequest(kind="evaluation", params={"group": 2}),
                BatchRequest(kind="update", params={"fresh": True}),
            ],
            "etas": ETAS,
            "per_sequence_etas": [0.001],
            "grad_chunk_size": 3,
            "microbatch_size": 32,
            "measured_rollouts": ROWS,
            "leave_one_out": [1],
            "what_if": WHAT_IF,
            "confirm": True,
            "plots": False,
            "run_directory": folder,
            **changes,
        }
    )


def array(folder, name):
    return np.load(folder / name, allow_pickle=False)
