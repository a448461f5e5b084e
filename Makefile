# Every target sets up what it needs, in .venv; a second call does no set-up work.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/ready
HOROVOD := $(VENV)/horovod-tried
CORE := $(VENV)/comm-core-built
CORE_TESTS := $(VENV)/comm-core-tests-built
NOTEBOOKS := $(VENV)/notebooks-ready
MUTANTS := $(VENV)/mutants-ready
SITE := $(VENV)/site-ready
READERS := $(VENV)/readers-ready
CORE_SOURCES := $(shell find common/comm_core common/emulation/links -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt)
# Another torch in the environment needs another build.
TORCH := $(wildcard $(VENV)/lib/python3*/site-packages/torch/version.py)
# Of an environment whose Python is gone, or is not the one that is given.
$(shell [ -x $(PY) ] || rm -f $(READY))
ifneq ($(origin PYTHON),file)
$(shell by=$$($(PYTHON) -c 'import sys; print(sys.base_prefix, sys.version.split()[0])'); \
  [[ ! -e $(VENV)/made_by || "$$(< $(VENV)/made_by)" == "$$by "* ]] || rm -f $(READY))
endif

# Each of them uses all cores.
.NOTPARALLEL:
.PHONY: bench predicted first-table test test-all retest core core-tests horovod gpu-check sanitize torch-suite mutants fault-campaign soak records docs site lint system-packages clean help

help:
	@echo "make bench            set up, a predicted table of 64 GPUs, then the default sweep"
	@echo "make test             set up, then the tests of every part (about 11 minutes on 2 cores)"
	@echo "make test-all         the same and everything that takes longer"
	@echo "make retest           only the tests that failed last"
	@echo "make core             build the comm core (part of bench and test)"
	@echo "make core-tests       the same with the C++ tests (part of test)"
	@echo "make sanitize         the comm core's C++ tests under ThreadSanitizer and AddressSanitizer"
	@echo "make gpu-check        everything that needs an NVIDIA GPU, in at most 12 minutes"
	@echo "make torch-suite      torch's own tests of backends on the comm core, 2 and 4 ranks"
	@echo "make mutants          small changes of meaning in the code: does a test notice each? (hours)"
	@echo "make fault-campaign   300 faults drawn at random, and what became of each (15 minutes)"
	@echo "make soak             four ranks exchange and train for 2 hours, then a sweep of 1,000 trials"
	@echo "make records          docs/records anew, from a clean commit (hours); ONLY=NAME for one"
	@echo "make docs             the numbers, tables and figures of all documents, from docs/records"
	@echo "make site             build/site: all documents and the API of the library as HTML"
	@echo "make horovod          build Horovod into .venv (part of bench and test)"
	@echo "make lint             ruff, import-linter, mypy, clang-format and shellcheck"
	@echo "make system-packages  install Open MPI and what the builds need (Debian, as root)"
	@echo "make clean            remove .venv, caches and outputs; records in logs/ stay"

# The predicted table needs nothing that is compiled. The first measured table does not wait for
# Horovod, which takes longest to build; its rows come after it.
bench: $(READY) predicted $(CORE) $(if $(wildcard $(HOROVOD)),,first-table) $(HOROVOD)
	$(PY) benchmarks.py

predicted: $(READY)
	$(PY) benchmarks.py predict

first-table: $(READY) $(CORE)
	$(PY) benchmarks.py run --filter 'ddp|wfbp|dear'

test: $(READY) $(CORE_TESTS) $(HOROVOD) lint
	scripts/test.sh $(VENV)

test-all: $(READY) $(CORE_TESTS) $(HOROVOD) $(NOTEBOOKS) $(MUTANTS) $(SITE) $(READERS) lint
	$(PY) -m pytest

# Only what failed last; nothing to repeat is a failure too.
retest: $(READY)
	scripts/test.sh $(VENV) --again

# Also if only torch has changed; what is up to date is not compiled again.
core: $(READY)
	scripts/build.sh $(VENV)
	touch $(CORE)

core-tests: $(CORE_TESTS)

sanitize: $(READY)
	scripts/sanitize.sh $(VENV)

