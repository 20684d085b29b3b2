# demo, test, bench, lint. Each works in the virtual environment that is active, or else makes .venv itself.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ifeq ($(strip $(VIRTUAL_ENV)),)
VENV := $(CURDIR)/.venv
else
VENV := $(VIRTUAL_ENV)
endif
OLDEST := $(CURDIR)/.venv-oldest
OLDEST_DEEPSPEED := $(shell sed -n 's/^ *deepspeed *>= *\([0-9.]*\).*/\1/p' setup.cfg)

# This checkout is what an environment's packages are installed for; each environment remembers which.
STAMP := $(VENV)/.deepspeed_ucp
OLDEST_STAMP := $(OLDEST)/.deepspeed_ucp
REQUIREMENTS := setup.cfg setup.py deepspeed_ucp.pth deepspeed_ucp.start pyproject.toml constraints.txt

export DS_ACCELERATOR ?= cpu
# Empty: the tests start hundreds of processes, and what these import is compiled once.
export PYTHONDONTWRITEBYTECODE :=
# torch first and under the constraint, so that nothing else chooses another build. DeepSpeed is a source package:
# no operator is compiled ahead.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DS_BUILD_OPS := 0
INSTALL = -m pip install --quiet -c constraints.txt

# What the commands below find: the environment's own deepspeed, mpirun and ninja, and the operator that DeepSpeed
# compiles at its first launch, kept with the environment because it depends on the DeepSpeed that is in it.
IN_ENV = PATH="$(1)/bin:$$PATH" TORCH_EXTENSIONS_DIR="$${TORCH_EXTENSIONS_DIR:-$(1)/torch_extensions}"

# Run a command, then remove the shared memory that its DeepSpeed launches left behind (69 MB per rank, also after a
# clean exit): what is ours, was written since, and no live process has mapped.
define TIDY_SCRIPT
start=$$(mktemp); trap : INT TERM; rc=0
"$$@" || rc=$$?
find /dev/shm -maxdepth 1 -name 'deepspeed_allreduce_buffer_*' -user "$$(id -u)" -newer "$$start" 2>/dev/null |
while read -r buffer; do
  cat /proc/[0-9]*/maps 2>/dev/null | grep -F "$$buffer" >/dev/null || rm -f "$$buffer"
done
rm -f "$$start"
exit $$rc
endef
export TIDY_SCRIPT
TIDY = bash -c "$$TIDY_SCRIPT" tidy

.PHONY: help demo figures proofs test test-all fuzz mutants bench house lint pytest test-oldest test-gpu test-releases test-platforms clean
help:
	@echo 'make demo    in two minutes: a GPT is trained on 4 ranks, killed, and resumed on 2 and on 3 (examples/byte_gpt);'
	@echo '             one with TP 2 and PP 2 goes on under other TP, PP and ZeRO (examples/megatron_gpt),'
	@echo '             and jobs under torchrun lose an agent, get one, hang, and lose a process and a node that'
	@echo '             had saved into memory (examples/elastic_restart)'
	@echo 'make figures the correctness figures of the paper, all of them (examples/megatron_gpt; minutes each)'
	@echo 'make proofs  where plain DeepSpeed resumes wrongly in an unchanged topology (examples/unchanged_topology)'
	@echo 'make test    lint, all tests, and the engine smoke tests on the oldest DeepSpeed ($(OLDEST_DEEPSPEED))'
	@echo 'make test-gpu    the tests of engines on GPUs, in an environment whose torch has CUDA'
	@echo 'make test-all    every combination of what make test combines in pairs, as well (an hour or two)'
	@echo 'make test-releases   the engine matrix on several releases, and what each saves in all others (an hour or two);'
	@echo '             writes docs/releases.md. RELEASES="0.16.0 newest" runs these rows again'
	@echo 'make test-platforms  the recipes of examples/platforms, with what pip can bring for them; Slurm is the machine'"'"'s'
	@echo 'make fuzz    damaged and drawn checkpoints with fresh seeds, for SECONDS=600'
	@echo 'make mutants make sure that the tests notice mistakes in the code: every small change of the pure rooms (mutmut),'
	@echo '             and mistakes that were made or feared (tests/mutants); hours, for a night'
	@echo 'make bench   the floor, DeepSpeed, upstream and this plugin, timed; writes docs/benchmarks.md'
	@echo 'make house   sizes, types, imports and docstrings of the package, and the files and types that a resume uses'
	@echo '             (bench/house.py); HOUSE_ARGS="--root DIR" measures another checkout'
	@echo 'make lint    ruff, mypy, import-linter'

