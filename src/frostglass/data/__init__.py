"""Datasets, and the split into private and public images."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.data._splits import make_split
    from frostglass.data.afhq import Afhq
    from frostglass.data.base import Dataset, datasets
    from frostglass.data.celeba import Celeba
    from frostglass.data.cifar10 import Cifar10
    from frostglass.data.digits import Digits
    from frostglass.data.faces import Faces
    from frostglass.data.facescrub import Facescrub
    from frostglass.data.ffhq import Ffhq
    from frostglass.data.folder import Folder
    from frostglass.data.half import Half
    from frostglass.data.hf import HuggingFace
    from frostglass.data.lfw import Lfw
    from frostglass.data.mnist import Mnist
    from frostglass.data.stanford_dogs import StanfordDogs
    from frostglass.data.vggface2 import Vggface2

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
