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
[ "${1:-}" != tools ] || needed="$needed setfattr:attr setfacl:acl rsync:rsync setpriv:util-linux perl:perl-base nbdinfo:libnbd-bin nbdsh:python3-libnbd \
    nbdkit:nbdkit"
# A server for kv/tests: the package of tools has the program, and starts no service.
[ "${1:-}" != tools ] || command -v redis-server >/dev/null 2>&1 || needed="$needed redis-check-rdb:redis-tools"
# A server for nfs/tests, which runs in namespaces of its own (as root only).
if [ "${1:-}" = tools ] && [ "$(id -u)" = 0 ]; then
    needed="$needed ganesha.nfsd:nfs-ganesha rpcbind:rpcbind rpc.statd:nfs-common"
fi
# A guest of its own, in software emulation (virtiofs/tests/guest.rs).
guest=no
case "${1:-}" in tools | ublk) [ "$(uname -m)" != x86_64 ] || guest=yes ;; esac
[ "${1:-}" != ublk ] || needed="$needed fio:fio mkfs.ext4:e2fsprogs blkdiscard:util-linux xz:xz-utils mkfs.xfs:xfsprogs dmsetup:dmsetup \
    losetup:mount nbd-client:nbd-client"
[ $guest = no ] || needed="$needed qemu-system-x86_64:qemu-system-x86 busybox:busybox-static cpio:cpio dpkg-deb:dpkg"
missing=""
for pair in $needed; do
    command -v "${pair%%:*}" >/dev/null 2>&1 || missing="$missing ${pair##*:}"
done
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
[ "${1:-}" != tools ] || [ -e /usr/include/liburing.h ] || missing="$missing liburing-dev"
# libnfs 4: the library that the back end nfs loads, and the header that a test compares with.
[ "${1:-}" != tools ] || [ -e /usr/include/nfsc/libnfs-raw.h ] || missing="$missing libnfs13 libnfs-dev"
if [ "${1:-}" = tools ] && [ "$(id -u)" = 0 ] && [ -z "$(find /usr/lib -name libfsalvfs.so | head -n 1)" ]; then
    missing="$missing nfs-ganesha-vfs"
fi
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
    # Nothing of it shall run as a service: tests start what they need themselves.
    policy=""
    if [ "$(id -u)" = 0 ] && [ ! -e /usr/sbin/policy-rc.d ]; then
        policy=/usr/sbin/policy-rc.d
        # (A shell that a signal ends runs no trap of EXIT.)
        trap 'rm -f "$policy"' EXIT
        trap 'exit 130' INT TERM HUP
        printf '#!/bin/sh\nexit 101\n' > $policy
        chmod 755 $policy
    fi
    $sudo apt-get update -qq
    # shellcheck disable=SC2086  # a list of package names
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing
    [ -z "$policy" ] || rm -f "$policy"
    trap - EXIT INT TERM HUP
}
[ -z "$missing" ] || install_packages

# Suites that the tests run (corbel/tests/e2e/suites.rs, scripts/suites), once: they stay in target/tools.
tools() {
    for tool in "$@"; do
        [ -x "target/tools/bin/${tool%@*}" ] && continue
        echo "prepare: installing $tool in target/tools"
        cargo install --quiet --locked --root target/tools "$tool"
    done
}
fsx=fsx@0.3.2

