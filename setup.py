"""Packaging.  Metadata is in pyproject.toml; only what TOML cannot say is here.

Three parts of the package lie at the top level of the repository.  Installed, they are sub-packages of ``tvm_comfuse``
and nothing else lands in site-packages.  In a checkout the symlinks ``tvm_comfuse/<part>`` show the same files.
"""

from setuptools import find_packages, setup
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import OptionError

TOP_LEVEL_PARTS = ("relay_patterns", "schedules", "tir_passes")


class ComfuseEditableWheel(editable_wheel):
    """An editable install that refuses the mode which would put the repository's root on sys.path."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if (self.mode or "").lower() == "compat":
            raise OptionError(
                "editable_mode=compat would make `schedules`, `tir_passes` and `relay_patterns` importable by these "
                "names; use `pip install -e .` without it, or editable_mode=strict"
            )


def packages() -> list[str]:
    """Names of all packages to install.

    The symlinks are left out of the first search: setuptools would otherwise take the files twice in an sdist.
    """
    hidden = [f"tvm_comfuse.{part}{tail}" for part in TOP_LEVEL_PARTS for tail in ("", ".*")]
    found = find_packages(include=["tvm_comfuse", "tvm_comfuse.*"], exclude=hidden)
    found.append("tvm_comfuse.tuning.pretuned")  # JSON only, but setuptools wants every folder named
    for part in TOP_LEVEL_PARTS:
        found.append(f"tvm_comfuse.{part}")
        found += [f"tvm_comfuse.{part}.{name}" for name in find_packages(part)]
    return found


setup(
    packages=packages(),
    package_dir={f"tvm_comfuse.{part}": part for part in TOP_LEVEL_PARTS},
    cmdclass={"editable_wheel": ComfuseEditableWheel},
)
