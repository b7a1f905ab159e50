"""Recipes: from a finding to edits at its line, one room for each kind of fault.

A recipe proposes; only a trial decides. It yields the likeliest edit first, and raises
`UnsureError` where the place or the text of an edit is not certain.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradient_doctor.findings import Finding
from gradient_doctor.fix.recipes import cuts, layers, losses, order
from gradient_doctor.fix.recipes.proposal import Proposal, Recipe
from gradient_doctor.fix.source import Source, UnsureError

RECIPES: dict[int, tuple[Recipe, ...]] = {
    1: (cuts.remove_no_grad, cuts.remove_cut),
    2: (cuts.remove_no_grad,),
    3: (cuts.remove_cut,),
    4: (layers.trainable_adapter,),
    6: (layers.build_in_init,),
    7: (layers.register, layers.optimizer_later),
    8: (layers.optimizer_later,),
    9: (order.move_zero_grad,),
    10: (cuts.not_reentrant, cuts.ask_for_the_leaf),
    11: (cuts.not_reentrant,),
    12: (cuts.detach_here,),
    13: (losses.out_of_place,),
    14: (cuts.detach_here,),
    15: (losses.full_precision,),
    17: (order.unscale_before_clip,),
    18: (losses.same_shape,),
    19: (losses.ignore_padding,),
    21: (order.take_the_step,),
    23: (cuts.remove_no_grad, cuts.remove_cut),
    26: (order.back_to_train,),
    27: (losses.floor_under_root,),
    28: (order.clear_gradients,),
    29: (losses.raw_scores,),
    30: (order.clear_before_own_backward,),
    31: (order.move_scheduler,),
}


def proposals(finding: Finding, source: Source) -> Iterator[Proposal]:
    """All of a finding's recipes, each edit once; `UnsureError` if none of them has one."""
    seen: set[frozenset[object]] = set()
    why: UnsureError | None = None
    for recipe in RECIPES.get(finding.number, ()):
        try:
            for proposal in recipe(finding, source):
                edits = frozenset(proposal.edits)
                if edits and edits not in seen:
                    seen.add(edits)
                    yield proposal
        except UnsureError as unsure:
            why = why or unsure
    if why is not None and not seen:
        raise why
