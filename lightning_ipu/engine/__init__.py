"""Engines: what carries a plan out. `local` does it in one process, everything in turn."""
