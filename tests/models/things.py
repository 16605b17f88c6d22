"""What users do to a model: each thing is done to a whole model in place, the same way every time."""

import copy
import types

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from turnout.models.patch import patched


def leaves(model):
    """Every module that has no module inside, by path."""
    return [(path, module) for path, module in model.named_modules() if not list(module.children())]


def layers(model, *, plain=False):
    """Linear layers and convolutions; plain: no classes derived from torch's."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return [
        (path, m) for path, m in leaves(model) if (stock_class(m) in kinds if plain else isinstance(m, kinds))
    ]


def stock_class(module):
    patch = patched(module)
    return type(module) if patch is None else patch.base


def changed(given, factor):
    """The tensors of an output or of inputs, times a factor."""
    if isinstance(given, torch.Tensor) and given.is_floating_point():
        return given * factor
    if isinstance(given, tuple):
        return tuple(changed(each, factor) for each in given)
    return given


def hooks_on_leaves(model, seen):
    for path, module in leaves(model):
        module.register_forward_hook(
            lambda module, args, out, path=path: seen.append(path) or changed(out, 1.03)
        )


def hooks_everywhere(model, seen):
    for path, module in model.named_modules():
        if path:
            module.register_forward_hook(lambda module, args, out, path=path: seen.append(path))


def pre_hooks(model, seen):
    for path, module in leaves(model):
        module.register_forward_pre_hook(
            lambda module, args, path=path: seen.append(path) or changed(args, 0.97)
        )


def one_hook(model, seen):
    """On a single convolution in the middle: what is around it stays fused."""
    path, module = layers(model)[len(layers(model)) // 2]
    module.register_forward_hook(lambda module, args, out: seen.append(path) or out * 1.5)


def global_hooks(model, seen):
    paths = {
        id(module): path for path, module in model.named_modules()
    }  # transformers makes other modules on the way
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, args, out: (id(m) in paths and seen.append(paths[id(m)])) or None
    )
    return handle.remove


def replaced_forwards(model, seen):
    for path, module in layers(model):
        stock = module.forward
        module.forward = lambda *args, stock=stock, path=path, **kwargs: (
            seen.append(path) or 0.9 * stock(*args, **kwargs)
        )


def offloaded(model, seen):
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))


def offloaded_in_blocks(model, seen):
    _group_offloading(model, offload_type="block_level", num_blocks_per_group=1)


def offloaded_in_leaves(model, seen):
    _group_offloading(model, offload_type="leaf_level")


def _group_offloading(model, **how):
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(
        model, onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), **how
    )


def cast_layerwise(model, seen):
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(model, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def lora(model, seen, *, merge=False):
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    torch.manual_seed(1)
    names = [path for path, m in layers(model, plain=True) if getattr(m, "groups", 1) == 1]
    inject_adapter_in_model(LoraConfig(r=2, target_modules=names, init_lora_weights=False), model)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer) and merge:
            module.merge()


def lora_merged(model, seen):
    lora(model, seen, merge=True)


def lora_deleted(model, seen):
    from peft.tuners.tuners_utils import BaseTunerLayer

    lora(model, seen)
    for path, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            above, _, name = path.rpartition(".")
            setattr(model.get_submodule(above), name, module.get_base_layer())


def weight_norms(model, seen):
    for _, module in layers(model):
        parametrizations.weight_norm(module)
        with torch.no_grad():
            module.parametrizations.weight.original0.mul_(1.1)


def old_weight_norms(model, seen):
    for _, module in layers(model):
        nn.utils.weight_norm(module)
        with torch.no_grad():
            module.weight_g.mul_(1.1)


def pruned(model, seen):
    for _, module in layers(model):
        prune.l1_unstructured(module, "weight", amount=0.5)


class Halved(nn.Module):
    """A layer in the place of another, as quantisation puts them there."""

    def __init__(self, layer):
        super().__init__()
        self.stock = layer
        self.in_features = getattr(layer, "in_features", None)

    @property
    def weight(self):
        return self.stock.weight

    @property
    def bias(self):
        return self.stock.bias

    def forward(self, x):
        return 0.5 * self.stock(x)


def replaced_layers(model, seen):
    for path, layer in layers(model, plain=True):
        above, _, name = path.rpartition(".")
        setattr(model.get_submodule(above), name, Halved(layer))


class Scaled(torch.Tensor):
    """A tensor whose products are not those of the numbers it holds."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        plain = [x.as_subclass(torch.Tensor) if isinstance(x, Scaled) else x for x in args]
        named = {
            k: x.as_subclass(torch.Tensor) if isinstance(x, Scaled) else x for k, x in (kwargs or {}).items()
        }
        out = func(*plain, **named)
        if func in (torch.Tensor.detach, torch.Tensor.requires_grad_):
            return out.as_subclass(Scaled)
        products = (nn.functional.linear, torch.conv2d, torch.conv3d)
        return 1.1 * out if func in products else out


def tensor_subclasses(model, seen):
    for _, layer in layers(model, plain=True):
        if stock_class(layer) is not nn.Conv1d:
            layer.weight = nn.Parameter(
                torch.Tensor._make_subclass(Scaled, layer.weight.detach()), requires_grad=False
            )


def gathered(model, seen):
    """As DeepSpeed's third stage does: a weight has no elements until a hook brings them."""
    for _, module in leaves(model):
        for name, parameter in module.named_parameters(recurse=False):
            whole = parameter.data

            def bring(module, args, name=name, whole=whole):
                getattr(module, name).data = whole

            def drop(module, args, out, name=name, whole=whole):
                getattr(module, name).data = whole.new_empty(0)

            module.register_forward_pre_hook(bring)
            module.register_forward_hook(drop)
            parameter.data = whole.new_empty(0)


