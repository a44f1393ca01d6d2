"""How a command ends: with its exit status, or with one sentence and a status for whatever went wrong."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from weightcache.errors import WeightcacheError
from weightcache.text import escape

EX_OUTPUT = 74
EX_CLOSED_PIPE = 128 + 13
EX_INTERRUPTED = 128 + 2


def orderly(program: str, run: Callable[[], int]) -> int:
    """Call ``run``, which may print, and return the exit status. Sentences on stderr begin with ``program``."""
    if hasattr(sys.stdout, "reconfigure"):
        # A terminal that cannot show a character is no reason to show nothing.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = run()
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return EX_CLOSED_PIPE
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return EX_INTERRUPTED
    except WeightcacheError as error:
        return _complain(program, error.message, error.exit_status)
    except OSError as error:
        if error.filename is not None:
            return _internal(program, error)
        # Commands turn their own system errors into sentences: this one is the output's.
        _silence_stdout()
        return _complain(program, f"the output could not be written ({error.strerror})", EX_OUTPUT)
    except Exception as error:  # noqa: BLE001 - the last resort: one sentence instead of a traceback
        return _internal(program, error)
    return status


def _internal(program: str, error: Exception) -> int:
    text = f"internal error: {type(error).__name__}: {error} (WEIGHTCACHE_TRACEBACK=1 shows where)"
    return _complain(program, text, WeightcacheError.exit_status)


def _silence_stdout() -> None:
    # The interpreter flushes stdout once more on its way out; what is left in the buffer goes nowhere.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _complain(program: str, message: str, status: int) -> int:
    if os.environ.get("WEIGHTCACHE_TRACEBACK"):
        traceback.print_exc()
    print(f"{program}: {escape(message)}", file=sys.stderr)
    return status
