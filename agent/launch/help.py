"""What ``wcache-launch --wcache-help`` prints."""

from __future__ import annotations

HELP = """\
usage: wcache-launch [OPTIONS] [--] SGLANG_ARGUMENTS...
       wcache-launch --wcache-slot NAME-a

Starts `python -m sglang.launch_server SGLANG_ARGUMENTS...` with the weights that an agent holds in memory, and stays
as its supervisor: signals and the exit status are passed through, one line a rank says how it got its weights.

  --weight-cache-mode MODE      client (default): attach to running agents, or load from disk
                                daemon: start the agents of this launch if none run, each under a keeper,
                                wait until they hold its model, attach
                                off: plain SGLang, nothing added
                                (recognised among SGLang's arguments too)
  --wcache-on-mismatch WHAT     when the resident weights are not what this launch needs, or there are none:
                                fallback (default): load from disk
                                evict: first drop the resident set if nobody uses it and the agent allows it
                                error: do not start
  --wcache-wait SECONDS         how long to wait for a load that is under way (client: 0, daemon: 3600)
  --wcache-explain              print what would happen and start nothing: exit 0 fine, 1 not, 69 no agent
  --wcache-explain=full         start the engine up to its decision and print every differing field
  --wcache-unproven             daemon mode: hold the model although no run has proven its methods; what an engine would
                                get is compared with what was loaded, bit by bit, in every load
  --wcache-restart              start the engine again whenever it ends, until this command gets a signal to end;
                                give up when it ends five times in a row before it served
  --wcache-hold-port            restart mode: hold the HTTP port, so that connections made while one engine is gone and
                                the next not there yet wait instead of being refused (a systemd socket unit's port is
                                held in any mode)
  --wcache-slot NAME-a          be one of the two slots (NAME-a, NAME-b) of the engine that is described, all of it, by
                                /etc/weightcache/engines/NAME.toml: the engine stands by until the other one is gone;
                                needs weightcache-http@NAME.socket; restart mode, without warm workers
  --wcache-without LEVERS       do not use these to shorten the start, separated by commas:
                                caches: compiled kernels are kept in a directory for this environment alone
                                graphs: most graphs are captured after the first answers, when the engine is idle
                                warmup: no warm-up requests when the same start succeeded before
                                workers: (restart mode) the next engine's processes have imported SGLang already
  --wcache-runtime-dir DIR      where the agents' sockets are (else the configuration's, else $WEIGHTCACHE_RUNTIME_DIR,
                                else /run/weightcache, else below $XDG_RUNTIME_DIR); below DIR/engines, a slot's
                                files, too (as for `wcache engines`, whatever the configuration says)
  --wcache-config FILE          the configuration (else /etc/weightcache/weightcache.toml where it exists)
  --wcache-python INTERPRETER   the Python that has SGLang (else this one, else the one of loader.command, else python3)
  --wcache-help                 this text; --help is SGLang's

Exit status: the server's own, 128 + N after signal N; 1 refused (mismatch), nothing to attach to, a load that failed or
too little room; 2 usage, 66 checkpoint, 69 no agent or no proof that the weights came as asked, 70 another error of the
launcher, 75 still loading, 76 an agent of another version, or an answer that is none, 77 permission, 78 configuration.

Examples:
  wcache-launch --model-path /models/llama --tp-size 4 --port 30000
  wcache-launch --wcache-on-mismatch error --wcache-wait 600 -- --model-path /models/llama
  wcache-launch --wcache-explain=full --model-path /models/llama --dtype float16
  wcache-launch --weight-cache-mode daemon --model-path /models/llama
"""