def dropouts_in_training(model, seen):
    """Dropout that drops nothing, in training mode: stock calls it all the same."""
    model.train()


def copied(model, seen):
    """A model whose parts were replaced by copies of themselves."""
    for name, child in list(model.named_children()):
        setattr(model, name, copy.deepcopy(child))


def bound_forward(model, seen):
    """A user's own method on an inner block."""
    blocks = [
        m
        for m in model.modules()
        if list(m.children()) and m is not model and not isinstance(m, nn.ModuleList | nn.Sequential)
    ]
    block = blocks[len(blocks) // 2]
    stock = type(block).forward

    def forward(self, *args, **kwargs):
        seen.append("block")
        return changed(stock(self, *args, **kwargs), 0.8)

    block.forward = types.MethodType(forward, block)


def two_loras(model, seen):
    """Both active, with weights of their own, as `set_adapters` sets them."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    torch.manual_seed(1)
    names = [path for path, m in layers(model, plain=True) if getattr(m, "groups", 1) == 1]
    for name in ("one", "other"):
        inject_adapter_in_model(
            LoraConfig(r=2, target_modules=names, init_lora_weights=False), model, adapter_name=name
        )
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter(["one", "other"])
            module.set_scale("one", 0.3)
            module.set_scale("other", 0.8)


def other_eps(model, seen):
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.1)


def without_biases(model, seen):
    for _, module in layers(model):
        if module._parameters.get("bias") is not None:
            module.bias = None


def other_activations(model, seen):
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.SiLU):
            above, _, name = path.rpartition(".")
            setattr(model.get_submodule(above), name, nn.ReLU())


def seamless(model, seen):
    """Pictures without seams, as their users make them: convolutions that pad in a circle."""
    for _, layer in layers(model):
        if isinstance(layer, nn.Conv2d | nn.Conv3d):
            layer.padding_mode = "circular"


def own_conv_forward(model, seen):
    """The other way to make them: a method in the place of `_conv_forward`."""
    for path, layer in layers(model):
        if isinstance(layer, nn.Conv2d | nn.Conv3d):

            def conv_forward(self, x, weight, bias, path=path):
                seen.append(path)
                return 1.1 * type(self)._conv_forward(self, x, weight, bias)

            layer._conv_forward = types.MethodType(conv_forward, layer)


def few_hooks(model, seen):
    """What is around them stays fused, and they run as often as on stock all the same."""
    paths = [path for path, _ in model.named_modules() if path]
    for path in paths[5::11]:
        model.get_submodule(path).register_forward_hook(
            lambda module, args, out, path=path: seen.append(path) or changed(out, 1.03)
        )


def dropouts_alone(model, seen):
    """In training mode while the rest is not, as for uncertainties. All is dropped: which places would be
    drawn follows from the layout."""
    for _, module in leaves(model):
        if isinstance(module, nn.Dropout):
            module.p, module.training = 1.0, True


def classes_patched(model, seen):
    """The forwards of torch's classes."""
    kinds = (nn.SiLU, nn.GroupNorm, nn.LayerNorm, nn.Linear, nn.Conv2d, nn.Conv3d)
    stock = {cls: cls.forward for cls in kinds}
    for cls, forward in stock.items():
        cls.forward = lambda module, x, forward=forward, name=cls.__name__: (
            seen.append(name) or 0.9 * forward(module, x)
        )
    return lambda: [setattr(cls, "forward", forward) for cls, forward in stock.items()]


_FUNCTIONS = ("silu", "linear", "conv2d", "conv3d", "group_norm", "layer_norm", "gelu")


def functions_patched(model, seen):
    """Those of torch.nn.functional, as profilers patch them."""
    stock = {name: getattr(nn.functional, name) for name in _FUNCTIONS}
    for name, function in stock.items():
        setattr(
            nn.functional, name, lambda *args, function=function, **named: 0.95 * function(*args, **named)
        )
    return lambda: [setattr(nn.functional, name, function) for name, function in stock.items()]


def function_mode(model, seen):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            return 0.95 * out if getattr(function, "__name__", "") in _FUNCTIONS else out

    mode = Mode()
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


def noisy_loras(model, seen):
    """Their dropout draws random numbers: layers are called in the order of the stock code."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(1)
    names = [path for path, m in layers(model, plain=True) if isinstance(m, nn.Linear)]
    if hasattr(model, "blocks") or hasattr(model, "transformer_blocks"):  # elsewhere layouts differ
        config = LoraConfig(r=2, target_modules=names, init_lora_weights=False, lora_dropout=0.2)
        inject_adapter_in_model(config, model)


THINGS = {
    thing.__name__: thing
    for thing in (
        hooks_on_leaves,
        hooks_everywhere,
        pre_hooks,
        one_hook,
        global_hooks,
        replaced_forwards,
        offloaded,
        offloaded_in_blocks,
        offloaded_in_leaves,
        cast_layerwise,
        lora,
        lora_merged,
        lora_deleted,
        weight_norms,
        old_weight_norms,
        pruned,
        replaced_layers,
        tensor_subclasses,
        gathered,
        dropouts_in_training,
        copied,
        bound_forward,
        seamless,
        own_conv_forward,
        two_loras,
        other_eps,
        without_biases,
        other_activations,
        few_hooks,
        dropouts_alone,
        classes_patched,
        functions_patched,
        function_mode,
        noisy_loras,
    )
}
