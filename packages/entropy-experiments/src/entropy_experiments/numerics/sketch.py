"""A few dozen numbers that stand for a large vector, so that closeness can be measured later.

    s_b = sum over elements e in bucket b of sign(e) x_e          (count sketch, 64 buckets, fp64)

Bucket and sign follow from the parameter's name and the element's place alone. E|s|^2 = |x|^2 with
a relative standard deviation of sqrt(2 / 64), and s is linear: the distance of two vectors is that
of their sketches, to about a tenth of itself, and the sketch of a step is the difference of the
sketches before and after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.types import Params

BUCKETS = 64
CHUNK = 1 << 22
"""Elements at a time: the hashes of a chunk take eight bytes each."""


def sketch(values: Params) -> Tensor:
    """[BUCKETS] in fp64, on the CPU."""
    total = torch.zeros(BUCKETS, dtype=torch.float64)
    for name, value in values.items():
        total += _of_one(name, value.detach())
    return total


def distance(actual: Tensor, expected: Tensor) -> float:
    """|found - expected| over |expected|, of sketches."""
    size = float(expected.norm())
    gap = float((actual - expected).norm())
    return gap / size if size else (0.0 if gap == 0 else float("inf"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Fingerprint:
    """A vector over named parameters: norm, norm of each parameter, sketch."""

    norm: float
    norms: Mapping[str, float]
    sketch: Tensor
    elements: int

    @staticmethod
    def of(values: Params) -> Fingerprint:
        norms = {name: float(value.detach().double().norm()) for name, value in values.items()}
        return Fingerprint(
            norm=sum(size**2 for size in norms.values()) ** 0.5,
            norms=norms,
            sketch=sketch(values),
            elements=sum(value.numel() for value in values.values()),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "norm": self.norm,
            "elements": self.elements,
            "sketch": self.sketch.tolist(),
            "norms": dict(self.norms),
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Fingerprint:
        values = torch.tensor(content["sketch"], dtype=torch.float64)
        if values.shape != (BUCKETS,):
            raise ValueError(
                f"A fingerprint has {len(values)} numbers; expected {BUCKETS}. It was written by "
                "another version: record training again."
            )
        return Fingerprint(
            norm=float(content["norm"]),
            norms=dict(content["norms"]),
            sketch=values,
            elements=int(content["elements"]),
        )

    def distance(self, other: Fingerprint) -> float:
        """Relative to `other`."""
        return distance(self.sketch, other.sketch)


def _of_one(name: str, value: Tensor) -> Tensor:
    if value.device.type == "mps":  # it has no fp64
        value = value.cpu()
    flat = value.reshape(-1)
    # 62 bits: torch's integers are signed.
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2
    total = torch.zeros(BUCKETS, dtype=torch.float64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        hashed = _mixed(torch.arange(start, start + len(part), device=flat.device) + seed)
        sign = ((hashed >> 6) & 1) * 2 - 1
        total.index_add_(0, hashed & (BUCKETS - 1), sign * part.double())
    return total.cpu()


def _mixed(x: Tensor) -> Tensor:
    """splitmix64, in signed integers that wrap around."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _right(x, shift)) * factor
    return x ^ _right(x, 31)


def _right(x: Tensor, bits: int) -> Tensor:
    """A shift that brings in zeros, whatever the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
