"""Leaves out declarations of a printed function that nothing in it reads.

Comes in: the lines of a C function whose names are declared once, with an initial value that has no effect. Goes out:
the lines without the dead ones. What a kernel is given but does not use would be a warning in every compiler.
"""

import re
from collections import Counter
from collections.abc import Sequence

DECLARATION = re.compile(r"\s*(?:const )?\w+\*?(?: restrict)? (\w+) = [^;]*;(?: //.*)?")
WORD = re.compile(r"\w+")


def drop_unused(lines: Sequence[str]) -> list[str]:
    """`lines` but for the declarations of names that no other line has, and of names that only those have."""
    words = [WORD.findall(line) for line in lines]
    count = Counter(word for line in words for word in line)
    kept: list[str] = []
    for line, own in zip(reversed(lines), reversed(words), strict=True):
        declared = DECLARATION.fullmatch(line)
        if declared and count[declared[1]] == 1:
            count.subtract(own)
        else:
            kept.append(line)
    return kept[::-1]
