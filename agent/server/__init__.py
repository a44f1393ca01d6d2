"""The resident agent of one rank: standard library only, no torch, no CUDA, one event loop."""
