#!/usr/bin/env bash
# Builds the image of the Dockerfile with podman, without a registry: image.sh <folder> <program>...
#
# The last stage is the Dockerfile's own, word for word. Before it, the programs are not built anew but taken as they
# are; what its build stage copies is left in <folder>/src, to be looked at. The base image stands in for Debian's: it
# has the C library from Debian and nothing else, so the programs need no more. With <folder>/podman the image can be
# run; its name is openclaw-mcp-proxy.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=$1
programs=("${@:2}")
mkdir -p "$folder"/{debs,base,context,programs}
cd "$folder"

# Its storage is all its own. runc, because crun wants other cgroups than some machines have.
cat >podman <<END
#!/bin/sh
exec podman --root '$folder/root' --runroot '$folder/run' --tmpdir '$folder/tmp' --storage-driver vfs \\
    --runtime runc --cgroup-manager cgroupfs --events-backend none --log-level error "\$@"
END
chmod +x podman

(cd debs && apt-get download -q libc6 libgcc-s1 >/dev/null 2>&1)
for package in debs/*.deb; do dpkg-deb -x "$package" base; done
base=$(sed -n 's/^FROM \(debian:.*\)$/\1/p' "$here/Dockerfile")
[[ -n $base ]]
tar -C base -c . | ./podman import --quiet - "docker.io/library/$base"

# All that git knows, and what it does not: nothing of this may come in.
git -C "$here" ls-files -z --cached --others --exclude-standard | tar -C "$here" -c --null -T - | tar -C context -x
mkdir -p context/target/release context/fuzz/target
touch context/{.env,deploy/.env,deploy/key.pem,target/release/stray,fuzz/target/stray}

for program in "${programs[@]}"; do strip -o "programs/${program##*/}" "$program"; done
cp /etc/ssl/certs/ca-certificates.crt .
{
    echo 'FROM scratch AS build'
    sed -n '/ AS build$/,/^COPY/{/ AS build$/d;p}' "$here/Dockerfile"
    echo 'COPY --from=programs / /out/'
    echo 'COPY --from=files /ca-certificates.crt /etc/ssl/certs/'
    sed -n '/^# The same Debian/,$p' "$here/Dockerfile"
} >Dockerfile
mkdir -p files && mv ca-certificates.crt files/
build=(./podman build --quiet --pull=never --isolation chroot --format docker -f Dockerfile
    --build-context "programs=$folder/programs" --build-context "files=$folder/files")
"${build[@]}" --target build --output "type=local,dest=$folder/built" context
mv built/src src
"${build[@]}" --tag openclaw-mcp-proxy context