# It makes the environment by itself, also without a network.
gpu-check:
	PYTHON="$(PYTHON)" scripts/gpu_check.sh $(VENV)

torch-suite: $(CORE)
	$(PY) -m pip install --disable-pip-version-check -q -r tests/comm/torch_suite/requirements.txt
	$(PY) tests/comm/torch_suite/run.py --world-size 2
	$(PY) tests/comm/torch_suite/run.py --world-size 4

# Stopped, it goes on where it was; MUTANTS_ARGS="--only dear/comm --out build/tried" tries a part.
mutants: $(CORE_TESTS) $(HOROVOD) $(MUTANTS)
	$(PY) -m tests.mutants $(MUTANTS_ARGS)

# FAULTS_ARGS="--seed 7" draws others; "--only 7:41" repeats one, "--backend gloo" compares.
fault-campaign: $(CORE)
	$(PY) -m tests.faults --faults 300 --json build/faults.json $(FAULTS_ARGS)

# SOAK_ARGS="--seconds 600 --period 60" is a short one.
soak: $(CORE)
	$(PY) -m tests.comm.soak --json build/soak.json $(SOAK_ARGS)
	$(PY) -m tests.comm.soak.sweep --json build/soak-sweep.json

records: $(CORE_TESTS) $(HOROVOD) $(MUTANTS)
	$(PY) bench/records.py $(ONLY)

docs: $(READY)
	$(PY) -m common.results.readme
	$(PY) -m common.profiling.compared
	$(PY) -m common.harness.verbs.list

site: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -f docs/site/mkdocs.yml
	@echo "build/site/index.html"

horovod:
	rm -f $(HOROVOD)
	$(MAKE) $(HOROVOD)

$(READY): requirements.txt pyproject.toml scripts/setup.sh
	PYTHON="$(PYTHON)" scripts/setup.sh $(VENV)
	touch $@

$(CORE): $(READY) scripts/build.sh scripts/build_facts.py $(CORE_SOURCES) $(TORCH)
	scripts/build.sh $(VENV)
	touch $@

# It builds the comm core, too; bench alone does without the tests.
$(CORE_TESTS): $(READY) scripts/build.sh scripts/build_facts.py $(CORE_SOURCES) $(TORCH)
	scripts/build.sh $(VENV) tests
	touch $@ $(CORE)

$(HOROVOD): $(READY) scripts/horovod.sh $(TORCH)
	scripts/horovod.sh $(VENV)
	touch $@

# Of the examples; only the tests need it.
$(NOTEBOOKS): $(READY) examples/requirements.txt
	$(PY) -m pip install --disable-pip-version-check -q -r examples/requirements.txt
	touch $@

$(MUTANTS): $(READY) tests/mutants/requirements.txt
	$(PY) -m pip install --disable-pip-version-check -q -r tests/mutants/requirements.txt
	touch $@

$(SITE): $(READY) docs/site/requirements.txt
	$(PY) -m pip install --disable-pip-version-check -q -r docs/site/requirements.txt
	touch $@

# Of exported traces; only the tests need them.
$(READERS): $(READY) tests/unit/requirements.txt
	$(PY) -m pip install --disable-pip-version-check -q -r tests/unit/requirements.txt
	touch $@

# The files of these patterns; outside of a clone of git (an archive), all but those that are made.
FILES = if git rev-parse --git-dir > /dev/null 2>&1; then git ls-files -z $(1); else \
  for pattern in $(1); do find . -path ./$(VENV) -prune -o -path ./build -prune \
    -o -path "./$$pattern" -type f -print0; done; fi

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	PYTHONPATH=. $(VENV)/bin/lint-imports
	$(VENV)/bin/mypy
	$(call FILES,'*.cc' '*.h') | xargs -0 $(VENV)/bin/clang-format --dry-run -Werror
	@if command -v shellcheck >/dev/null; then \
	  $(call FILES,'*.sh' .ci/run) | xargs -0 shellcheck; \
	else echo "shellcheck not installed: shell scripts not checked"; fi

system-packages:
	scripts/system_packages.sh

clean:
	rm -rf $(VENV) build *.egg-info common/comm_core/*.so common/comm_core/_built_for.json \
	  common/emulation/links/link_switch/link_switch
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
