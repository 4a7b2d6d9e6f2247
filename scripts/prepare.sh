#!/bin/sh
# Installs what a bare Debian 12 lacks, by package name, and only what is missing. The Rust
# toolchain is the one thing assumed (rustup; the version is pinned in rust-toolchain.toml).
set -eu

if ! command -v cargo >/dev/null 2>&1 && [ -x "$HOME/.cargo/bin/cargo" ]; then
    echo "prepare: cargo is installed but not on PATH: run  . \"\$HOME/.cargo/env\"  first" >&2
    exit 1
fi
if ! command -v cargo >/dev/null 2>&1; then
    cat >&2 <<'TEXT'
prepare: no Rust toolchain found. Corbel is built with the version pinned in rust-toolchain.toml.
  Install rustup as https://rustup.rs says, open a new shell, and run this again; rustup then
  fetches the pinned version by itself. (Debian's own rustc package is too old.)
TEXT
    exit 1
fi

# command that must be there : package that has it
needed="cc:gcc ld:binutils git:git sqlite3:sqlite3 python3:python3 tar:tar find:findutils sha256sum:coreutils"
# What the tests run beside that: each says "skipped" or fails without.
[ "${1:-}" != tools ] || needed="$needed setfattr:attr setfacl:acl rsync:rsync setpriv:util-linux perl:perl-base nbdinfo:libnbd-bin"
missing=""
for pair in $needed; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair##*:}"
done
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
[ "${1:-}" != tools ] || [ -e /usr/include/liburing.h ] || missing="$missing liburing-dev"
[ "$(id -u)" = 0 ] || command -v fusermount3 >/dev/null 2>&1 || missing="$missing fuse3"

install_packages() {
    echo "prepare: installing$missing"
    sudo=""
    if [ "$(id -u)" != 0 ]; then
        sudo=sudo
        if ! command -v sudo >/dev/null 2>&1; then
            echo "prepare: not root and no sudo: install$missing as root (apt-get install$missing)" >&2
            exit 1
        fi
    fi
    $sudo apt-get update -qq
    # shellcheck disable=SC2086  # a list of package names
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing
}
[ -z "$missing" ] || install_packages

# Suites that the tests run (corbel/tests/e2e/suites.rs), once: they stay in target/tools.
[ "${1:-}" = tools ] || exit 0
cd "$(dirname "$0")/.."
for tool in fsx@0.3.2 pjdfstest@0.2.2; do
    [ -x "target/tools/bin/${tool%@*}" ] && continue
    echo "prepare: installing $tool in target/tools"
    cargo install --quiet --locked --root target/tools "$tool"
done
