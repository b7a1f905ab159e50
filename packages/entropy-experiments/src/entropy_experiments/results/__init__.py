"""The versioned schema of results: what commands write, and what the report reads.

Every result names its schema and the version of it:

    {"format": "entropy_experiments.measurements", "schema": 1, ...}

    command                 file                                schema
    entropy-probe run       results.json                        PROBE
                            logs/DATE/entropy_probe_*.json.gz   PROBE_LOG
    entropy-probe measure   results.json                        MEASUREMENTS
    entropy-probe influence summary.json, manifest.json         INFLUENCE
    entropy-probe evaluate  evaluation.json                     EVALUATION
    entropy-probe explain   summary.json, manifest.json         RUN_LEDGER
    write_trajectory        trajectory.json                     TRAJECTORY
    a probed training       entropy_probe.jsonl, a row a step   TRAINING_ROW
    entropy-probe train     train_summary.json                  TRAINING

A version is raised when a reader of the one before would misread the file; a new key raises
nothing. `Schema.check` refuses a version that this program does not know. Files that were written
before a schema had its name in them are read as its first version.

The types of each file are the JSON values themselves: a key that may be absent is `NotRequired`, a
number that may not exist is `None`. `docs/file_formats.md` says what each number is. Without torch:
to read a result is quick.
"""

# Every name of these files belongs to the schema.
from entropy_experiments.results.evaluation import *  # noqa: F403
from entropy_experiments.results.influence import *  # noqa: F403
from entropy_experiments.results.measurements import *  # noqa: F403
from entropy_experiments.results.probe import *  # noqa: F403
from entropy_experiments.results.run_ledger import *  # noqa: F403
from entropy_experiments.results.schema import *  # noqa: F403
from entropy_experiments.results.training import *  # noqa: F403
