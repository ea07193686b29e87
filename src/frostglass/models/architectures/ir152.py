"""IR-152, the largest of the three low-resolution face classifiers that inversion papers attack."""

from torch import nn

from frostglass.core.types import Shape
from frostglass.models.architectures._ir import ir
from frostglass.models.base import models


@models.register
def ir152(*, classes: int, image_shape: Shape, width: int = 64) -> nn.Module:
    """50 improved residual units, dropout, a 512-d embedding with batch norm, and a linear head.

    Four stages of 3, 8, 36 and 3 units. 62.60 million weights for 1000 classes at 64 px.
    Checkpoints of face.evoLVe can be read at the image size they were made for, or in parts.

    Paper: Deng, Guo, Xue, Zafeiriou, ArcFace, 2019 (arXiv:1801.07698), in the code of face.evoLVe,
    2021 (arXiv:2107.08621); this head: Zhang et al., 2020 (arXiv:1911.07135). Differs: as
    `facenet`, it takes images of any size, grey or colour, not only 64 and 112 px in colour, and
    starts with random weights unless starting weights are given.

    Args:
        width: channels of the first stage; the others have 2, 4 and 8 times as many, the embedding
            as many as the last. 64 is IR-152.
    """
    return ir("ir152", (3, 8, 36, 3), classes=classes, image_shape=image_shape, width=width)
