# The commands of this project. `make demo` and `make test` need Python, a C/C++ compiler and make, and no more.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
C_FILES = $(filter-out %codebook.h,$(wildcard c_src/tq/*.[ch] c_src/ggml/*.[ch] c_src/ggml/*.cpp c_src/bench/*.[ch] \
	tests/*.c))

.DEFAULT_GOAL := help
.PHONY: help demo test dev programs wheel bench sanitize lint format codebooks clean

help:  ## list these commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/built  ## build everything and compare the cache types on a real model
	@$(BIN)/python scripts/demo.py

test: $(VENV)/built $(VENV)/tests  ## build everything and run all tests
	@$(BIN)/python scripts/build.py --llama-tests --bench --programs
	$(BIN)/python -m pytest

dev: $(VENV)/packages  ## rebuild after an edit
	@$(BIN)/python scripts/build.py
	@touch $(VENV)/built

programs: $(VENV)/built  ## build llama.cpp's own llama-server, llama-cli, llama-bench, llama-perplexity and ggml-rpc-server
	@$(BIN)/python scripts/build.py --programs

bench: $(VENV)/built $(VENV)/bench  ## measure attention and whole models, and write docs/speed.md; about an hour
	@$(BIN)/python scripts/build.py --bench
	$(BIN)/python scripts/bench.py

wheel: $(VENV)/built $(VENV)/wheel  ## build the wheel that travels and try it, emulated as well; ARCH=aarch64 for Arm
	@$(BIN)/python scripts/wheel.py $(if $(ARCH),--arch $(ARCH))

sanitize: $(VENV)/built $(VENV)/tests  ## tests under ASan and UBSan (as make test), and attention in ggml under TSan
	TQ_THREAD_SANITIZER=1 $(BIN)/python -m pytest -k sanitizer

lint: $(VENV)/lint  ## check style and the generated header
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/python scripts/generate_codebooks.py --check

format: $(VENV)/lint  ## bring the sources to that style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

codebooks: $(VENV)/packages  ## write c_src/tq/tq_codebook.h
	$(BIN)/python scripts/generate_codebooks.py

clean:  ## remove the build and the virtual environment
	rm -rf build $(VENV)

# Each stamp stands for the step that makes it; what it was made from is its prerequisite.

$(VENV)/packages: pyproject.toml scripts/fetch_llama_cpp.py
	@$(PYTHON) scripts/preflight.py --venv $(if $(wildcard build/*/cmake_install.cmake),--no-space)
	@$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --group build
	@$(BIN)/python scripts/build.py --llama-cpp-python
	@touch $@

$(VENV)/built: $(VENV)/packages $(wildcard c_src/*.* c_src/*/*) bindings/build_kernels.py
	@$(BIN)/python scripts/build.py
	@touch $@

$(VENV)/tests: $(VENV)/packages
	$(BIN)/python -m pip install --quiet --group test
	@$(BIN)/python -m pip install --quiet --only-binary faiss-cpu --group oracle || \
		echo "No faiss-cpu for this machine: one test, which compares our codebooks with it, will be skipped."
	@touch $@

$(VENV)/bench: $(VENV)/packages
	$(BIN)/python -m pip install --quiet --group bench
	@touch $@

$(VENV)/wheel: $(VENV)/packages
	$(BIN)/python -m pip install --quiet --group wheel
	@touch $@

$(VENV)/lint: $(VENV)/packages
	$(BIN)/python -m pip install --quiet --group lint
	@touch $@
