# make demo | test | test-fast | test-systemd | test-package | lint | bench | env | python | clean
# make deb | rpm | packages | stage DESTDIR=...
# Everything runs in environments outside the checkout, which the first use builds (tests/env/build.sh).

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help env env-systemd demo test test-units test-units-too test-engines test-engines-too test-fast test-systemd \
	test-systemd-252 test-systemd-257 test-systemd-sglang test-with-sglang lint bench stage python clean

ENVS ?= $(or $(WEIGHTCACHE_ENVS),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/weightcache-dev)
export WEIGHTCACHE_ENVS := $(ENVS)
PYTHON := $(ENVS)/engine-0.5.23/bin/python
PYTEST := $(PYTHON) -m pytest --timeout 300
# mypy and import-linter find the package under its import name here; agent/ is only its folder.
NAMED := build/named
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' agent/__init__.py)

help:
	@sed -n '1,3s/^# //p' $(MAKEFILE_LIST)

env:
	@tests/env/build.sh

# Only for these tests, since it installs packages and so needs root.
env-systemd: env
	@tests/env/systemd.sh

env-package: env-systemd
	@tests/env/package.sh

demo: env
	@$(PYTHON) -m tests.demo

test: lint
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-units test-units-too
	@$(MAKE) --no-print-directory env-package
	@$(MAKE) --no-print-directory -j3 --output-sync=target test-systemd-252 test-systemd-257 test-with-sglang
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-engines test-engines-too

# Most unit tests wait for something: two halves of about the same length share two cores well.
FIRST_UNITS := tests/unit/server tests/unit/launch

test-units:
	$(PYTEST) $(FIRST_UNITS)

test-units-too:
	$(PYTEST) tests/unit tests/gpu $(FIRST_UNITS:%=--ignore=%)

# Most of an engine's start is one thread's work: two halves of about the same length share two cores well.
SECOND_HALF := 0.5.17 or test_ranks or test_failures or test_parity or test_slot or test_take_over

test-engines:
	$(PYTEST) tests/engine -k "not ($(SECOND_HALF))"

test-engines-too:
	$(PYTEST) tests/engine -k "$(SECOND_HALF)"

test-fast: env
	$(PYTEST) tests/unit

# Machines of one version of systemd, of the other, and those with SGLang: they know nothing of each other, and each
# part waits for something most of the time.
test-systemd: env-systemd
	@$(MAKE) --no-print-directory -j3 --output-sync=target test-systemd-252 test-systemd-257 test-systemd-sglang

# One after the other: both read one checkpoint, and look at which of its pages are in memory.
test-with-sglang:
	@$(MAKE) --no-print-directory test-systemd-sglang
	@$(MAKE) --no-print-directory test-package

test-systemd-252:
	$(PYTEST) tests/systemd -k "not 257 and not test_sglang"

test-systemd-257:
	$(PYTEST) tests/systemd -k 257

test-systemd-sglang:
	$(PYTEST) tests/systemd/test_sglang.py tests/systemd/test_sglang_standby.py

test-package: env-package
	$(PYTEST) tests/package

lint: env
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	@mkdir -p $(NAMED) && ln -sfn ../../agent $(NAMED)/weightcache
	MYPYPATH=$(NAMED) $(PYTHON) -m mypy
	$(ENVS)/engine-0.5.23/bin/lint-imports --no-logo

bench: env
	@$(PYTHON) -m tests.bench

# What packages install, as a tree below DESTDIR. It needs no environment, only a Python with pip.
stage:
	@PYTHON=$(firstword $(wildcard $(PYTHON)) python3) packaging/stage.sh $(abspath $(or $(DESTDIR),$(error which folder? make stage DESTDIR=...)))

# Packages, in build/packages. The archive of the sources is all that needs a network (pip), or $VENDOR.
.PHONY: packages source deb rpm env-package test-package
PACKAGES := build/packages
packages: deb rpm

source:
	@packaging/source.sh $(PACKAGES)

deb: source
	@packaging/deb/build.sh $(PACKAGES)/weightcache-$(VERSION).tar.gz $(PACKAGES)

rpm: source
	@packaging/rpm/build.sh $(PACKAGES)/weightcache-$(VERSION).tar.gz $(PACKAGES)

python:
	@echo $(PYTHON)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find agent tests -name __pycache__ -prune -exec rm -rf {} +
