# `make` alone lists the targets. Each target that needs the environment makes it first. Once it is made, only podman, audit,
# bench and wheel use the network; test calls podman, once.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
EXTRAS := dev
STAMP := $(VENV)/setup.stamp
STARTED := $(VENV)/setup.started
# Bytecode is written into $(VENV) and src even where the environment forbids it: without it each process compiles torch
# and transformers again, 9.3 seconds of processor time instead of 4.1.
unexport PYTHONDONTWRITEBYTECODE
ACTIVATE := export PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.PHONY: help setup run test lint wheel audit faults manifests podman bench golden docs

help:  ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | while IFS=$$'\t' read -r target text; do
		printf '  make %-9s %s\n' "$$target" "$$text"
	done

setup:  ## make .venv with the pinned versions (only when pyproject.toml or constraints.txt changed)
	@if cat pyproject.toml constraints.txt | cmp -s - $(STAMP); then exit 0; fi
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
		echo "realmops needs Python 3.11 or newer as '$(PYTHON)'; name another with: make setup PYTHON=python3.12" >&2
		exit 2
	fi
	uv=$$(command -v uv || true)
	if [ -z "$$uv" ] && ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then
		version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
		echo "'$(PYTHON)' cannot make virtual environments: its venv package is missing." >&2
		echo "Install it (apt-get install python$$version-venv) or put uv on the PATH; then call make again." >&2
		exit 2
	fi
	echo "realmops: setting up $(VENV) with $(EXTRAS), once; uv takes about a minute"
	# A killed set-up may have left a partially installed package, which pip and uv accept as complete.
	if [ -e $(STARTED) ]; then rm -rf $(VENV); fi
	mkdir -p $(VENV)
	touch $(STARTED)
	if [ -n "$$uv" ]; then
		"$$uv" venv --quiet --allow-existing --no-python-downloads --python "$$(command -v $(PYTHON))" $(VENV)
	else
		$(PYTHON) -m venv $(VENV)
		if $(VENV)/bin/python -m pip install -q --disable-pip-version-check --constraint constraints.txt uv; then
			uv=$(VENV)/bin/uv
		fi
	fi
	if [ -n "$$uv" ]; then
		# uv does not read what pip is configured with. Its own variables, where they are set, come first.
		settings=$$({ $(VENV)/bin/python -m pip config list || $(PYTHON) -m pip config list; } 2>/dev/null || true)
		take() {
			local value=$${!2:-$$(sed -En "s/^(global|install)\.$$3='(.*)'$$/\2/p" <<<"$$settings" | tail -n 1)}
			value=$${value//\\n/ } value=$${value# }
			if [ -z "$${!1:-}" ] && [ -n "$$value" ]; then export "$$1=$${value// /$${4:- }}"; fi
		}
		take UV_DEFAULT_INDEX PIP_INDEX_URL index-url
		take UV_EXTRA_INDEX_URL PIP_EXTRA_INDEX_URL extra-index-url
		take UV_FIND_LINKS PIP_FIND_LINKS find-links ,
		take SSL_CERT_FILE PIP_CERT cert
		export UV_INDEX_STRATEGY=$${UV_INDEX_STRATEGY:-unsafe-best-match}  # of all indexes, as pip does
		install=("$$uv" pip install --python $(VENV)/bin/python)
	else
		echo "realmops: uv cannot be installed; pip takes some 4 minutes" >&2
		install=($(VENV)/bin/python -m pip install --disable-pip-version-check)
	fi
	if ! "$${install[@]}" --constraint constraints.txt --editable '.[$(EXTRAS)]'; then
		rm -f $(STARTED)
		echo "realmops: the packages could not be installed; see the reason above (without a network, pip reports" >&2
		echo "conflicting dependencies). Fix it and call make again." >&2
		exit 1
	fi
	cat pyproject.toml constraints.txt > $(STAMP).new
	mv $(STAMP).new $(STAMP)
	rm -f $(STARTED)

run: setup  ## train and evaluate REALM on the sample corpus, then print the report
	@$(ACTIVATE)
	echo "realmops: sample, snapshot, tag, ict, pretrain, finetune, evaluate; the longest is pretrain, all take 3 to 12 minutes on 2 cores that do nothing else, by processor"
	dvc repro || { code=$$?; echo "realmops: stopped; what is done is kept, and the same call goes on from there" >&2; exit $$code; }
	realmops report

podman: setup  ## install podman, PostgreSQL and chromium, as root on Debian, for the tests that need them; else those are skipped
	@packages=()
	command -v podman >/dev/null || packages+=(podman crun catatonit)
	[ -n "$$(command -v initdb || ls /usr/lib/postgresql/*/bin/initdb 2>/dev/null)" ] || packages+=(postgresql)
	command -v chromedriver >/dev/null || packages+=(chromium chromium-driver)
	if [ $${#packages[@]} = 0 ] || [ "$$(id -u)" != 0 ] || [ ! -e /etc/debian_version ]; then exit 0; fi
	if [ -e $(VENV)/podman.tried ] && [ "$(MAKECMDGOALS)" != podman ]; then exit 0; fi
	touch $(VENV)/podman.tried
	echo "realmops: installing $${packages[*]}, once, for the tests that need them"
	# no service is started: with RUNLEVEL 1 Debian's packages leave that
	export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
	options=(-qq -o Acquire::Retries=0 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60)
	if ! { timeout 120 apt-get "$${options[@]}" update && timeout 300 apt-get "$${options[@]}" install --yes \
		--no-install-recommends --no-upgrade "$${packages[@]}"; } >$(VENV)/podman.log 2>&1; then
		echo "realmops: $${packages[*]} cannot be installed, tests that need them are skipped; see $(VENV)/podman.log"
	fi

test: lint podman  ## every check: ruff, mypy, pytest (what continuous integration calls)
	@$(ACTIVATE)
	export OMP_NUM_THREADS=1
	pytest --numprocesses $(JOBS) --dist loadscope --no-loadscope-reorder

lint: setup  ## ruff (rules and format) and mypy only
	@$(ACTIVATE)
	ruff check .
	ruff format --check .
	mypy

wheel: setup  ## build the sdist and the wheel of it, install that into an environment of its own, and run a small sample chain in an empty folder
	@$(ACTIVATE)
	rm -rf build/wheel
	uv build --quiet --out-dir build/wheel
	uv venv --quiet --python "$(PYTHON)" build/wheel/venv
	uv pip install --quiet --python build/wheel/venv/bin/python build/wheel/*.whl
	export PATH="$$PWD/build/wheel/venv/bin:$$PATH"
	mkdir build/wheel/project
	cd build/wheel/project
	realmops init
	realmops params --write --set sample.subjects=60 --set tag.steps=40 --set ict.steps=20 --set ict.reader_steps=40 \
		--set pretrain.steps=40 --set pretrain.refresh_every=20 --set pretrain.lag=5 --set evaluate.bootstrap=100
	realmops run all
	realmops search "Who was born there?" -k 3
	realmops report

audit: setup  ## known vulnerabilities of the packages in constraints.txt; asks PyPI for each of them
	@$(MAKE) setup EXTRAS=dev,audit STAMP=$(VENV)/audit.stamp
	$(ACTIVATE)
	exec pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

faults: setup  ## the campaign against faults at full length; make faults PART=disk runs a part
	@$(ACTIVATE)
	export OMP_NUM_THREADS=1 REALMOPS_FAULTS=1
	pytest --numprocesses $(JOBS) --dist worksteal --timeout 1500 -m faults -k '$(PART)'

manifests: setup  ## render the Kubernetes overlays into build/manifests and check them
	@$(ACTIVATE)
	mkdir -p build/manifests
	for overlay in k8s/overlays/*/; do
		file="build/manifests/$$(basename "$$overlay").yaml"
		kubectl kustomize "$$overlay" > "$$file"
		echo "realmops: $$file"
	done
	pytest -p no:xdist -q tests/cluster/test_manifests.py tests/cluster/test_gitops.py

bench: setup  ## every benchmark, one table; make bench NAME=... runs one, ARGS=... are its options
	@$(MAKE) setup EXTRAS=dev,bench STAMP=$(VENV)/bench.stamp
	$(ACTIVATE)
	exec python benchmarks/$(or $(NAME),against).py $(ARGS)

golden: setup  ## write tests/fixtures/golden.json again after an intended change of the data or its order
	@$(ACTIVATE)
	OMP_NUM_THREADS=1 PYTHONPATH=tests python tests/project/test_golden.py

docs: setup  ## write the generated pages of docs/ again after a change of commands, options, components, pipelines or records
	@$(ACTIVATE)
	python scripts/reference_pages.py
	python scripts/results.py
