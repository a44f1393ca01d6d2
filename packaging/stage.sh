#!/usr/bin/env bash
# stage.sh DESTDIR: lay out what packages install, as one tree below DESTDIR (make stage DESTDIR=...).
#
#   /usr/lib/weightcache/weightcache, .../vendor     the package, and the pure-Python packages that it uses
#   /usr/libexec/weightcache/{agent,loader}          what the units start
#   /usr/bin/{wcache,wcache-launch,wcache-top}
#   /usr/lib/systemd/{system,system-preset}, /usr/lib/sysusers.d, /usr/lib/tmpfiles.d
#   /usr/share/man, .../bash-completion, .../zsh     made from what the commands say of themselves (commands.py)
#   /usr/share/weightcache                           alert rules for Prometheus, a dashboard for Grafana, and the wheel
#                                                    for SGLang environments and images
#   /etc/weightcache/weightcache.toml, /etc/needrestart/conf.d/weightcache.conf
#
# The same sources give the same bytes, modes and times ($SOURCE_DATE_EPOCH, or else the last commit's). The vendored
# packages come from $VENDOR, a folder where they are installed, from vendor/ in a source archive (source.sh), or else
# $PYTHON's pip downloads them; $PYTHON is 3.11 or newer. The programs themselves run on the distribution's $INTERPRETER
# (/usr/bin/python3), which also brings psutil.
set -euo pipefail
umask 022
export LC_ALL=C

(($# == 1)) && [[ $1 == /?* ]] || { echo "usage: stage.sh DESTDIR, an absolute path" >&2; exit 2; }
destdir=$1
cd "$(dirname "${BASH_SOURCE[0]}")/.."
library=/usr/lib/weightcache
interpreter=${INTERPRETER:-/usr/bin/python3}
python=${PYTHON:-python3}
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)}
if [[ -e $destdir$library ]]; then
    echo "stage.sh: $destdir holds a tree already" >&2
    exit 2
fi
mkdir -p "$destdir"

put() { install -D -m "${3:-644}" "$1" "$destdir$2"; } # FILE PATH [MODE]

copy() { # FOLDER TARGET, and relative paths on standard input
    mkdir -p "$destdir$2"
    (cd "$1" && xargs -d '\n' cp --parents --no-preserve=mode,ownership,timestamps -t "$destdir$2")
}

# What a wheel brought: neither what was made when it was installed, nor programs, nor a module for everybody's path.
brought() { # DIST-INFO
    cut -d, -f1 "$1/RECORD" | grep -vE '^(\.\./|bin/|[^/]*\.dist-info/|example\.py$)|\.pyc$|(^|/)tests?/' | sort
}

licences() { # DIST-INFO
    find "$1" -type f \( -path '*/licenses/*' -o -iname 'LICEN[CS]E*' \) | sort
}

program() { # PATH MODULE
    local file=$destdir$1
    mkdir -p "${file%/*}"
    # -I: neither the environment nor a user's folder decides what is imported; -B: nothing is left beside the package.
    cat >"$file" <<END
#!$interpreter -IB
import sys

sys.path[:0] = ["$library", "$library/vendor"]
from $2 import main

sys.exit(main())
END
    chmod 755 "$file"
}

(cd agent && find . -name '*.py' -o -name '*.tcss' -o -name py.typed -o -name evidence.toml) | sort | copy agent $library/weightcache

requirements=tests/env/agent.txt
vendor=${VENDOR:-}
if [[ -z $vendor && -d vendor ]]; then
    vendor=vendor
elif [[ -z $vendor ]]; then
    vendor=$(mktemp -d)
    trap 'rm -rf "$vendor"' EXIT
    PYTHON=$python packaging/vendor.sh "$vendor"
fi
while IFS='=' read -r name _ version; do
    info=$vendor/$(tr 'A-Z.-' 'a-z__' <<<"$name")-$version.dist-info
    [[ -d $info ]] || { echo "stage.sh: no $name $version in $vendor" >&2; exit 1; }
    brought "$info" | copy "$vendor" $library/vendor
    licences "$info" | while read -r file; do
        put "$file" "$library/vendor/$name-$version.${file##*/}"
    done
done < <(grep -v '^#' $requirements)

program /usr/libexec/weightcache/agent weightcache.server.__main__
program /usr/libexec/weightcache/loader weightcache.loader.unit
program /usr/bin/wcache weightcache.cli.main
program /usr/bin/wcache-launch weightcache.launch.main
program /usr/bin/wcache-top weightcache.tui.main

for unit in agent/units/*.{service,socket,target}; do
    put "$unit" "/usr/lib/systemd/system/${unit##*/}"
done
put agent/units/90-weightcache.preset /usr/lib/systemd/system-preset/90-weightcache.preset
put agent/units/weightcache.sysusers.conf /usr/lib/sysusers.d/weightcache.conf
put agent/units/weightcache.tmpfiles.conf /usr/lib/tmpfiles.d/weightcache.conf
for file in packaging/monitoring/*; do
    put "$file" "/usr/share/weightcache/${file##*/}"
done
put docs/weightcache.toml /etc/weightcache/weightcache.toml
put packaging/needrestart.conf /etc/needrestart/conf.d/weightcache.conf
"$python" -IB packaging/wheel.py "$destdir/usr/share/weightcache"

# Manual pages and completions, from the tree's own programs.
made() { # SCRIPT FOLDER
    PYTHONPATH=$destdir$library:$destdir$library/vendor:packaging COLUMNS=80 "$python" -sB "packaging/$1" "$destdir$2"
}
made man/pages.py /usr/share/man
made completions/shells.py /usr/share

find "$destdir" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
