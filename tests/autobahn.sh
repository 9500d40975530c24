#!/usr/bin/env bash
# Runs the Autobahn testsuite against a server that sends back what it gets: tests/autobahn.sh <ws-url>
#
# All that concerns a server without compression must pass: framing, pings, reserved bits, opcodes, fragments, UTF-8,
# closing, messages of up to 16 MiB, and messages in many small pieces. Prints a table of the outcomes. To see it:
#
#   cargo test -- --include-ignored --nocapture autobahn
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "tests/autobahn.sh: $*" >&2; exit 1; }

[[ $# == 1 ]] || fail "usage: tests/autobahn.sh <ws-url>"
clients=${OCP_CLIENTS_DIR:-target/clients}
python=$clients/py2-autobahn/python
[[ -x $python ]] || fail "the suite is not in $clients; run tests/clients/install.sh --heavy"

results=$PWD/target/autobahn
rm -rf "$results"
mkdir -p "$results"
cat >"$results/spec.json" <<JSON
{
  "outdir": "$results/reports",
  "servers": [{ "agent": "bridge", "url": "$1" }],
  "cases": ["1.*", "2.*", "3.*", "4.*", "5.*", "6.*", "7.*", "9.*", "10.*"],
  "exclude-cases": []
}
JSON
"$python" -c 'from autobahntestsuite.wstest import run; run()' -m fuzzingclient -s "$results/spec.json" \
    >"$results/log" 2>&1 || fail "the suite failed: $(tail -5 "$results/log")"

"$python" - "$results/reports/index.json" <<'PYTHON'
import collections, json, sys

cases = json.load(open(sys.argv[1]))["bridge"]
passed = ["OK", "NON-STRICT", "INFORMATIONAL"]
groups = collections.defaultdict(collections.Counter)
failed = []
for name, case in sorted(cases.items()):
    outcomes = [case["behavior"], case["behaviorClose"]]
    is_passed = all(outcome in passed for outcome in outcomes)
    groups[int(name.split(".")[0])][outcomes[0] if is_passed else "FAILED"] += 1
    if not is_passed:
        failed.append("case %s: %s, closing %s; see %s" % (name, outcomes[0], outcomes[1], case["reportfile"]))
columns = passed + ["FAILED"]
print("group " + " ".join("%14s" % column for column in columns))
for group, counts in sorted(groups.items()):
    print("%5d " % group + " ".join("%14d" % counts[column] for column in columns))
sys.stdout.flush()
sys.exit("\n".join(failed) if failed or len(cases) < 300 else 0)
PYTHON
