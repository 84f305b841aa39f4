# Every target does all its set-up: a fresh clone with Python 3.11 or later, gcc and git is enough.
# Settings: PYTHON (interpreter of the virtual environment), VENV (its folder), TORCH (what pip is asked for), PART (of the
# mutants: 1/8 takes every eighth, from number 1 on).

VENV ?= .venv
PYTHON ?= $(firstword $(foreach p,python3.11 python3,$(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $(p))))
TORCH ?= torch==2.13.0
PART ?= 0/1

PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/.specdec-installed
# Two processes have two cores: threads of PyTorch's that wait for one another by spinning cost a third of the time.
BOTH := OMP_NUM_THREADS=1 $(RUN) pytest -n 2 --dist loadfile

.PHONY: help venv test test-fast test-long test-gpu mutants lint demo engines performance models clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo       export a real model and generate with and without speculation'
	@echo 'make test       the fast tests, then those that need a real model or the network'
	@echo 'make test-long  other real models, precisions and repetitions: half an hour and more'
	@echo 'make test-fast  tests that need neither'
	@echo 'make test-gpu   tests that need an NVIDIA GPU'
	@echo 'make engines    compile a real model with TensorRT-RTX, without a GPU, in every precision it takes'
	@echo 'make performance  write the figures of the documentation from docs/results/*.json'
	@echo 'make mutants    plant faults in the runtime, one at a time; the tests have to notice each'
	@echo 'make lint       ruff check, ruff format --check, mypy --strict'
	@echo 'make models     fetch the real test model into the cache'
	@echo 'make venv       the virtual environment alone'
	@echo 'make clean      remove what the other targets made, except the model cache'

# torch goes first and by exact version: asking for it loosely, or through a dependency, may bring gigabytes of CUDA.
$(STAMP): pyproject.toml
	@test -n '$(PYTHON)' || { echo 'make: no Python 3.11 or later found; install one or set PYTHON=/path/to/python' >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) --editable '.[cpu,export,dev]'
	@touch $@

venv: $(STAMP)

models: $(STAMP)
	$(RUN) specdec.tools.models smollm2

test: $(STAMP) models
	$(BOTH) -m 'not slow'
	$(BOTH) -m 'slow and not real'
	$(RUN) pytest -m 'real and not long'

test-fast: $(STAMP)
	$(BOTH) -m 'not slow'

test-long: $(STAMP) models
	$(RUN) pytest -m long

test-gpu: $(STAMP) models
	$(RUN) pytest -m gpu

mutants: $(STAMP)
	$(VENV)/bin/python tests/mutants.py --part $(PART)

lint: $(STAMP)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

demo: $(STAMP) models
	$(RUN) specdec.tools.demo

engines: $(STAMP) models
	$(RUN) specdec.tools.engines

performance: $(STAMP)
	$(RUN) specdec.tools.performance

clean:
	rm -rf $(VENV) build dist specdec.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find engines examples export runtime tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
