"""Whom to probe with whom.

The first pass pairs the nodes that nothing is known of, in order of placement, so that neighbours
are tried together; an odd one makes a group of three, or is paired with a good node.

Later passes are about those the first one did not clear. A good node is the best partner: the
fastest one for the slowest suspect, and never the same pair twice. Two suspects of a failed group
of three share one good node, so that a pass says more than who fails: also that those two work with
each other. Where good nodes do not suffice, nodes that were merely held up by another's failure are
paired with each other, and suspects crossed with suspects of other groups: if there are two good
nodes among them a pass will bring them together before long. Who is left is probed alone, once, to
see whether its own probes tell.

Nodes that were slow are measured a second time beside good ones that were not, some of which are
measured just for the comparison. O(n log n) a pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from elasticrun.core.netcheck_trials import FailedGroup, Trial

Nodes = tuple[str, ...]

BESIDE = 5
"""Good nodes that are measured in the same pass as those whose matmul was slow: their median tells
how the pass differs from the one before. With fewer, chance has a say in who is called slow; more
cost no time either, as they wait anyway, but help little."""


def first_pass(trials: dict[str, Trial]) -> list[Nodes]:
    """Groups of the nodes that are not good yet; each of the others is at most a partner."""
    new = [one.node for one in trials.values() if not one.good]
    good = _fastest_first(one for one in trials.values() if one.good)
    groups: list[Nodes] = [(new[at], new[at + 1]) for at in range(0, len(new) - 1, 2)]
    if len(new) % 2:
        if good:
            groups.append((good[0].node, new[-1]))
        elif groups:
            groups[-1] = (*groups[-1], new[-1])
        else:
            groups.append((new[-1],))
    return groups


def later_pass(
    trials: dict[str, Trial], failed: Iterable[FailedGroup], slow: dict[str, bool]
) -> list[Nodes]:
    """Groups of those that must be probed again; none if nothing more can be learnt. `failed`: the
    groups of the pass before. `slow`: nodes to be measured again; whether alone will do."""
    open_ = [one for one in trials.values() if not one.good and not one.out]
    seekers = _seekers(open_, failed)
    good = [one for one in trials.values() if one.good and not one.out and one.node not in slow]
    free = OrderedDict((one.node, one) for one in _fastest_first(good))
    groups: list[Nodes] = []
    left: list[Trial] = []
    for unit in seekers:
        partner = _unmet(unit, free)
        if partner is None:
            left.extend(unit)
        else:
            del free[partner]
            groups.append((partner, *(one.node for one in unit)))
    groups.extend(_among_themselves(left, helped=bool(good)))
    for node in [node for node, one in free.items() if one.told_slow]:
        del free[node]
    for node, alone_will_do in slow.items():
        partner = _unmet([trials[node]], free)
        if partner is not None:
            del free[partner]
            groups.append((partner, node))
        elif alone_will_do:
            groups.append((node,))
    if any(slow.values()):
        there = {node for group in groups for node in group}
        wanted = BESIDE - sum(one.node in there and not one.told_slow for one in good)
        groups.extend(_beside(free, trials, max(0, wanted)))
    return groups


def _beside(free: Iterable[str], trials: Mapping[str, Trial], wanted: int) -> list[Nodes]:
    """So many that are measured just for the comparison, from the middle of `free`, the fastest
    first: who was the fastest of many was so by chance too, and would seem to have lost speed."""
    idle = [node for node in free if not trials[node].alone]
    first = max(0, len(idle) - wanted) // 2
    return [(node,) for node in idle[first : first + wanted]]


def _seekers(open_: Sequence[Trial], failed: Iterable[FailedGroup]) -> list[list[Trial]]:
    """Those who want a good partner, the most urgent first: suspects, slowest first; then who was
    held up by another's failure; then who failed by itself, and may as well be probed alone."""
    joint = {one.node: one for one in open_ if one.suspect and not one.broken}
    units: list[list[Trial]] = []
    for group in failed:
        if len(group.nodes) == 3 and all(node in joint for node in group.nodes):
            first, *others = (joint.pop(node) for node in group.nodes)
            units += [[first], others]
    units += [[one] for one in joint.values()]
    units.sort(key=lambda unit: -max(one.pace for one in unit))
    units += [[one] for one in open_ if not one.suspect]
    units += [[one] for one in open_ if one.broken]
    return units


def _among_themselves(left: Sequence[Trial], *, helped: bool) -> list[Nodes]:
    """Groups of those for whom no good partner was left; `helped`: there will be one later."""
    held_up = [one for one in left if not one.suspect]
    joint = sorted((one for one in left if one.suspect and not one.broken), key=lambda t: t.place)
    pairs = _crossed(held_up) + _crossed(joint)
    paired = {one.node for pair in pairs for one in pair}
    rest = [one for one in (*held_up, *joint) if one.node not in paired]
    if not helped:
        more = _crossed(rest)
        pairs += more
        paired.update(one.node for pair in more for one in pair)
    alone = [one for one in left if one.node not in paired and not one.alone]
    return [(one.node, other.node) for one, other in pairs] + [(one.node,) for one in alone]


def _crossed(nodes: Sequence[Trial]) -> list[tuple[Trial, Trial]]:
    """Pairs of nodes that have not been a pair, of different groups where that can be: neighbours
    were probed together, so each is paired with one half the list away."""
    half = len(nodes) // 2
    free = OrderedDict((one.node, one) for one in nodes[half:])
    pairs: list[tuple[Trial, Trial]] = []
    rest: list[Trial] = []
    for one in nodes[:half]:
        other = _unmet([one], free)
        if other is None:
            rest.append(one)
        else:
            pairs.append((one, free.pop(other)))
    rest.extend(free.values())
    while rest:
        one = rest.pop()
        partner = next((other for other in rest if other.node not in one.met), None)
        if partner is not None:
            rest.remove(partner)
            pairs.append((partner, one))
    return pairs


def _unmet(unit: Sequence[Trial], free: Collection[str]) -> str | None:
    """The first of `free` that was in no group with any of these; else one that was, but in a group
    of three. O(passes): they have not met more."""
    seen = {node for one in unit for node in one.seen}
    met = {node for one in unit for node in one.met}
    fresh = next((node for node in free if node not in seen), None)
    return fresh or next((node for node in free if node not in met), None)


def _fastest_first(good: Iterable[Trial]) -> list[Trial]:
    """Good nodes; those last whose good name is from before this check and has failures since."""

    def order(one: Trial) -> tuple[bool, bool, float, int]:
        return bool(one.failures) and not one.fresh, one.told_slow, one.pace, one.place

    return sorted(good, key=order)