# Guests that have ublk_drv, which Debian 12's own kernels have not (scripts/suites/ublk.sh): the kernels of Debian 13, and the newest
# that its backports have. Each lies in target/tools/ublk/SUITE, with the modules that are not part of it; `modules/list` says in which order.
if [ "${1:-}" = ublk ]; then
    cd "$(dirname "$0")/.."
    tools $fsx
    # module NAME: a module of the kernel unpacked in $work, and before it those that it needs, into $fresh/modules
    module() {
        [ ! -e "$fresh/modules/$1.ko" ] || return 0
        # Names are written with both signs.
        found=$(find "$work/root" -name "$(echo "$1" | sed 's/[-_]/[-_]/g').ko*" | head -n 1)
        # One that is not there is part of the kernel, or missed by whoever wants it.
        [ -n "$found" ] || return 0
        case $found in *.xz) xz -dc "$found" >"$fresh/modules/$1.ko" ;; *) cp "$found" "$fresh/modules/$1.ko" ;; esac
        for need in $(tr '\0' '\n' <"$fresh/modules/$1.ko" | sed -n 's/^depends=//p' | tr , ' '); do module "$need"; done
        echo "$1" >>"$fresh/modules/list"
    }
    # Where this machine's packages come from, and whose signature they bear.
    archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Label: Debian' 2>/dev/null | head -n 1)
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    for suite in trixie trixie-backports; do
        [ ! -e "target/tools/ublk/$suite/modules/list" ] || continue
        if [ -z "$archive" ] || [ ! -e $keys ]; then
            echo "prepare: this machine knows no archive of Debian: no kernels with ublk_drv" >&2
            exit 0
        fi
        echo "prepare: unpacking a kernel of $suite in target/tools/ublk"
        work=$(mktemp -d)
        fresh="target/tools/ublk/$suite.new"
        trap 'rm -rf "$work" "$fresh"' EXIT
        trap 'exit 130' INT TERM HUP
        chmod 755 "$work"
        mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/root"
        # (apt downloads as its own user.)
        [ "$(id -u)" != 0 ] || chown -R _apt "$work"
        echo "deb [signed-by=$keys] $archive $suite main" >"$work/sources"
        # Lists of its own: those of this machine stay as they are.
        apart="-o Dir::Etc::sourcelist=$work/sources -o Dir::Etc::sourceparts=- -o Dir::State::lists=$work/lists -o Dir::Cache=$work/cache"
        # shellcheck disable=SC2086  # options
        (
            apt-get $apart update -qq || exit 1
            needs() { apt-cache $apart depends "$1" | sed -n "s/^ *Depends: *\($2-[0-9][^ ]*\)\$/\1/p"; }
            image=$(needs linux-image-cloud-amd64 linux-image)
            [ -n "$image" ] || exit 1
            cd "$work"
            for package in $image $(needs "$image" linux-binary) $(needs "$image" linux-modules); do
                apt-get $apart download -qq "$package" || exit 1
                dpkg-deb --fsys-tarfile "$package"_*.deb | tar -x -C root
            done
        ) || { echo "prepare: no kernel of $suite could be had: guests with it say that they are skipped" >&2; rm -rf "$work"; continue; }
        rm -rf "$fresh"
        mkdir -p "$fresh/modules"
        module ublk_drv
        mv "$fresh/modules/ublk_drv.ko" "$fresh/"
        # (The driver is nobody's need, and inserted by the tests themselves.)
        : >"$fresh/modules/list"
        for name in loop dm-mod dm-log-writes xfs nbd; do module $name; done
        cp "$(find "$work/root" -name 'vmlinuz*' | head -n 1)" "$fresh/vmlinuz"
        rm -rf "target/tools/ublk/$suite" "$work"
        mv "$fresh" "target/tools/ublk/$suite"
    done
    exit 0
fi

[ "${1:-}" = tools ] || exit 0
cd "$(dirname "$0")/.."
tools $fsx pjdfstest@0.2.2

# The kernel that the guest boots: Debian's own package, unpacked, with the few modules that it needs.
[ $guest = yes ] || exit 0
[ ! -e target/tools/guest/nfsd.ko ] || [ ! -e target/tools/guest/vmlinuz ] || exit 0
kernel_package() {
    apt-cache depends linux-image-cloud-amd64 2>/dev/null | sed -n 's/^ *Depends: *\(linux-image-[^ ]*\)$/\1/p' | head -n 1
}
package=$(kernel_package)
# Where nothing had to be installed the lists may not be there.
[ -n "$package" ] || { [ "$(id -u)" != 0 ] || apt-get update -qq; package=$(kernel_package); }
if [ -z "$package" ]; then
    echo "prepare: no package has a kernel for a guest: the tests with one say that they are skipped" >&2
    exit 0
fi
echo "prepare: unpacking $package in target/tools/guest"
work=$(mktemp -d)
fresh=target/tools/guest.new
trap 'rm -rf "$work" $fresh' EXIT
trap 'exit 130' INT TERM HUP
chmod 755 "$work"
(cd "$work" && apt-get download -qq "$package" && dpkg-deb --fsys-tarfile "$package"_*.deb | tar -x)
# What is there is whole: it gets its name when all of it is.
rm -rf $fresh
mkdir -p $fresh
# The network and NFS are for the guest of a bench (corbel/src/bench/guest.rs), a disk and the server of NFS for scripts/suites/knfsd.sh.
for module in virtio virtio_ring virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci fuse virtiofs \
    failover net_failover virtio_net sunrpc grace lockd netfs fscache nfs dns_resolver nfsv4 virtio_blk auth_rpcgss nfs_acl nfsd; do
    find "$work/lib/modules" -name "$module.ko" -exec cp {} $fresh/ \;
done
# What belongs to that server, unpacked only: installed, it would be a service of this machine.
if (cd "$work" && apt-get download -qq nfs-kernel-server && dpkg-deb --fsys-tarfile nfs-kernel-server_*.deb | tar -x); then
    mkdir $fresh/sbin
    for name in rpc.mountd rpc.nfsd exportfs nfsdcld; do cp "$work/usr/sbin/$name" $fresh/sbin/; done
else
    echo "prepare: nfs-kernel-server could not be had: the tests with it say that they are skipped" >&2
fi
cp "$work"/boot/vmlinuz-* $fresh/vmlinuz
rm -rf target/tools/guest
mv $fresh target/tools/guest
