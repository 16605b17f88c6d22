"""torch.func on accelerated models: what stock can do they can, with the same results."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import turnout
from tests.models.zoo import ZOO, made

pytestmark = pytest.mark.filterwarnings("ignore")


class Called(nn.Module):
    """A model of the zoo with the call that the zoo makes of it."""

    def __init__(self, name):
        super().__init__()
        self.model, self.call = made(name).requires_grad_(False), ZOO[name][1]

    def forward(self):
        return self.call(self.model)


def other_weights(called):
    return {key: 1.1 * x if x.is_floating_point() else x for key, x in called.state_dict().items()}


def with_other_weights(called):
    called()  # what is remembered of the model's own weights is not asked about the others
    return torch.func.functional_call(called, other_weights(called), ())


def forward_derivatives(called):
    weights = {key: x for key, x in called.state_dict().items() if x.is_floating_point()}
    directions = {key: 0.1 * x for key, x in weights.items()}
    return torch.func.jvp(
        lambda given: torch.func.functional_call(called, given, ()), (weights,), (directions,)
    )[1]


def gradients(called):
    weights = {key: x.detach() for key, x in called.named_parameters()}

    def loss(given):
        return torch.func.functional_call(called, given, ()).square().mean()

    return torch.cat([x.flatten() for x in torch.func.grad(loss)(weights).values()])


def several_weights(called):
    weights = {key: torch.stack([x, other_weights(called)[key]]) for key, x in called.named_parameters()}
    return torch.vmap(lambda given: torch.func.functional_call(called, given, ()))(weights)


def assigned(called):
    called()
    called.load_state_dict(other_weights(called), assign=True)
    return called()


@pytest.mark.parametrize(
    "transform",
    [with_other_weights, forward_derivatives, gradients, several_weights, assigned],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize(
    "name",
    [
        "flux-vae",
        "wan",
        "wan22",
        "ltx",
        "ltx2",
        "cogvideox",
        "hunyuan",
        "flux",
        "wan-transformer",
        "qwen-image",
        "unet",
    ],
)
def test_transforms_of_accelerated_models_are_those_of_stock(name, transform):
    called = Called(name).eval()
    fast = Called(name).eval()
    turnout.accelerate(fast)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no forward derivative
        try:
            expected = transform(called)
        except RuntimeError:
            return  # nor can stock
        actual = transform(fast)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
