#!/usr/bin/env bash
# Boots a systemd as the first process of its own namespaces, where there is no container manager:
#
#   tests/gpu/boot.sh ROOT        ROOT: an unpacked distribution root with systemd; needs root; prints nothing
#
# The process that this becomes is systemd's parent: killing it ends everything inside. There is no network inside but
# loopback, and no device but the harmless ones.
set -euo pipefail

if [[ ${1:-} != --inside ]]; then
    root=$(realpath "$1")
    # A group of its own, so that systemd manages nobody else's processes.
    group=/sys/fs/cgroup/unified
    [[ -e $group/cgroup.procs ]] || group=/sys/fs/cgroup
    if [[ ! -e $group/cgroup.procs ]]; then
        group=$(mktemp -d)
        mount -t cgroup2 cgroup2 "$group"
    fi
    mkdir -p "$group/weightcache-boot"
    echo $$ >"$group/weightcache-boot/cgroup.procs"
    exec unshare --fork --kill-child --pid --mount --uts --ipc --net --cgroup -- "$0" --inside "$root"
fi

root=$2
mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mkdir -p proc sys dev run tmp old
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
for name in null zero full random urandom tty; do
    : >dev/$name
    mount --bind "/dev/$name" "dev/$name"
done
hostname boot
pivot_root . old
umount -l /old
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin /sbin/init </dev/null
