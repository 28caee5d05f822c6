"""Which streams run together.

In: their lengths and what the model can do. Out: groups. Invariant: streams of a group may run in one run by the
abilities that were probed.
"""

from collections.abc import Sequence as Items

from runtime.server.generation.probe import Abilities
from runtime.server.generation.streams import Job


def group_steps(jobs: Items[Job], abilities: Abilities, *, token_bytes: int, worth: int) -> list[list[Job]]:
    """The groups of one step, one token for each job.

    A run of its own costs reading the weights once more, `worth` bytes; padding costs reading and writing what is not
    there. So a group's padding takes at most as many bytes as a run of its own is worth.
    """
    if not abilities.rows:
        return [[job] for job in jobs]
    groups: list[list[Job]] = []
    padding = 0
    for job in sorted(jobs, key=lambda job: -job.sequence.length):
        if groups:
            shorter = groups[-1][0].sequence.length - job.sequence.length
            padding += shorter * token_bytes
            if padding <= worth if abilities.padding else shorter == 0:
                groups[-1].append(job)
                continue
        groups.append([job])
        padding = 0
    return groups


def group_prompts(jobs: Items[Job], abilities: Abilities, *, most: int) -> list[Job]:
    """The jobs whose prompts are read in one run: the first, and others like it, `most` tokens with their padding.

    Only prompts that are read whole from an empty cache join others.
    """
    first = jobs[0]
    chosen = [first]
    if not abilities.rows or first.sequence.length or len(first.left) > most:
        return chosen
    longest = len(first.left)
    for job in jobs[1:]:
        size = max(longest, len(job.left))
        fits = not job.sequence.length and size * (len(chosen) + 1) <= most
        if fits and (abilities.padding or len(job.left) == longest):
            chosen.append(job)
            longest = size
    return chosen
