#!/usr/bin/env bash
# Makes what tests/systemd boots, for root on Debian or Ubuntu: the container manager, and in $WEIGHTCACHE_ENVS (and tmux,
# which other tests want)
#
#   root-257   Debian 13 with systemd 257 (about 200 MB, 15 s)
#   root-252   Debian 12 with systemd 252, only where this machine runs another version
#
# For anybody else it says so and does nothing: these tests are then skipped. Running it again costs a moment.
set -euo pipefail

envs=${WEIGHTCACHE_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/weightcache-dev}
packages=systemd,systemd-sysv,dbus,procps,python3,python3-psutil

say() { printf 'env: %s\n' "$*" >&2; }

if [[ $EUID != 0 ]] || ! command -v apt-get >/dev/null; then
    say "no machines for tests/systemd: that needs root, and apt"
    exit 0
fi

wanted=()
for package in dbus debian-archive-keyring mmdebstrap systemd-container systemd-sysv tmux; do
    if [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) != installed ]]; then
        wanted+=("$package")
    fi
done
if ((${#wanted[@]})); then
    say "installing ${wanted[*]} ..."
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq </dev/null
    apt-get install -y -qq --no-install-recommends "${wanted[@]}" </dev/null >/dev/null
fi

# The mirror that this machine's Debian comes from, if it is one; otherwise mmdebstrap's own choice.
mirror_of() { # SUITE
    local site
    site=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(COMPONENT) $(CODENAME)' 'Created-By: Packages' |
        awk '$2 == "Debian" && $3 == "main" && $4 !~ /-/ { print $1; exit }')
    if [[ $site ]]; then
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $1 main"
    fi
}

ensure() { # VERSION SUITE
    local root=$envs/root-$1 start=$SECONDS key mirror
    key="$2 $packages"
    if [[ -f $root/.stamp && $(<"$root/.stamp") == "$key" ]]; then
        return
    fi
    say "making $root ..."
    rm -rf --one-file-system "$root"
    mirror=$(mirror_of "$2")
    mmdebstrap --quiet --variant=apt --include="$packages" "$2" "$root" ${mirror:+"$mirror"}
    printf '%s\n' "$key" >"$root/.stamp"
    say "made ${root##*/} in $((SECONDS - start)) s"
}

mkdir -p "$envs"
exec {lock}>"$envs/.lock-systemd"
flock "$lock"
ensure 257 trixie
if [[ $(systemctl --version) != "systemd 252 "* ]]; then
    ensure 252 bookworm
fi
