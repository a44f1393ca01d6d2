"""What each start of an engine spent its time on: written while it starts, read afterwards. Standard library only."""
