"""Repeat the middle layer of a recording, so that a model of few layers stands for a deep one.

A dry run of all layers takes minutes, and all layers but the first and the last ones allocate
alike. Reserved memory is not linear in the layers, so the events themselves are repeated, and the
allocator then replays as many as a whole dry run has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchtitan_like.plan.record import Alloc, Free, Mark, Recording

# Layers of the recording. Its layers 1 to 3 must allocate alike, and layer 2 is repeated.
NUM_RECORDED, REPEATED = 5, 2
_LAYER = re.compile(r"layers\.(\d+)\b")

Event = Alloc | Free


@dataclass
class _Section:
    """Consecutive events: those of each layer in turn, or (one list, no `layers`) of no layer.

    layers: the layer of each list of events, ascending or descending.
    """

    mark: str
    layers: list[int]
    events: list[list[Event]]
    allocs: dict[int, list[int]] = field(default_factory=dict)  # ids by layer, in order

    def __post_init__(self) -> None:
        for layer, events in zip(self.layers, self.events, strict=True) if self.layers else ():
            self.allocs[layer] = [event.id for event in events if isinstance(event, Alloc)]


def deepen(recording: Recording, num_layers: int) -> Recording:
    """Return the memory events of a model with `num_layers` layers, without its work.

    recording: of `NUM_RECORDED` layers; with a pipeline, of the first of its stages.
    Raises ValueError if its middle layers do not allocate alike.
    """
    sections = list(_sections(recording))
    for section in sections:
        _check(section, recording)
    place = {
        identity: (section, layer, index)
        for section in sections
        for layer, identities in section.allocs.items()
        for index, identity in enumerate(identities)
    }
    more = num_layers - NUM_RECORDED

    def origin(layer: int) -> int:
        return max(min(layer, REPEATED), layer - more)

    new_ids: dict[tuple[int, int], int] = {}  # by recorded id and layer; -1: of no layer
    result = Recording()
    result.streams = recording.streams

    def add(event: Alloc, layer: int) -> None:
        new_ids[event.id, layer] = len(result.events) + 1
        result.events.append(event._replace(id=len(result.events) + 1))
        if event.id in recording.categories:
            result.categories[len(result.events)] = recording.categories[event.id]

    def free(event: Free, layer: int) -> None:
        """Free what is, as seen from this layer, at the place of the recorded allocation.

        A layer frees what it or a neighbor allocated, or what the first or the last layer did.
        """
        if event.id not in place:
            owners = [(event.id, -1)]
        elif layer < 0:  # of all layers at once
            owner = place[event.id][1]
            owners = [(event.id, each) for each in range(num_layers) if origin(each) == owner]
        else:
            section, owner, index = place[event.id]
            distance = owner - origin(layer)
            if abs(distance) <= 1:
                each = layer + distance
            else:
                each = owner if owner < REPEATED else owner + more
            owners = [(section.allocs[origin(each)][index], each)]
        for key in owners:
            if key in new_ids:
                result.events.append(Free(new_ids.pop(key), event.at))

    for section in sections:
        order = _order(section, num_layers)
        by_layer = dict(zip(section.layers or [-1], section.events, strict=True))
        for layer in order:
            for event in by_layer[-1 if layer < 0 else origin(layer)]:
                if isinstance(event, Alloc):
                    add(event, layer)
                else:
                    free(event, layer)
        if result.marks and result.marks[-1].name == section.mark:
            result.marks.pop()
        result.marks.append(Mark(section.mark, len(result.events), 0))
    return result


def _order(section: _Section, num_layers: int) -> Sequence[int]:
    if not section.layers:
        return [-1]
    first, last = section.layers[0], section.layers[-1]
    return range(first, num_layers) if first < last else range(num_layers - 1, last - 1, -1)


def _check(section: _Section, recording: Recording) -> None:
    if not section.layers:
        return
    by_layer = dict(zip(section.layers, section.events, strict=True))
    shapes = [
        [(event.num_bytes, event.stream) for event in by_layer[layer] if isinstance(event, Alloc)]
        for layer in range(REPEATED - 1, REPEATED + 2)
    ]
    if shapes[0] != shapes[1] or shapes[1] != shapes[2]:
        raise ValueError(
            f"layers {REPEATED - 1} to {REPEATED + 1} of the recording allocate differently in "
            f"{section.mark}: expected equal ones; dry-run all layers"
        )


def _sections(recording: Recording) -> Iterator[_Section]:
    """Divide each phase into forward and backward passes of its layers, and what is between."""
    sizes = {event.id: event.num_bytes for event in recording.events if isinstance(event, Alloc)}
    start = 0
    for mark in recording.marks:
        events = recording.events[start : mark.num_events]
        position = 0
        for layers, cuts in _passes(events):
            yield from _periodic(mark.name, events[position : cuts[0]], sizes)
            yield _layered(mark.name, events, cuts, layers)
            position = cuts[-1]
        yield from _periodic(mark.name, events[position:], sizes)
        start = mark.num_events


def _layered(
    mark: str, events: list[Event], cuts: Sequence[int], layers: Sequence[int]
) -> _Section:
    parts = [events[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    return _Section(mark, list(layers), parts)


def _passes(events: list[Event]) -> Iterator[tuple[Sequence[int], list[int]]]:
    """Yield the layers of each pass in order, and where the events of each begin; and their end.

    What follows the last layer of a forward pass counts as its own, up to the next pass.
    """
    begins: list[tuple[bool, int, int]] = []  # is it the forward pass, layer, index
    for index, event in enumerate(events):
        if isinstance(event, Alloc) and (match := _LAYER.match(event.module)):
            key = event.pass_ == "forward", int(match[1])
            if not begins or begins[-1][:2] != key:
                begins.append((*key, index))
    for first in range(0, len(begins), NUM_RECORDED):
        some = begins[first : first + NUM_RECORDED]
        is_forward = some[0][0]
        layers = range(NUM_RECORDED) if is_forward else range(NUM_RECORDED - 1, -1, -1)
        if [(is_forward, layer) for layer in layers] != [begin[:2] for begin in some]:
            raise ValueError(
                f"layers run in the order {[begin[1] for begin in some]}: expected passes through "
                f"{NUM_RECORDED} layers of one stage; dry-run all layers"
            )
        cuts = [begin[2] for begin in some]
        if not is_forward:
            end = _end_of_backward(events, cuts[-1])
        elif first + NUM_RECORDED < len(begins):
            end = begins[first + NUM_RECORDED][2]
        else:
            end = len(events)
        yield layers, [*cuts, end]


def _end_of_backward(events: list[Event], start: int) -> int:
    for index in range(start, len(events)):
        event = events[index]
        if isinstance(event, Alloc) and not _LAYER.match(event.module):
            return index
    return len(events)


def _periodic(mark: str, events: list[Event], sizes: dict[int, int]) -> Iterator[_Section]:
    """Divide events of no layer where as many equal parts as layers follow each other.

    Parameters, their states and gradients are allocated and freed layer by layer.
    """
    kinds = [
        (event.num_bytes, event.stream) if isinstance(event, Alloc) else (-sizes[event.id], 0)
        for event in events
    ]
    # The first layer may differ: it allocates what all layers share.
    runs = [(first, *_longest_run(kinds, NUM_RECORDED - first)) for first in (0, 1)]
    first, start, period = max(runs, key=lambda run: (NUM_RECORDED - run[0]) * run[2])
    end = start + (NUM_RECORDED - first) * period
    yield _Section(mark, [], [events[:start]])
    if period:
        yield _layered(mark, events, range(start, end + 1, period), range(first, NUM_RECORDED))
    yield _Section(mark, [], [events[end:]])


def _longest_run(kinds: Sequence[object], times: int) -> tuple[int, int]:
    """Return start and period of the longest part that repeats so many times; 0 for none."""
    for period in range(len(kinds) // times, 0, -1):
        equal = 0
        for index in range(len(kinds) - period):
            equal = equal + 1 if kinds[index] == kinds[index + period] else 0
            if equal == (times - 1) * period:
                return index - equal + 1, period
    return 0, 0
