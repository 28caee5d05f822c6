"""Polynomials with integer coefficients over atoms of any kind: sums, products, division by a term.

A polynomial is a dict, monomial → coefficient; a monomial is its atoms with repetition, sorted by their text, () the
constant term. Invariant: no coefficient in a result is 0.
"""

from typing import TypeVar

A = TypeVar("A")
Poly = dict[tuple[A, ...], int]


def plus(left: Poly[A], right: Poly[A], factor: int = 1) -> Poly[A]:
    """`left` + `factor` · `right`."""
    total = dict(left)
    for monomial, coefficient in right.items():
        total[monomial] = total.get(monomial, 0) + factor * coefficient
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def times(left: Poly[A], right: Poly[A]) -> Poly[A]:
    """`left` · `right`."""
    total: Poly[A] = {}
    for a, x in left.items():
        for b, y in right.items():
            monomial = tuple(sorted(a + b, key=str)) if a and b else a or b
            total[monomial] = total.get(monomial, 0) + x * y
    return {monomial: coefficient for monomial, coefficient in total.items() if coefficient}


def divide(poly: Poly[A], divisor: Poly[A]) -> tuple[Poly[A], Poly[A]]:
    """Quotient and remainder, term by term, by a single-term divisor; by several terms only when one is a multiple."""
    if poly == divisor:
        return {(): 1}, {}
    if len(divisor) != 1:
        return {}, poly
    ((unit, amount),) = divisor.items()
    quotient: Poly[A] = {}
    remainder: Poly[A] = {}
    for monomial, coefficient in poly.items():
        rest = list(monomial)
        try:
            for atom in unit:
                rest.remove(atom)
        except ValueError:
            remainder[monomial] = coefficient
            continue
        whole, part = divmod(coefficient, amount)
        if whole:
            quotient[tuple(rest)] = whole
        if part:
            remainder[monomial] = part
    return quotient, remainder
