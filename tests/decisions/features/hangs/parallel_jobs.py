"""Jobs of tensor, pipeline and data parallelism as programs of collectives, played until no rank goes on, and what NCCL
RAS or the flight recorder shows then."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrover_run.features.hangs.collectives.positions import Position, Source
from dlrover_run.features.hangs.collectives.rank_sets import pack


@dataclass(frozen=True)
class Call:
    """One call of a rank: a collective of a group, or with a `peer` a send or a receive."""

    group: str
    members: tuple[int, ...]
    operation: str
    bytes: int = 1024
    peer: int | None = None


@dataclass
class Played:
    """How far each rank has come: the calls that it has entered, and how many of them have ended."""

    entered: Mapping[int, Sequence[Call]]
    ended: Mapping[int, int]
    names: Mapping[str, str] = field(default_factory=dict)


def program(tensor: int, pipeline: int, data: int, steps: int) -> dict[int, list[Call]]:
    """The calls of each rank of such a job: forward and backward through the stages, then the sum of the gradients.
    Rank = (stage * data + replica) * tensor + shard."""

    def rank_of(stage: int, replica: int, shard: int) -> int:
        return (stage * data + replica) * tensor + shard

    calls: dict[int, list[Call]] = {}
    for stage in range(pipeline):
        for replica in range(data):
            for shard in range(tensor):
                rank = rank_of(stage, replica, shard)
                tp = tuple(rank_of(stage, replica, other) for other in range(tensor))
                dp = tuple(rank_of(stage, other, shard) for other in range(data))
                before = rank_of(stage - 1, replica, shard) if stage else None
                behind = rank_of(stage + 1, replica, shard) if stage + 1 < pipeline else None
                own: list[Call] = []
                for _ in range(steps):
                    if before is not None:
                        own.append(Call(f"pp {min(before, rank)}", (before, rank), "recv", peer=before))
                    if tensor > 1:
                        own.append(Call(f"tp {tp[0]}", tp, "all_reduce", 2048))
                    if behind is not None:
                        own.append(Call(f"pp {min(behind, rank)}", (rank, behind), "send", peer=behind))
                        own.append(Call(f"pp {min(behind, rank)}", (rank, behind), "recv", peer=behind))
                    if tensor > 1:
                        own.append(Call(f"tp {tp[0]}", tp, "reduce_scatter_tensor", 4096))
                    if before is not None:
                        own.append(Call(f"pp {min(before, rank)}", (before, rank), "send", peer=before))
                    if data > 1:
                        own.append(Call(f"dp {dp[0]}", dp, "all_reduce", 2**24))
                calls[rank] = own
    return calls


def play(calls: Mapping[int, Sequence[Call]], stops: Mapping[int, int], ahead: int = 1) -> Played:
    """Play the calls until no rank goes on. A rank in `stops` sleeps before that call. Each rank enters up to `ahead`
    calls of collectives before it waits, as with NCCL, and waits in a call with a peer."""
    entered: dict[int, list[Call]] = {rank: [] for rank in calls}
    ended = dict.fromkeys(calls, 0)
    moved = True
    while moved:
        moved = False
        for rank, own in calls.items():
            position = len(entered[rank])
            if position < len(own) and position < stops.get(rank, len(own)) and position - ended[rank] < ahead:
                entered[rank].append(own[position])
                moved = True
            if ended[rank] < len(entered[rank]) and _can_end(rank, ended[rank], entered):
                ended[rank] += 1
                moved = True
    return Played(entered, ended)


def _can_end(rank: int, index: int, entered: Mapping[int, Sequence[Call]]) -> bool:
    call = entered[rank][index]
    if call.peer is None:
        number = sum(one.group == call.group for one in entered[rank][: index + 1])
        return all(sum(one.group == call.group for one in entered[other]) >= number for other in call.members)
    number = sum(one == call for one in entered[rank][: index + 1])
    opposite = "recv" if call.operation == "send" else "send"
    there = [one for one in entered[call.peer] if one.peer == rank and one.operation == opposite]
    return len(there) >= number


def recorder(played: Played, absent: Sequence[int] = ()) -> dict[int, list[Position]]:
    """What the flight recorders of all ranks but the absent ones show."""
    found: dict[int, list[Position]] = {}
    for rank, calls in played.entered.items():
        if rank in absent:
            continue
        groups: dict[tuple[str, bool], list[tuple[Call, bool]]] = defaultdict(list)
        for index, call in enumerate(calls):
            groups[call.group, call.peer is not None].append((call, index < played.ended[rank]))
        found[rank] = []
        for (group, _), entries in groups.items():
            done = sum(is_done for _, is_done in entries)
            number = min(done + 1, len(entries))
            call = entries[number - 1][0]
            found[rank].append(
                Position(
                    group,
                    Source.FLIGHT_RECORDER,
                    call.operation,
                    entered=len(entries),
                    number=number,
                    completed=done,
                    name=group.split()[0],
                    size=len(call.members),
                    members=pack(call.members),
                    bytes=call.bytes,
                    dtype="float32",
                    peer=call.peer,
                )
            )
    return found


def ras(played: Played, absent: Sequence[int] = ()) -> dict[int, list[Position]]:
    """What NCCL RAS shows: it counts collectives by group and kind, and nothing between two ranks."""
    counts = {
        rank: Counter((call.group, call.members, call.operation) for call in calls if call.peer is None)
        for rank, calls in played.entered.items()
    }
    kinds = set().union(*counts.values())
    found: dict[int, list[Position]] = {rank: [] for rank in counts if rank not in absent}
    for group, members, operation in sorted(kinds):
        of = {rank: counts[rank][group, members, operation] for rank in members if rank not in absent}
        for rank, entered in of.items():
            found[rank].append(
                Position(
                    group,
                    Source.RAS,
                    operation,
                    entered=entered,
                    number=entered,
                    size=len(members),
                    members=pack(members),
                    furthest=max(of.values()),
                    ahead=sum(other > entered for other in of.values()),
                )
            )
    return found
