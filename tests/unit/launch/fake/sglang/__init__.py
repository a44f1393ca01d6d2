"""A stand-in for SGLang that plays a script instead of serving."""
