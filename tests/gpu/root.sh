#!/usr/bin/env bash
# Packs a Debian 13 with systemd 257 and the staged tree, for a GPU machine without systemd and without network:
#
#   tests/gpu/root.sh OUT.tar.xz       about a minute, about 30 MB; needs root, and what `make env-systemd` makes
set -euo pipefail

[[ $# == 1 ]] || { echo "usage: root.sh OUT.tar.xz" >&2; exit 1; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
base=${WEIGHTCACHE_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/weightcache-dev}/root-257
[[ -d $base ]] || { echo "root: there is no $base: run make env-systemd" >&2; exit 1; }
out=$(realpath -m "$1")
mkdir -p "$(dirname "$out")"
work=$(mktemp -d)
trap 'rm -rf --one-file-system "$work"' EXIT

unneeded=(
    ./var/lib/apt ./var/cache ./var/lib/dpkg ./usr/share/doc ./usr/share/locale ./usr/share/man ./usr/share/i18n
    ./usr/share/perl ./usr/share/perl5 ./usr/share/zoneinfo ./usr/lib/locale './usr/lib/x86_64-linux-gnu/perl*'
    ./usr/lib/x86_64-linux-gnu/gconv
)
tar -C "$base" "${unneeded[@]/#/--exclude=}" -cf - . | tar -C "$work" -xf -
make -s -C "$here" stage DESTDIR="$work"
chroot "$work" /usr/bin/python3 -m compileall -q /usr/lib/weightcache # as packages do
chroot "$work" systemd-sysusers
chroot "$work" systemctl mask systemd-modules-load.service
chroot "$work" systemctl enable weightcache-loader.socket
tar -C "$work" --sort=name -cf - . | xz -T0 -9 >"$out.part"
mv "$out.part" "$out"
echo "root: $out, $(stat -c %s "$out") bytes" >&2
