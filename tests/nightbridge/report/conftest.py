"""What tests of the report share."""

import pickle
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest

from nightbridge.report import night_page


@pytest.fixture(scope="session", autouse=True)
def drawn_once() -> Iterator[None]:
    """Pages of the same nights have the same charts: each is drawn for the first of them, in a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("nights_chart", "steps_chart", "spread_chart"):
            patch.setattr(night_page, name, _remembered(getattr(night_page, name)))
        yield


def _remembered(draw: Callable[..., str]) -> Callable[..., str]:
    drawings: dict[bytes, str] = {}

    @wraps(draw)
    def drawing(*given: Any, **options: Any) -> str:
        key = pickle.dumps((given, options))
        if key not in drawings:
            drawings[key] = draw(*given, **options)
        return drawings[key]

    return drawing
