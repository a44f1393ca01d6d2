"""wcache-launch: start SGLang with resident weights, and stay as its supervisor. Standard library only."""
