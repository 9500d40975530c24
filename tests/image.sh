#!/usr/bin/env bash
# Builds the Dockerfile as it is, with podman and without a registry: image.sh <folder> <commit>
#
# The images that it begins with are made of Debian's packages and get the names of its FROM lines. Cargo, the compiler
# and the crates are those of this machine, lent read-only; cargo downloads nothing. What would take long, optimising,
# is switched off by the environment that the image of Rust has. deploy/compose.yaml finds its Caddy, too.
# With <folder>/podman the image can be run; its name is openclaw-mcp-proxy. Needs root.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$1
commit=$2
toolchain=$(rustc --print sysroot)
crates=${CARGO_HOME:-$HOME/.cargo}/registry
mkdir -p "$folder/context"
cd "$folder"

# Its storage is all its own. runc, because crun wants other cgroups than some machines have.
cat >podman <<END
#!/bin/sh
exec podman --root '$folder/root' --runroot '$folder/run' --tmpdir '$folder/tmp' --storage-driver vfs \\
    --runtime runc --cgroup-manager cgroupfs --events-backend none --log-level fatal "\$@"
END
chmod +x podman

rust=$(sed -n 's/^FROM \(rust:.*\) AS build$/\1/p' "$here/Dockerfile")
debian=$(sed -n 's/^FROM \(debian:.*\)$/\1/p' "$here/Dockerfile")
release=${debian#debian:}
release=${release%-slim}
[[ -n $release && $rust == *-"$release" ]]
# An image of this name with these packages, and with what else `podman import` is told.
base() {
    mmdebstrap --quiet --variant=minbase --include="$2" "$release" - | ./podman import --quiet "${@:3}" - "docker.io/library/$1"
}
base "$debian" base-files
base "$rust" ca-certificates,gcc,libc6-dev \
    --change 'ENV PATH=/usr/local/toolchain/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    --change 'ENV CARGO_HOME=/usr/local/cargo' --change 'ENV CARGO_NET_OFFLINE=true' \
    --change 'ENV CARGO_PROFILE_RELEASE_LTO=off' --change 'ENV CARGO_PROFILE_RELEASE_OPT_LEVEL=0' \
    --change 'ENV CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16'
base caddy:2 caddy --change 'ENV XDG_DATA_HOME=/data' --change 'ENV XDG_CONFIG_HOME=/config' \
    --change 'CMD ["caddy", "run", "--config", "/etc/caddy/Caddyfile"]'

# All that git knows, and what it does not: nothing of this may come in.
git -C "$here" ls-files -z --cached --others --exclude-standard | tar -C "$here" -c --null -T - | tar -C context -x
mkdir -p context/target/release context/fuzz/target
touch context/{.env,deploy/.env,deploy/key.pem,target/release/stray,fuzz/target/stray}

build() { timeout 1500 ./podman build --quiet --pull=never --isolation chroot --layers=false --format docker "$@"; }
# What the build stage copies, in <folder>/sources, to be looked at.
sed -e 's/^FROM rust:.*/FROM scratch/' -e '/^ARG /,$d' "$here/Dockerfile" >copying
build -f copying --output "type=local,dest=$folder/copied" context >/dev/null
mv copied/src sources
build --volume "$toolchain:/usr/local/toolchain:ro" --volume "$crates:/usr/local/cargo/registry:ro" \
    --build-arg "OPENCLAW_BUILD_COMMIT=$commit" --tag openclaw-mcp-proxy context
