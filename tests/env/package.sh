#!/usr/bin/env bash
# Makes what tests/package builds packages in and installs them in, for root on Debian or Ubuntu, in $WEIGHTCACHE_ENVS:
#
#   root-packages    Debian 12 with the tools of both families: debhelper, lintian, rpm, rpmlint, dnf, createrepo_c
#   root-packages-12 Debian 12 with python3, the index of its repository and what `apt install` will want from it
#   root-packages-13 the same of Debian 13
#
# About 1 GB and two minutes. This machine itself is left as it is, but for mmdebstrap (systemd.sh installs it). For
# anybody else it says so and does nothing: these tests are then skipped. Running it again costs a moment.
set -euo pipefail

envs=${WEIGHTCACHE_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/weightcache-dev}
bootable=systemd,systemd-sysv,dbus,procps,python3
tools=debhelper,dpkg-dev,lintian,rpm,rpmlint,dnf,createrepo-c,make
tools+=,python3-pip,python3-psutil,python3-setuptools,python3-wheel
# Readers of what is installed: manual pages, completions.
tools+=,bash-completion,man-db,zsh
# What a package depends on is not there yet, but can be had without a network.
later=python3-psutil

say() { printf 'env: %s\n' "$*" >&2; }

if [[ $EUID != 0 ]] || ! command -v mmdebstrap >/dev/null; then
    say "nothing for tests/package: that needs root, and mmdebstrap"
    exit 0
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

ensure() { # NAME SUITE PACKAGES OPTIONS...
    local root=$envs/$1 suite=$2 packages=$3 start=$SECONDS key mirror
    shift 3
    key="$suite $packages $*"
    if [[ -f $root/.stamp && $(<"$root/.stamp") == "$key" ]]; then
        return
    fi
    say "making $root ..."
    rm -rf --one-file-system "$root"
    mirror=$(mirror_of "$suite")
    mmdebstrap --quiet --variant=apt --include="$packages" "$@" "$suite" "$root" ${mirror:+"$mirror"}
    printf '%s\n' "$key" >"$root/.stamp"
    say "made ${root##*/} in $((SECONDS - start)) s"
}

mkdir -p "$envs"
exec {lock}>"$envs/.lock-package"
flock "$lock"
ensure root-packages bookworm "$bootable,$tools"
offline=(--skip=cleanup/apt/lists --skip=cleanup/apt/cache)
offline+=("--customize-hook=APT_CONFIG=\$MMDEBSTRAP_APT_CONFIG apt-get -qq --yes --download-only install $later")
ensure root-packages-12 bookworm "$bootable" "${offline[@]}"
ensure root-packages-13 trixie "$bootable" "${offline[@]}"
