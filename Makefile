# pdserve: everything a newcomer needs is `make demo`. Each target sets up .venv by itself, from requirements.lock.
# PYTHON=... chooses the interpreter .venv is made with (3.11 or newer); ONCE=1 and PROMPT="..." are for `make demo`.

PYTHON ?=
ONCE ?=
PROMPT ?=

SHELL := /bin/bash
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
CANDIDATES := python3.11 python3.12 python3.13 python3.14 python3
IS_NEW_ENOUGH := import sys, venv; sys.exit(sys.version_info < (3, 11))

.PHONY: help demo test lint format protos clean .venv
.DEFAULT_GOAL := help

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv  ## a real chat model, on 1 prefill and 1 decode worker of this machine (ONCE=1: one prompt, then stop)
	@$(BIN)/pdserve demo $(if $(ONCE),--once) $(if $(value PROMPT),--prompt '$(subst ','\'',$(value PROMPT))')

test: lint  ## all checks: lint, then the tests
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: .venv  ## ruff and mypy --strict
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check .
	@$(BIN)/mypy

format: .venv  ## lets ruff put the files in order
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format -q .

protos: .venv  ## writes the generated code anew, from protos/*.proto
	@$(BIN)/python -m protos

clean:  ## removes .venv and what the tools left (not the demo models: pdserve model build --help says where they are)
	rm -rf .venv .venv.lock build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Reads what pip says and tells how far it is: on a terminal in one line that is written over, elsewhere now and then.
TELL := n=0; total=$$(grep -c == requirements.lock); what=""; next=10; \
	while true; do \
		if read -r -t 1 word name size unit _; then \
			case "$$word" in \
				Collecting | Processing) n=$$((n + 1)); what="$${name\#\#*/}"; what="$${what%%[=<>-]*}" ;; \
				Downloading) what="$${name%%-*} $$size $$unit" ;; \
				Installing) what="all downloaded; unpacking them" ;; \
			esac; \
		elif [ $$? -le 128 ]; then \
			break; \
		fi; \
		line="  $$SECONDS s  $$n of $$total packages: $$what"; \
		if [ -t 2 ]; then \
			printf '\r%.79s\033[K' "$$line" >&2; \
		elif [ $$SECONDS -ge $$next ]; then \
			echo "$$line" >&2; next=$$((SECONDS + 20)); \
		fi; \
	done; \
	[ ! -t 2 ] || printf '\r\033[K' >&2

# The copies inside .venv are its stamps, written last: after an interruption, or when the lock or this folder's place has
# changed, it is made again. pyproject.toml alone changes only the entry point. Where there is flock, two makes at once
# take turns.
.venv:
	@set -e -o pipefail; \
	if command -v flock >/dev/null; then \
		exec 9>.venv.lock; \
		flock -n 9 || { echo "Waiting for another make, which sets up .venv" >&2; flock 9; }; \
	fi; \
	if ! { cmp -s requirements.lock .venv/requirements.lock && [ "$$(cat .venv/place)" = "$(CURDIR)" ] \
			&& $(BIN)/python -c '' 2>/dev/null; }; then \
		python=""; \
		for name in $(or $(PYTHON),$(CANDIDATES)); do \
			if "$$name" -c '$(IS_NEW_ENOUGH)' 2>/dev/null; then python=$$name; break; fi; \
		done; \
		[ -n "$$python" ] || { echo "pdserve needs Python 3.11 or newer with its venv module; none of these is:" \
			"$(or $(PYTHON),$(CANDIDATES)). Name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }; \
		echo "Setting up .venv with $$($$python --version): $$(grep -c == requirements.lock) packages, some minutes" >&2; \
		rm -rf .venv; \
		"$$python" -m venv .venv; \
		$(PIP) install --progress-bar off --only-binary :all: -r requirements.lock 2>&1 \
			| tee .venv/pip.log | { $(TELL); } || { tail -n 12 .venv/pip.log >&2; exit 1; }; \
		echo "$(CURDIR)" > .venv/place; \
		cp requirements.lock .venv/requirements.lock; \
	fi; \
	if ! cmp -s pyproject.toml .venv/pyproject.toml; then \
		$(PIP) -qq install --no-deps --no-build-isolation -e .; \
		cp pyproject.toml .venv/pyproject.toml; \
		echo "Ready: .venv" >&2; \
	fi
