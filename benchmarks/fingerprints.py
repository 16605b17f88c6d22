"""Try every small model of the tests with the releases of diffusers and transformers that are installed, and
add the fingerprints of the
classes in those that agree: python benchmarks/fingerprints.py

Other releases can lie in a folder of their own: pip install --no-deps --target DIR diffusers==0.41.0, then
PYTHONPATH=DIR.
"""

import sys
import warnings

import torch

import turnout
from tests.models.zoo import CLIPS, ZOO, made, random
from turnout.models import stock
from turnout.models.accelerate import KNOWN, _instances, _key


def outputs(name: str, model: torch.nn.Module) -> list[torch.Tensor]:
    result = [ZOO[name][1](model)]
    if name in CLIPS:
        result.append(model.encode(random(*CLIPS[name])).latent_dist.mean)
    return result


def agrees(name: str) -> set[str] | None:
    """The known classes in a model that says the same accelerated; None where it does not, or is not in this
    release.
    """
    try:
        model = made(name)
        with torch.no_grad():
            expected = outputs(name, model)
            turnout.accelerate(model)
            actual = outputs(name, model)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error)[:100]}")
        return None
    worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(actual, expected, strict=True))
    print(f"{name}: {worst:.1e}")
    return {key for _, each in _instances(model) if (key := _key(each, KNOWN))} if worst <= 3e-5 else None


def main() -> None:
    warnings.simplefilter("ignore")
    stock.unlike_stock = lambda *_: iter(())
    tried = {name: agrees(name) for name in ZOO}
    keys = set().union(*(keys for keys in tried.values() if keys))
    failed = [name for name, keys in tried.items() if not keys]
    print(f"{stock.add_installed(KNOWN, keys)} added to {stock.TABLE.name}; failed: {failed}")


if __name__ == "__main__":
    sys.exit(main())
