# Makefile - `make help` lists what it can do.
#
# One set of sources, two devices. DEVICE=cuda compiles with the real nvcc for the GPU in this machine;
# DEVICE=cpu compiles the same files with dev/cpu/nvcc, which takes nvcc's arguments and makes a program for
# the processor. Without DEVICE the Makefile takes cuda if there are a GPU and nvcc, else cpu.
# MPI is used if mpicc is found; NO_MPI=1 builds without it (start the ranks with -pi fs then).

CUDA_HOME ?= /usr/local/cuda
REAL_NVCC := $(or $(shell command -v nvcc 2>/dev/null),$(wildcard $(CUDA_HOME)/bin/nvcc))
HAS_GPU   := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
DEVICE    ?= $(if $(REAL_NVCC),$(if $(filter-out 0,$(HAS_GPU)),cuda,cpu),cpu)
JOBS      ?= 2
export DEVICE
# What a shell may have set for other programs: modules that hide ours or pip's, asserts left out, other folders for cd.
unexport PYTHONPATH PYTHONHOME PYTHONOPTIMIZE CDPATH BASH_ENV

ifeq ($(DEVICE),cuda)
  NVCC ?= $(or $(REAL_NVCC),nvcc)
  CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
  CAPABILITY := $(subst .,,$(CAPABILITY))
  ARCH ?= $(if $(CAPABILITY),sm_$(CAPABILITY),native)
  DEVICE_FLAGS = -arch=$(ARCH)
else ifeq ($(DEVICE),cpu)
  NVCC ?= dev/cpu/nvcc
  DEVICE_DEPENDS := dev/cpu/nvcc $(wildcard $(addprefix dev/cpu/,*.py *.cpp *.h include/*.h include/*/*.h))
else
  $(error DEVICE=$(DEVICE): cuda or cpu)
endif

# MPI, as mpicc would compile and link it, in words that nvcc takes. One in .venv is there for want of one that works.
ifndef NO_MPI
  MPICC ?= $(or $(wildcard .venv/bin/mpicc),$(shell command -v mpicc 2>/dev/null))
  MPI_LINK := $(if $(MPICC),$(shell $(MPICC) -showme:link 2>/dev/null))
  ifneq ($(MPI_LINK),)
    MPI_FLAGS := -DZERO_USE_MPI -DOMPI_SKIP_MPICXX $(subst -pthread,,$(shell $(MPICC) -showme:compile))
    MPI_LIBS  := $(subst -pthread,,$(subst -Wl$(shell echo ,),-Xlinker ,$(MPI_LINK)))
  endif
endif

# xxHash and JSON: the copies that dev/deps.sh leaves, or those that it fetched; the compiler reads this variable by itself.
export CPATH := $(CURDIR)/build/headers:$(CURDIR)/.venv/include$(addprefix :,$(CPATH))

# NCCL from elsewhere (a folder with include/ and lib/), for example from a Python package.
ifdef NCCL_HOME
  NCCL_FLAGS := -I$(NCCL_HOME)/include
  NCCL_LIBS  := -L$(NCCL_HOME)/lib -Xlinker -rpath,$(NCCL_HOME)/lib
endif

