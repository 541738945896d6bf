# make smoke   from a fresh clone to a served tiny@2, on a CPU
# make test    the CPU tests, each package in the environment it belongs to
# make test-all   adds the slow ones: the rest of the parity matrix, repeats, every restart; make test-slice a tenth of them
# make check   ruff, formatting, types, links of the docs; make docs builds only the site, in build/site
# make chaos   a run under a nemesis for HOURS=2, with a fresh seed, then with real Megatron and vLLM
# make envs-cuda, make smoke-cuda   the same on a CUDA machine with two GPUs; nothing else here needs one; CUDA_STACK=033: newer versions

# `make envs PYTHON=...` names the interpreter of both environments.
PYTHON ?=
INFERENCE_PYTHON = $(or $(PYTHON),$(shell for p in python3 python3.12 python3.13 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done))
TRAINER := .venv-trainer
INFERENCE := .venv-inference
REPORT ?= runs/smoke/report.json
SMOKE_ARGS ?=
PYTEST_ARGS ?=
# The CUDA locks: 026 or 033, vLLM's version. requirements/cuda-stack has the default, also of the images.
CUDA_STACK ?= $(shell cat requirements/cuda-stack)
LOCKS := requirements/torch-cpu.lock requirements/make_env.sh requirements/find_python.sh pyproject.toml

# The models and datasets of tests are local folders: nothing asks a hub.
test test-all test-slice test-trainer test-orchestrator test-runs test-inference mutants chaos chaos-short: export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1
# The environments keep their bytecode, whatever the shell says: without it every process compiles torch, Megatron and vLLM again.
unexport PYTHONDONTWRITEBYTECODE

HOURS ?= 2
CHAOS_ARGS ?=

.PHONY: help envs envs-both envs-cuda dev smoke smoke-cuda test test-trainer test-orchestrator test-runs test-inference test-all test-slice mutants chaos chaos-short check check-code docs docs-version lint-fix clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -6

envs: ## the two environments; pip's work is mostly unpacking, so both at once
	@$(MAKE) --no-print-directory -j2 envs-both

envs-both: $(TRAINER)/.installed $(INFERENCE)/.installed

$(TRAINER)/.installed: requirements/trainer.lock $(LOCKS)
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$(requirements/find_python.sh 3.12) || exit 1; \
	requirements/make_env.sh "$$python" $(TRAINER) requirements/trainer.lock 3.12 3.13
	@touch $@

$(INFERENCE)/.installed: requirements/inference.lock $(LOCKS)
	@requirements/make_env.sh "$(INFERENCE_PYTHON)" $(INFERENCE) requirements/inference.lock 3.11
	@touch $@

envs-cuda: ## the same two folders, from the CUDA locks
	@$(MAKE) --no-print-directory -j2 $(TRAINER)/.installed-cuda-$(CUDA_STACK) $(INFERENCE)/.installed-cuda-$(CUDA_STACK)

$(TRAINER)/.installed-cuda-%: requirements/trainer-cuda-%.lock requirements/trainer-cuda-%-build.lock $(LOCKS)
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$(requirements/find_python.sh 3.12) || exit 1; \
	requirements/make_env.sh "$$python" $(TRAINER) requirements/trainer-cuda-$*.lock 3.12 3.13
	@touch $@

$(INFERENCE)/.installed-cuda-%: requirements/inference-cuda-%.lock $(LOCKS)
	@python="$(PYTHON)"; [ -n "$$python" ] || python=$$(requirements/find_python.sh 3.12) || exit 1; \
	requirements/make_env.sh "$$python" $(INFERENCE) requirements/inference-cuda-$*.lock 3.12 3.13
	@touch $@

dev: envs $(TRAINER)/.dev $(TRAINER)/.plot $(TRAINER)/.docs $(TRAINER)/.ray $(TRAINER)/.tinker $(TRAINER)/.examples $(TRAINER)/.sinks $(TRAINER)/.s3 $(INFERENCE)/.dev

%/.dev: requirements/dev.lock %/.installed
	@$*/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/dev.lock
	@touch $@

# Benchmarks draw their results, the docs become a site, tests have a Ray cluster and a Tinker server, run the examples, have an S3 server and log to W&B, MLflow and trackio: all in the trainer's environment.
# Ray needs its bytecode: a raylet gives its agents 15 s to start (ray issue 65983).
$(TRAINER)/.plot $(TRAINER)/.docs $(TRAINER)/.ray $(TRAINER)/.tinker $(TRAINER)/.examples $(TRAINER)/.sinks $(TRAINER)/.s3: $(TRAINER)/.%: requirements/%.lock $(TRAINER)/.installed
	@$(TRAINER)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(if $(findstring ray,$@),,--no-compile) -r requirements/$*.lock
	@touch $@

