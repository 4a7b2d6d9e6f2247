#!/bin/sh
# The long form of the checks: planted bugs, crash states of memory, histories of the cluster, suites of
# others on real clusters, random input, each for a share of SECONDS (3600). The figures of each are
# printed; the exit code says whether all was well.
set -u
cd "$(dirname "$0")/.."
seconds=${SECONDS_TOTAL:-3600}
case $seconds in
'' | *[!0-9]*) echo "soak: SECONDS=$seconds is not a number" >&2; exit 2 ;;
esac
failed=0

share() {
    echo $((seconds * $1 / 100))
}

step() {
    echo "== $1"
    shift
    "$@" || { failed=$((failed + 1)); echo "== failed: $*" >&2; }
}

cargo build --quiet --release -p sim || exit 1
# In a folder of its own: the feature must not get into anything else that is built.
cargo build --quiet --release -p sim --features planted --target-dir target/planted || exit 1
sim=target/release/corbel-sim

step "planted bugs: each must be caught" \
    timeout "$(($(share 20) + 600))" target/planted/release/corbel-sim planted
step "crash states of memory" $sim crash --length 2 --sample 1000000 --seconds "$(share 25)"
# Seeds that no run has seen.
step "histories of the cluster" \
    $sim --seeds 100000000 --from "$(date +%s)000" --seconds "$(share 25)" --keep-going
step "suites of others, on a mount and under corbel run" scripts/suites/soak.sh "$(share 20)"
if cargo +nightly fuzz --version > /dev/null 2>&1; then
    targets=$(cd fuzz/fuzz_targets && ls ./*.rs | sed 's/\.rs$//; s/^\.\///')
    each=$(($(share 10) / $(echo "$targets" | wc -w) + 1))
    for target in $targets; do
        # What is new goes into a folder that is not kept; fuzz/corpus is only read.
        mkdir -p "fuzz/corpus-local/$target"
        step "fuzz $target" cargo +nightly fuzz run "$target" "fuzz/corpus-local/$target" \
            "fuzz/corpus/$target" -- -max_total_time="$each"
    done
else
    echo "== no cargo-fuzz: the tests with hostile input instead"
    cargo build --quiet --release -p hostile --example hunt
    step "random changes of the corpus" \
        env MALLOC_MMAP_THRESHOLD_=65536 target/release/examples/hunt "$(($(share 10) / 14 + 1))" "$(date +%s)"
    step "hostile clients and peers" cargo test --release --quiet -p service --test node -- hostile messages
    step "hostile bytes" cargo test --release --quiet -p cluster --test hostile --test messages
    step "damaged media" cargo test --release --quiet -p storage --test flips
fi
echo "soak: $failed parts failed"
[ "$failed" = 0 ]
