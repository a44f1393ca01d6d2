"""wcache-top: the screen of an operator."""

import os

# Textual reads this when it is first imported. Over a slow line fewer, larger repaints look calmer and cost less.
if "SSH_CONNECTION" in os.environ:
    os.environ.setdefault("TEXTUAL_FPS", "15")
