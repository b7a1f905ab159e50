"""`grpo_callback` in a process that has imported unsloth first, as unsloth asks for.

On a CPU, unsloth leaves TRL's trainers as they are; what it patches on a GPU is not run here.
"""

import runpy
from pathlib import Path

import unsloth  # noqa: F401  (patches TRL where it can)

runpy.run_path(str(Path(__file__).with_name("grpo_callback.py")), run_name="__main__")
