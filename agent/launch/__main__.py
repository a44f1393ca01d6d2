"""``python -m weightcache.launch``."""

from weightcache.launch.main import main

if __name__ == "__main__":
    raise SystemExit(main())
