"""Registers of a CTA's threads: what they start with, what wgmma needs then, and what the roles get.

Every kernel has one producer warp group, two or more MMA warp groups and perhaps a memory warp group, and is alone on its SM.
"""

from __future__ import annotations

from dataclasses import dataclass

#: threads of a warp group
THREADS_OF_GROUP = 128
#: 32-bit registers of a Hopper SM
REGISTER_FILE = 65536
#: registers are given in multiples of 8; a thread has at most 255
REGISTER_UNIT, THREAD_LIMIT = 8, 255
#: what ptxas asks for next to the accumulators of a wgmma (a wgmma of 128 accumulators was refused below 154 registers)
WGMMA_OVERHEAD = 26

#: of the producer's threads, by number of MMA warp groups: three or four of these are short of registers, two are not
PRODUCER_REGISTERS = {2: 40, 3: 32, 4: 32}
#: of the producer's and the MMA warp groups' threads where these only multiply: up to 96 accumulators, addresses, and what is
#: packed to be handed over
PRODUCER_BESIDE_MEMORY, MMA_BESIDE_MEMORY = 32, 128


@dataclass(frozen=True)
class RoleRegisters:
    """Registers of a thread of each role, as setmaxnreg takes them."""

    producer: int
    mma: int
    memory: int = 0


def entry_registers(threads: int, registers: int = REGISTER_FILE) -> int:
    """Registers of each of a CTA's threads when the kernel starts, on an SM with so many."""
    return min(registers // threads // REGISTER_UNIT * REGISTER_UNIT, THREAD_LIMIT)


def role_registers(mma_groups: int, hands_over: bool = False) -> RoleRegisters:
    """What the roles have after setmaxnreg: all that the producer does not need goes to the MMA warp groups.

    The roles share what the CTA started with, which may be less than the SM has.
    2: 128 * 40 + 256 * 232 = 64,512; 3: 128 * 32 + 384 * 160 = 65,536; 4: 128 * 32 + 512 * 112 = 61,440.
    With a memory warp group: 128 * (32 + 2 * 128 + 224) = 65,536.
    Raises KeyError for another number of groups.
    """
    if hands_over:
        entry = entry_registers((2 + mma_groups) * THREADS_OF_GROUP)
        rest = (2 + mma_groups) * entry - PRODUCER_BESIDE_MEMORY - mma_groups * MMA_BESIDE_MEMORY
        return RoleRegisters(PRODUCER_BESIDE_MEMORY, MMA_BESIDE_MEMORY, rest // REGISTER_UNIT * REGISTER_UNIT)
    producer, groups = PRODUCER_REGISTERS[mma_groups], 1 + mma_groups
    rest = groups * entry_registers(groups * THREADS_OF_GROUP) - producer
    return RoleRegisters(producer, rest // mma_groups // REGISTER_UNIT * REGISTER_UNIT)
