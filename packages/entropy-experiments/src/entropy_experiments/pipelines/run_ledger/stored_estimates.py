"""Estimates with their influence values as JSON, whose floats come back bit by bit."""

from __future__ import annotations

from dataclasses import asdict

import torch

from entropy_experiments.results import JSONObject
from entropy_experiments.types import Estimand, Estimate
from entropy_experiments.types.estimate import Influence


def pack(estimate: Estimate | None) -> JSONObject | None:
    """The estimate as JSON; None stays None."""
    if estimate is None:
        return None
    return {
        "value": estimate.value,
        "noise_floor": estimate.noise_floor,
        "given_reasons": list(estimate.given_reasons),
        "estimand": asdict(estimate.estimand),
        "influences": [
            {
                "value_C": one.value_C.tolist(),
                "prompt_C": one.prompt_C.tolist(),
                "stratum_C": one.stratum_C.tolist(),
                "sample": one.sample,
            }
            for one in estimate.influences
        ],
    }


def unpack(packed: JSONObject | None) -> Estimate | None:
    """What `pack` was given."""
    if packed is None:
        return None
    return Estimate.build(
        value=packed["value"],
        estimand=Estimand(**packed["estimand"]),
        noise_floor=packed["noise_floor"],
        why_not=packed["given_reasons"],
        influences=[
            Influence(
                value_C=torch.tensor(one["value_C"], dtype=torch.float64),
                prompt_C=torch.tensor(one["prompt_C"], dtype=torch.int64),
                stratum_C=torch.tensor(one["stratum_C"], dtype=torch.int64),
                sample=one["sample"],
            )
            for one in packed["influences"]
        ],
    )
