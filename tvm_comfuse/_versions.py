"""The check that TVM and its FFI have versions this package works with.

It reads the installed distributions' metadata and imports neither, so that a wrong version gives one clear line instead
of a crash inside a native library.
"""

from __future__ import annotations

import re
from importlib import metadata

from tvm_comfuse.errors import VersionError

#: distribution -> (lowest version that works, first version that does not), both as release numbers
SUPPORTED = {
    "apache-tvm": ((0, 27, 0), (0, 27, 1)),
    "apache-tvm-ffi": ((0, 1, 14), (0, 1, 15)),
}
#: the command that repairs any mismatch
FIX = 'pip install "apache-tvm==0.27.0.post1" "apache-tvm-ffi>=0.1.14.post0,<0.1.15"'


def release(version: str) -> tuple[int, ...]:
    """The leading release numbers of a version, padded to three: ``"0.27.0.post1"`` -> ``(0, 27, 0)``."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else []
    return tuple([*numbers, 0, 0, 0][:3])


def check_versions() -> None:
    """Raise VersionError for the first dependency that is missing or has a version that does not work."""
    for name, (lowest, first_bad) in SUPPORTED.items():
        needed = f"{name} >={'.'.join(map(str, lowest))}, <{'.'.join(map(str, first_bad))}"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise VersionError(needed, f"no installed {name}", FIX) from None
        if not lowest <= release(version) < first_bad:
            raise VersionError(needed, f"{name} {version}", FIX)
