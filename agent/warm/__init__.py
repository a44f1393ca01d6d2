"""Warm workers: parked process trees that have imported SGLang and wait for a launch (docs/restart.md).

The launcher's side (pool, key, messages) is standard library only; the other modules run in the engine's interpreter.
"""
