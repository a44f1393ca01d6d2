#!/usr/bin/env bash
# inside.sh ROOT FOLDER LAYER COMMAND...: run a command in a throw-away layer over ROOT, where FOLDER is /build and the
# only place that keeps anything. In a mount namespace of its own (unshare --mount), so that nothing has to be unmounted;
# LAYER is an empty folder to mount at.
set -euo pipefail
root=$1 folder=$2 layer=$3
shift 3

mount -t tmpfs -o mode=0755 tmpfs "$layer"
mkdir "$layer/upper" "$layer/work" "$layer/root"
mount -t overlay -o "lowerdir=$root,upperdir=$layer/upper,workdir=$layer/work" overlay "$layer/root"
mkdir -p "$layer/root/build"
mount --bind "$folder" "$layer/root/build"
mount -t proc proc "$layer/root/proc"
mount --bind /dev/null "$layer/root/dev/null"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$layer/root/dev/pts"
ln -sf pts/ptmx "$layer/root/dev/ptmx"
exec env -i HOME=/root LANG=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/tmp \
    chroot "$layer/root" "$@"
