# `make demo` shows what MatKV does; `make test` checks everything. Both fetch what they need.

CARGO ?= cargo
PYTHON ?= python3
XDG_CACHE ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)
export MATKV_CACHE_DIR ?= $(XDG_CACHE)/matkv
PREFIX ?= /usr/local
export MATKV_REQUIRE_MODELS = 1

.PHONY: demo build test quick compile unit e2e nextest models deny bench-e2e bench-cold bench-forward install clean

demo: build
	target/release/matkv demo

build:
	$(CARGO) build --release --workspace --bins

test: quick unit e2e

# Seconds, after the first build: what most mistakes fail at.
quick:
	$(CARGO) fmt --all --check
	$(CARGO) xtask tidy
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	scripts/deny.sh check bans licenses sources

unit: compile models nextest
	$(CARGO) nextest run --workspace -E 'not package(matkv-tests)'

# Two real processes, killed for real.
e2e: compile models nextest
	$(CARGO) nextest run --workspace -E 'package(matkv-tests)'

# Everything at once: a build of fewer packages would resolve other features, and build the
# dependencies a second time.
compile:
	$(CARGO) build --workspace --all-targets

NEXTEST_VERSION = 0.9.143
nextest:
	@$(CARGO) nextest --version >/dev/null 2>&1 || \
		$(CARGO) install cargo-nextest --version $(NEXTEST_VERSION) --locked

models: compile
	target/debug/matkv model pull smollm2-135m minilm
	$(PYTHON) tests/fixtures/scripts/fetch_vocabs.py $(MATKV_CACHE_DIR)/vocabs

# The figures of the README; each prints one JSON object with --format json.
# DATA is a directory with longbench-hotpotqa unpacked.
DATA ?= ../shared/data
bench-e2e: build
	scripts/bench.sh e2e $(DATA)

bench-cold: build
	scripts/bench.sh cold $(DATA)

bench-forward:
	$(CARGO) bench -p matkv-benches --bench forward -- \
		$(MATKV_CACHE_DIR)/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf

install: build
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 755 target/release/matkv target/release/matkv-loader target/release/matkv-decoder \
		$(DESTDIR)$(PREFIX)/bin

clean:
	$(CARGO) clean