demo: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -u examples/demo.py

figures: $(STAMP)
	for figure in fig7a fig7b fig8 fig9 experts; do \
	    $(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -u examples/megatron_gpt/figures.py $$figure || exit 1; \
	done

proofs: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -u examples/unchanged_topology/proofs.py $(CASES)

bench: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -u bench/run.py
	$(call IN_ENV,$(VENV)) $(VENV)/bin/python -u bench/scale.py --quick
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -u bench/saves.py

HOUSE_ARGS ?=
house: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python bench/house.py $(HOUSE_ARGS)

# Lint and the oldest DeepSpeed take what the tests leave of the cores in the first minutes. Each says what it has to say
# in one piece when it is done; whatever fails fails the whole.
test: $(STAMP)
	beside() { local log rc=0; log=$$("$$@" 2>&1) || rc=$$?; printf '%s\n' "$$log"; return $$rc; }; \
	beside $(MAKE) --no-print-directory lint test-oldest & others=$$!; rc=0; \
	$(MAKE) --no-print-directory pytest || rc=$$?; \
	wait $$others || { rc=$$?; echo 'make test: lint or the oldest DeepSpeed failed, see above' >&2; }; exit $$rc

pytest: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m pytest -n 4 --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

test-all: $(STAMP)
	$(MAKE) --no-print-directory pytest PYTEST_ARGS="-m 'exhaustive or not exhaustive' $(PYTEST_ARGS)"

SECONDS ?= 600
fuzz: $(STAMP)
	$(call IN_ENV,$(VENV)) $(VENV)/bin/python -m tests.fuzz --seconds $(SECONDS) $(FUZZ_ARGS)

# The changes of the tool (`mutmut show NAME` shows one of them), then those that are kept by hand.
mutants: $(STAMP)
	$(VENV)/bin/python $(INSTALL) 'mutmut>=3.8,<4'
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m mutmut run $(MUTMUT_ARGS)
	$(VENV)/bin/python -m mutmut results
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m tests.mutants $(MUTANT_ARGS)

# On this machine's GPUs, with the torch that drives them: NCCL where each rank has a GPU, else ranks share them.
test-gpu: export DS_ACCELERATOR := cuda
test-gpu: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m pytest tests/engine $(PYTEST_ARGS)

# The modules that have such tests: importing all others takes longer than these.
SMOKE = $(shell grep -rl engine_smoke tests --include='test_*.py')
test-oldest: $(OLDEST_STAMP)
	$(call IN_ENV,$(OLDEST)) $(TIDY) $(OLDEST)/bin/python -m pytest -m engine_smoke $(SMOKE) $(PYTEST_ARGS)

# Each release in a layer of its own over this environment; those that were run are not run again unless RELEASES names them.
RELEASES ?=
test-releases: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m tests.releases $(RELEASES) $(RELEASES_ARGS)

# Debian: apt-get install slurmctld slurmd slurm-client slurm-wlm-basic-plugins. What is missing is a skipped test.
test-platforms: $(STAMP)
	$(VENV)/bin/python $(INSTALL) -e '.[test,platforms]'
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m pytest tests/platforms -m 'exhaustive or not exhaustive' \
	    $(PYTEST_ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# An environment that another checkout has installed itself into since is installed again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif
$(STAMP): $(REQUIREMENTS)
	@echo 'installing PyTorch, DeepSpeed and the test tools into $(VENV): some minutes, once'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(INSTALL) torch numpy
	$(VENV)/bin/python $(INSTALL) -e '.[test,mpi,plot]'
	echo $(CURDIR) > $@

ifneq ($(shell cat $(OLDEST_STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(OLDEST_STAMP)
endif
$(OLDEST_STAMP): $(REQUIREMENTS)
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(INSTALL) torch numpy setuptools wheel
	$(OLDEST)/bin/python $(INSTALL) --no-build-isolation -e '.[test]' deepspeed==$(OLDEST_DEEPSPEED)  # its set-up needs torch
	echo $(CURDIR) > $@

clean:
	rm -rf .venv .venv-oldest .venv-releases build mutants *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
