"""`python -m weightcache.cli` is `wcache`."""

from __future__ import annotations

import sys

from weightcache.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
