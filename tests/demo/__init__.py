"""``make demo``: the main job on this machine's CPU, with a real SGLang and a real model."""
