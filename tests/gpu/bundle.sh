#!/usr/bin/env bash
# Packs SGLang 0.5.17 for a GPU machine that has Python 3.12 and torch 2.11 but no network:
#
#   tests/gpu/bundle.sh OUT.tar.xz       about 4 minutes, about 50 MB; needs pip, strip (binutils) and xz
#
# Over there, unpack it, put the folder `site312` on PYTHONPATH, and start engines with
# --attention-backend triton --sampling-backend pytorch --grammar-backend none: the large kernels of the other backends
# are what makes SGLang large, and are left out. So is everything the machine has already (bundle-requirements.txt).
set -euo pipefail

LIMIT=$((60 * 1000 * 1000))
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

die() { printf 'bundle: %s\n' "$*" >&2; exit 1; }

[[ $# == 1 ]] || die "usage: bundle.sh OUT.tar.xz"
for command in strip tar xz; do
    command -v "$command" >/dev/null || die "needs $command; on Debian and Ubuntu: apt install binutils xz-utils"
done
python=${WEIGHTCACHE_PYTHON:-python3}
out=$(realpath -m "$1")
mkdir -p "$(dirname "$out")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# pip takes for another Python only wheels whose platform tag is named: all that run on glibc 2.39 and older.
platforms=(--platform any)
for minor in 39 38 35 34 31 28 27 26 24 17 12 5; do
    platforms+=(--platform "manylinux_2_${minor}_x86_64")
done
for name in 2014 2010 1; do
    platforms+=(--platform "manylinux${name}_x86_64")
done

download() {
    "$python" -m pip -qq --no-input --disable-pip-version-check download --dest "$work/wheels" --no-deps \
        --only-binary :all: --implementation cp --python-version 3.12 --abi cp312 --abi abi3 --abi none \
        "${platforms[@]}" --requirement "$here/bundle-requirements.txt"
}

# A wheel keeps some of its files in NAME.data/{purelib,platlib}, to be moved up; its scripts are of no use here.
unpack() { # SITE
    "$python" - "$work/wheels" "$1" <<'PYTHON'
import pathlib, sys, zipfile

wheels, site = map(pathlib.Path, sys.argv[1:])
for wheel in sorted(wheels.glob("*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            top, _, rest = member.filename.partition("/")
            if top.endswith(".data"):
                kind, _, rest = rest.partition("/")
                if kind not in ("purelib", "platlib"):
                    continue
                member.filename = rest
            if member.filename:
                archive.extract(member, site)
PYTHON
}

trim() { # SITE
    cd "$1"
    rm -rf sgl_kernel/{flash_ops,infllm_ops,flashmla_ops}* sgl_kernel/{sm100,testing} # FA3, FlashMLA, Blackwell
    rm -rf flashinfer/data/{cutlass,spdlog,tests}* torchao/_C*.so xgrammar/lib zstandard/_cffi*.so
    rm -rf torch_memory_saver_hook_mode_*_cu12* # for CUDA 12
    rm -rf sglang/{multimodal_gen,test} test tools build_backend.py build_utils.py
    # The machine's own tokenizers may be newer than transformers allows; nothing that is used here changed.
    sed -i 's/tokenizers>=0.22.0,<=0.23.0/tokenizers>=0.22.0/' transformers/dependency_versions_table.py
    find . -name '*.so*' -type f -exec strip --strip-unneeded {} + 2>/dev/null || true # some are not ELF, or refuse
}

echo "bundle: downloading ..." >&2
download
echo "bundle: unpacking ..." >&2
mkdir "$work/site312"
unpack "$work/site312"
(trim "$work/site312")
# The agent's own; it is published as source only, and is one file.
"$python" -m pip -qq --no-input --disable-pip-version-check install --no-deps --no-compile --target "$work/site312" \
    sdnotify==0.3.2
echo "bundle: compressing ..." >&2
tar -C "$work" --sort=name --owner=0 --group=0 -cf - site312 | xz -T0 -9e >"$out.part"
size=$(stat -c %s "$out.part")
((size < LIMIT)) || die "the archive has $size bytes, more than $LIMIT"
mv "$out.part" "$out"
echo "bundle: $out, $size bytes" >&2
