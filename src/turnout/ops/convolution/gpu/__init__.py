"""Convolutions by our own GPU kernels.

`routes.py` leads in: refusals and costs, in terms of a `Task` (`task.py`). `tiles.py` gives the
configurations, `launches.py` launches them, the `*kernels.py` files are what a card runs.
"""