smoke: envs
	$(TRAINER)/bin/splice smoke --report $(REPORT) $(SMOKE_ARGS)

smoke-cuda: envs-cuda
	$(TRAINER)/bin/splice smoke --set device=cuda --report $(REPORT) $(SMOKE_ARGS)

# The parts run at once, since each waits for much of its time, and all run even if one fails; the result is red if any is.
# A part's output comes when it ends.
TEST_JOBS ?= 4
test: dev
	@if $(MAKE) --no-print-directory --keep-going --jobs=$(TEST_JOBS) --output-sync=target test-trainer test-orchestrator test-runs test-inference; \
	then echo "make test: all parts passed"; else echo "make test: at least one part FAILED" >&2; exit 1; fi

# torch's TCPStore looks up its clients' names: where a name server loses packets, each such lookup would hold a join for 5 s or more.
test-trainer test-orchestrator test-runs test-inference: export RES_OPTIONS := $(or $(RES_OPTIONS),timeout:1 attempts:2)

test-trainer:
	$(TRAINER)/bin/python -m pytest tests/trainer_node $(PYTEST_ARGS)

test-orchestrator:
	$(TRAINER)/bin/python -m pytest tests/test_imports.py tests/test_readme.py tests/test_docs.py tests/test_installation.py tests/test_kept_exceptions.py tests/test_numerics.py tests/orchestrator tests/splice tests/chaos tests/weight_transfer tests/benchmarks $(PYTEST_ARGS)

test-runs:
	$(TRAINER)/bin/python -m pytest tests/e2e tests/train tests/rl tests/tinker tests/layouts $(PYTEST_ARGS)

test-inference:
	$(INFERENCE)/bin/python -m pytest tests/inference_node tests/weight_transfer/test_digest.py $(PYTEST_ARGS)

# Tests marked `whole` (`tests/conftest.py` lists them) run here only.
test-all:
	@$(MAKE) --no-print-directory test PYTEST_ARGS="-m 'not gpu1 and not gpu2 and not gpu4' $(PYTEST_ARGS)"

# A tenth of what only `make test-all` runs, but for the mutants and a shorter week. SLICE is 0 to 9.
SLICE ?= 0
test-slice:
	@SPLICE_WEEK_STEPS=400 $(MAKE) --no-print-directory test PYTEST_ARGS="-m 'whole and not gpu1 and not gpu2 and not gpu4' \
	--slice=$(SLICE)/10 --deselect tests/trainer_node/test_mutants.py $(PYTEST_ARGS)"

# Wrong versions of the production code; each must be found by the test it names. Part of `make test-all`.
mutants: dev
	$(TRAINER)/bin/python -m pytest tests/trainer_node/test_mutants.py -m whole $(PYTEST_ARGS)

# Each run has its own seed, printed first, and five minutes of faults; half of the time goes to fake nodes, half to real ones.
chaos: dev
	$(TRAINER)/bin/python -m tests.chaos --hours $(HOURS) $(CHAOS_ARGS)

# Three minutes for CI: two seeds that are always the same, and a fresh one.
chaos-short: dev
	$(TRAINER)/bin/python -m tests.chaos --seed 1 --runs 2 --minutes 0.7
	$(TRAINER)/bin/python -m tests.chaos --minutes 0.7

check: $(TRAINER)/.dev $(TRAINER)/.plot $(TRAINER)/.docs
	@$(MAKE) --no-print-directory -j2 check-code docs

# Strict: a missing page, link or anchor is an error.
docs: $(TRAINER)/.plot $(TRAINER)/.docs
	NO_MKDOCS_2_WARNING=1 $(TRAINER)/bin/python -m mkdocs build --quiet

# The site of this version next to those of others, with a switch between them: a commit on the branch gh-pages, which the user pushes.
docs-version: $(TRAINER)/.plot $(TRAINER)/.docs
	export NO_MKDOCS_2_WARNING=1 PATH="$(CURDIR)/$(TRAINER)/bin:$$PATH" && \
	mike deploy --update-aliases $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) latest && mike set-default latest

check-code: $(TRAINER)/.dev
	$(TRAINER)/bin/ruff check .
	$(TRAINER)/bin/ruff format --check .
	$(TRAINER)/bin/mypy

lint-fix: $(TRAINER)/.dev
	$(TRAINER)/bin/ruff check --fix .
	$(TRAINER)/bin/ruff format .

clean:
	rm -rf $(TRAINER) $(INFERENCE) runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
