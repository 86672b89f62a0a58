# `make demo` and `make test` do all their own set-up. Needed: Python 3.11+ with venv, git, make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip names every local index folder that it does not find; the demo's reader has no use for that.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
SEEDS ?= 3
# A machine of usual speed needs less; a slower one leaves the last tests out and says how many. CI leaves none out.
TEST_MINUTES ?= $(if $(filter true,$(CI)),inf,20)

# The one command that resolves versions. What stands in a lock file already keeps its version; UPGRADE=--upgrade moves all.
LOCK = $(BIN)/uv pip compile --quiet --system-certs --universal --python-version 3.11 --generate-hashes --no-annotate --no-header $(UPGRADE)

# The marks of tests that need a part besides Python, or minutes: see pyproject.toml.
PARTS := slurm or s3 or registry or prefect or embedded or launcher or random_kill or thorough

# The quick tests that import Prefect, which takes as long as collecting all others.
WITH_PREFECT := tests/blocks tests/tasks tests/nightbridge/cli tests/examples/test_demo.py tests/nightbridge/slurm/test_patience.py tests/nightbridge/test_errors.py tests/test_docs.py

# Each of the long counts is a target of its own, so that one that fails costs none of the others its hours.
SOAKS := soak-newest-prefect soak-submission soak-fuzz soak-kills soak-restore soak-stages soak-month

# What no worker of pytest finds compiled it compiles itself, as every process that a test starts does.
unexport PYTHONDONTWRITEBYTECODE

# Nothing that is started here sends usage data: Prefect's commands, its server and its workers with the flows they run.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false

.PHONY: help require install lock demo check quick quick-with-prefect test whole docs lint soak $(SOAKS) bench server deploy worker night clean clean-all

help:
	@echo "make demo     the whole pipeline on this machine, from nothing"
	@echo "make check    style, types, layers, and the quick tests that need Python only: before every commit"
	@echo "make test     style, types, layers and all tests, on real parts where they can be installed"
	@echo "make lock     resolve the lock files again, after a change of pyproject.toml or launcher.in"
	@echo "make docs     the documentation as a site in site/, with every warning as an error"
	@echo "make soak     the long counts"
	@echo "make bench    the short benchmarks of docs/benchmarks.md"
	@echo "make server   a Prefect server with the settings of prefect.toml"
	@echo "make deploy   work pool, queues, blocks and deployments to the Prefect server"
	@echo "make worker   a worker that runs what is due"
	@echo "make clean    remove what can be made again; the store stays"
	@echo "make clean-all  remove the store in .nightbridge, too: history and decisions; asks first"
	@echo "make night    start a night by hand: a new one, or NIGHT=ID, which goes on where it had ended"

require:
	@command -v git >/dev/null || { echo "git is missing: install it, on Debian or Ubuntu with: apt-get install git" >&2; exit 1; }
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 to 3.13, or name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "$$($(PYTHON) --version) is not between 3.11 and 3.13: name another one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv is missing: install it, on Debian or Ubuntu with: apt-get install python3-venv" >&2; exit 1; }

install: require $(VENV)/.installed

# pip installs uv, which installs the rest in a fifth of the time. The part of the lock file that is uv's carries its hashes.
$(BIN)/uv: | require
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > $(VENV)/uv.lock
	@$(PIP) install --quiet --require-hashes --requirement $(VENV)/uv.lock

# uv uses the certificates of this machine, as Debian's pip does: an organisation may have some of its own.
$(VENV)/.installed: requirements.lock pyproject.toml nightbridge/repos/launcher.lock | $(BIN)/uv
	@echo "installing the locked requirements into $(VENV)"
	@$(BIN)/uv pip install --quiet --system-certs --compile-bytecode --python $(BIN)/python --require-hashes --requirement requirements.lock
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@$(BIN)/nightbridge demo --prepare
	@touch $@

lock: $(BIN)/uv
	$(LOCK) --extra dev --output-file requirements.lock pyproject.toml
	$(LOCK) --output-file nightbridge/repos/launcher.lock nightbridge/repos/launcher.in

demo: install
	@$(BIN)/nightbridge demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The linters run one after the other, on one core: the tests run beside them, and in `test` the real parts' installation, too.
check:
	@$(MAKE) --no-print-directory --jobs 3 lint quick quick-with-prefect

# All tests of whole flows and nights need Prefect: each worker would import them, and Prefect's server, to leave them out.
# Five workers keep two cores busy although a third of their time is waiting; each one costs four seconds to collect.
quick: install
	$(BIN)/pytest --numprocesses 5 --dist loadfile --no-loadscope-reorder -m "not ($(PARTS))" --ignore tests/flows --ignore tests/nights $(WITH_PREFECT:%=--ignore %)

# One process imports Prefect for them, instead of each worker.
quick-with-prefect: install
	$(BIN)/pytest -m "not ($(PARTS))" $(WITH_PREFECT)

test:
	@$(MAKE) --no-print-directory --jobs 2 lint whole

