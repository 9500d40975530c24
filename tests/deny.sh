#!/usr/bin/env bash
# Checks what the dependencies may be, as deny.toml says: no crate twice but for those listed, no licence but those
# listed, nothing that is not from crates.io.
#
# What is known to be vulnerable is not checked here, for the database of advisories is fetched from GitHub. Where that
# can be reached: cargo deny check advisories
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.20.2
tools=$PWD/target/tools
if [[ $("$tools/bin/cargo-deny" --version 2>/dev/null) != "cargo-deny $version" ]]; then
    # Unoptimised, it is built in half the time, and runs as long as one notices: not at all.
    cargo install --quiet --locked --debug --root "$tools" "cargo-deny@$version"
fi
exec "$tools/bin/cargo-deny" --locked check bans licenses sources
