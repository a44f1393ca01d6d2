#!/usr/bin/env bash
# vendor.sh FOLDER: put the pure-Python packages that are vendored (tests/env/agent.txt) into FOLDER, from $VENDOR,
# where they are installed already, or else by $PYTHON's pip.
set -euo pipefail

folder=$1
requirements=$(dirname "${BASH_SOURCE[0]}")/../tests/env/agent.txt
mkdir -p "$folder"
if [[ -z ${VENDOR:-} ]]; then
    "${PYTHON:-python3}" -m pip -qq --no-input --disable-pip-version-check install --no-deps --no-compile \
        --root-user-action=ignore --target "$folder" -r "$requirements"
    rm -rf "$folder/bin" # programs that name this machine's interpreter
    exit
fi
while IFS='=' read -r name _ version; do
    info=$VENDOR/$(tr 'A-Z.-' 'a-z__' <<<"$name")-$version.dist-info
    [[ -d $info ]] || { echo "vendor.sh: no $name $version in $VENDOR" >&2; exit 1; }
    cut -d, -f1 "$info/RECORD" | grep -vE '^\.\./|\.pyc$|^bin/' |
        (cd "$VENDOR" && xargs -d '\n' cp --parents --no-preserve=mode,ownership -t "$(realpath "$folder")")
done < <(grep -v '^#' "$requirements")