ALIGNED  = $(if $(filter cpu,$(DEVICE)),-Xcompiler -fsanitize=alignment$(comma)-fsanitize-undefined-trap-on-error)
comma   := ,
WARNINGS = -Xcompiler -Wall,-Wextra
FLAGS    = -O3 -std=c++17 -I. $(WARNINGS) $(DEVICE_FLAGS) $(MPI_FLAGS) $(NCCL_FLAGS)
LIBS     = $(NCCL_LIBS) -lcublasLt -lnccl $(MPI_LIBS)
HEADERS := $(wildcard llmc_zero/*.cuh dev/mlp/*.h dev/mlp/*.cuh test/*.h)

# Unit tests: each test/test_*.cu is a program; test_cpu_*.cu tests dev/cpu itself and has no CUDA build.
# test/*_program.cu are programs that the pytest files start on several ranks.
# FAST_UNITS are built a second time with --use_fast_math, as NAME_fast: the formulas must not change.
UNIT_FILES := $(wildcard test/test_*.cu)
ifeq ($(DEVICE),cuda)
  UNIT_FILES := $(filter-out test/test_cpu_%,$(UNIT_FILES))
endif
FAST_UNITS := $(filter test_adamw test_grad_norm test_reduce,$(UNIT_FILES:test/%.cu=%))
PROGRAMS   := $(patsubst test/%.cu,build/test/%,$(wildcard test/*_program.cu))
ifneq ($(RUN_ALL),1)
  PROGRAMS := $(filter-out build/test/save_program,$(PROGRAMS))   # for a slow test alone
endif
UNITS      := $(UNIT_FILES:test/%.cu=build/test/%) $(FAST_UNITS:%=build/test/%_fast)

# Programs of the llm.c that dev/llmc/compare.sh has patched, with llm.c's flags: build/llmc/NAME/train_gpt2
# is made from build/llmc/src/train_gpt2.cu, or FROM=another folder. NO_MULTI_GPU=1 as in llm.c.
PRECISION ?= BF16
FROM ?= build/llmc/src
LLMC_FLAGS = --use_fast_math -std=c++17 -O3 $(DEVICE_FLAGS) -DENABLE_$(PRECISION) -I$(FROM)/llmc_zero/third_party
LLMC_LIBS  = -lcublas -lcublasLt $(NVML_LIBS)
ifndef NO_MULTI_GPU
  LLMC_FLAGS += -DMULTI_GPU $(if $(MPI_FLAGS),-DUSE_MPI $(MPI_FLAGS)) $(NCCL_FLAGS)
  LLMC_LIBS  += $(NCCL_LIBS) -lnccl $(MPI_LIBS)
endif

.PHONY: help demo test test-all test-san hashes units chaos cuda-check lint bench llmc clean FORCE
.DELETE_ON_ERROR:

help: ## this list
	@echo "device: $(DEVICE)   compiler: $(NVCC)   MPI: $(if $(MPI_FLAGS),$(MPICC),no)"
	@awk -F ':.*## ' '/^[a-z_-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@echo "  DEVICE=cuda|cpu overrides what was found, NO_MPI=1 builds without MPI, JOBS=n compiles n at a time"

train_mlp: train_mlp.cu $(HEADERS) $(DEVICE_DEPENDS) build/flags ## build the example trainer
	$(NVCC) $(FLAGS) --use_fast_math $< -o $@ $(LIBS)

demo: ## install what is missing, run the recipe with sharding off and on, print its table
	dev/deps.sh demo
	$(MAKE) train_mlp
	.venv/bin/python dev/demo.py

test: ## install what is missing, run everything this machine can run
	dev/deps.sh test
	$(MAKE) -j$(JOBS) train_mlp units
	.venv/bin/python -m pytest -q -n $(JOBS) --dist loadfile test

test-all: ## the same with the slow tests too
	RUN_ALL=1 $(MAKE) test

test-san: ## tests with AddressSanitizer and UBSan in every program; SHORT=1: what takes CI a few minutes
	dev/deps.sh test
	JOBS=$(JOBS) dev/sanitize.sh $(if $(SHORT),--short)

hashes: train_mlp units ## write test/data/hashes.json anew, where a change of bits is meant (test/hashes.py)
	HASHES=write .venv/bin/python -m pytest -q test/test_hashes.py test/test_llmc_runs.py -k keep_their_bits

units: $(UNITS) $(PROGRAMS) ## build the unit tests, build/test/*

# Kernels are tested as they are used; in the other tests -O3 would cost the compiler more than the runs gain.
$(filter-out $(foreach unit,$(FAST_UNITS),build/test/$(unit) build/test/$(unit)_fast),$(UNITS)) $(PROGRAMS): private FLAGS := $(subst -O3,-O1,$(FLAGS))

# gtest_main is linked always: a main() in the test file itself comes before it.
build/test/%: test/%.cu $(HEADERS) $(DEVICE_DEPENDS) build/flags
	@mkdir -p build/test
	$(NVCC) $(FLAGS) $< -o $@ $(LIBS) -lgtest_main -lgtest

build/test/%_program: test/%_program.cu $(HEADERS) $(DEVICE_DEPENDS) build/flags
	@mkdir -p build/test
	$(NVCC) $(FLAGS) $< -o $@ $(LIBS)

build/test/train_program: train_mlp.cu

# On a CPU a vector access that is not aligned would pass unseen; there it stops the program.
build/test/%_fast: test/%.cu $(HEADERS) $(DEVICE_DEPENDS) build/flags
	@mkdir -p build/test
	$(NVCC) $(FLAGS) --use_fast_math -DWITH_FAST_MATH $(ALIGNED) $< -o $@ $(LIBS) -lgtest_main -lgtest

cuda-check: ## compile and link every CUDA target for sm_80, 90 and 100; needs nvcc, no GPU
	dev/cuda_check.sh

lint: ## layout and common mistakes: clang-format, ruff, shellcheck, in the versions that dev/deps.sh names
	dev/deps.sh lint
	git ls-files '*.cuh' '*.cu' '*.h' '*.cpp' '*.c' | xargs .venv/bin/clang-format --dry-run -Werror
	.venv/bin/ruff check -q
	.venv/bin/shellcheck -x .ci/run dev/*.sh dev/llmc/*.sh dev/cpu/*.sh dev/cpu/nvcc

chaos: ## kill a run again and again, on other numbers of ranks each time, and compare it with one left alone
	dev/deps.sh demo
	$(MAKE) train_mlp
	.venv/bin/python dev/chaos.py --kills $(or $(KILLS),20) --seed $(or $(SEED),0)

bench: ## update and norm kernels beside a plain copy and a plain read, in one run
	dev/gpu_check.sh --only bandwidth

build/gpu_check/bandwidth: dev/gpu_check.cu $(HEADERS) $(DEVICE_DEPENDS) build/flags
	@mkdir -p build/gpu_check
	$(NVCC) $(FLAGS) $< -o $@

llmc: ## patch a copy of the llm.c in LLMC_DIR=..., train it with sharding off and on, compare
	dev/llmc/compare.sh "$(LLMC_DIR)" --precision $(PRECISION)

build/llmc/%: FORCE
	@mkdir -p $(@D)
	$(NVCC) $(LLMC_FLAGS) $(FROM)/$(@F).cu -o $@ $(LLMC_LIBS)

# Changes when the compiler or its flags do, so that nothing stays from another device.
build/flags: FORCE
	@mkdir -p build
	@echo '$(NVCC) $(FLAGS) $(LIBS)' | cmp -s - $@ || echo '$(NVCC) $(FLAGS) $(LIBS)' >$@

clean: ## remove what was built (.venv stays)
	rm -rf build train_mlp
