"""A stand-in for SGLang whose server spawns children through multiprocessing, as the real one does."""
