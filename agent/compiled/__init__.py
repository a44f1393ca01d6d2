"""Compiled kernels that outlive engines: one directory for each environment, what is in it, and when it goes."""
