#!/bin/sh
# A clone of this repository in DIR/build, whose history git checks, and one of its packages built from
# source there; the same bytes must come out of it as of a copy elsewhere.
# Usage: scripts/suites/build.sh DIR SCRATCH
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
dir=$1/build
scratch=$2/build
rm -rf "$dir" "$scratch"
mkdir -p "$scratch"
git clone -q --no-local "$root" "$dir"
cd "$dir"
git fsck --full --strict 2>&1 | { ! grep -v '^dangling\|^notice'; }
[ -z "$(git status --porcelain)" ]
git -c gc.auto=0 gc -q --prune=now
git fsck --full
git archive HEAD | tar -x -C "$scratch"
diff -r --exclude=.git "$dir" "$scratch"
cargo build --quiet --offline --package base --target-dir "$dir/target"
ls -l "$dir"/target/debug/libbase.rlib
