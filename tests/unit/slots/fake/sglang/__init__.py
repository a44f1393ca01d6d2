"""A stand-in for SGLang in a slot: real locks, a real channel, and an HTTP server that says who answered."""
