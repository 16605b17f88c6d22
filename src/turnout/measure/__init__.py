"""Measuring: the one timer, checks of outputs against float64, `tune`, and what peers need to be measured
fairly.
"""
