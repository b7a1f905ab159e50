"""All of them."""

from __future__ import annotations

from hostile import checkpoint_files, data_files, settings_files, surroundings
from hostile.harness import Case

FAMILIES = (
    *checkpoint_files.FAMILIES,
    *settings_files.FAMILIES,
    *data_files.FAMILIES,
    *surroundings.FAMILIES,
)
CASES: tuple[Case, ...] = tuple(case for family in FAMILIES for case in family.made)


def by_family() -> dict[str, int]:
    return {family.family: len(family.made) for family in FAMILIES}
