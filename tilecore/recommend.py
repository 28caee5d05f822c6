"""Tile recommendation: placeholder until the cost model below lands in this session."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tilecore.contract.spec import Spec
from tilecore.ir import Program
from tilecore.profile import HardwareProfile
from tilecore.target import Target


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A configuration and why it was chosen."""

    config: Mapping[str, int]
    why: str


def recommend(spec: Spec, at: Callable[[Mapping[str, int] | None], Program], profile: HardwareProfile, target: Target) -> Recommendation:
    raise ValueError("give a config")
