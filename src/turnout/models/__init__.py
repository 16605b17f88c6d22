"""Real models down the fastest routes: accelerate, restore, accelerated, decoding while latents arrive."""

from turnout.models.accelerate import Report, accelerate, accelerated, restore
from turnout.models.decode_stream import DecodeStream

__all__ = ["DecodeStream", "Report", "accelerate", "accelerated", "restore"]
