"""Turn frames into pictures."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor


def frame(output: Tensor, which: int = 0) -> Tensor:
    """Convert one frame of `[B, 3, H, W]` or `[B, 3, T, H, W]` in [-1, 1] to `[H, W, 3]` bytes."""
    picture = output[0] if output.dim() == 4 else output[0, :, min(which, output.shape[2] - 1)]
    return ((picture.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def side_by_side(*frames: Tensor, gap: int = 8) -> Tensor:
    """Put frames `[H, W, 3]` of one height next to each other, with white between them."""
    white = torch.full((frames[0].shape[0], gap, 3), 255, dtype=torch.uint8)
    parts = [part for picture in frames for part in (picture, white)]
    return torch.cat(parts[:-1], 1)


def load_pillow() -> Any:
    """Import Pillow's Image; raise ValueError if it is not installed."""
    try:
        from PIL import Image
    except ImportError as missing:
        raise ValueError(
            "Pillow is not installed, --report needs it: pip install 'turnout[race]'"
        ) from missing
    return Image


def png(picture: Tensor) -> bytes:
    """Encode `[H, W, 3]` bytes as a PNG file."""
    file = io.BytesIO()
    load_pillow().fromarray(picture.numpy()).save(file, format="PNG")
    return file.getvalue()
