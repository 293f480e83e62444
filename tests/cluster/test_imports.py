from __future__ import annotations

import gc

import pytest

from verl.cluster.imports import quick_imports


@pytest.mark.parametrize("collects", [True, False])
def test_nothing_is_collected_meanwhile(collects: bool) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if collects else gc.disable()
        with pytest.raises(ImportError), quick_imports():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == collects
    finally:
        gc.enable() if was else gc.disable()
        gc.unfreeze()
