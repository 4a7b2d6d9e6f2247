#!/bin/sh
# Format, lints, every test. The last line is `N passed, N failed`; the exit code says the same.
set -u
cd "$(dirname "$0")/.."
log=$(mktemp)
# Tests wait for services more than they compute: on few processors more of them run at a time, above all where others
# want the processors, too.
threads=$(nproc)
: "${RUST_TEST_THREADS:=$((threads < 5 ? 5 : threads))}"
export RUST_TEST_THREADS
trap 'rm -f "$log"' EXIT
failed=0

step() {
    echo "== $1"
    shift
    "$@" || { failed=$((failed + 1)); echo "== failed: $*" >&2; }
}

step "format" cargo fmt --all --check
step "lints" cargo clippy --workspace --exclude intercept --all-targets --quiet -- -D warnings
# Alone, as it is shipped: with the workspace the features of its dependencies are united, and it
# must do without std.
step "lints of the interception library" cargo clippy --quiet -p intercept -- -D warnings
step "interception library" cargo build --quiet -p intercept
# Tests unwind. The programs that they start do so as well, and are built with them: then all that they have in common is built
# once, and no test need build anything.
export CARGO_PROFILE_DEV_PANIC=unwind CORBEL_TEST_BUILT=1
echo "== tests"
cargo test --workspace --no-fail-fast 2>&1 | tee "$log" | grep -vE '^test .* ok$|^$|^running '
grep -qE '^test result: ' "$log" || failed=$((failed + 1))
grep -qE '^error(\[|:)' "$log" && ! grep -qE '^test .* FAILED$' "$log" && failed=$((failed + 1))

passed=$(sed -nE 's/^test result: .* ([0-9]+) passed.*/\1/p' "$log" | awk '{n += $1} END {print n + 0}')
wrong=$(sed -nE 's/^test result: .* ([0-9]+) failed.*/\1/p' "$log" | awk '{n += $1} END {print n + 0}')
failed=$((failed + wrong))
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
