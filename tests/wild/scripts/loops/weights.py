"""What a training leaves behind, as one line."""

import hashlib
import json
import sys
from pathlib import Path


def save_digest(module, **numbers):
    """Every bit of the weights, and whatever else says that something was trained."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    Path(sys.argv[1]).write_text(json.dumps({"weights": digest.hexdigest(), **numbers}))
