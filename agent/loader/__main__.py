"""``python -m weightcache.loader ROLE``: the only part of weightcache that opens a device.

Runs in the operator's SGLang environment. Roles: load (one SGLang launch that publishes), lookout (does a load of
other hosts wait for this one?), check (map a resident set
and recompute its digests), doctor (what this environment can do), parity (is an attached engine what a disk load is?).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from weightcache.errors import WeightcacheError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one role; errors are one sentence on stderr and the error's exit status."""
    from weightcache.loader import check, doctor, load, lookout
    from weightcache.parity import role as parity

    parser = argparse.ArgumentParser(prog="weightcache.loader", description=__doc__.partition("\n")[0])
    roles = parser.add_subparsers(dest="role", required=True)
    for name, module in (
        ("load", load),
        ("lookout", lookout),
        ("check", check),
        ("doctor", doctor),
        ("parity", parity),
    ):
        role = roles.add_parser(name, help=(module.__doc__ or "").partition("\n")[0])
        module.add_arguments(role)
        role.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except WeightcacheError as error:
        if os.environ.get("WEIGHTCACHE_TRACEBACK"):
            raise
        print(f"weightcache-loader: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
