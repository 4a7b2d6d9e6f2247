#!/bin/sh
# Builds corbel_VERSION_amd64.deb in target/ from the release binaries. Needs dpkg-deb only.
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
cargo build --release --quiet -p corbel -p capi -p dpu
cargo build --release --quiet -p intercept

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
put() { install -D -m "$1" "$2" "$root/$3"; }
put 0755 target/release/corbel usr/bin/corbel
put 0644 target/release/libcorbel.so usr/lib/libcorbel.so
put 0644 target/release/libcorbel.a usr/lib/libcorbel.a
put 0644 target/release/libintercept.so usr/lib/corbel/libintercept.so
put 0644 capi/include/corbel.h usr/include/corbel.h
put 0644 foreign/include/corbel-fs.h usr/include/corbel-fs.h
put 0644 target/release/libcorbel_dpu.so usr/lib/libcorbel_dpu.so
put 0644 dpu/include/corbel-dpu.h usr/include/corbel-dpu.h
put 0644 corbel/config/corbel.toml etc/corbel/corbel.toml
put 0644 packaging/systemd/corbel.service lib/systemd/system/corbel.service
put 0644 packaging/systemd/corbel-coordinator.service lib/systemd/system/corbel-coordinator.service
for unit in corbel-snapshot.service corbel-snapshot.timer; do
    put 0644 packaging/systemd/$unit lib/systemd/system/$unit
done
put 0644 packaging/sysusers.d/corbel.conf usr/lib/sysusers.d/corbel.conf
put 0644 packaging/vhost-user/60-corbel-virtiofsd.json usr/share/qemu/vhost-user/60-corbel-virtiofsd.json
put 0644 LICENSE usr/share/doc/corbel/copyright
install -d "$root/sbin" "$root/usr/share/man/man1" "$root/usr/share/bash-completion/completions"
ln -s ../usr/bin/corbel "$root/sbin/mount.corbel"
ln -s corbel "$root/usr/bin/corbel-virtiofsd"
target/release/corbel man "$root/usr/share/man/man1" >/dev/null
gzip -9n "$root"/usr/share/man/man1/*
target/release/corbel completion bash > "$root/usr/share/bash-completion/completions/corbel"
install -d "$root/usr/share/zsh/vendor-completions"
target/release/corbel completion zsh > "$root/usr/share/zsh/vendor-completions/_corbel"

install -d "$root/DEBIAN"
echo /etc/corbel/corbel.toml > "$root/DEBIAN/conffiles"
cat > "$root/DEBIAN/control" <<TEXT
Package: corbel
Version: $version
Architecture: amd64
Maintainer: The Corbel authors <corbel@example.invalid>
Depends: libc6 (>= 2.36), libgcc-s1
Recommends: fuse3
Suggests: libnfs13
Section: admin
Priority: optional
Description: replicated POSIX file system on persistent memory
 Unmodified programs write to memory of their own machine from user space;
 fsync returns when every replica holds the data.
TEXT
cat > "$root/DEBIAN/postinst" <<'TEXT'
#!/bin/sh
set -e
# The services' user; their directories are made by their units.
if [ "$1" = configure ] && command -v systemd-sysusers >/dev/null; then
    systemd-sysusers corbel.conf
fi
TEXT
chmod 0755 "$root/DEBIAN/postinst"
dpkg-deb --root-owner-group --build "$root" "target/corbel_${version}_amd64.deb"
