"""The IR-50 that inversion papers call FaceNet: FaceNet64 for 64 px and FaceNet112 for 112 px."""

from torch import nn

from frostglass.core.types import Shape
from frostglass.models.architectures._ir import ir
from frostglass.models.base import models


@models.register
def facenet(*, classes: int, image_shape: Shape, width: int = 64) -> nn.Module:
    """24 improved residual units, dropout, a 512-d embedding with batch norm, and a linear head.

    Four stages of 3, 4, 14 and 3 units: IR-50, not the FaceNet of Schroff et al. For 1000 classes
    35.44 million weights at 64 px (FaceNet64) and 44.09 million at 112 px (FaceNet112). Checkpoints
    of face.evoLVe can be read at the image size they were made for, or in parts.

    Paper: Deng, Guo, Xue, Zafeiriou, ArcFace, 2019 (arXiv:1801.07698), in the code of face.evoLVe,
    2021 (arXiv:2107.08621); this head: Zhang et al., 2020 (arXiv:1911.07135). Differs: images of
    any size, grey or colour, where the code takes 64 and 112 px in colour; random initial weights
    unless starting weights are given.

    Args:
        width: channels of the first stage; the others have 2, 4 and 8 times as many, the embedding
            as many as the last. 64 is IR-50.
    """
    return ir("facenet", (3, 4, 14, 3), classes=classes, image_shape=image_shape, width=width)
