# `make help` lists what there is. A target sets up what it needs in .venv; nothing outside of this folder is touched, but pip's cache.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(addprefix $(VENV)/., demo test lint bench docs)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# What an installation depends on. pip's -c keeps torch at the tested version; which build of it (CPU or CUDA) is the index's choice: see the README.
INPUTS := pyproject.toml setup.py constraints.txt $(shell find csrc -type f)

DEMO_ARGS ?=
PYTEST_ARGS ?=
RELEASES ?=
BENCH_ARGS ?=
MINUTES ?= 10
SOAK_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test compat gpu soak lint docs bench bench-quick bench-compare clean distclean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.demo ## train CartPole with shmsync (DEMO_ARGS="--updater torchrl" to compare)
	$(BIN)/python examples/cartpole.py $(DEMO_ARGS)

test: $(VENV)/.test ## run all tests (PYTEST_ARGS="tests/unit -x")
	$(BIN)/python -m pytest $(PYTEST_ARGS)

compat: $(VENV)/.test ## tests/compat with each supported release of torchrl (RELEASES="0.11 0.9" for some)
	$(BIN)/python -m tests.compat $(RELEASES) -- $(PYTEST_ARGS)

gpu: ## on a machine with an NVIDIA GPU: its tests and figures (PYTHON=... that has shmsync: no .venv then)
	PYTHON='$(PYTHON)' tests/gpu/run.sh

soak: $(VENV)/.test ## kill, stop and restart processes at random (MINUTES=10)
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(SOAK_ARGS)

lint: $(VENV)/.lint ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs ## build the documentation into site/; a broken link is an error
	rm -rf site
	$(BIN)/python -m sphinx -b html -E -W --keep-going -q -d build/doctrees -c docs . site
	@echo "site/index.html"

bench: $(VENV)/.bench ## measure against the rivals (BENCH_ARGS=...)
	$(BIN)/python -m bench run $(BENCH_ARGS)

bench-quick: $(VENV)/.bench ## the same with fewer rounds and sizes
	$(BIN)/python -m bench run --quick $(BENCH_ARGS)

bench-compare: $(VENV)/.bench ## compare two results: make bench-compare A=old.json B=new.json
	$(BIN)/python -m bench compare $(A) $(B)

clean: ## remove what was built, but for .venv
	rm -rf build dist site demo-out *.egg-info shmsync/_C*.so shmsync/_gather.fatbin .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	rm -f $(STAMPS)
	find shmsync tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## remove .venv too
	rm -rf $(VENV)

# ── Set-up ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# One stamp per set of extras. The installation is editable, so that the extension (if there is a compiler) lies beside
# the sources and a test imports the same files wherever it runs.

$(VENV)/.demo: EXTRAS := demo
$(VENV)/.test: EXTRAS := test,torchrl,demo
$(VENV)/.lint: EXTRAS := lint,test,torchrl,demo
$(VENV)/.bench: EXTRAS := bench
$(VENV)/.docs: EXTRAS := docs

$(STAMPS): $(VENV)/.build-tools $(INPUTS)
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

# The build's own tools are installed first and used as they are: in an isolated build pip would not pin them.
$(VENV)/.build-tools: $(VENV)/pyvenv.cfg constraints.txt
	$(PIP) install -c constraints.txt setuptools pybind11
	@touch $@

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)
