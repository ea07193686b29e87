"""A network as a row of layers from the input to the head: what comes first, and which weights belong together."""

from torch import nn

from frostglass.core.types import Shape
from frostglass.models.taps import STEPS, trace


def leaves(module: nn.Module) -> list[str]:
    """All layers without layers inside, in the order they were registered: activations, pools and norms included."""
    return [name for name, part in module.named_modules() if name and not any(part.children())]


def groups(module: nn.Module, image_shape: Shape, head: str) -> list[tuple[str, ...]]:
    """The layers before the head in order of execution, a convolution or linear layer together with the norms and the rest that follow it.

    What comes before the first of them belongs to it. A layer whose weights are used without calling it, as attention does, comes where
    the part around it finishes; what has no part in a forward pass is left out.
    """
    calls, _ = trace(module, image_shape)
    called = {call.name for call in calls}
    waiting = [name for name in leaves(module) if not inside(name, head)]
    found: list[list[str]] = [[]]
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
            if steps > len(found):
                found.append([])
            found[-1].append(name)
    return [tuple(group) for group in found if group]


def inside(name: str, block: str) -> bool:
    """Whether a layer is the block or part of it."""
    return name == block or name.startswith(f"{block}.")


def weights_by_leaf(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Every weight under the name of a layer: what a larger part owns besides, such as a transformer's positions, goes with its first layer."""
    simple = leaves(module)
    first = {
        ".".join(leaf.split(".")[:depth]): leaf
        for leaf in reversed(simple)
        for depth in range(1, leaf.count(".") + 2)
    }
    found: dict[str, list[nn.Parameter]] = {leaf: [] for leaf in simple}
    for name, part in module.named_modules():
        # A part all of whose layers are known under other names has no weights of its own that are not the network's.
        found[first.get(name, simple[0])] += part.parameters(recurse=False)
    return found
