#!/bin/sh
# The long form of the checks: planted bugs, crash states of memory, histories of the cluster, suites of
# others on real clusters, the differential hunter, random input, each for a share of SECONDS (3600). The last lines are one for each
# part: what it ran, its figures, and whether it found something; the exit code says whether any did.
# A finding prints what replays it (a seed, a workload, an input), which holds for the commit named first.
set -u
cd "$(dirname "$0")/.."
seconds=${SECONDS_TOTAL:-3600}
case $seconds in
'' | *[!0-9]*) echo "soak: SECONDS=$seconds is not a number" >&2; exit 2 ;;
esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

share() {
    echo $((seconds * $1 / 100))
}

# part NAME LINES COMMAND...: runs it; its last LINES lines are its figures.
part() {
    name=$1 lines=$2
    shift 2
    echo "== $name"
    { "$@" 2>&1 && echo ok >"$work/verdict" || echo FAILED >"$work/verdict"; } | tee "$work/said"
    verdict=$(cat "$work/verdict")
    [ "$verdict" = ok ] || { failed=$((failed + 1)); echo "== failed: $*"; }
    { echo "$name: $verdict"; tail -n "$lines" "$work/said" | sed 's/^/    /'; } >>"$work/summary"
}

# Each target for as long; the inputs that were run, and those that showed something.
fuzz() {
    cargo +nightly fuzz build 2>"$work/build" || { cat "$work/build"; return 1; }
    inputs=0 bad=0 rates=""
    for target in $(cd fuzz/fuzz_targets && ls ./*.rs | sed 's/\.rs$//; s/^\.\///'); do
        # What is new goes into a folder that is not kept; fuzz/corpus is only read.
        mkdir -p "fuzz/corpus-local/$target"
        cargo +nightly fuzz run "$target" "fuzz/corpus-local/$target" "fuzz/corpus/$target" -- \
            -max_total_time="$1" -print_final_stats=1 >"$work/fuzz" 2>&1 || {
            bad=$((bad + 1))
            echo "FOUND by $target:"
            tail -30 "$work/fuzz"
        }
        ran=$(sed -n 's/^stat::number_of_executed_units: *//p' "$work/fuzz" | tail -1)
        rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$work/fuzz" | tail -1)
        inputs=$((inputs + ${ran:-0}))
        rates="$rates $target ${ran:-0} (${rate:-0}/s)"
    done
    echo "$inputs inputs, $bad targets found something;$rates"
    [ "$bad" = 0 ]
}

# Without cargo-fuzz: changes of the corpus without guidance, and the tests with hostile input.
hostile() {
    cargo build --quiet --release -p hostile --example hunt || return 1
    wrong=0
    MALLOC_MMAP_THRESHOLD_=65536 target/release/examples/hunt "$1" "$(date +%s)" || wrong=1
    cargo test --release --quiet -p service --test node -- hostile messages || wrong=1
    cargo test --release --quiet -p cluster --test hostile --test messages || wrong=1
    cargo test --release --quiet -p storage --test flips || wrong=1
    return $wrong
}

# Random calls on several nodes beside a reference; what differs is kept as a script.
hunter() {
    if [ "$(id -u)" != 0 ] || ! [ -e /dev/fuse ]; then
        echo "skipped: no right to mount here"
        return 0
    fi
    cargo build --quiet --release -p intercept && cargo build --quiet --release -p corbel -p hunt || return 1
    CORBEL_LIES=all cargo test --release --quiet -p corbel --test e2e -- hunt::planted || return 1
    target/release/corbel bench hunt --seed "${now}000" --seconds "$1" --found "target/hunt-$now"
}

# The attacks of the tests, with one check after the other taken out.
doors() {
    for crate in cluster:keys cluster:machine storage:snapshots service:node block:layer block:pool block:paced block:ublk; do
        cargo test --quiet --features planted --target-dir target/planted -p "${crate%:*}" --test "${crate#*:}" \
            -- --ignored --test-threads 1 || return 1
    done
    # The list of those that are found here, and not by histories.
    cargo test --quiet --features planted --target-dir target/planted -p sim --lib -- elsewhere || return 1
    # What is packed, and other parts, by the tests beside them; those of the front end plant for their own thread.
    cargo test --quiet -p frontend --lib -- planted_bugs || return 1
    cargo test --quiet --features planted --target-dir target/planted -p service --lib -- --ignored --test-threads 1 || return 1
}

changed=$(git status --porcelain 2>/dev/null | wc -l)
echo "soak: commit $(git rev-parse HEAD 2>/dev/null || echo unknown), $changed files changed, $seconds s"
cargo build --quiet --release -p sim || exit 1
# In a folder of its own: the feature must not get into anything else that is built.
cargo build --quiet --release -p sim --features planted --target-dir target/planted || exit 1
# Each history frees its regions, buffers of megabytes. glibc takes the first of these for a sign to map such buffers
# no more but to cut them from its heap, where small ones keep them from being joined again: the process grows
# to gigabytes with nothing lost. With a threshold that is set it stays as large as one history.
mapped="env MALLOC_MMAP_THRESHOLD_=131072"
sim="$mapped target/release/corbel-sim"
now=$(date +%s)

part "planted bugs: each must be caught" 1 \
    timeout "$(($(share 15) + 600))" $mapped target/planted/release/corbel-sim planted
part "checks of who speaks: each taken out must be missed" 1 doors
# Random sequences and seeds that no run has seen.
part "block devices and pools on simulated stores" 1 \
    $sim block --seeds 100000000 --from "$now" --seconds "$(share 4)"
part "crash states of memory" 1 \
    $sim crash --length 2 --sample 1000000 --seed "$now" --seconds "$(share 16)"
part "histories of the cluster" 3 \
    $sim --seeds 100000000 --from "${now}000" --seconds "$(share 16)" --keep-going
part "nodes cut off from all others" 3 \
    $sim --flavour parted --seeds 100000000 --from "${now}000" --seconds "$(share 4)" --keep-going
part "suites of others, on a mount and under corbel run" 1 scripts/suites/soak.sh "$(share 15)"
part "the hunter, three nodes with faults" 1 hunter "$(share 20)"
targets=$(find fuzz/fuzz_targets -name '*.rs' | wc -l)
if cargo +nightly fuzz --version >/dev/null 2>&1; then
    part "random input, guided by coverage" 1 fuzz "$(($(share 10) / targets + 1))"
else
    part "random input (no cargo-fuzz here)" 1 hostile "$(($(share 10) / targets + 1))"
fi
echo "== commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
cat "$work/summary"
echo "soak: $failed parts failed"
[ "$failed" = 0 ]
