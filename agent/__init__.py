"""weightcache: keeps one rank's model weights in GPU memory and hands them to SGLang engines without a copy."""

__version__ = "0.1.0"
