"""The device side: load through SGLang, export, pack, digest, publish, check."""
