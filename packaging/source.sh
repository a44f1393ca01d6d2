#!/usr/bin/env bash
# source.sh OUT: pack what both packages are built from, for builders without a network:
#
#   OUT/weightcache-VERSION.tar.gz    the checkout as it is now, and vendor/ with the packages that are vendored
#
# The same checkout, pins and $SOURCE_DATE_EPOCH (default: the last commit's time) give the same bytes. It prints the path.
# $PYTHON and $VENDOR: see vendor.sh.
set -euo pipefail
umask 022
export LC_ALL=C

(($# == 1)) || { echo "usage: source.sh OUT" >&2; exit 2; }
out=$(realpath -m "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' agent/__init__.py)
name=weightcache-$version
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/$name"
# Tracked, or new and not ignored, and still there.
git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do [[ ! -e $file ]] || printf '%s\0' "$file"; done |
    xargs -0 cp --parents --preserve=mode,links -t "$work/$name"
packaging/vendor.sh "$work/$name/vendor"

mkdir -p "$out"
tar -C "$work" --create --sort=name --owner=0 --group=0 --numeric-owner --mode='u=rwX,go=rX' \
    --mtime="@$SOURCE_DATE_EPOCH" "$name" | gzip --no-name -9 >"$out/$name.tar.gz"
echo "$out/$name.tar.gz"
