"""The one timer, and what is built on it: sweeps, rooflines, reports."""
