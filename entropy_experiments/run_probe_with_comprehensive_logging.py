"""Document 002's command; the same as `entropy-probe run`, with all of its options.

    python entropy_experiments/run_probe_with_comprehensive_logging.py \
        --config entropy_experiments/configs/detailed_logging_example.yaml \
        --checkpoint /path/to/checkpoint

Without --checkpoint it probes the policy in the package. How much the log holds is
`detailed_logging.level` in the YAML.
"""

import sys

from entropy_experiments.cli import app

if __name__ == "__main__":
    app(["run", *sys.argv[1:]], prog_name="run_probe_with_comprehensive_logging.py")
