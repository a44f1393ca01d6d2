#!/usr/bin/env bash
# Builds the environments that the tests and the CPU demo run in, outside the checkout:
#
#   engine-0.5.23   SGLang 0.5.23 on the CPU, and the project's own tools; the tests themselves run here
#   engine-0.5.17   SGLang 0.5.17 and what it wants in other versions, laid over the first one
#   agent           what the agent and `wcache` run in: no torch, no SGLang
#
# They live in $WEIGHTCACHE_ENVS (default: $XDG_CACHE_HOME/weightcache-dev or ~/.cache/weightcache-dev), about 7 GB.
# Running it again costs a moment: an environment is rebuilt when its requirements, its interpreter or the function
# that makes it has changed. Every run points all three at this checkout (link.py), so that the newest caller wins.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
envs=${WEIGHTCACHE_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/weightcache-dev}
base=$envs/engine-0.5.23

say() { printf 'env: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# -qq: errors only; a machine with several package indexes otherwise prints a page of warnings.
pip_into() { # ENVIRONMENT ARGUMENTS...
    local python=$1/bin/python
    shift
    "$installer" -m pip --python "$python" -qq --no-input --disable-pip-version-check install "$@"
}

usable() { "$1" -I -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }

find_python() {
    local name
    for name in ${WEIGHTCACHE_PYTHON:-/usr/bin/python3 python3 python3.13 python3.12 python3.11}; do
        if usable "$name"; then
            command -v "$name"
            return
        fi
    done
    return 1
}

make_engine_0_5_23() { # DIRECTORY
    "$python" -m venv "$1"
    pip_into "$1" -r "$here/sglang-0.5.23.txt" -r "$here/agent.txt" -r "$here/tools.txt"
    # --no-deps: SGLang's own list asks for many GB of kernels that only a GPU can run.
    pip_into "$1" --no-deps sglang==0.5.23
}

make_engine_0_5_17() { # DIRECTORY
    "$python" -m venv --without-pip "$1"
    pip_into "$1" --no-deps -r "$here/sglang-0.5.17.txt"
    site_packages "$base" >"$(site_packages "$1")/base.pth"
}

make_agent() { # DIRECTORY
    "$python" -m venv --without-pip "$1"
    pip_into "$1" --no-deps -r "$here/agent.txt" "$(grep ^psutil== "$here/sglang-0.5.23.txt")"
}

site_packages() { "$1/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# The environment's scripts hold absolute paths, so it is made in its place; the stamp, written last, says it is whole.
ensure() { # NAME FUNCTION REQUIREMENTS...
    local directory=$envs/$1 recipe=$2 start=$SECONDS key
    shift 2
    key=$({ "$python" -VV; echo "$directory"; declare -f "$recipe" pip_into; cat "$@"; } | sha256sum)
    if [[ -f $directory/.stamp && $(<"$directory/.stamp") == "$key" ]]; then
        return
    fi
    say "making $directory ..."
    rm -rf "$directory"
    "$recipe" "$directory"
    printf '%s\n' "$key" >"$directory/.stamp"
    say "made ${directory##*/} in $((SECONDS - start)) s"
}

if ! python=$(find_python); then
    command -v apt-get >/dev/null && [[ $EUID == 0 ]] ||
        die "needs Python 3.11, 3.12 or 3.13 with its venv module; on Debian and Ubuntu: apt install python3-venv"
    say "installing python3-venv ..."
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null </dev/null ||
        die "could not install python3-venv; try: apt update && apt install python3-venv"
    python=$(find_python) || die "python3-venv is installed, but no Python from 3.11 to 3.13 can make an environment"
fi

mkdir -p "$envs"
exec {lock}>"$envs/.lock"
if ! flock -n "$lock"; then
    say "waiting for another build in $envs ..."
    flock "$lock"
fi

installer=$base/bin/python
ensure engine-0.5.23 make_engine_0_5_23 "$here"/{sglang-0.5.23,agent,tools}.txt
ensure engine-0.5.17 make_engine_0_5_17 "$here/sglang-0.5.17.txt" "$base/.stamp"
ensure agent make_agent "$here"/{sglang-0.5.23,agent}.txt
for name in engine-0.5.23 engine-0.5.17 agent; do
    "$envs/$name/bin/python" -I "$here/link.py" "$root"
done
