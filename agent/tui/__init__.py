"""wcache-top: the screen of an operator."""
