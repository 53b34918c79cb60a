"""The peer's and NeMo's own modules, for every file of this folder."""

from tests.read.test_nemo2_plugin import nemo
from tests.recipes.test_peer import peer, wheel

__all__ = ["nemo", "peer", "wheel"]
