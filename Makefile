# make bench    correctness, table, plot and JSON of the main job, into bench_out/: on the GPUs of
#               this machine if there are any, else CPU ranks over the software NIC; BENCH_ARGS="..."
# make test     lint, build, C++ tests with ASan and UBSan, Python tests: what every change needs
# make test-changed  what `make test` leaves out, for the parts that changed, and a fifth of the rest
# make test-all everything; notes in tests/green on which commit it passed
# make test-engines  fetches Megatron-Core, vLLM, SGLang and DeepEP (400 MB; .py files are kept in the
#               user's cache) and runs tests/engines; ENGINES=newest: the newest releases
# make test-TIER  tests of one tier: test-transfer, -moe, -kv, -weights, -adapters
# make test-again  the tests that failed in the last run, alone
#               TIMES=FILE: wall and CPU seconds of each test (python -m tests.times FILE)
# make lint     ruff, mypy, clang-format, clang-tidy; `make format` fixes what tools can fix
# make wheel    dist/*.whl, for systems as old as its tag says, or newer; make sdist: dist/*.tar.gz
# make release  both kinds of host, compiled kernels, an sdist, checksums, notes (docs/release.md)
# make clean    removes everything that was built; `make distclean` removes .venv too
#
# Without PYTHON, an environment is made in .venv once; pip uses this machine's configuration. With
# PYTHON=python3 that interpreter is used unchanged: nothing is installed or downloaded; missing
# linters and doctest are skipped with a reason, a missing torch is an error.

TORCH ?= 2.13.0
export ENGINES
VENV ?= .venv
BENCH_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= 3
TIMES ?=
HAS_DOCTEST := import sys; sys.path.insert(0, "tests/cpp"); import build; sys.exit(build.find_doctest() is None)
workers = $(shell $(PY) -c 'import xdist' 2> /dev/null && printf -- '-n %s' $(WORKERS))

# On a terminal pip and the compilers show how far they are.
QUIET := $(shell [ -t 2 ] || echo --quiet)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

STAMPS := build/stamps
ifdef PYTHON
  PY := $(PYTHON)
  ENVIRONMENT :=
else
  PY := $(VENV)/bin/python
  ENVIRONMENT := $(VENV)/.ready
endif
PIP := $(PY) -m pip install $(QUIET) --disable-pip-version-check --retries 1
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

