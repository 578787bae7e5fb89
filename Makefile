# `make run`: from a fresh clone to results.txt. `make test`: the test suite. `make check`: style, types and tests.
# `make coverage`: the suite, and which lines it runs: it takes about half as long again.
# `make test-cuda`: the GPU's code on a software CUDA device and a software mps, every method but the head, and the main modes.
# `make test-gpu`: the same methods' texts, and the Triton kernel, on a CUDA device.
# `make test-zoo`: every kind of model that transformers has, made tiny: decoded right, or refused; docs/models.md says which.
# `make kernels`: counts the CUDA kernels of a round without a GPU, for docs/pythia-on-gpu.md. It needs Triton (pip install triton).
# `make bench`: the benchmark. `make bench-peers`: the same beside other engines, which it installs into .peers/ first
# (minutes; llama.cpp is compiled). `make audit`: do they sample the target's text? (hours). `make docs`: renders the figures in
# README.md and docs/ from their records.
# `make records`: measures the records of the documentation anew, where the code has changed; goes on where it was stopped.
# `make report`: a check of the device, then the course report's whole protocol, downloads included, and one page out:
# courseReport/report.md. For other models TARGET=... DRAFT=... MID=...; smaller: SENTENCES=2 MAXLEN=40 TOKENS=3200 DATASETS=sample.
# Each makes .venv first if it is not there.
PYTHON ?= python3
VENV = .venv/bin/python

.PHONY: run test coverage test-cuda test-gpu test-zoo kernels style check bench bench-peers audit records report docs clean

run: .venv/installed
	$(VENV) test.py

test: .venv/installed
	$(VENV) -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(COVER)

coverage: COVER = --cov=.
coverage: test

test-cuda: .venv/installed
	FULL=1 $(VENV) -m pytest tests/test_softwareCuda.py

test-gpu: .venv/installed
	GPU=1 FULL=1 $(VENV) -m pytest tests/test_softwareCuda.py -k "greedy_texts or drawn_texts or a_queue"
	TRITON_INTERPRET=0 $(VENV) -m pytest tests/test_cudaKernels.py

test-zoo: .venv/installed
	PYTHONPATH=. $(VENV) tests/zoo.py
	$(VENV) -m scripts.render

kernels: .venv/installed
	PYTHONPATH=. $(VENV) tests/countKernels.py
	$(VENV) -m scripts.render

style: .venv/installed
	$(VENV) -m ruff check
	$(VENV) -m ruff format --check
	$(VENV) -m mypy

check: style test

bench: .venv/installed
	$(VENV) -m benchmark

bench-peers: .venv/installed
	$(VENV) -m benchmark.install
	$(VENV) -m benchmark --compare all,generate,llama.cpp,openvino,ctranslate2,vllm

audit: .venv/installed
	$(VENV) -m benchmark.install
	$(VENV) -m scripts.auditEngines
	$(VENV) -m scripts.auditEngines --mistakes
	$(VENV) -m scripts.auditEngines --mended
	$(VENV) -m scripts.render

report: .venv/installed
	$(if $(DRAFT),$(if $(TARGET),,$(error give TARGET too: the first of the two names is the target)))
	-$(VENV) test.py --check $(if $(DEVICE),--device $(DEVICE))
	$(VENV) -m scripts.courseReport $(TARGET) $(DRAFT) $(if $(MID),--mid $(MID)) $(if $(OUT),--out $(OUT)) \
	  $(if $(DATASETS),--data $(DATASETS)) $(if $(TOKENS),--tokens $(TOKENS)) \
	  --flags "$(if $(DEVICE),--device $(DEVICE)) $(if $(SENTENCES),--sentences $(SENTENCES)) $(if $(MAXLEN),--maxLen $(MAXLEN)) $(FLAGS)"

records: .venv/installed
	$(VENV) -m scripts.keepRecord
	$(VENV) -m scripts.render
	$(VENV) -m scripts.render --check

docs: .venv/installed
	$(VENV) -m scripts.render

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(VENV) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

clean:
	rm -rf .venv .peers .coverage .pytest_cache .ruff_cache .mypy_cache .hypothesis __pycache__ tests/__pycache__
