#!/usr/bin/env bash
# Builds the programs for Windows, and tests them under Wine: the tests that are not for Unix alone, and the programs
# with each other.
#
# It needs Debian 12 on x64, with its security archive, and crates.io. Two things are installed with apt-get where they
# are missing: MinGW's C compiler, as linker, and Wine. The rest goes below target/windows.
#
#   first run     7 minutes on two cores, 300 MB of downloads
#   after that    1 minute, and what is to be built anew
#   disk          2.1 GB below target/windows, 1.2 GB of packages
#
# What Debian calls rustc-web is its only Rust that is kept up to date and brings the source of std, from which std for
# Windows is built. It is unpacked and not installed, so it is in nobody's way. To get a newer one, remove
# target/windows/rust.
#
# Wine stands for Windows 10 in files, processes, sockets and the console. It has no display here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=x86_64-pc-windows-gnu
windows=$PWD/target/windows
rust=$windows/rust
export WINEPREFIX=$windows/wine
# Mono and Gecko would ask to be installed; menus are for desktops. Of pdh there is one of ours, below.
export WINEDEBUG=-all WINEDLLOVERRIDES='mscoree,mshtml,winemenubuilder.exe=;pdh=n'

fail() { echo "tests/windows.sh: $*" >&2; exit 1; }
step() { echo "tests/windows.sh: $* (after $SECONDS s)"; }

# What cargo runs programs with: not with the libraries of the unpacked Rust, and not in anybody's home.
run=$windows/run
mkdir -p "$windows/home"
cat >"$run" <<END
#!/bin/sh
unset LD_LIBRARY_PATH DISPLAY WAYLAND_DISPLAY
export HOME='$windows/home' LC_ALL=C.UTF-8
exec "\$@"
END
printf '#!/bin/sh\nexec "%s" wine "$@"\n' "$run" >"$windows/wine-run"
chmod +x "$run" "$windows/wine-run"

finish() {
    local code=$?
    # Ends what still runs in our prefix, and nothing else.
    "$run" wineserver -k 2>/dev/null || true
    ((code == 0)) || echo "tests/windows.sh: FAILED; what the programs wrote is in $windows/check" >&2
}
trap finish EXIT

# --- What it needs ---

as_root=()
[[ $(id -u) == 0 ]] || as_root=(sudo)
missing=()
need() { "${@:2}" >/dev/null 2>&1 || missing+=("$1"); }
need build-essential cc --version
need python3 python3 --version
need gcc-mingw-w64-x86-64-posix x86_64-w64-mingw32-gcc-posix --version
need wine wine --version
need wine64 test -x /usr/lib/wine/wine64

export LD_LIBRARY_PATH=$rust/usr/lib/x86_64-linux-gnu PATH=$rust/usr/bin:$PATH RUSTC=$rust/usr/bin/rustc
is_rust_ready() { [[ -f $rust/built-by && $(rustc --version) == "$(<"$rust/built-by")" ]]; }

