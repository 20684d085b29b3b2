# Targets use the active virtual environment, or create .venv. `make help` lists them.
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

# Each environment has a stamp with the path of the checkout for which its packages were installed.
STAMP := $(VENV)/.deepspeed_ucp
OLDEST_STAMP := $(OLDEST)/.deepspeed_ucp
REQUIREMENTS := setup.cfg setup.py deepspeed_ucp.pth deepspeed_ucp.start pyproject.toml constraints.txt

export DS_ACCELERATOR ?= cpu
# Empty, so that the hundreds of processes of the tests share compiled modules.
export PYTHONDONTWRITEBYTECODE :=
# torch is installed first and under the constraint, so that no other package chooses another build. DeepSpeed is a
# source package; its installation compiles no operators.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DS_BUILD_OPS := 0
INSTALL = -m pip install --quiet -c constraints.txt

# Environment of the commands below: PATH with the environment's deepspeed, mpirun and ninja, and the folder of the
# operator that DeepSpeed compiles at its first launch. It depends on the DeepSpeed of the environment.
IN_ENV = PATH="$(1)/bin:$$PATH" TORCH_EXTENSIONS_DIR="$${TORCH_EXTENSIONS_DIR:-$(1)/torch_extensions}"

# Run a command, then remove the shared memory that DeepSpeed leaves after each launch (69 MB per rank, also after a
# clean exit): files of this user that were written since the start and that no live process has mapped.
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
	@echo 'make demo    two minutes: kill a GPT on 4 ranks and resume it on 2 and 3 (examples/byte_gpt); resume one of TP 2'
	@echo '             and PP 2 under other TP, PP and ZeRO (examples/megatron_gpt); kill, stop and add agents, ranks'
	@echo '             and a node under torchrun (examples/elastic_restart)'
	@echo 'make figures all correctness figures of the paper (examples/megatron_gpt; minutes each)'
	@echo 'make proofs  cases in which plain DeepSpeed resumes wrongly (examples/unchanged_topology)'
	@echo 'make test    lint, all tests with a selection of cases, engine smoke tests on the oldest DeepSpeed ($(OLDEST_DEEPSPEED))'
	@echo 'make test-gpu    engine tests on GPUs; needs an environment whose torch has CUDA'
	@echo 'make test-all    all cases of all tests (an hour or two)'
	@echo 'make test-releases   the engine matrix on several releases; each also loads saves of the others (an hour or two);'
	@echo '             writes docs/releases.md. RELEASES="0.16.0 newest" repeats these rows'
	@echo 'make test-platforms  the recipes of examples/platforms; installs Ray, NVRx and schemas by pip, but not Slurm'
	@echo 'make fuzz    random and damaged checkpoints with new seeds, for SECONDS=600'
	@echo 'make mutants test that tests detect mistakes in the code: all small changes of some modules (mutmut), and'
	@echo '             a list of likely mistakes (tests/mutants); runs for hours'
	@echo 'make bench   times of DeepSpeed, upstream, this plugin and the hardware; writes docs/benchmarks.md'
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
	$(call IN_ENV,$(VENV)) $(VENV)/bin/python -u bench/scale.py
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -u bench/saves.py

HOUSE_ARGS ?=
house: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python bench/house.py $(HOUSE_ARGS)

# Lint and the tests on the oldest DeepSpeed run in parallel to the other tests. Each prints its output when it ends.
# The target fails if any of them fails.
test: $(STAMP)
	beside() { local log rc=0; log=$$("$$@" 2>&1) || rc=$$?; printf '%s\n' "$$log"; return $$rc; }; \
	beside $(MAKE) --no-print-directory lint test-oldest & others=$$!; rc=0; \
	$(MAKE) --no-print-directory pytest || rc=$$?; \
	wait $$others || { rc=$$?; echo 'make test: lint or the oldest DeepSpeed failed, see above' >&2; }; exit $$rc

pytest: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder $(PYTEST_ARGS)

test-all: $(STAMP)
	$(MAKE) --no-print-directory pytest PYTEST_ARGS="-m 'exhaustive or not exhaustive' $(PYTEST_ARGS)"

SECONDS ?= 600
fuzz: $(STAMP)
	$(call IN_ENV,$(VENV)) $(VENV)/bin/python -m tests.fuzz --seconds $(SECONDS) $(FUZZ_ARGS)

# First the changes by mutmut (`mutmut show NAME` shows one of them), then those in tests/mutants.
mutants: $(STAMP)
	$(VENV)/bin/python $(INSTALL) 'mutmut>=3.8,<4'
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m mutmut run $(MUTMUT_ARGS)
	$(VENV)/bin/python -m mutmut results
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m tests.mutants $(MUTANT_ARGS)

# Uses NCCL if each rank has a GPU; otherwise ranks share GPUs.
test-gpu: export DS_ACCELERATOR := cuda
test-gpu: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m pytest tests/engine $(PYTEST_ARGS)

# Only modules that have such tests, since importing all others takes longer than the tests.
SMOKE = $(shell grep -rl engine_smoke tests --include='test_*.py')
test-oldest: $(OLDEST_STAMP)
	$(call IN_ENV,$(OLDEST)) $(TIDY) $(OLDEST)/bin/python -m pytest -m engine_smoke $(SMOKE) $(PYTEST_ARGS)

# Each release is installed in a layer above this environment. RELEASES names rows to repeat.
RELEASES ?=
test-releases: $(STAMP)
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m tests.releases $(RELEASES) $(RELEASES_ARGS)

# Debian: apt-get install slurmctld slurmd slurm-client slurm-wlm-basic-plugins. Tests of missing programs are skipped.
test-platforms: $(STAMP)
	$(VENV)/bin/python $(INSTALL) -e '.[test,platforms]'
	$(call IN_ENV,$(VENV)) $(TIDY) $(VENV)/bin/python -m pytest tests/platforms -m 'exhaustive or not exhaustive' \
	    $(PYTEST_ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Reinstall if another checkout has used the environment since.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif
$(STAMP): $(REQUIREMENTS)
	@echo 'installing PyTorch, DeepSpeed and the test tools into $(VENV); this takes some minutes, once'
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
