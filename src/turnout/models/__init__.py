"""Real models down the fast tracks: accelerate, restore, accelerated, and decoding while latents arrive."""

from turnout.models.accelerate import Report, accelerate, accelerated, restore
from turnout.models.wan import DecodeStream

__all__ = ["DecodeStream", "Report", "accelerate", "accelerated", "restore"]
