"""Document 003's loss; it lives in `arc_refine.efe`.

efe_loss = EFE(prompt_width, agent_width)
terms = efe_loss(output, backward_output, targets, refined_prompt)
"""

from arc_refine.efe import EFE, EfeWeights, check_targets

__all__ = ["EFE", "EfeWeights", "check_targets"]
