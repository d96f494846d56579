"""Which variable points to which part of a cache of compiled code. Pure.

Two processes may write the same entry of Triton's cache at the same time, with files that do not belong together
(pytorch#92664), and on a network disk one crashes on the files of the other (triton#2688, #11512). So each local rank
has a directory of its own for Triton, and no two nodes share one. The cache of torch.compile names an entry by its
content and moves it into place, so all ranks of a node share it and one of them compiles.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

INDUCTOR, TRITON, CUDA = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"

GRAPHS = "TORCHINDUCTOR_FX_GRAPH_CACHE"
"""The variable by which torch before 2.5 keeps compiled graphs; later ones do by default."""


def own_variables(directory: str, local_rank: int) -> dict[str, str]:
    """The variables of a worker whose caches are all below `directory`."""
    return {
        INDUCTOR: os.path.join(directory, "inductor"),
        GRAPHS: "1",
        TRITON: os.path.join(directory, "triton", str(local_rank)),
        CUDA: os.path.join(directory, "cuda"),
    }


def default_places(environ: Mapping[str, str], temporary: str) -> dict[str, str]:
    """Where each cache is without its variable, in the home directory or in the `temporary` one."""
    home = environ.get("HOME", "")
    return {
        INDUCTOR: temporary,
        TRITON: os.path.join(environ.get("TRITON_HOME") or home, ".triton"),
        CUDA: os.path.join(home, ".nv"),
    }


def shared_by_nodes(environ: Mapping[str, str], temporary: str, network_disk: Callable[[str], str]) -> frozenset[str]:
    """The variables of the caches that would be on a network disk. `network_disk` returns the kind of one, or an empty
    text for a local disk."""
    return frozenset(name for name, place in default_places(environ, temporary).items() if network_disk(place))
