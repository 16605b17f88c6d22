"""Benchmarks of single calls: sweeps over an op's cases, rooflines, reports, what the router adds."""
