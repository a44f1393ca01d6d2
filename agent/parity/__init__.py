"""Whether an engine that attached is the engine that a disk load would have been: `wcache parity`."""
