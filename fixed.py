"""Document 003's command; the same as `entropy-probe arc train`, with all of its options.

python fixed.py --epochs 1 --agent_lr 1e-5 --qwen_lr 5e-5 --device cpu --max_batches 5

Its classes live in `arc_refine.document_003`.
"""

import sys

from arc_refine.command import app
from arc_refine.document_003 import QwenCfg, QwenHybridPrompt

__all__ = ["QwenCfg", "QwenHybridPrompt"]

if __name__ == "__main__":
    app(["train", *sys.argv[1:]], prog_name="fixed.py")
