#!/usr/bin/env bash
# build.sh SOURCE.tar.gz OUT: build OUT/weightcache_VERSION_all.deb from the archive that packaging/source.sh made.
# It needs dpkg-dev and debhelper, no network and no root. The same archive gives the same bytes.
set -euo pipefail
umask 022
export LC_ALL=C

(($# == 2)) || { echo "usage: build.sh SOURCE.tar.gz OUT" >&2; exit 2; }
command -v dpkg-buildpackage dh >/dev/null || { echo "build.sh: apt install dpkg-dev debhelper" >&2; exit 1; }
source=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tar -C "$work" -xf "$source"
cd "$work"/weightcache-*/
cp -R packaging/deb debian
# The time of the archive is the time of the package.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(stat -c %Y agent/__init__.py)}
# Nothing is compiled, so build-essential need not be there (-d).
dpkg-buildpackage --build=binary --unsigned-changes --no-pre-clean -d >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
cp "$work"/*.deb "$out/"
ls "$out"/weightcache_*_all.deb
