"""Text with Mamba and transformers, without causal-conv1d or mamba-ssm. Without a folder: random weights,
which shows the speed only.

python examples/mamba_text.py [/path/to/mamba-790m-hf "Once upon a time"]
"""

import sys
import time

import torch
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM

import turnout

device = "cuda" if torch.cuda.is_available() else "cpu"
if len(sys.argv) == 3:
    model = MambaForCausalLM.from_pretrained(sys.argv[1], torch_dtype=torch.bfloat16).to(device)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    prompt = tokenizer(sys.argv[2], return_tensors="pt").input_ids.to(device)
else:
    tokenizer = None
    model = (
        MambaForCausalLM(MambaConfig(hidden_size=256, num_hidden_layers=4, vocab_size=1000)).to(device).eval()
    )
    prompt = torch.randint(1000, (1, 128), device=device)


def generate():
    before = time.perf_counter()
    tokens = model.generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=0, eos_token_id=None)
    return tokens, time.perf_counter() - before


with torch.no_grad():
    generate()
    print(f"stock        {generate()[1]:.2f} s")
    print(turnout.accelerate(model))
    generate()
    tokens, seconds = generate()
print(f"accelerated  {seconds:.2f} s")
if tokenizer is not None:
    print(tokenizer.decode(tokens[0]))
