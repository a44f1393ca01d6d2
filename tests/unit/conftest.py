"""What all unit tests share."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes is the machine's business, which may be busy; --timeout ends what hangs.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
