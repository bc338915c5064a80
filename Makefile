# `make demo` shows what MatKV does; `make test` checks everything. Both fetch what they need.

CARGO ?= cargo
PYTHON ?= python3
XDG_CACHE ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)
export MATKV_CACHE_DIR ?= $(XDG_CACHE)/matkv
PREFIX ?= /usr/local
export MATKV_REQUIRE_MODELS = 1
export MATKV_REQUIRE_S3 = 1
# The same gateway as over a disk, and ready sooner.
export MATKV_CEPH_STORE ?= memstore

.PHONY: demo build test quick compile unit valgrind e2e nextest models tools deny bench-e2e \
	bench-cold bench-turns bench-load bench-codec bench-fidelity bench-musique bench-throughput bench-energy \
	bench-trace bench-start bench-forward bench-prefill bench-decode bench-peers peers bench-paper soak \
	soak-storage simulate fuzz install clean

demo: build
	target/release/matkv demo

build:
	$(CARGO) build --release --workspace --bins

test: quick unit valgrind e2e

# Seconds, after the first build: what most mistakes fail at.
quick:
	$(CARGO) fmt --all --check
	$(CARGO) xtask tidy
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	scripts/deny.sh check bans licenses sources

unit: compile models tools nextest
	$(CARGO) nextest run --workspace -E 'not package(matkv-tests)'

# The ring and what it lies in, on the heap.
valgrind: compile tools
	scripts/valgrind.sh

# Two real processes, killed for real.
e2e: compile models tools nextest
	$(CARGO) nextest run --workspace -E 'package(matkv-tests)'

# Everything at once: a build of fewer packages would resolve other features, and build the
# dependencies a second time.
compile:
	$(CARGO) build --workspace --all-targets

NEXTEST_VERSION = 0.9.143
nextest:
	@$(CARGO) nextest --version >/dev/null 2>&1 || \
		$(CARGO) install cargo-nextest --version $(NEXTEST_VERSION) --locked

# What the tests need besides the toolchain.
tools:
	@scripts/tools.sh

models: compile
	target/debug/matkv model pull smollm2-135m minilm
	$(PYTHON) tests/fixtures/scripts/fetch_vocabs.py $(MATKV_CACHE_DIR)/vocabs

# The figures of the README; each prints one JSON object with --format json.
# DATA is a directory with longbench-hotpotqa, for bench-paper with turborag, for bench-musique with
# musique, unpacked or not.
DATA ?= ../shared/data
bench-e2e bench-cold bench-turns bench-load bench-codec bench-fidelity bench-musique bench-throughput \
bench-energy bench-paper: build
	scripts/bench.sh $(@:bench-%=%) $(DATA)

# llama.cpp is built once; PEERS=--torch also installs PyTorch, which has gigabytes.
peers:
	benches/peers/install.sh $(PEERS)

bench-peers: build peers
	scripts/bench.sh peers $(DATA)

bench-trace bench-start bench-prefill bench-decode: build
	target/release/matkv bench $(@:bench-%=%)

bench-forward:
	$(CARGO) bench -p matkv-benches --bench forward -- \
		$(MATKV_CACHE_DIR)/models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf

# Longer than a test may take: a hundred kills and pauses of thirty seconds under load (about ten
# minutes), as many seeds as wanted, every fuzz target for a while.
soak: models
	MATKV_SOAK_KILLS=$(or $(KILLS),100) $(CARGO) test --release -p matkv-tests --test soak -- \
		--include-ignored --nocapture --test-threads=1

# Ingest, questions, deletions, migration, full disks, flipped bits and kills, for SECONDS.
soak-storage: compile models
	MATKV_SOAK_SECONDS=$(or $(SECONDS),1800) $(CARGO) test -p matkv-tests --test storage_soak -- \
		--nocapture --test-threads=1

SEEDS ?= 1000000
simulate:
	$(CARGO) run --release -p matkv-simulation -- --first 10000 --count $(SEEDS)

fuzz:
	scripts/fuzz.sh

# Programs, units and the annotated configuration; `systemctl enable --now matkv.target` then starts
# them. DESTDIR is for packagers.
UNITS = matkv-loader.service matkv-decoder.service matkv.socket matkv.target
install: build
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/systemd/system \
		$(DESTDIR)$(PREFIX)/lib/sysusers.d $(DESTDIR)/etc/matkv
	install -m 755 target/release/matkv target/release/matkv-loader target/release/matkv-decoder \
		$(DESTDIR)$(PREFIX)/bin
	for unit in $(UNITS); do \
		sed 's|@PREFIX@|$(PREFIX)|g' configs/systemd/$$unit \
			>$(DESTDIR)$(PREFIX)/lib/systemd/system/$$unit || exit 1; \
	done
	install -m 644 configs/systemd/matkv.sysusers.conf \
		$(DESTDIR)$(PREFIX)/lib/sysusers.d/matkv.conf
	[ -e $(DESTDIR)/etc/matkv/matkv.toml ] || \
		install -m 644 configs/matkv.example.toml $(DESTDIR)/etc/matkv/matkv.toml

clean:
	$(CARGO) clean
