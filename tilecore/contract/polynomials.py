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
    """Quotient and remainder, term by term, by a single-term divisor; by several, of whole multiples."""
    if len(divisor) != 1:
        return _take_multiples(poly, divisor)
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


def _take_multiples(poly: Poly[A], divisor: Poly[A]) -> tuple[Poly[A], Poly[A]]:
    """The factors of a divisor of several terms whose products with it are terms of `poly`, and what is left of it."""
    lead, amount = next(iter(divisor.items()), ((), 0))
    quotient: Poly[A] = {}
    remainder = poly
    for monomial, coefficient in poly.items():
        rest = list(monomial)
        try:
            for atom in lead:
                rest.remove(atom)
        except ValueError:
            continue
        factor: Poly[A] = {tuple(rest): coefficient // amount} if amount else {}
        multiple = times(factor, divisor)
        if multiple and all(remainder.get(term) == value for term, value in multiple.items()):
            quotient, remainder = plus(quotient, factor), plus(remainder, multiple, -1)
    return quotient, remainder
