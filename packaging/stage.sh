#!/usr/bin/env bash
# stage.sh DESTDIR: lay out what packages install, as one tree below DESTDIR (make stage DESTDIR=...).
#
#   /usr/lib/weightcache/weightcache, .../vendor     the package, and the pure-Python packages that it uses
#   /usr/libexec/weightcache/{agent,loader}          what the units start
#   /usr/bin/{wcache,wcache-launch}
#   /usr/lib/systemd/{system,system-preset}, /usr/lib/sysusers.d, /usr/lib/tmpfiles.d
#   /etc/weightcache/weightcache.toml
#
# The same sources give the same bytes, modes and times ($SOURCE_DATE_EPOCH, or else the last commit's). The vendored
# packages come from $VENDOR, a folder where they are installed, or else $PYTHON's pip downloads them. The programs
# themselves run on the distribution's /usr/bin/python3, which also brings psutil.
set -euo pipefail
umask 022
export LC_ALL=C

(($# == 1)) && [[ $1 == /?* ]] || { echo "usage: stage.sh DESTDIR, an absolute path" >&2; exit 2; }
destdir=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
library=/usr/lib/weightcache
if [[ -e $destdir$library ]]; then
    echo "stage.sh: $destdir holds a tree already" >&2
    exit 2
fi
mkdir -p "$destdir"

put() { install -D -m "${3:-644}" "$1" "$destdir$2"; } # FILE PATH [MODE]

python_files() { (cd "$1" && find . -name '*.py' -o -name py.typed) | sed 's,^\./,,' | sort; } # FOLDER

program() { # PATH MODULE
    local file=$destdir$1
    mkdir -p "${file%/*}"
    # -I: neither the environment nor a user's folder decides what is imported; -B: nothing is left beside the package.
    cat >"$file" <<END
#!/usr/bin/python3 -IB
import sys

sys.path[:0] = ["$library", "$library/vendor"]
from $2 import main

sys.exit(main())
END
    chmod 755 "$file"
}

python_files agent | while read -r file; do
    put "agent/$file" "$library/weightcache/$file"
done

requirements=tests/env/agent.txt
vendor=${VENDOR:-}
if [[ -z $vendor ]]; then
    vendor=$(mktemp -d)
    trap 'rm -rf "$vendor"' EXIT
    "${PYTHON:-python3}" -m pip -qq --no-input --disable-pip-version-check install \
        --no-deps --no-compile --root-user-action=ignore --target "$vendor" -r $requirements
fi
while IFS='=' read -r name _ version; do
    [[ -d $vendor/$name-$version.dist-info ]] || { echo "stage.sh: no $name $version in $vendor" >&2; exit 1; }
    python_files "$vendor/$name" | while read -r file; do
        put "$vendor/$name/$file" "$library/vendor/$name/$file"
    done
    for file in "$vendor/$name-$version.dist-info"/licenses/*; do
        put "$file" "$library/vendor/$name-$version.${file##*/}"
    done
done < <(grep -v '^#' $requirements)

program /usr/libexec/weightcache/agent weightcache.server.__main__
program /usr/libexec/weightcache/loader weightcache.loader.unit
program /usr/bin/wcache weightcache.cli.main
program /usr/bin/wcache-launch weightcache.launch.main

for unit in agent/units/*.{service,socket,target}; do
    put "$unit" "/usr/lib/systemd/system/${unit##*/}"
done
put agent/units/90-weightcache.preset /usr/lib/systemd/system-preset/90-weightcache.preset
put agent/units/weightcache.sysusers.conf /usr/lib/sysusers.d/weightcache.conf
put agent/units/weightcache.tmpfiles.conf /usr/lib/tmpfiles.d/weightcache.conf
put docs/weightcache.toml /etc/weightcache/weightcache.toml

when=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}
find "$destdir" -exec touch --no-dereference --date="@$when" {} +