# A second try of what ran into its time limit would have none: pytest-timeout's is for all tries of a test together. Where a part
# that all need is broken, or the machine has come to a halt, each of hundreds would take its minutes to fail.
# A make that a test starts is none of the jobs here.
whole: install
	$(BIN)/python tests/real/packages.py
	MAKEFLAGS= NIGHTBRIDGE_SEEDS=$(SEEDS) NIGHTBRIDGE_TEST_MINUTES=$(TEST_MINUTES) $(BIN)/pytest --numprocesses 5 --dist loadfile --no-loadscope-reorder --reruns 1 --rerun-except "Timeout \(>" --maxfail 5 --durations 20

# The theme's own advertisement would be a warning among ours.
docs: install
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The tests that use Prefect, on the newest release that pyproject.toml allows. `soak` starts with it.
soak-newest-prefect: install
	$(BIN)/python tests/real/packages.py
	cp requirements.lock $(VENV)/newest.lock
	$(LOCK) --upgrade-package prefect --extra dev --output-file $(VENV)/newest.lock pyproject.toml
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(VENV)/newest
	$(BIN)/uv pip install --quiet --system-certs --python $(VENV)/newest/bin/python --require-hashes --requirement $(VENV)/newest.lock
	$(BIN)/uv pip install --quiet --python $(VENV)/newest/bin/python --no-deps --no-build-isolation --editable .
	$(VENV)/newest/bin/prefect version
	$(VENV)/newest/bin/pytest tests/blocks tests/tasks tests/flows tests/nights --ignore tests/nights/test_soak.py

soak: install
	@$(MAKE) --no-print-directory --keep-going --jobs 1 $(SOAKS)

soak-submission: install
	NIGHTBRIDGE_SEEDS=500 $(BIN)/pytest -s tests/nightbridge/slurm/test_soak.py

soak-fuzz: install
	NIGHTBRIDGE_FUZZ=100 $(BIN)/pytest -s tests/test_fuzz.py

soak-kills: install
	NIGHTBRIDGE_SEEDS=200 $(BIN)/pytest -m random_kill --timeout 7200 --ignore tests/nightbridge/slurm/test_soak.py

soak-restore: install
	$(BIN)/python benchmarks/restore.py --files 0 --small 0 --gib 0 --times 1000

soak-stages: install
	NIGHTBRIDGE_EVERY_STAGE=1 $(BIN)/pytest -s tests/nights tests/flows/test_endings.py tests/flows/test_attribute_axes.py tests/flows/test_control_arm.py tests/nightbridge/harvest/test_faults.py tests/nightbridge/test_any_file.py --ignore tests/nights/test_soak.py

soak-month: install
	NIGHTBRIDGE_SOAK_NIGHTS=30 NIGHTBRIDGE_SOAK_TESTS=6 $(BIN)/pytest -s tests/nights/test_soak.py

bench: install
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/sweep.py
	PYTHONPATH=. $(BIN)/python benchmarks/clone.py
	PYTHONPATH=. $(BIN)/python benchmarks/polling.py 200 60

server: install
	$(BIN)/prefect server start

deploy: install
	$(BIN)/nightbridge deploy

# A worker gives up when twelve of its requests in a row have failed, and ends the flows that it runs. With Prefect's 5
# further tries of each (2, 4, 8 ... s apart) that was after 22 minutes without the server, with 10 it is after hours. It
# notices the server's return after at most as long as the server was away, and at most 17 minutes.
#
# Prefect's workers of all users of a host share one folder for temporary files, which the first of them makes.
RUNNERS = $${TMPDIR:-/tmp}/runner_storage
worker: export PREFECT_CLIENT_MAX_RETRIES ?= 10
worker: export PREFECT_CLIENT_RETRY_EXTRA_CODES ?= 500,504
worker: install
	@test -n "$$PREFECT_API_URL" || $(BIN)/prefect config view | grep -q '^PREFECT_API_URL=' || { echo "PREFECT_API_URL is not set, and a worker of its own server finds nothing due. With that of make server: export PREFECT_API_URL=http://127.0.0.1:4200/api" >&2; exit 1; }
	@mkdir -p "$(RUNNERS)" 2>/dev/null; chmod 1777 "$(RUNNERS)" 2>/dev/null; test -d "$(RUNNERS)" -a -w "$(RUNNERS)" || { echo "$(RUNNERS) is another user's, and Prefect's worker writes there: let its owner run chmod 1777 $(RUNNERS), or name another folder for temporary files: TMPDIR=... make worker" >&2; exit 1; }
	$(BIN)/prefect worker start --pool nightbridge

night: install
	$(BIN)/python -m nightbridge.flows.by_hand "$(NIGHT)" "$(DEPLOYMENT)"

# The workspace holds the store: history and decisions, which nothing brings back.
clean:
	rm -rf $(VENV) site .nightbridge/envs .nightbridge/practice .nightbridge/demo-prefect
	@test ! -d .nightbridge || echo "kept: .nightbridge with its store; make clean-all removes it, too"

clean-all:
	@test -d .nightbridge || exit 0; \
	echo "removes .nightbridge: $$(ls .nightbridge/store/nights 2>/dev/null | wc -l) nights, $$(ls .nightbridge/store/decisions 2>/dev/null | wc -l) clusters' decisions, $$(du -sh .nightbridge | cut -f1)"; \
	printf "type yes: "; read answer; test "$$answer" = yes
	rm -rf $(VENV) site .nightbridge
