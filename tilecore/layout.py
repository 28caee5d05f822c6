"""Layouts by TileLang's names, for `T.annotate_layout`: swizzles are for GPUs and leave the choice to inference."""

from typing import Any

from tilecore.tiles import LayoutHint


def make_swizzled_layout(tile: Any, **hints: Any) -> LayoutHint:
    """Any layout: on a CPU there are no banks to avoid."""
    return LayoutHint.ANY


make_full_bank_swizzled_layout = make_half_bank_swizzled_layout = make_swizzled_layout
make_quarter_bank_swizzled_layout = make_linear_layout = make_swizzled_layout
