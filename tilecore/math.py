"""Whole numbers of tile sizes, by the names that TileLang's `tilelang.math` gives them. Python numbers in and out."""


def next_power_of_2(number: int) -> int:
    """The smallest power of 2 that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def cdiv(number: int, divisor: int) -> int:
    """`number` / `divisor`, rounded up."""
    return -(-number // divisor)
