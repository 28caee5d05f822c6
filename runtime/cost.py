"""The cost models that the scan asks: the fuser's view of nodes joined with the compiler's predictions for a machine.

Comes in: a hardware profile, or none for NVIDIA cards. Goes out: a `fuser.worth.CostModel`. Equal specs are judged
once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fuser.region import Prediction
from fuser.unfused import Work
from fuser.worth import CostModel, Everything
from tilecore.canonical import canonical
from tilecore.contract.dtype import DType
from tilecore.contract.few_rows import rounded_on_the_way
from tilecore.contract.narrow import narrowed
from tilecore.contract.spec import AttentionSpec, ContractionSpec, Spec
from tilecore.cuda.profile import GpuProfile
from tilecore.cuda.region import refusal
from tilecore.predict import Predictor
from tilecore.profile import HardwareProfile
from tilecore.target import Target

TIE = 1.1  # predictions closer than this say nothing: fewer nodes are better then
TIE_OF_ATTENTION = 1.6  # predictions of attention err by that much, on what surrounds its products most of all
TIE_OF_LEVELS = 1.6  # left alone, levels lose what ONNX Runtime needs around them to sum integers: regions take that
JITTER = 5e-6  # seconds: nor do differences of less; a node of a few elements alone costs about 2 µs


@dataclass(slots=True)
class MachineCost:
    """Predictions for one machine; with `fuse_all`, nothing is declined on their account.

    With `narrow`, operands of products will be rounded to bfloat16, and it is such kernels that are judged.
    """

    predictor: Predictor
    fuse_all: bool = False
    narrow: bool = False
    _kernels: dict[Spec, float] = field(default_factory=dict[Spec, float])
    _merges: dict[Spec, bool] = field(default_factory=dict[Spec, bool])

    def refuses(self, spec: Spec) -> str | None:
        """None: what the processor has no code for is found when it is compiled."""
        return None

    def merges(self, spec: Spec) -> bool:
        """Whether one kernel for all products is predicted to be no slower than one each."""
        key = self._compiled(spec)
        if not isinstance(key, ContractionSpec):
            return False
        if key not in self._merges:
            self._merges[key] = self.predictor.kernel(key, weights=False) <= TIE * self.predictor.apart(key)
        return self._merges[key]

    def sizes(self, spec: Spec) -> Mapping[str, int]:
        """The sizes that predictions are for."""
        return self.predictor.sizes(spec)

    def predict(self, spec: Spec, nodes: tuple[Work, ...], sizes: Mapping[str, int]) -> Prediction:
        """Both costs of a region."""
        tie = TIE_OF_ATTENTION if isinstance(spec, AttentionSpec) else TIE
        if isinstance(spec, ContractionSpec) and spec.acc.dtype is DType.I32:
            tie = TIE_OF_LEVELS
        return Prediction(self._kernel(self._compiled(spec)), self.predictor.operators(nodes), sizes, tie)

    def accepts(self, prediction: Prediction) -> bool:
        """Whether one kernel is predicted to be no slower."""
        return self.fuse_all or prediction.fused <= prediction.tie * prediction.unfused + JITTER

    def _compiled(self, spec: Spec) -> Spec:
        """What the kernel will be made of."""
        narrow = narrowed(spec) if self.narrow else spec
        return canonical(spec if rounded_on_the_way(narrow) else narrow)

    def _kernel(self, spec: Spec) -> float:
        if spec not in self._kernels:
            self._kernels[spec] = self.predictor.kernel(spec)
        return self._kernels[spec]


def card_cost(card: GpuProfile, *, narrow: bool = False) -> CostModel:
    """Decisions for an NVIDIA card: a region is fused if it has a kernel there, else ONNX Runtime's own run its nodes.

    A kernel for the processor alone would have everything around it copied there and back. With `narrow`, operands of
    products will be rounded to bfloat16.
    """
    refused: dict[Spec, str | None] = {}

    def why(spec: Spec) -> str | None:
        key = canonical(spec)
        if key not in refused:
            refused[key] = refusal(narrowed(key) if narrow else key, card)
        reason = refused[key]
        return None if reason is None else f"no kernel for NVIDIA cards: {reason}"

    return Everything(why)


def machine_cost(profile: HardwareProfile, target: Target, *, fuse_all: bool, narrow: bool = False) -> MachineCost:
    """The cost model of a machine. With `narrow`, operands of products will be rounded to bfloat16."""
    return MachineCost(Predictor(profile, target), fuse_all, narrow)