SOURCES := $(shell find csrc kernels -type f -not -name '*.pyc' -not -name '*.md') setup.py pyproject.toml \
           moe_p2p/moe/gpu/fd_exchange.py moe_p2p/moe/rendezvous/agreement.py moe_p2p/engine/checksum.py moe_p2p/engine/strides.py \
           moe_p2p/moe/expert_map.py moe_p2p/moe/expert_mover.py moe_p2p/moe/votes.py moe_p2p/deep_ep_v25/balance.py \
           $(wildcard $(addsuffix /*.py,$(addprefix moe_p2p/,fleet kv weights)))  # csrc/letter.py

PYTEST = $(PY) -m pytest -rfEs --durations=8 --progress $(call workers) $(if $(TIMES),--times=$(TIMES))

TIERS := transfer moe kv weights adapters
TIER_transfer := machine engine fleet package/test_cpp.py package/test_strangers.py gpu/test_gpu_engine.py \
                 gpu/test_gpu_driver.py
TIER_moe := moe layer gpu faults package/test_cpp.py
TIER_kv := kv gpu/test_gpu_kv_rows.py gpu/test_gpu_signals.py
TIER_weights := weights gpu/test_gpu_weights.py
TIER_adapters := deep_ep nixl_ep mooncake integrations engines

.PHONY: $(addprefix test-,$(TIERS)) bench test test-all test-changed test-again test-engines lint format build wheel kernels sdist release clean distclean packages force
.NOTPARALLEL:

bench: build
	$(PY) -m moe_p2p bench $(BENCH_ARGS)

# Workers run files in parallel (tests/progress.py). Without pytest-xdist there is one.
test: build packages
	$(PYTEST) $(PYTEST_ARGS)

test-all: build packages
	$(PY) -m tests.engines.packages
	$(PY) -m tests.support.aarch64
	$(PYTEST) --all-cells $(PYTEST_ARGS)
	$(PY) -m tests.changed --green

# One tier of the tree: the same share of its tests as `make test` runs.
$(addprefix test-,$(TIERS)): test-%: build packages
	$(PYTEST) $(addprefix tests/,$(TIER_$*)) $(PYTEST_ARGS)

# Beside `make test`, which leaves them out.
test-changed: build packages
	$(PY) -m tests.changed

test-engines: build
	$(PY) -m tests.engines.packages
	$(PYTEST) --all-cells tests/engines $(PYTEST_ARGS)

# What failed in the runs before, one after the other.
test-again: build
	@echo "once more, alone: what failed"
	$(PY) -m pytest -rfE --all-cells --last-failed --last-failed-no-failures=none --progress

lint: $(ENVIRONMENT) packages
	$(PY) tests/lint.py

format: $(ENVIRONMENT)
	$(PY) tests/lint.py --fix

build: $(STAMPS)/extension

# auditwheel tags the wheel with the oldest systems that it runs on. torch is not included. With
# CXX=aarch64-linux-gnu-g++ it is one for hosts of that kind.
wheel: $(ENVIRONMENT)
	@rm -rf build/wheel build/lib* build/bdist.* && mkdir -p dist
	$(PY) -m pip wheel --no-index --no-build-isolation --no-deps --wheel-dir build/wheel .
	@if $(PY) -c 'import auditwheel' 2> /dev/null; then \
	  PATH="$$(dirname $(PY)):$$PATH" $(PY) -m auditwheel repair --exclude 'libtorch*' --wheel-dir dist build/wheel/*.whl; \
	else cp build/wheel/*.whl dist; echo "auditwheel is missing: the wheel is for systems like this one"; fi

# The wheel moe_p2p_kernels: kernels of usual shapes, compiled by the NVRTC that is installed.
WHEEL_SHAPES ?= deepseek-v3:128,256,512 kimi-k2:128,256,512 qwen3-235b-a22b:128,256 \
  deepseek-v4-pro:128,256 deepseek-v4-flash:128,256 kimi-k3:128 glm-5:128
WHEEL_ARCHS ?= sm_90a sm_100a sm_103a
kernels: build
	@rm -rf build/compiled && mkdir -p dist build/compiled
	@for arch in $(WHEEL_ARCHS); do for shape in $(WHEEL_SHAPES); do \
	  $(PY) -m moe_p2p compile --model $${shape%%:*} --tokens $${shape#*:} --quantize \
	    --combine-dtype block16 --arch $$arch --into build/compiled || exit 1; \
	done; done
	@$(PY) contrib/release/kernels.py build/compiled dist

release: packages
	@rm -rf dist
	+@$(MAKE) --no-print-directory wheel
	+@CXX=aarch64-linux-gnu-g++ $(MAKE) --no-print-directory wheel
	+@$(MAKE) --no-print-directory kernels sdist
	@$(PY) contrib/release/finish.py dist

sdist: $(ENVIRONMENT)
	@rm -rf moe_p2p.egg-info && mkdir -p dist
	@$(PY) -c 'from setuptools import build_meta; print(build_meta.build_sdist("dist"))' | tail -n 1

clean:
	rm -rf build dist bench_out .cache .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis *.egg-info
	find moe_p2p -name '*.so' -delete
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf '$(VENV)'

# --- prerequisites of the targets above --------------------------------------------------------

# The extension is built next to the Python sources, so the package runs from this folder. Ninja
# compiles what changed; when nothing changed, this does not run.
$(STAMPS)/extension: $(ENVIRONMENT) $(STAMPS)/interpreter $(SOURCES)
	@echo "building the extension (a minute or two the first time)"
	@$(PY) setup.py $(QUIET) build_ext --inplace
	@touch $@

# Changes with the interpreter or the torch version.
$(STAMPS)/interpreter: $(ENVIRONMENT) force
	@mkdir -p $(STAMPS)
	@$(PY) -c 'import sys, importlib.metadata as m; print(sys.executable, sys.version, m.version("torch"))' > $@.new \
	  || { echo "$(PY) has no torch: install torch >= 2.10 for it, or leave PYTHON out"; exit 1; }
	@cmp -s $@.new $@ || mv $@.new $@

$(VENV)/.ready: requirements-dev.txt
	@echo "setting up $(VENV): once, about two minutes"
	@[ -x $(VENV)/bin/python ] || python3 -m venv $(VENV) \
	  || { echo "python3 cannot make a venv: install python3-venv, or pass PYTHON=python3"; exit 1; }
	@log=$(VENV)/pip.log; { $(PY) -c 'import torch' || $(PIP) 'torch>=2.10,<=$(TORCH)'; } 2> $$log \
	  && $(PIP) -r requirements-dev.txt 2>> $$log || { \
	    grep -m 1 "connection broken" $$log || grep ERROR $$log || cat $$log; \
	    echo "pip could not set up $(VENV): is there a network? PYTHON=python3 needs none, if it has torch"; exit 1; }
	@touch $@

# The C++ tests need doctest's header, tests of the libfabric provider its library, namespaces as
# hosts iproute2, test_aarch64.py a compiler, test_aarch64_wheel.py an emulator, and test_models.py spin. All are
# installed where apt-get runs without questions; elsewhere their tests are skipped with a reason.
PACKAGES := doctest-dev libfabric1 libfabric-dev iproute2 g++-aarch64-linux-gnu qemu-user spin
packages: $(ENVIRONMENT)
	@{ $(PY) -c '$(HAS_DOCTEST)' && $(PY) -c 'import ctypes; ctypes.CDLL("libfabric.so.1")' 2> /dev/null \
	  && command -v ip > /dev/null && command -v aarch64-linux-gnu-g++ > /dev/null && command -v qemu-aarch64 > /dev/null && command -v spin > /dev/null; } || { \
	  if [ -z '$(PYTHON)' ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "installing $(PACKAGES)"; export DEBIAN_FRONTEND=noninteractive; \
	    install="apt-get install -qq -y --no-install-recommends $(PACKAGES)"; \
	    $$install > /dev/null 2>&1 || { apt-get update -qq && $$install > /dev/null; } \
	      || echo "they could not be installed: their tests will be skipped"; \
	  else echo "some tests will be skipped: apt-get install $(PACKAGES)"; fi; }

force:
