"""Slow to import, and noisy; says where it is imported."""

import os
import sys
import time
from pathlib import Path

if "FAKE_IMPORTS" in os.environ:
    with (Path(os.environ["FAKE_IMPORTS"])).open("a") as log:
        log.write(f"{os.getpid()} {sys.argv[1:]!r}\n")
if "FAKE_ASK" in os.environ:
    import torch

    torch.cuda.get_device_capability()
time.sleep(float(os.environ.get("FAKE_IMPORT_SECONDS", "0.3")))
print("imported with a warning", file=sys.stderr)
os.environ["SET_BY_IMPORTS"] = "1"
