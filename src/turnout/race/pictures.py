"""Frames as PNG, without a picture library."""

from __future__ import annotations

import struct
import zlib

import torch
from torch import Tensor


def frame(output: Tensor, which: int = 0) -> Tensor:
    """One frame of `[B, 3, H, W]` or `[B, 3, T, H, W]` in [-1, 1] as `[H, W, 3]` bytes."""
    picture = output[0] if output.dim() == 4 else output[0, :, min(which, output.shape[2] - 1)]
    return ((picture.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def side_by_side(*frames: Tensor, gap: int = 8) -> Tensor:
    """Frames of one height next to each other, white between them."""
    white = torch.full((frames[0].shape[0], gap, 3), 255, dtype=torch.uint8)
    parts = [part for picture in frames for part in (picture, white)]
    return torch.cat(parts[:-1], 1)


def png(picture: Tensor) -> bytes:
    """`[H, W, 3]` bytes as a PNG file."""
    height, width, _ = picture.shape
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in picture)  # each row is told to be unfiltered

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, colour
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 6)) + chunk(b"IEND", b"")
