"""Draw the diagram of docs/verify.md from the kernel.

python docs/diagram.py            rewrites the part of the page between the markers
python docs/diagram.py --check    only says, by its exit status, whether the page is up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "verify.md"
BEGIN, END = "<!-- diagram:begin -->", "<!-- diagram:end -->"
FAMILY = "pingpong_cluster"


def drawn() -> str:
    """The Mermaid text of the family's kernel."""
    from tvm_comfuse.target import parse_target
    from tvm_comfuse.tir_passes.lower import lower
    from tvm_comfuse.verify.diagram import protocol_diagram
    from tvm_comfuse.verify.families import FAMILIES

    (family,) = (family for family in FAMILIES if family.name == FAMILY)
    return protocol_diagram(lower(family.cluster(parse_target("h200")), FAMILY))


def with_diagram(page: str) -> str:
    """The page's text with the diagram between its markers."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n```mermaid\n{drawn()}```\n{END}{tail}"


def main(arguments: list[str]) -> int:
    """Exit code 0 if the page is, or has been made, up to date."""
    page = PAGE.read_text(encoding="utf-8")
    new = with_diagram(page)
    if "--check" in arguments:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
