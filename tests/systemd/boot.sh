#!/usr/bin/env bash
# boot.sh LOWER FOLDER STAGE UNITS READABLE -- NSPAWN...: lay the machine out and run its container manager.
#
# Run by machine.py in a mount namespace of its own, so that every mount is gone when the last process is. UNITS are
# enabled before the boot; READABLE are folders that unprivileged users inside must be able to reach.
set -euo pipefail
lower=$1 folder=$2 stage=$3
read -ra units <<<"$4"
mapfile -t readable < <(tr ':' '\n' <<<"$5")
shift 6

for procs in "$folder"/cgroups/*; do
    echo $$ >"$procs/cgroup.procs"
done
mount -t tmpfs -o size=4G,mode=0755 tmpfs "$folder/mnt"
root=$folder/mnt/root
mkdir "$folder/mnt/upper" "$folder/mnt/work" "$root"
mount -t overlay -o "lowerdir=$lower,upperdir=$folder/mnt/upper,workdir=$folder/mnt/work" overlay "$root"

# Of a host's configuration nothing may start inside. A missing machine-id would mean a first boot: all presets.
rm -rf "$root"/etc/systemd/system/*.{wants,requires} "$root/usr/sbin/policy-rc.d"
ln -sfn /usr/lib/systemd/system/multi-user.target "$root/etc/systemd/system/default.target"
ln -sfn /dev/null "$root/etc/systemd/system/console-getty.service"
: >"$root/etc/fstab"
tr -d - </proc/sys/kernel/random/uuid >"$root/etc/machine-id"

for path in "${readable[@]}"; do
    while [[ $path == /?* ]]; do
        mkdir -p "$root$path"
        [[ $(stat -c %A "$root$path") == *r?x ]] || chmod a+rx "$root$path"
        path=${path%/*}
    done
done

# What a package does when it is installed.
cp -R --no-preserve=ownership --preserve=mode,links "$stage/." "$folder/files/." "$root/"
export SYSTEMD_OFFLINE=1
mount --bind /proc "$root/proc"
chroot "$root" systemd-sysusers
chroot "$root" systemctl --quiet preset weightcache.target weightcache-loader.socket
if ((${#units[@]})); then
    chroot "$root" systemctl --quiet enable "${units[@]}"
fi
umount "$root/proc"
unset SYSTEMD_OFFLINE

# 133: the machine wants to boot again, and leaves that to whoever runs the container manager.
status=133
while ((status == 133)); do
    status=0
    setpriv --pdeathsig=KILL systemd-nspawn --directory "$root" "$@" || status=$?
done
exit "$status"
