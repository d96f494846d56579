"""Run seeds by hand: one seed with a trace of its events, or many."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from simulation import stall_world, succession
from simulation.etcd_scenario import EtcdScenario
from simulation.parameter_servers.program import ServersProgram
from simulation.parameter_servers.scaled import ScaledServersProgram
from simulation.program import Program
from simulation.scenario import MasterScenario, Scenario, simulate
from simulation.survivors.program import PreparingSurvivorsProgram, SurvivorsProgram
from simulation.timeline import Broken
from simulation.torch.program import PreparingProgram, TorchProgram
from simulation.torch.scaled import ScaledProgram


def main() -> int:
    """Return the exit code: the number of seeds that failed, at most 100."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("seed", type=int, help="the seed, or the first of several")
    parser.add_argument("--count", type=int, default=1, help="run that many seeds, without a trace")
    parser.add_argument("--etcd", action="store_true", help="let the records live in etcd, not in a master")
    scaled = "run a job of torch that chooses its own number of nodes"
    parser.add_argument("--scaled", action="store_true", help=scaled)
    servers = "run a job with parameter servers, not one of torch"
    parser.add_argument("--parameter-servers", action="store_true", help=servers)
    scaled = "run a job with parameter servers that chooses its own numbers"
    parser.add_argument("--scaled-servers", action="store_true", help=scaled)
    parser.add_argument("--survivors", action="store_true", help="run a job whose workers outlive their round")
    preparing = "let the nodes of a job of torch, or of one with --survivors, prepare before they take part"
    parser.add_argument("--preparing", action="store_true", help=preparing)
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--succession", action="store_true", help="lose masters that nodes have started themselves")
    early = "the same, before the first round"
    other.add_argument("--early-succession", action="store_true", help=early)
    stalls = "let one worker of a round hang or only seem to; without a trace"
    other.add_argument("--stalls", action="store_true", help=stalls)
    arguments = parser.parse_args()
    if arguments.succession or arguments.early_succession or arguments.stalls:
        return run_others(arguments)
    program: type[Program] = ServersProgram if arguments.parameter_servers else TorchProgram
    if arguments.scaled:
        program = ScaledProgram
    if arguments.scaled_servers:
        program = ScaledServersProgram
    if arguments.survivors:
        program = SurvivorsProgram
    if arguments.preparing:
        program = PreparingSurvivorsProgram if arguments.survivors else PreparingProgram
    kind: type[Scenario] = EtcdScenario if arguments.etcd else MasterScenario
    failed = 0
    phases: Counter[str] = Counter()
    began = time.monotonic()
    rounds = versions = restarts = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        try:
            outcome = simulate(seed, print if arguments.count == 1 else None, kind, program)
        except Broken as broken:
            failed += 1
            print(broken)
            continue
        phases[outcome.phase] += 1
        rounds += outcome.rounds
        versions += outcome.versions
        restarts += outcome.restarts
    took = time.monotonic() - began
    worth = f"{dict(phases)}, {rounds} rounds, {versions} versions, {restarts} restarts"
    print(f"{arguments.count} seeds in {took:.1f} s: {worth}, {failed} failed")
    return min(failed, 100)


def run_others(arguments: argparse.Namespace) -> int:
    """Play seeds of what is no job of `simulate`; return the exit code."""
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        lines: list[str] = []
        try:
            if arguments.stalls:
                print(stall_world.play(seed))
            else:
                kinds = succession.EARLY_KINDS if arguments.early_succession else succession.KINDS
                kind, masters = succession.play(seed, lines, kinds)
                lines.append(f"seed {seed}: {kind}, {masters} masters")
        except Broken as broken:
            failed += 1
            lines.append(str(broken))
        print("\n".join(lines if arguments.count == 1 else lines[-1:]))
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
