"""Count calls in tests."""

from typing import Any

import pytest
import torch.nn.functional as F


class Counted:
    """Counts the calls of a function of torch.nn.functional."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "batch_norm") -> None:
        self.calls, usual = 0, getattr(F, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return usual(*args, **kwargs)

        monkeypatch.setattr(F, name, counting)
