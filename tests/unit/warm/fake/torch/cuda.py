"""Initialised by the first question, as the real one."""

import os

_initialised = False


def is_initialized() -> bool:
    return _initialised


def get_device_capability(device=None):
    global _initialised
    _initialised = True
    return (int(os.environ.get("FAKE_CAPABILITY", "0")), 0)


def is_available() -> bool:
    return False


def device_count() -> int:
    return 0


current_device = get_device_name = get_device_properties = get_device_capability
