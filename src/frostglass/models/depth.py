"""The order of a network's layers from the input to the head, and the weights of each layer."""

from torch import nn

from frostglass.core.types import Shape
from frostglass.models.taps import STEPS, trace


def leaves(module: nn.Module) -> list[str]:
    """Return the layers without sub-layers, in the order they were registered."""
    return [name for name, part in module.named_modules() if name and not any(part.children())]


def groups(module: nn.Module, image_shape: Shape, head: str) -> list[tuple[str, ...]]:
    """Group the layers before the head in order of execution, one group per weighted layer.

    A group is a convolution or linear layer with the norms and other layers that follow it; layers
    before the first one belong to it. A layer whose weights are used without calling it, as in
    attention, comes where the part around it finishes. Layers that do not run are left out.
    """
    calls, _ = trace(module, image_shape)
    called = {call.name for call in calls}
    waiting = [name for name in leaves(module) if not inside(name, head)]
    ordered: list[list[str]] = [[]]
    steps = 0
    for call in calls:
        # A layer that runs twice counts where it runs first.
        done = [
            name
            for name in waiting
            if name == call.name or (name not in called and call.name and inside(name, call.name))
        ]
        waiting = [name for name in waiting if name not in done]
        for name in done:
            steps += isinstance(module.get_submodule(name), STEPS)
            if steps > len(ordered):
                ordered.append([])
            ordered[-1].append(name)
    return [tuple(group) for group in ordered if group]


def inside(name: str, block: str) -> bool:
    """Return whether a layer is the block or part of it."""
    return name == block or name.startswith(f"{block}.")


def weights_by_leaf(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return every weight under the name of a layer without sub-layers.

    Weights that a larger part owns itself, such as a transformer's positions, go with the first
    layer of that part.
    """
    simple = leaves(module)
    first = {
        ".".join(leaf.split(".")[:depth]): leaf
        for leaf in reversed(simple)
        for depth in range(1, leaf.count(".") + 2)
    }
    weights: dict[str, list[nn.Parameter]] = {leaf: [] for leaf in simple}
    for name, part in module.named_modules():
        # A part whose layers are all known under other names adds only weights of the network.
        weights[first.get(name, simple[0])] += part.parameters(recurse=False)
    return weights
