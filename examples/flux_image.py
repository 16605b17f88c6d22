"""A picture with Flux and diffusers. One line is turnout's: accelerate(pipeline).

python examples/flux_image.py /path/to/FLUX.1-dev "a lighthouse at dusk"
"""

import sys

import torch
from diffusers import FluxPipeline

import turnout

folder, prompt = sys.argv[1:3]
pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16).to("cuda")
print(turnout.accelerate(pipeline))  # the added line
pipeline(prompt, height=1024, width=1024, num_inference_steps=28).images[0].save("flux.png")