if ((${#missing[@]})) || ! is_rust_ready; then
    command -v apt-get >/dev/null || fail "apt-get is missing; this needs Debian 12"
    step "looking for packages"
    "${as_root[@]}" apt-get -q update
fi
if ((${#missing[@]})); then
    step "installing ${missing[*]}"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -q -o DPkg::Lock::Timeout=600 install -y --no-install-recommends "${missing[@]}"
fi
if ! is_rust_ready; then
    packages=(rustc-web cargo-web rust-web-src libstd-rust-web-dev)
    # These, and what of their dependencies is not installed.
    plan=$(apt-get install -s --reinstall --no-install-recommends "${packages[@]}") ||
        fail "apt-get finds no ${packages[*]}; is the security archive among its sources?"
    mapfile -t packages < <(awk '$1 == "Inst" { print $2 }' <<<"$plan")
    step "unpacking ${packages[*]}"
    rm -rf "$rust" "$windows/debs" "$windows/cargo"
    mkdir "$rust" "$windows/debs"
    (cd "$windows/debs" && apt-get -q -o APT::Sandbox::User=root download "${packages[@]}")
    for package in "$windows"/debs/*.deb; do dpkg -x "$package" "$rust"; done
    rm -r "$windows/debs"
    version=$(rustc --version) || fail "the unpacked $RUSTC does not run"

    step "building std with $version"
    rm -rf "$windows/std"
    mkdir -p "$windows/std/src"
    printf '[workspace]\n[package]\nname = "empty"\nedition = "2024"\n' >"$windows/std/Cargo.toml"
    echo 'fn main() {}' >"$windows/std/src/main.rs"
    (cd "$windows/std" && RUSTC_BOOTSTRAP=1 cargo build -q --release --target "$target" --target-dir target \
        -Z build-std=std,panic_unwind,test)
    mkdir -p "$rust/usr/lib/rustlib/$target/lib"
    cp "$windows/std/target/$target/release/deps/"*.rlib "$rust/usr/lib/rustlib/$target/lib"
    # The sources of Rust are 434 MB.
    rm -r "$windows/std" "$rust/usr/src"
    echo "$version" >"$rust/built-by"
fi

# --- Windows ---

if [[ ! -f $WINEPREFIX/ready ]]; then
    step "making a Windows"
    rm -rf "$WINEPREFIX"
    timeout 300 "$run" wineboot -i 2>/dev/null || fail "wineboot could not make a Windows in $WINEPREFIX"
    timeout 60 "$run" wine winecfg -v win10
    "$run" wineserver -w
    touch "$WINEPREFIX/ready"
fi
# It lives as long as the programs, and would say at its end what they left open.
"$run" wineserver 2>/dev/null || true
library() {
    x86_64-w64-mingw32-gcc-posix -O2 -shared -s -x c -o "$WINEPREFIX/drive_c/windows/system32/$1.dll" - "${@:2}"
}
# Windows 10 has this, and std gets its randomness there; Wine 8 has not.
library bcryptprimitives -ladvapi32 <<'END'
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T count) {
    for (ULONG part; count; bytes += part, count -= part) {
        part = count > 0x10000000 ? 0x10000000 : (ULONG)count;
        if (!SystemFunction036(bytes, part)) return FALSE;
    }
    return TRUE;
}
END
# Wine's performance counters end a program that lists them; these have no data.
library pdh <<'END'
#include <windows.h>
#define SAYS(name, code) __declspec(dllexport) LONG WINAPI name(void) { return (LONG)code; }
#define NOTHING 0x800007D5
SAYS(PdhOpenQueryW, 0) SAYS(PdhCloseQuery, 0) SAYS(PdhEnumObjectsW, NOTHING)
SAYS(PdhAddEnglishCounterW, NOTHING) SAYS(PdhRemoveCounter, NOTHING) SAYS(PdhCollectQueryData, NOTHING)
SAYS(PdhCollectQueryDataEx, NOTHING) SAYS(PdhGetFormattedCounterValue, NOTHING)
END

# --- The tests ---

unset RUSTFLAGS CARGO_ENCODED_RUSTFLAGS CARGO_BUILD_TARGET
export CARGO_TARGET_DIR=$windows/cargo CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=false
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc-posix
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=$windows/wine-run

tests=(cargo test --locked --target "$target" --lib --test integration)
step "building the programs and their tests with $(rustc --version)"
"${tests[@]}" --no-run
step "running the tests"
# Wine takes its time for sockets, so what must be quick is tested elsewhere.
timeout --kill-after=10 900 "${tests[@]}" -- --test-threads=2 \
    --skip a_flood_of_tool_lists_delays_no_other_session --skip the_app_hears_within_a_tenth_of_a_second

# --- The programs ---

programs=$CARGO_TARGET_DIR/$target/debug
check=$windows/check
rm -rf "$check"
mkdir "$check"

# start NAME PROGRAM ARGUMENT...: starts it; what it writes is in check/NAME.out and .err, its process in $pid.
start() {
    "$windows/wine-run" "$programs/$2.exe" "${@:3}" >"$check/$1.out" 2>"$check/$1.err" </dev/null &
    pid=$!
}
# soon COMMAND...: tries it until it succeeds, and gives what it printed then.
soon() {
    local tries
    for ((tries = 0; tries < 150; tries++)); do
        "$@" && return
        sleep 0.2
    done
    fail "this did not succeed in time: $*"
}
is_dead() { ! kill -0 "$1" 2>/dev/null; }
# stopped PROCESS NAME: presses Ctrl-C, and waits for an end without an error.
stopped() {
    kill -INT "$1"
    soon is_dead "$1"
    wait "$1" || fail "$2 ended with code $? at Ctrl-C"
}
# is_running TEXT: whether there is a process with this in its command line.
is_running() {
    local file command
    for file in /proc/[0-9]*/cmdline; do
        # It may have ended meanwhile.
        { command=$(tr '\0' ' ' <"$file"); } 2>/dev/null || continue
        [[ $command != *"$1"* ]] || return 0
    done
    return 1
}
is_gone() { ! is_running "$1"; }
winnode() { "$windows/wine-run" "$programs/winnode.exe" "$@" 2>>"$check/winnode.err"; }

step "running the programs with each other"
export OPENCLAW_PROXY_LISTEN=127.0.0.1:0 OPENCLAW_PROXY_APP_TOKEN=a-token-for-apps OPENCLAW_PROXY_OPENCLAW_TOKEN=a-token-for-clients
# The token file as the desktop app writes it, where winnode looks for it.
settings=("$WINEPREFIX"/drive_c/users/*/AppData/Roaming)
mkdir -p "${settings[0]}/OpenClawTray"
printf '\xef\xbb\xbf%s\r\n' "$OPENCLAW_PROXY_OPENCLAW_TOKEN" >"${settings[0]}/OpenClawTray/mcp-token.txt"

# The proxy, and in it an app that lends echo_text.
start proxy openclaw-mcp-proxy demo
proxy=$pid
app_url=$(soon grep -oP 'An MCP client asks \K\S+' "$check/proxy.out")
soon grep -qF '{"echoed_text":"Hello from an app behind NAT"}' "$check/proxy.out"

# A node that lends an MCP server, which is found by a bare name and starts another program: the stdio program, which
# serves the tools of that app.
stdio=$("$run" winepath -w "$programs/openclaw-mcp-stdio.exe")
printf '@"%s" --url %%1\r\n' "$stdio" >"$check/echo-server.cmd"
WINEPATH=$("$run" winepath -w "$check") \
    start node openclaw-node lend --json --proxy-url "${app_url%/v1/mcp/*}" -- echo-server "$app_url"
node=$pid
mcp_url=$(soon grep -oP '"mcp_url":"\K[^"]+' "$check/node.out")
is_running "openclaw-mcp-stdio.exe --url $app_url" || fail "the lent server does not run"

answer=$(soon winnode --mcp-url "$mcp_url" --command echo_text --params '{"text":"Grüße"}')
[[ $answer == *'"echoed_text": "Grüße"'* ]] || fail "winnode printed: $answer"

# A client on the other side of the sockets is no Windows program.
python3 - "$mcp_url" "$OPENCLAW_PROXY_OPENCLAW_TOKEN" <<'END'
import json, sys, urllib.request
url, token = sys.argv[1:]
call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call",
        "params": {"name": "echo_text", "arguments": {"text": "from Linux"}}}
headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream",
           "Authorization": "Bearer " + token}
request = urllib.request.Request(url, json.dumps(call).encode(), headers)
answer = json.load(urllib.request.urlopen(request, timeout=30))
assert answer["result"]["structuredContent"] == {"echoed_text": "from Linux"}, answer
END

# A node that serves what the computer can do, on both sides, and runs what its owner has approved.
"$windows/wine-run" "$programs/openclaw-node.exe" approvals allow whoami >"$check/approvals.out"
start serve openclaw-node serve --json --mcp-port 0 --proxy-url "${app_url%/v1/mcp/*}" --lend system.run
serving=$pid
local_url=$(soon grep -oP '"local_mcp_url":"\K[^"]+' "$check/serve.out")
lent_url=$(soon grep -oP '"mcp_url":"\K[^"]+' "$check/serve.out")
is_connected() { [[ $(winnode --mcp-url "$local_url" --command app.status) == *'"connectionStatus": "connected"'* ]]; }
soon is_connected
for url in "$local_url" "$lent_url"; do
    answer=$(winnode --mcp-url "$url" --command device.info)
    [[ $answer == *'"systemName": "Windows"'* ]] || fail "winnode printed: $answer"
    answer=$(winnode --mcp-url "$url" --command system.run --params '{"command":["whoami"]}')
    [[ $answer == *'"success": true'* ]] || fail "winnode printed: $answer"
    if winnode --mcp-url "$url" --command system.run --params '{"command":["hostname"]}'; then
        fail "a program ran that nobody has approved"
    fi
done
stopped "$serving" "the serving node"

stopped "$node" "the node"
soon is_gone "$app_url"
if winnode --mcp-url "$mcp_url" --list-tools; then fail "the node left its session behind"; fi
grep -q 'HTTP 404' "$check/winnode.err" || fail "winnode said: $(<"$check/winnode.err")"
stopped "$proxy" "the proxy"
step "all is well"
