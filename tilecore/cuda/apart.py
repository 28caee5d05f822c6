"""Tasks of a split that run apart: whenever each has a processor, not as one cluster.

Comes in: a split with a state, and what the program does from its first join on. Goes out: text. Every task leaves its
state in memory; the last one to arrive goes through the parts, in the same order whoever it is, and does what the first
task would. A counter per result says who is last, and is 0 again after it. Where a result's counter and states lie does
not depend on how many results there are, so that launches of other sizes leave it 0 as well.
"""

from collections.abc import Callable, Iterator, Sequence

from tilecore.cuda.joins import (
    COUNTER_WORDS,
    REDUCTIONS,
    WARP_ROWS,
    Split,
    element_index,
    joined_words,
    word_loop,
    words_of,
)
from tilecore.cuda.roles import Roles
from tilecore.ir import Buffer, Join, Stmt

MOST_WORDS = 180  # of a thread that goes through parts: of sums, and of parts that are under way together
WARPGROUP = 128
STARTS = {"sum": "0.0f", "max": "-TILE_INF", "fmax": "-TILE_INF", "min": "TILE_INF", "prod": "1.0f"}


def apart_text(
    tail: Sequence[Stmt], split: Split, roles: Roles, write: Callable[[Sequence[Stmt]], list[str]]
) -> list[str]:
    """What a consumer warpgroup does from the first join on, which is `tail`; `write` is the text of statements.

    The names of the task, and of a thread's row, are those of the part and the row that it works on there.
    """
    axis, threads = split.axis, split.groups[0].threads
    assert axis is not None
    lines = [
        f"u32* const room = workspace + (i64)t * {split.tasks} * {split.task_words(roles.consumers)};",
        f"float* const parts = (float*)room + {COUNTER_WORDS} + warpgroup * {split.words};",
        f"if (thread < {threads}) {{",
        *("  " + line for line in _state_text(split, roles, "part_write({at}, {element});", "thread")),
        "}",
        f"if (all_arrived(room + warpgroup, {split.tasks}, 5 + warpgroup)) {{",
    ]
    inner = _held(split, roles)
    between: list[Stmt] = []
    at = 0
    for number, group in enumerate(split.groups):
        inner += _gathered(number, between, split, roles, write)
        at += len(group.joins)
        following = next((x for x in range(at, len(tail)) if isinstance(tail[x], Join)), len(tail))
        if group is split.groups[-1]:
            inner += [f"const int {axis.name} = 0;", *write(tail[at:])]
        between += tail[at:following]
        at = following
    return [*lines, *("  " + line for line in inner), "}"]


