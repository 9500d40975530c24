#!/usr/bin/env bash
# Runs the fuzzers: tests/fuzz.sh [seconds for each] [target ...]
#
# Each begins with fuzz/corpus/<target>, and goes on where the last run stopped: what it learns is kept below
# target/fuzz. The first input that breaks a property ends the run with the name of its file; put it into the corpus,
# which the ordinary tests hold against the properties, too. Building takes some minutes the first time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "tests/fuzz.sh: $*" >&2; exit 1; }

seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "unknown argument '$1'; usage: tests/fuzz.sh [seconds for each] [target ...]"
targets=("${@:2}")
((${#targets[@]})) || for source in fuzz/fuzz_targets/*.rs; do targets+=("$(basename "$source" .rs)"); done

command -v cargo-fuzz >/dev/null || fail "cargo-fuzz is missing; install it with: cargo install --locked cargo-fuzz"
# Coverage needs a flag of the compiler's that the stable one keeps for itself unless it is told otherwise. There is no
# unsafe code here for a sanitizer to watch.
RUSTC_BOOTSTRAP=1 cargo fuzz build --sanitizer none --target-dir target/fuzz

binaries=target/fuzz/$(rustc -vV | sed -n 's/^host: //p')/release
for target in "${targets[@]}"; do
    [[ -x $binaries/$target ]] || fail "there is no target '$target'"
    learned=target/fuzz/corpus/$target
    found=target/fuzz/found/$target
    mkdir -p "$learned" "$found"
    echo "tests/fuzz.sh: $target for $seconds s"
    "$binaries/$target" -max_total_time="$seconds" -artifact_prefix="$found/" -max_len=4096 -timeout=10 \
        -rss_limit_mb=2048 -use_value_profile=1 -print_final_stats=1 "$learned" "fuzz/corpus/$target" \
        >"$found/log" 2>&1 || {
        grep -aE 'panicked|SUMMARY|Test unit' -A1 "$found/log" >&2 || tail -20 "$found/log" >&2
        fail "$target breaks a property; its input is below $found"
    }
    grep -aE 'number_of_executed_units|new_units_added' "$found/log" | sed "s/^stat::/$target: /"
done
