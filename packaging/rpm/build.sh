#!/usr/bin/env bash
# build.sh SOURCE.tar.gz OUT [RPMBUILD ARGUMENTS]: build OUT/weightcache-VERSION.noarch.rpm from the archive that
# packaging/source.sh made. It needs rpmbuild, no network and no root. The same archive gives the same bytes. (A source
# package names the folder where it was built: `rpmbuild -ts SOURCE.tar.gz` makes one.)
set -euo pipefail
umask 022
export LC_ALL=C

(($# >= 2)) || { echo "usage: build.sh SOURCE.tar.gz OUT [RPMBUILD ARGUMENTS]" >&2; exit 2; }
command -v rpmbuild >/dev/null || { echo "build.sh: dnf install rpm-build, or apt install rpm" >&2; exit 1; }
source=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/SOURCES" "$work/home"
cp "$source" "$work/SOURCES/"
tar -C "$work" -xf "$source" --strip-components=3 --wildcards '*/packaging/rpm/weightcache.spec'
# The time of the archive is the time of the package.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(stat -c %Y "$work/weightcache.spec")}
options=(
    --define "_topdir $work" --define "_buildhost reproducible"
    --define "use_source_date_epoch_as_buildtime 1" --define "clamp_mtime_to_source_date_epoch 1"
)
# Debian's rpm knows nothing of what dpkg installed.
[[ ! -e /etc/debian_version ]] || options+=(--nodeps)
HOME=$work/home rpmbuild -bb "${options[@]}" "$@" "$work/weightcache.spec" >"$work/log" 2>&1 ||
    { cat "$work/log" >&2; exit 1; }
cp "$work"/RPMS/noarch/*.rpm "$out/"
ls "$out"/weightcache-*.noarch.rpm
