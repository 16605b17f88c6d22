"""A video with Wan and diffusers. One line is turnout's: accelerate(pipeline).

python examples/wan_video.py /path/to/Wan2.1-T2V-1.3B-Diffusers "a cat walks through snow"
"""

import sys

import torch
from diffusers import WanPipeline
from diffusers.utils import export_to_video

import turnout

folder, prompt = sys.argv[1:3]
pipeline = WanPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16).to("cuda")
print(turnout.accelerate(pipeline))  # the added line
frames = pipeline(prompt, height=480, width=832, num_frames=81).frames[0]
export_to_video(frames, "wan.mp4", fps=16)
