"""Names by position: specs that differ only in the names of their tensors become equal, and so share one kernel."""

from dataclasses import replace

from tilecore.contract.spec import Spec, outputs_of
from tilecore.contract.tensors import with_tensors


def canonical(spec: Spec, *, constants: bool = True) -> Spec:
    """`spec` with its inputs named x0, x1, … and its outputs y0, y1, …

    Without `constants`, nothing is known of any input when kernels are made: their layout is then the model's own.
    """
    names = {
        tensor: replace(tensor, name=f"x{i}", constant=tensor.constant and constants)
        for i, tensor in enumerate(spec.inputs)
    }
    places = {tensor: replace(tensor, name=f"y{i}") for i, tensor in enumerate(outputs_of(spec))}
    return with_tensors(spec, names, places)
