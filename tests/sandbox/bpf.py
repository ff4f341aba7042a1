"""An interpreter of classic BPF as linux/filter.h and linux/seccomp.h have it, so that the filter of another
architecture is tested as well."""

import struct

MAX_LINES = 4096  # BPF_MAXINSNS
X86_64, AARCH64, I386, ARM = 0xC000003E, 0xC00000B7, 0x40000003, 0x40000028  # linux/audit.h


def verdict(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """What the program returns for a system call."""
    padded = [argument % 2**64 for argument in (*arguments, *[0] * 6)][:6]
    data = struct.pack("<IIQ6Q", number, arch, 0, *padded)
    lines = list(struct.iter_unpack("HBBI", program))
    assert len(lines) <= MAX_LINES
    at = accumulator = 0
    while True:
        code, if_true, if_false, k = lines[at]
        at += 1
        match code:
            case 0x20:  # load a word of the data
                (accumulator,) = struct.unpack_from("<I", data, k)
            case 0x54:
                accumulator &= k
            case 0x05:
                at += k
            case 0x15:
                at += if_true if accumulator == k else if_false
            case 0x35:
                at += if_true if accumulator >= k else if_false
            case 0x06:
                return k
            case _:
                raise AssertionError(f"the filter has an operation {code:#x}")
