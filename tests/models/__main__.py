"""``python -m tests.models smollm2`` or ``python -m tests.models tiny [FAMILY [OPTION...]]``: prints the folder."""

import sys

from tests import models

MAKERS = {"smollm2": models.smollm2, "tiny": models.tiny}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in MAKERS:
        sys.exit(__doc__)
    print(MAKERS[sys.argv[1]](*sys.argv[2:]))
