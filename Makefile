# `make serve` and `make test` are all a new machine needs to know; python3, pip and make are all it needs to have.
#
#   make serve          installs into .venv, fetches SmolLM2, serves it           ARGS="--port 50052" adds flags
#   make test           the tests, about 15 minutes on two cores                  PYTEST_ARGS="-k stop" narrows
#   make test-compile   kernels through the real TPU and GPU compilers, no device (downloads about 700 MB)
#   make test-next      engine and CPU kernel tests with the newest jax, where a python3.12 is found
#   make test-eval      lm-eval's harness against the HTTP server, on local data (downloads about 600 MB)
#   make soak           the long tests; JSERVE_SOAK_MINUTES=30 says how long each of the two longest takes
#   make clean          removes the environments

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
# A python3.12 or newer that runs; pyenv's shims can be on PATH without running, so ask each.
PYTHON_NEXT ?= $(shell for candidate in python3.12 python3.13 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[23].*/bin/python3; do \
	if "$$candidate" -c pass >/dev/null 2>&1; then echo "$$candidate"; break; fi; done)

# Extras to install beside the plain package: `make serve EXTRAS=tpu`, `EXTRAS=cuda13`.
EXTRAS ?=
MODEL ?= smollm2-135m
ARGS ?=
JOBS ?= 2
PYTEST_ARGS ?=
# Not yet among them: the interpreted TPU kernels, which have been run with jax 0.10.2 only.
NEXT_TESTS ?= tests/engine tests/pallas_kernels/test_paged_attention.py tests/pallas_kernels/test_block_copy.py \
	tests/pallas_kernels/test_mosaic_gpu.py
COMPILE_TESTS := $(wildcard tests/compile/test_*.py tests/compile/*/test_*.py)

comma := ,
# The stamp's name holds the extras, so that other extras install again.
SERVE_STAMP := .venv/installed$(if $(EXTRAS),-$(subst $(comma),-,$(EXTRAS)))
PYTEST_LIMITS := --timeout 300 --timeout-method thread

.PHONY: serve install test test-compile test-next test-eval soak clean help
.DEFAULT_GOAL := help

help:
	@sed -n '3,9s/^# \{0,1\}//p' Makefile

# $(call environment,FOLDER,PYTHON): a venv, also where the venv module comes without ensurepip (Debian).
define environment
	test -x $(1)/bin/python || $(2) -m venv $(1) || { rm -rf $(1); $(2) -m venv --without-pip $(1); }
	$(1)/bin/python -m pip --version >/dev/null 2>&1 || $(2) -m pip --python $(1)/bin/python install --quiet pip
endef

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"jserve needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.12 ...")'
	@echo "making .venv with $$($(PYTHON) --version)"
	@$(call environment,.venv,$(PYTHON))

$(SERVE_STAMP): pyproject.toml | .venv/bin/python
	@echo "installing jserve (once; a minute or two)"
	@.venv/bin/python -m pip install --quiet --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
	@touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	@echo "installing jserve and what its tests need (once; a few minutes)"
	@.venv/bin/python -m pip install --quiet --editable '.[test]'
	@touch $@

install: $(SERVE_STAMP)

serve: $(SERVE_STAMP)
	@exec .venv/bin/jserve serve --model $(MODEL) $(ARGS)

test: .venv/installed-test
	.venv/bin/python -m pytest -n $(JOBS) --dist loadgroup $(PYTEST_LIMITS) $(PYTEST_ARGS) tests

soak: .venv/installed-test
	.venv/bin/python -m pytest -m soak --timeout 0 -s $(PYTEST_ARGS) tests

ifeq ($(COMPILE_TESTS),)
test-compile:
	@echo "test-compile: no tests in tests/compile yet; nothing was run"
else
.venv-compile/installed: pyproject.toml
	@$(call environment,.venv-compile,$(PYTHON))
	@echo "installing the TPU and GPU compilers (once; about 700 MB)"
	@.venv-compile/bin/python -m pip install --quiet --editable '.[compile]'
	@touch $@

test-compile: .venv-compile/installed
	.venv-compile/bin/python -m pytest -m compile -n $(JOBS) --dist loadgroup --timeout 900 $(PYTEST_ARGS) tests/compile
endif

ifeq ($(PYTHON_NEXT),)
test-next:
	@echo "test-next: no python3.12 or newer found (PYTHON_NEXT=... names one); nothing was run"
else
.venv-next/installed: pyproject.toml
	@$(call environment,.venv-next,$(PYTHON_NEXT))
	@echo "installing jserve with the newest jax for $$($(PYTHON_NEXT) --version)"
	@.venv-next/bin/python -m pip install --quiet --upgrade --editable '.[test]'
	@touch $@

test-next: .venv-next/installed
	@.venv-next/bin/python -c 'import sys, jax; print("python", sys.version.split()[0], "jax", jax.__version__)'
	.venv-next/bin/python -m pytest -n $(JOBS) --dist loadgroup $(PYTEST_LIMITS) $(PYTEST_ARGS) $(NEXT_TESTS)
endif

.venv-eval/installed: pyproject.toml
	@$(call environment,.venv-eval,$(PYTHON))
	@echo "installing jserve and lm-eval (once; about 600 MB)"
	@.venv-eval/bin/python -m pip install --quiet --editable '.[test,eval]'
	@touch $@

test-eval: .venv-eval/installed
	PATH="$(CURDIR)/.venv-eval/bin:$$PATH" .venv-eval/bin/python -m pytest $(PYTEST_LIMITS) $(PYTEST_ARGS) tests/http/test_lm_eval.py

clean:
	rm -rf .venv .venv-compile .venv-next .venv-eval build *.egg-info
