import os

from weightcache.engine import directive as directives

at_import = os.environ.get("WEIGHTCACHE_DIRECTIVE")


def load_plugins(process: str) -> None:
    """As the plugin does: the directive is read here."""
    told = directives.read()
    if told is not None:
        directives.send_report(told, directives.PluginReady(os.getpid(), process, "0.0.0"))
        if process == "scheduler":
            directives.send_report(told, directives.Decision(0, "target", "disk", message="a test"))
