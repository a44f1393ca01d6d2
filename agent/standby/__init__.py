"""Active and standby engines that share a port (docs/standby.md): what launcher, engine and command line share.

Standard library only; nothing here imports SGLang, torch or the other processes' code.
"""
