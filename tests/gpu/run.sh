#!/usr/bin/env bash
# Everything that needs a GPU, on a machine with Python 3.12, torch 2.11 and no network:
#
#   tests/gpu/run.sh setup BUNDLE        unpack SGLang (tests/gpu/bundle.sh made it), link weightcache, write a 16.4 GB model
#   tests/gpu/run.sh warm                one plain start: fills Triton's and torch's caches, so that later starts compare
#   tests/gpu/run.sh memory [PYTEST...]  shared memory alone
#   tests/gpu/run.sh story [PYTEST...]   load, attach, survive, donate, with SGLang
#   tests/gpu/run.sh parity [OPTIONS] [KIND...]  disk load and attach compared for small models of every kind
#   tests/gpu/run.sh ranks [OPTIONS] [LAYOUT...] several GPUs: disk load, load, attach and kill for parallel layouts
#   tests/gpu/run.sh starts [OPTIONS] [WAY...]   SIGKILL of the engine to the next one's first token, by what shortens it
#   tests/gpu/run.sh standby [OPTIONS]   two engines that share a port, the active one killed under load
#   tests/gpu/run.sh priorities [OPTIONS]  two engines that do not fit beside each other
#   tests/gpu/run.sh parked [OPTIONS] [KIND...]  small models whose KV memory is given back and taken again
#   tests/gpu/run.sh hold FOLDER         an agent that holds the model, for --agents FOLDER of starts, standby, priorities
#   tests/gpu/run.sh backed [GIB]        how fast KV memory comes and goes
#   tests/gpu/run.sh own                 SGLang's own weight cache on the same model, for comparison
#   tests/gpu/run.sh own-ranks           the same over all GPUs
#   tests/gpu/run.sh systemd ROOT [PYTEST...]   a real systemd holds the memory; needs no SGLang (root.sh made ROOT)
#
# WEIGHTCACHE_SIZE=32b (65.5 GB) or 72b (145 GB) makes setup's model larger, for four GPUs and more.
# Logs and figures go to $LOGS (default /tmp/weightcache-gpu). Steps can run one after the other in several calls.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export LOGS=${LOGS:-/tmp/weightcache-gpu} WEIGHTCACHE_MODEL=${WEIGHTCACHE_MODEL:-/tmp/weightcache-model}
export PYTHONPATH=/tmp/weightcache-link:/tmp/site312:$here PYTHONUNBUFFERED=1 SGLANG_DISABLE_TELEMETRY=1
export WEIGHTCACHE_FIGURES=$LOGS/figures.json
unset PYTHONDONTWRITEBYTECODE
mkdir -p "$LOGS"
cd "$here"

# pytest without the plugins that only the other tests need, and whose settings it would call unknown.
gpu_pytest() {
    python3 -m pytest -q -s -p no:cacheprovider -o addopts=-ra -W ignore::pytest.PytestConfigWarning "$@"
}

setup() {
    python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall('/tmp', filter='fully_trusted')" "$1" &
    local unpacking=$! making
    [[ -f $WEIGHTCACHE_MODEL/config.json ]] || PYTHONPATH=$here python3 -m tests.models.make_large --like "${WEIGHTCACHE_SIZE:-8b}" "$WEIGHTCACHE_MODEL" &
    making=$!
    wait "$unpacking"
    # As pip does when it installs: otherwise every start compiles SGLang's modules again, where caches are not written.
    python3 -m compileall -q -j 0 /tmp/site312 >"$LOGS/compileall.log" 2>&1 || true
    wait "$making"
    python3 tests/env/link.py "$here" /tmp/weightcache-link
    python3 -m weightcache.loader doctor --backend cuda || true
}

warm() {
    WEIGHTCACHE_FIGURES='' gpu_pytest tests/gpu/test_engine.py -k warm
}

systemd() {
    export WEIGHTCACHE_ROOT=/tmp/weightcache-root
    [[ -d $WEIGHTCACHE_ROOT ]] || { mkdir "$WEIGHTCACHE_ROOT" && tar -C "$WEIGHTCACHE_ROOT" -xf "$1"; }
    python3 tests/env/link.py "$here" /tmp/weightcache-link
    gpu_pytest tests/gpu/test_systemd.py "${@:2}"
}

case ${1:-} in
    setup) setup "$2" ;;
    warm) warm ;;
    memory) gpu_pytest tests/gpu/test_memory.py "${@:2}" ;;
    story) gpu_pytest tests/gpu/test_engine.py -k "not warm" "${@:2}" ;;
    parity) python3 -m tests.gpu.parity "${@:2}" ;;
    ranks) python3 -m tests.gpu.ranks "${@:2}" ;;
    systemd) systemd "${@:2}" ;;
    starts) python3 -m tests.gpu.starts --out "$LOGS" "${@:2}" ;;
    standby) python3 -m tests.gpu.standby --out "$LOGS" "${@:2}" ;;
    priorities) python3 -m tests.gpu.priorities --out "$LOGS" "${@:2}" ;;
    parked) python3 -m tests.gpu.parked --out "$LOGS" "${@:2}" ;;
    hold) exec python3 -m tests.gpu.hold "$2" ;;
    backed) python3 -m tests.bench.backed "${@:2}" ;;
    own) python3 -m tests.bench.own_cache "$LOGS" ;;
    own-ranks) python3 -m tests.gpu.own_ranks "$LOGS" ;;
    *) sed -n '2,22s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
