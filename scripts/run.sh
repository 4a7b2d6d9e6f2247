#!/bin/sh
# Builds the release binary and the interception library, then shows them at work.
set -eu
cd "$(dirname "$0")/.."
echo "== building (release)"
cargo build --release --quiet -p corbel -p capi
cargo build --release --quiet -p intercept
exec target/release/corbel demo "$@"
