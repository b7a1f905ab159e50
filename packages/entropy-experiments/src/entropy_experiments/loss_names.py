"""Names of the losses that are rebuilt: the config's and the mathematics' one list.

`update.objective` has the formula of each. No torch here: a config is checked without it.
"""

from __future__ import annotations

from typing import Literal

Loss = Literal["reinforce", "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "rloo"]
Ratio = Literal["token", "sequence"]
