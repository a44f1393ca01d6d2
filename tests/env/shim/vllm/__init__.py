"""Stands in for vLLM in the CPU test engine, where SGLang imports three of its kernels without calling them."""