def _turns(split: Split) -> int:
    """Parts that a team goes through."""
    return -(-split.tasks // split.groups[0].teams)


def _words(split: Split) -> int:
    """Of a thread's state."""
    return sum(count for _, count in split.state)


def _holds(split: Split) -> bool:
    """Whether several groups of joins find the state of all parts in registers, where it was read once."""
    return len(split.groups) > 1 and (_turns(split) + 1) * _words(split) <= MOST_WORDS


def _over_parts(split: Split, body: Sequence[str], unrolled: int) -> list[str]:
    """A loop over the parts of a thread's team."""
    assert split.axis is not None
    group = split.groups[0]
    some = f" && thread < {group.teams * group.threads}" if group.teams * group.threads < WARPGROUP else ""
    return [
        f"#pragma unroll {unrolled}",
        f"for (int turn = 0; turn < {_turns(split)}; turn++) {{",
        f"  const int {split.axis.name} = turn * {group.teams} + thread / {group.threads};",
        f"  if ({split.axis.name} < {split.tasks}{some}) {{",
        *("    " + line for line in body),
        "  }",
        "}",
    ]


def _held(split: Split, roles: Roles) -> list[str]:
    if not _holds(split):
        return []
    thread = f"thread % {split.groups[0].threads}"
    reads = _state_text(split, roles, "held[turn][{word} + x] = part_read({at});", thread)
    return [f"float held[{_turns(split)}][{_words(split)}];", *_over_parts(split, list(reads), _turns(split))]


def _state_text(split: Split, roles: Roles, form: str, thread: str, joined: Sequence[Buffer] = ()) -> Iterator[str]:
    """`form` of every word x of a task's state, from `word` on, that is not joined yet: `at` in memory, `element` of
    registers.
    """
    assert split.axis is not None
    group = split.groups[0]
    words = 0
    for buffer, count in split.state:
        task = f"(i64){split.axis.name} * {split.task_words(roles.consumers)}"
        at = f"parts + {task} + ({words} + x) * {group.threads} + {thread}"
        if buffer not in joined:
            element = f"{buffer.name}[{element_index(buffer, group, roles)}]"
            yield f"{word_loop(count)} {form.format(at=at, element=element, word=words)}"
        words += count


def _gathered(
    number: int, between: Sequence[Stmt], split: Split, roles: Roles, write: Callable[[Sequence[Stmt]], list[str]]
) -> list[str]:
    """The joins of a group over all parts: teams of warps take turns at parts, and what they have is joined in order.

    `between` is what every task does between the joins before and these.
    """
    group = split.groups[number]
    threads, joins = group.threads, list(joined_words(group, roles))
    done = [join.buffer for earlier in split.groups[:number] for join in earlier.joins]
    row = f"const int own_row = group_row + {WARP_ROWS} * (thread % {threads} / 32) + lane / 4;"
    lines: list[str] = []
    for join, loop, *_ in joins:
        name = join.buffer.name
        lines.append(f"float {name}_all[{words_of(join.buffer, roles) * group.halves // 2}];")
        lines.append(f"{loop} {name}_all[x] = {STARTS[join.kind]};")
    form = "{element} = held[turn][{word} + x];" if _holds(split) else "{element} = part_read({at});"
    body = [
        *([row] if group.teams > 1 else []),
        *_state_text(split, roles, form, f"thread % {threads}", done),
        *write(between),
    ]
    for join, loop, index, _ in joins:
        name = join.buffer.name
        body.append(f"{loop} {name}_all[x] = {REDUCTIONS[join.kind]}::join({name}_all[x], {name}[{index}]);")
    unrolled = _turns(split) if _holds(split) else max(1, MOST_WORDS // _words(split) - 1)
    return [*lines, *_over_parts(split, body, unrolled), *_between_teams(number, joins, split)]


def _between_teams(number: int, joins: Sequence[tuple[Join, str, str, int]], split: Split) -> list[str]:
    """What teams have by way of shared memory: all of them get it, or, at the end, the first one."""
    group = split.groups[number]
    threads, teams = group.threads, group.teams
    if teams == 1:
        return [f"{loop} {join.buffer.name}[{index}] = {join.buffer.name}_all[x];" for join, loop, index, _ in joins]
    own = teams - group.rooms  # teams that need not write
    stride = 4 * group.words * threads
    base = f"exchange_{number} + warpgroup * {group.bytes} + thread % {threads} * 4"
    some = f"if (thread >= {own * threads} && thread < {teams * threads}) {{"
    lines = [some]
    for join, loop, _, offset in joins:
        at = f"{base} + (thread / {threads} - {own}) * {stride} + ({offset} + x) * {4 * threads}"
        lines.append(f"  {loop} exchange_write({at}, {join.buffer.name}_all[x]);")
    lines += ["}", "named_sync(5 + warpgroup, 128);", f"if (thread < {threads if own else WARPGROUP}) {{"]
    for join, loop, index, offset in joins:
        at = f"{base} + ({offset} + x) * {4 * threads}"
        call = f"teams_read<{REDUCTIONS[join.kind]}, {teams - 1}, {stride}>"
        first = f"{join.buffer.name}_all[x], {at}" if own else f"exchange_own({at}), {at} + {stride}"
        lines.append(f"  {loop} {join.buffer.name}[{index}] = {call}({first});")
    return [*lines, "}"]
