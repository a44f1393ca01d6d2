import sys

from sglang.srt import plugins, server_args

if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server

    plugins.load_plugins("main")
    if "--bad" in sys.argv:
        sys.exit(2)
    if "--die-at-once" in sys.argv:
        sys.exit(5)
    assert server_args
    launch_server(sys.argv[1:])
