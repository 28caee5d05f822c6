"""The cost model that the scan asks: the fuser's view of nodes joined with the compiler's predictions for a machine.

Comes in: a hardware profile. Goes out: a `fuser.worth.CostModel`. Equal specs are predicted once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fuser.region import Prediction
from fuser.worth import Work
from tilecore.canonical import canonical
from tilecore.contract.spec import ContractionSpec, RowSpec, Spec
from tilecore.predict import Predictor
from tilecore.profile import HardwareProfile
from tilecore.target import Target

TIE = 1.05  # predictions closer than this say nothing: fewer nodes are better then
JITTER = 1e-6  # seconds: nor do differences of less


@dataclass(slots=True)
class MachineCost:
    """Predictions for one machine; with `fuse_all`, nothing is declined on their account."""

    predictor: Predictor
    fuse_all: bool = False
    _kernels: dict[Spec, float] = field(default_factory=dict[Spec, float])
    _products: dict[Spec, float] = field(default_factory=dict[Spec, float])
    _merges: dict[Spec, bool] = field(default_factory=dict[Spec, bool])

    def merges(self, spec: Spec) -> bool:
        """Whether one kernel for all products is predicted to be no slower than one each."""
        key = canonical(spec)
        if not isinstance(key, ContractionSpec):
            return False
        if key not in self._merges:
            self._merges[key] = self._kernel(key) <= TIE * self.predictor.apart(key)
        return self._merges[key]

    def sizes(self, spec: Spec) -> Mapping[str, int]:
        """The sizes that predictions are for."""
        return self.predictor.sizes(spec)

    def predict(self, spec: Spec, nodes: tuple[Work, ...], sizes: Mapping[str, int]) -> Prediction:
        """Both costs of a region."""
        key = canonical(spec)
        fused = self._kernel(key)
        if isinstance(key, RowSpec):
            unfused = sum(self.predictor.operator(work.moved, work.operations) for work in nodes)
        elif isinstance(key, ContractionSpec):
            others = [work for work in nodes if not work.multiplies]
            unfused = self._bare(key) + sum(self.predictor.operator(work.moved, work.operations) for work in others)
        else:
            unfused = fused + sum(self.predictor.operator(work.moved, 0) for work in nodes[1:])
        return Prediction(fused, unfused, sizes)

    def accepts(self, prediction: Prediction) -> bool:
        """Whether one kernel is predicted to be no slower."""
        return self.fuse_all or prediction.fused <= TIE * prediction.unfused + JITTER

    def _bare(self, spec: ContractionSpec) -> float:
        if spec not in self._products:
            self._products[spec] = self.predictor.products(spec)
        return self._products[spec]

    def _kernel(self, spec: Spec) -> float:
        if spec not in self._kernels:
            self._kernels[spec] = self.predictor.kernel(spec)
        return self._kernels[spec]


def machine_cost(profile: HardwareProfile, target: Target, *, fuse_all: bool) -> MachineCost:
    """The cost model of a machine."""
    return MachineCost(Predictor(profile, target), fuse_all)
