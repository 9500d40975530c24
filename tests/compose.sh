#!/usr/bin/env bash
# Brings deploy/compose.yaml up, looks at it with the doctor from outside, and takes it down:
#
#   unshare --net --mount --pid --fork --mount-proc --kill-child \
#       tests/compose.sh <folder of image.sh> <docker-compose> <openclaw-mcp-proxy>
#
# Compose speaks to a podman of its own. In these namespaces ports 80 and 443 are nobody else's, and nothing is left.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$1
compose=$2
doctor=$3
PATH=$PATH:/usr/sbin:/sbin
mount -t tmpfs none /run
mkdir /run/lock
ip link set lo up

# until_ok <seconds> <command>...: until it succeeds.
until_ok() {
    local left=$1
    until "${@:2}" >/dev/null 2>&1; do
        ((left--)) || { echo "compose.sh: this never succeeded: ${*:2}" >&2; exit 1; }
        sleep 1
    done
}
podman=$folder/podman
export DOCKER_HOST=unix:///run/podman.sock
"$podman" system service --time=0 "$DOCKER_HOST" >"$folder/service.log" 2>&1 &
until_ok 30 test -S /run/podman.sock

mkdir "$folder/project"
cp -r "$here/Dockerfile" "$here/deploy" "$folder/project"
cd "$folder/project"
export OPENCLAW_PROXY_APP_TOKEN=0123456789abcdef-app OPENCLAW_PROXY_OPENCLAW_TOKEN=0123456789abcdef-claw
# For this name Caddy makes a certificate of its own.
cat >deploy/.env <<END
OPENCLAW_HOST=localhost
OPENCLAW_PROXY_APP_TOKEN=$OPENCLAW_PROXY_APP_TOKEN
OPENCLAW_PROXY_OPENCLAW_TOKEN=$OPENCLAW_PROXY_OPENCLAW_TOKEN
END
# As many as any machine lets a container have.
cat >limits.yaml <<END
services:
  proxy: { ulimits: { nofile: 1024, nproc: 1024 } }
  caddy: { ulimits: { nofile: 1024, nproc: 1024 } }
END
compose() { timeout 120 "$compose" --progress quiet -f deploy/compose.yaml -f limits.yaml "$@" >&2; }

# Caddy is started when the proxy is healthy. podman leaves it to systemd to ask again and again, which is not here.
compose up --detach --no-build --pull never &
starting=$!
until_ok 60 timeout 10 "$podman" healthcheck run openclaw-mcp-proxy-proxy-1
wait "$starting" || { tail -n 30 "$folder/service.log" >&2; exit 1; }
until_ok 60 "$podman" cp openclaw-mcp-proxy-caddy-1:/data/caddy/pki/authorities/local/root.crt /run/root.crt

status=0
SSL_CERT_FILE=/run/root.crt timeout 120 "$doctor" doctor --json --url https://localhost || status=$?
compose down --volumes
[[ -z $("$podman" ps --all --quiet --filter label=com.docker.compose.project) ]]
exit "$status"
