"""A network as a row of layers from the input to the head: what comes first, and which weights belong together."""

from torch import nn

from frostglass.models.base import inner
from frostglass.models.taps import STEPS, trace
from frostglass.types import Shape


def leaves(module: nn.Module) -> list[str]:
    """All layers without layers inside, in the order they were registered: activations, pools and norms included."""
    return [name for name, part in module.named_modules() if name and not any(part.children())]


def groups(module: nn.Module, image_shape: Shape, head: str) -> list[tuple[str, ...]]:
    """The layers before the head in order of execution, a convolution or linear layer together with the norms and the rest that follow it.

    What comes before the first of them belongs to it. Layers that never run are left out.
    """
    waiting = {name for name in leaves(module) if not inside(name, head)}
    found: list[list[str]] = [[]]
    steps = 0
    for call in trace(module, image_shape)[0]:
        if call.name in waiting:
            waiting.remove(call.name)  # a layer that runs twice counts where it runs first
            steps += isinstance(call.layer, STEPS)
            if steps > len(found):
                found.append([])
            found[-1].append(call.name)
    return [tuple(group) for group in found if group]


def inside(name: str, block: str) -> bool:
    """Whether a layer is the block or part of it."""
    return name == block or name.startswith(f"{block}.")


def weights_by_leaf(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Every weight under the name of a layer: what a larger part owns besides goes with the last of its layers, and what the whole network
    owns (such as a transformer's positions) with the first.
    """
    simple = leaves(module)
    last = {".".join(leaf.split(".")[:depth]): leaf for leaf in simple for depth in range(1, leaf.count(".") + 2)}
    found: dict[str, list[nn.Parameter]] = {leaf: [] for leaf in simple}
    for name, part in module.named_modules():
        whole = part is module or part is inner(module)
        found[simple[0] if whole and simple else last[name]] += part.parameters(recurse=False)
    return found
