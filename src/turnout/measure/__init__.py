"""Measuring: the timer, the verification of outputs against float64, `tune`, and wrappers for peers."""
