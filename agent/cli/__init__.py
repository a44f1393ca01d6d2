"""The command `wcache`: everything an operator asks of the agents of one host."""
