# make demo    the whole job on a real model      make test       all tests, under 15 minutes on 2 cores
# make lint    what style can be checked          make test-long  the suites that take hours

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := true
# modules are compiled once, at their first import: this package starts many processes
export PYTHONDONTWRITEBYTECODE :=
# glibc keeps large blocks instead of mapping them anew each step: a sixth of the CPU demo's training time
export MALLOC_MMAP_THRESHOLD_ := 4294967296
export MALLOC_TRIM_THRESHOLD_ := 4294967296

.PHONY: demo test test-long lint schemas docs clean

demo: $(VENV)/.installed
	$(BIN)/python -m dflash_offline.demo $(DEMO)

# two processes of one thread each: most of the time goes to starting processes and to small tensors
test: $(VENV)/.installed
	$(BIN)/python -m dflash_offline.demo --fetch-only
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)

test-long: $(VENV)/.docs
	$(BIN)/python -m dflash_offline.demo --fetch-only
	$(BIN)/python -m pytest -m long --timeout 7200 $(TESTS)

lint: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m dflash_offline.schemas --check
	$(BIN)/mypy

schemas: $(VENV)/.installed
	$(BIN)/python -m dflash_offline.schemas

# the site in build/site
docs: $(VENV)/.docs
	$(BIN)/python docs/figures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt -e '.[gguf,tensorboard,regenerate,test,dev]'
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check --no-deps dflash==0.1.0
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
