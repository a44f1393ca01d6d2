"""``python -m weightcache.warm FD PADDING``: a parked main process (started by wcache-launch only)."""

from weightcache.warm.parked import main

if __name__ == "__main__":
    main()
